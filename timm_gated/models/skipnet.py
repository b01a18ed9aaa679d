"""SkipNet: residual blocks that are skipped per image

A baseline for channel gating: `timm.create_model('skipnet_resnet38')`. The gate after a block decides whether the next
block is executed, x = m * block(x) + (1 - m) * x. Gates are first trained with the network, then by reinforcement
learning with a reward for skipped blocks (option `stage`).

Paper: SkipNet: Learning Dynamic Routing in Convolutional Networks (https://arxiv.org/abs/1711.09485)

A gate is a child of the block that it switches, because it reads that block's input. The first block has no gate and is
always executed. A skipped block that changes the shape of the map outputs its shortcut, without the activation after
it, as in the original.

The gates are in `timm_gated.layers.skip_gates`. Differences from the original: gates have no weight decay, like all
gates here, and the shortcuts of the CIFAR networks have no parameters. See `Skipping` for the hybrid loss.
"""
from typing import Any, Callable, Dict, Mapping, Optional, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.models import generate_default_cfgs, register_model
from timm.models.resnet import BasicBlock, Bottleneck

from ..layers import (
    GATES,
    STAGES,
    GatedConvs,
    Memory,
    RecurrentGate,
    SkipGate,
    apply_gate,
    basic_branch,
    bottleneck_branch,
    gate_logits,
    gates,
    shortcut_of,
)
from ..loss import Objective, Step, Term
from ..utils import check_number
from ._carry import CarryNet
from ._method import GatingMethod
from .cifar_resnet import cifar_cfg
from .gated_cifar_resnet import GatedCifarResNet, build_cifar_resnet
from .gated_resnet import GatedResNet, build_imagenet_resnet, imagenet_cfg

__all__ = [
    'SkipBasicBlock', 'SkipBottleneck', 'SkipCifarResNet', 'SkipResNet', 'Skipping', 'reinforce_loss',
]


class _SkipBlock(nn.Module):
    """Mixin over timm's blocks whose gate chooses between the complete block and its shortcut.

    Args:
        inplanes: Input channel dimensionality.
        *args: Arguments of timm's block.
        gate_layer: Factory of the gate, called with (in_channels, num_gates).
        **kwargs: Keyword arguments of timm's block.
    """

    convs: Tuple[str, ...]

    def __init__(
            self,
            inplanes: int,
            *args,
            gate_layer: Callable[..., SkipGate] = RecurrentGate,
            device=None,
            dtype=None,
            **kwargs,
    ) -> None:
        dd = {'device': device, 'dtype': dtype}
        super().__init__(inplanes, *args, **kwargs, **dd)
        self.gate: Optional[SkipGate] = gate_layer(inplanes, 1, **dd)

    @property
    def gated_convs(self) -> GatedConvs:
        return {} if self.gate is None else {name: (None, self.gate) for name in self.convs}

    def step(self, x: torch.Tensor, memory: Optional[Memory]) -> Tuple[torch.Tensor, Optional[Memory]]:
        """Run or skip the block; returns its output and the memory for the next gate."""
        mask = None
        if self.gate is not None:
            mask, memory = self.gate.recall(x, memory)
        return self(x, mask), memory

    def forward(self, x: torch.Tensor, mask: Optional[torch.Tensor] = None) -> torch.Tensor:
        """Run or skip the block.

        Args:
            x: Input of the block.
            mask: Decision of the gate. By default the gate decides without memory, as the first gate of a network.
        """
        if mask is None and self.gate is not None:
            mask, _ = self.gate.recall(x, None)
        shortcut = shortcut_of(self, x)
        out = self._run(x, shortcut)
        return out if mask is None else apply_gate(out, mask) + apply_gate(shortcut, 1 - mask)

    def _run(self, x: torch.Tensor, shortcut: torch.Tensor) -> torch.Tensor:
        """Output of timm's block, given the output of its shortcut."""
        raise NotImplementedError


class SkipBasicBlock(_SkipBlock, BasicBlock):
    """timm's BasicBlock, executed or skipped per image."""

    convs = ('conv1', 'conv2')

    def _run(self, x: torch.Tensor, shortcut: torch.Tensor) -> torch.Tensor:
        out = basic_branch(self, x)
        out += shortcut
        return self.act2(out)


class SkipBottleneck(_SkipBlock, Bottleneck):
    """timm's Bottleneck, executed or skipped per image."""

    convs = ('conv1', 'conv2', 'conv3')

    def _run(self, x: torch.Tensor, shortcut: torch.Tensor) -> torch.Tensor:
        out = bottleneck_branch(self, x)
        out += shortcut
        return self.act3(out)


