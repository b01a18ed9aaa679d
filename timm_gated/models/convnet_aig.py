"""ConvNet-AIG: residual blocks that are executed or skipped per image

A baseline for channel gating: `timm.create_model('convnet_aig_resnet34')`. One gate per block decides from the block's
input whether the residual branch is executed. A loss drives the execution rate of each block to a target.

Paper: Convolutional Networks with Adaptive Inference Graphs (https://arxiv.org/abs/1711.11503)

The gate is the channel gate with two outputs, closed and open. A straight-through Gumbel-softmax sample of the two is
a binary concrete sample of their difference, and is computed as such. Differences from the original:

- Evaluation has no noise.
- Gates have no weight decay, like all gates here.
- The first layer of the gate has torch's default initialization.
- A training batch of one image is normalized as in `ChannelGate`.

ResNet-50 and ResNet-101 have the original's targets per block. In all other networks all blocks have the same target.
"""
from typing import Any, Callable, Dict, Optional, Sequence, Tuple

import torch
import torch.nn as nn
from timm.models import generate_default_cfgs, register_model
from timm.models.resnet import BasicBlock, Bottleneck

from ..layers import (
    ChannelGate,
    Gate,
    GatedConvs,
    GatePool,
    apply_gate,
    basic_branch,
    bottleneck_branch,
    gate_masks,
    gates,
    shortcut_of,
)
from ..loss import Objective, Step, Term
from ..utils import check_number
from ._method import GatingMethod
from ._registry import weights_file
from .cifar_resnet import cifar_cfg
from .gated_cifar_resnet import GatedCifarResNet, build_cifar_resnet
from .gated_resnet import GatedResNet, build_imagenet_resnet, imagenet_cfg

__all__ = ['AigBasicBlock', 'AigBottleneck', 'AigGate', 'TargetRate', 'target_rate_loss']

IMAGENET_RECIPE: Dict[str, Any] = dict(target_rate=0.7, target_weight=1.)
CIFAR10_RECIPE: Dict[str, Any] = dict(target_rate=0.6, target_weight=2.)
# Targets of the original per block; None stands for `target_rate`. ResNet-101 was trained with rates of 0.3 and 0.5.
RESNET50_RATES = (1, 1, 0.8, 1, *[None] * 3, 1, *[None] * 5, 1, 0.7, 1)
RESNET101_RATES = (*[1] * 8, *[None] * 25)


class AigGate(ChannelGate):
    """One binary decision per block, from the block's pooled input [N, in_channels].

    Args:
        in_channels: Number of input channels of the block.
        num_gates: Number of decisions per image, 1 for a block.
        hidden_channels: Width of the hidden layer.
        temperature: Temperature of the Gumbel-softmax.
        bias: Initial biases of closed and open. With the default about 87 % of the blocks are executed.
    """

    def __init__(
            self,
            in_channels: int,
            num_gates: int,
            hidden_channels: int = 16,
            temperature: float = 1.,
            bias: Tuple[float, float] = (0.1, 2.),
            device=None,
            dtype=None,
    ) -> None:
        super().__init__(in_channels, 2 * num_gates, hidden_channels, temperature, device=device, dtype=dtype)
        if not isinstance(bias, Sequence) or len(bias) != 2:
            raise ValueError(f'bias of a gate must be a pair (closed, open), got {bias!r}.')
        nn.init.normal_(self.fc2.weight, std=1e-3)
        for outcome, value in enumerate(bias):
            nn.init.constant_(self.fc2.bias[outcome::2], check_number(value, 'bias of a gate'))

    @property
    def num_gates(self) -> int:
        return self.fc2.out_features // 2

    @property
    def logit_biases(self) -> Dict[str, torch.Tensor]:
        return {'': self.fc2.bias[1::2]}  # of the open outcome

    def score(self, x: torch.Tensor) -> torch.Tensor:
        outcomes = super().score(x).unflatten(1, (-1, 2))
        return outcomes[..., 1] - outcomes[..., 0]


class _AigBlock(nn.Module):
    """Mixin over timm's blocks that multiplies the residual branch by a gate.

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
            gate_layer: Callable[..., Gate] = AigGate,
            device=None,
            dtype=None,
            **kwargs,
    ) -> None:
        dd = {'device': device, 'dtype': dtype}
        super().__init__(inplanes, *args, **kwargs, **dd)
        self.gate_pool = GatePool()
        self.gate = gate_layer(inplanes, 1, **dd)

    @property
    def gated_convs(self) -> GatedConvs:
        return {name: (None, self.gate) for name in self.convs}


class AigBasicBlock(_AigBlock, BasicBlock):
    """timm's BasicBlock, executed or skipped per image."""

    convs = ('conv1', 'conv2')

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.gate(self.gate_pool(x))
        out = apply_gate(basic_branch(self, x), mask)
        out += shortcut_of(self, x)
        return self.act2(out)


class AigBottleneck(_AigBlock, Bottleneck):
    """timm's Bottleneck, executed or skipped per image."""

    convs = ('conv1', 'conv2', 'conv3')

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = self.gate(self.gate_pool(x))
        out = apply_gate(bottleneck_branch(self, x), mask)
        out += shortcut_of(self, x)
        return self.act3(out)