class _SkipNet(CarryNet):
    """Mixin over a gated network that passes the memory of the gates from block to block."""

    def link_gates(self) -> None:
        first, *others = [module for module in self.modules() if isinstance(module, _SkipBlock)]
        first.gate = None
        for block in others[1:]:
            assert block.gate is not None
            block.gate.follow()

    @property
    def logit_biases(self) -> Dict[str, torch.Tensor]:
        """The bias of the output layer that all recurrent gates share, by name of the gate."""
        recurrent = {name: gate for name, gate in gates(self) if isinstance(gate, RecurrentGate)}
        biases = [gate.fc.bias for gate in recurrent.values() if hasattr(gate, 'fc')]
        return dict.fromkeys(recurrent, biases[0]) if biases else {}


class SkipResNet(_SkipNet, GatedResNet):
    """timm's ResNet of blocks that are executed or skipped."""


class SkipCifarResNet(_SkipNet, GatedCifarResNet):
    """CifarResNet of blocks that are executed or skipped."""


def reinforce_loss(
        logits: torch.Tensor,
        decisions: torch.Tensor,
        losses: torch.Tensor,
        alpha: float = 0.1,
        discount: float = 1.,
) -> torch.Tensor:
    """REINFORCE loss of sampled decisions: its gradient is that of E[loss - alpha * share of skipped blocks].

    The log-probability of each decision is weighted by its return: the rewards of its block and of all later blocks,
    alpha / blocks per skipped block, minus the loss of the image. Mean over images.

    Args:
        logits: Log-odds of executing each block, in the order of the blocks, [N, blocks].
        decisions: 1 for executed blocks and 0 for skipped ones, [N, blocks].
        losses: Task loss per image, [N].
        alpha: Weight of the skipping reward.
        discount: Discount factor per block.
    """
    rewards = alpha / logits.shape[1] * (1 - decisions)
    future = -losses.detach()
    returns = []
    for reward in reversed(rewards.unbind(1)):
        future = reward + discount * future
        returns.append(future)
    # A binary cross entropy would be NaN for infinite logits.
    log_probabilities = F.logsigmoid((2 * decisions - 1) * logits)
    return -(log_probabilities * torch.stack(returns[::-1], dim=1)).sum(1).mean()


class Skipping(Objective):
    """Training stages of SkipNet. In the supervised stages the gates are trained by the task loss alone.

    The hybrid stage adds `reinforce_loss`, with the cross entropy per image, to the task loss. The sum has the gradient
    of the paper's objective, E[L - alpha / N * skipped blocks], where L is the cross entropy. The original code
    deviates from the paper: its weight is 0.01, and for ImageNet it also scales L within the reward by alpha / N.

    Args:
        stage: 'supervised' for hard gates with the gradient of soft gates, 'soft' for soft gates, or 'hybrid'. Gates
            are always hard in evaluation.
        alpha: Weight of the skipping reward.
        rl_weight: Weight of the REINFORCE loss.
        discount: Discount factor of later rewards.
    """

    def __init__(
            self,
            stage: str = 'supervised',
            alpha: float = 0.1,
            rl_weight: float = 1.,
            discount: float = 1.,
    ) -> None:
        super().__init__()
        if stage not in STAGES:
            raise ValueError(f'stage must be one of {", ".join(STAGES)}, got {stage!r}.')
        self.stage = stage
        self.alpha = check_number(alpha, 'alpha', minimum=0)
        self.rl_weight = check_number(rl_weight, 'rl_weight', minimum=0)
        self.discount = check_number(discount, 'discount', minimum=0)

    def extra_repr(self) -> str:
        return f'stage={self.stage}, alpha={self.alpha}, rl_weight={self.rl_weight}, discount={self.discount}'

    def attach(self, network: nn.Module) -> None:
        for _, gate in gates(network):
            assert isinstance(gate, SkipGate)
            gate.stage = self.stage

    def terms(self, model: nn.Module, epoch: float, step: Optional[Step] = None) -> Dict[str, Term]:
        if self.stage != 'hybrid':
            return {}
        if step is None:
            raise ValueError('the skipping reward depends on the classification loss: it needs the step, got none.')
        logits = gate_logits(model)
        decisions = torch.cat([gate.decision for _, gate in gates(model) if gate.decision is not None], dim=1)
        losses = F.cross_entropy(step.output.to(logits.dtype), step.target, reduction='none')
        batch = self.gathered(torch.cat((logits, decisions, losses.detach()[:, None]), dim=1))
        logits, decisions, losses = batch.split((logits.shape[1], decisions.shape[1], 1), dim=1)
        loss = reinforce_loss(logits, decisions, losses[:, 0], self.alpha, self.discount)
        return {'reinforce_loss': Term(loss, self.rl_weight, 'rl_weight')}