def target_rate_loss(rates: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over blocks of the squared difference between rate and target. Blocks with a target of 1 count as zero.

    Args:
        rates: Execution rate of each block over the batch, [blocks].
        targets: Target rate of each block, [blocks].
    """
    return ((targets - rates) ** 2 * (targets < 1)).mean()


class TargetRate(Objective):
    """Loss that drives the execution rate of each block to its target.

    Args:
        target_rate: Target share of images that execute a block.
        target_weight: Weight of the loss.
        block_rates: Target rates per block. None stands for `target_rate`; 1 excludes a block from the loss. By default
            all blocks have `target_rate`.
    """

    def __init__(
            self,
            target_rate: float = 0.7,
            target_weight: float = 1.,
            block_rates: Optional[Sequence[Optional[float]]] = None,
    ) -> None:
        super().__init__()
        self.target_rate = check_number(target_rate, 'target_rate', minimum=0, maximum=1)
        self.target_weight = check_number(target_weight, 'target_weight', minimum=0)
        self.block_rates = None if block_rates is None else [
            self.target_rate if rate is None else check_number(rate, 'each of block_rates', minimum=0, maximum=1)
            for rate in block_rates]

    def extra_repr(self) -> str:
        return f'target_rate={self.target_rate}, target_weight={self.target_weight}, block_rates={self.block_rates}'

    def attach(self, network: nn.Module) -> None:
        num_blocks = len(gates(network))
        if self.block_rates is not None and len(self.block_rates) != num_blocks:
            raise ValueError(
                f'block_rates must have a target for each of the {num_blocks} gated blocks, got '
                f'{len(self.block_rates)}.')

    def terms(self, model: nn.Module, epoch: float, step: Optional[Step] = None) -> Dict[str, Term]:
        rates = self.gathered(torch.cat(list(gate_masks(model).values()), dim=1)).mean(0)
        targets = rates.new_tensor(self.block_rates or [self.target_rate] * len(rates))
        return {'target_rate_loss': Term(target_rate_loss(rates, targets), self.target_weight, 'target_weight')}


default_cfgs = generate_default_cfgs({
    'convnet_aig_resnet20.aig_c10': cifar_cfg(
        file=weights_file('convnet_aig_resnet20.aig_c10'), paper_ids='arXiv:1711.11503'),
    'convnet_aig_resnet20.dense_e40_c10': cifar_cfg(
        file=weights_file('cifar_resnet20.e40_c10'), paper_ids='arXiv:1711.11503'),
    **{f'convnet_aig_resnet{depth}.untrained': imagenet_cfg(paper_ids='arXiv:1711.11503')
       for depth in (18, 34, 50, 101)},
    **{f'convnet_aig_resnet{depth}.untrained': cifar_cfg(paper_ids='arXiv:1711.11503') for depth in (20, 32, 38, 110)},
})

METHOD = GatingMethod(
    gate_layer=AigGate,
    gate_options=dict(gate_hidden='hidden_channels', gate_temperature='temperature', gate_bias='bias'),
    objective=TargetRate,
    objective_options=('target_rate', 'target_weight', 'block_rates'),
)


def _create_imagenet(depth: int, pretrained: bool = False, **kwargs) -> GatedResNet:
    return build_imagenet_resnet(
        f'convnet_aig_resnet{depth}', depth, pretrained, method=METHOD, recipe=IMAGENET_RECIPE, **kwargs)


def _create_cifar(depth: int, pretrained: bool = False, **kwargs) -> GatedCifarResNet:
    model_args = dict(block=AigBasicBlock, recipe=CIFAR10_RECIPE)
    return build_cifar_resnet(
        f'convnet_aig_resnet{depth}', depth, pretrained, method=METHOD, **dict(model_args, **kwargs))


@register_model
def convnet_aig_resnet18(pretrained: bool = False, **kwargs) -> GatedResNet:
    """Constructs a ConvNet-AIG ResNet-18."""
    model_args = dict(block=AigBasicBlock, layers=(2, 2, 2, 2))
    return _create_imagenet(18, pretrained, **dict(model_args, **kwargs))


@register_model
def convnet_aig_resnet34(pretrained: bool = False, **kwargs) -> GatedResNet:
    """Constructs a ConvNet-AIG ResNet-34."""
    model_args = dict(block=AigBasicBlock, layers=(3, 4, 6, 3))
    return _create_imagenet(34, pretrained, **dict(model_args, **kwargs))


@register_model
def convnet_aig_resnet50(pretrained: bool = False, **kwargs) -> GatedResNet:
    """Constructs a ConvNet-AIG ResNet-50 with the targets of the original per block."""
    model_args = dict(block=AigBottleneck, layers=(3, 4, 6, 3))
    if 'layers' not in kwargs:
        model_args.update(block_rates=RESNET50_RATES)
    return _create_imagenet(50, pretrained, **dict(model_args, **kwargs))


@register_model
def convnet_aig_resnet101(pretrained: bool = False, **kwargs) -> GatedResNet:
    """Constructs a ConvNet-AIG ResNet-101 with the targets of the original per block."""
    model_args = dict(block=AigBottleneck, layers=(3, 4, 23, 3))
    if 'layers' not in kwargs:
        model_args.update(block_rates=RESNET101_RATES)
    return _create_imagenet(101, pretrained, **dict(model_args, **kwargs))


@register_model
def convnet_aig_resnet20(pretrained: bool = False, **kwargs) -> GatedCifarResNet:
    """Constructs a ConvNet-AIG CIFAR ResNet-20."""
    return _create_cifar(20, pretrained, **kwargs)


@register_model
def convnet_aig_resnet32(pretrained: bool = False, **kwargs) -> GatedCifarResNet:
    """Constructs a ConvNet-AIG CIFAR ResNet-32."""
    return _create_cifar(32, pretrained, **kwargs)


@register_model
def convnet_aig_resnet38(pretrained: bool = False, **kwargs) -> GatedCifarResNet:
    """Constructs a ConvNet-AIG CIFAR ResNet-38."""
    return _create_cifar(38, pretrained, **kwargs)


@register_model
def convnet_aig_resnet110(pretrained: bool = False, **kwargs) -> GatedCifarResNet:
    """Constructs a ConvNet-AIG CIFAR ResNet-110."""
    return _create_cifar(110, pretrained, **kwargs)