CIFAR_DEPTHS = (38, 74, 110)
IMAGENET_DEPTHS = (18, 34, 50, 101)

default_cfgs = generate_default_cfgs({
    **{f'skipnet_resnet{depth}.untrained': imagenet_cfg(paper_ids='arXiv:1711.09485') for depth in IMAGENET_DEPTHS},
    **{f'skipnet_resnet{depth}.untrained': cifar_cfg(paper_ids='arXiv:1711.09485') for depth in CIFAR_DEPTHS},
})


_OBJECTIVE: Dict[str, Any] = dict(objective=Skipping, objective_options=('stage', 'alpha', 'rl_weight', 'discount'))
METHODS: Mapping[str, GatingMethod] = {
    'rnn': GatingMethod(GATES['rnn'], dict(gate_hidden='hidden_channels', gate_bias='bias'), **_OBJECTIVE),
    'ff1': GatingMethod(GATES['ff1'], dict(gate_bias='bias'), **_OBJECTIVE),
    'ff2': GatingMethod(GATES['ff2'], dict(gate_bias='bias'), **_OBJECTIVE),
}


def _create(create: Callable[..., Any], depth: int, pretrained: bool = False, gate: str = 'rnn', **kwargs) -> Any:
    if gate not in METHODS:
        raise ValueError(f'gate must be one of {", ".join(METHODS)}, got {gate!r}.')
    if kwargs.get('budget') is not None and kwargs.get('stage') == 'hybrid':
        raise ValueError(
            f'a budget trains gates through their masks, which are samples without a gradient in the hybrid stage; '
            f'got budget={kwargs["budget"]}. Use alpha.')
    return create(f'skipnet_resnet{depth}', depth, pretrained, method=METHODS[gate], **kwargs)


def _create_imagenet(depth: int, pretrained: bool = False, **kwargs) -> SkipResNet:
    model_args = dict(model_cls=SkipResNet, recipe=dict(alpha=0.01))
    return _create(build_imagenet_resnet, depth, pretrained, **dict(model_args, **kwargs))


def _create_cifar(depth: int, pretrained: bool = False, **kwargs) -> SkipCifarResNet:
    model_args = dict(block=SkipBasicBlock, model_cls=SkipCifarResNet, recipe=dict(alpha=0.1))
    return _create(build_cifar_resnet, depth, pretrained, **dict(model_args, **kwargs))


@register_model
def skipnet_resnet18(pretrained: bool = False, **kwargs) -> SkipResNet:
    """Constructs a SkipNet ResNet-18."""
    model_args = dict(block=SkipBasicBlock, layers=(2, 2, 2, 2))
    return _create_imagenet(18, pretrained, **dict(model_args, **kwargs))


@register_model
def skipnet_resnet34(pretrained: bool = False, **kwargs) -> SkipResNet:
    """Constructs a SkipNet ResNet-34."""
    model_args = dict(block=SkipBasicBlock, layers=(3, 4, 6, 3))
    return _create_imagenet(34, pretrained, **dict(model_args, **kwargs))


@register_model
def skipnet_resnet50(pretrained: bool = False, **kwargs) -> SkipResNet:
    """Constructs a SkipNet ResNet-50."""
    model_args = dict(block=SkipBottleneck, layers=(3, 4, 6, 3))
    return _create_imagenet(50, pretrained, **dict(model_args, **kwargs))


@register_model
def skipnet_resnet101(pretrained: bool = False, **kwargs) -> SkipResNet:
    """Constructs a SkipNet ResNet-101."""
    model_args = dict(block=SkipBottleneck, layers=(3, 4, 23, 3))
    return _create_imagenet(101, pretrained, **dict(model_args, **kwargs))


@register_model
def skipnet_resnet38(pretrained: bool = False, **kwargs) -> SkipCifarResNet:
    """Constructs a SkipNet CIFAR ResNet-38."""
    return _create_cifar(38, pretrained, **kwargs)


@register_model
def skipnet_resnet74(pretrained: bool = False, **kwargs) -> SkipCifarResNet:
    """Constructs a SkipNet CIFAR ResNet-74."""
    return _create_cifar(74, pretrained, **kwargs)


@register_model
def skipnet_resnet110(pretrained: bool = False, **kwargs) -> SkipCifarResNet:
    """Constructs a SkipNet CIFAR ResNet-110."""
    return _create_cifar(110, pretrained, **kwargs)
