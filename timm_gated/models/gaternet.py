"""GaterNet: a network beside the network chooses its filters

A rival of channel gating, in the same harness: `timm.create_model('gaternet_resnet50')`. Where other methods decide
block by block, from what the network has computed so far, here a network of its own, the gater, reads the image and
decides about all filters before the network runs.

Paper: You Look Twice: GaterNet for Dynamic Filter Selection in CNNs (https://arxiv.org/abs/1811.11205)

The gater's features go through a bottleneck, FC, BN, ReLU, and an FC to one logit a filter, of which improved semantic
hashing makes gates. Gated are the inner maps of all blocks, after the ReLU, as by `GatedBasicBlock` and
`GatedBottleneck`. Ours are the gater's architectures: ResNet-18 for ImageNet, and for CIFAR a ResNet-20 of one block a
stage and half the width, as a whole one would cost as much as the network in which it is to save; the widths of the
bottleneck; the weight of the loss; and a bias by which most gates start open. All of the gater counts as overhead.
"""
from typing import Any, Dict, List, Mapping, Optional, Tuple

import timm
import torch
import torch.nn as nn
from timm.models import generate_default_cfgs, register_model, register_notrace_module

from ..layers import Gate, GatedBasicBlock, GatedBlock, GatedBottleneck, Gating, MapMasks, gate_masks, gates, two_layers
from ..loss import Objective, Step, Term
from ..utils import check_number, full_precision
from ._carry import CarryNet
from .cifar_resnet import cifar_cfg
from .gated_cifar_resnet import GatedCifarResNet, build_cifar_resnet
from .gated_resnet import GatedResNet, build_imagenet_resnet, imagenet_cfg

__all__ = ['Gater', 'GaterCifarResNet', 'GaterResNet', 'GateSparsity', 'HashingGate', 'semantic_hashing']


def semantic_hashing(logits: torch.Tensor) -> torch.Tensor:
    """Gates by improved semantic hashing: with noise; 0 or 1 for every other image of the batch, soft for the rest.

    All have the gradient of the soft ones.

    Args:
        logits: [N, gates].
    """
    noisy = logits + torch.randn_like(logits)
    soft = (1.2 * torch.sigmoid(noisy) - 0.1).clamp(0, 1)
    hard = (noisy > 0).to(soft.dtype) + (soft - soft.detach())  # the bracket is exactly zero
    # Which half is which does not matter, as batches are shuffled; but an image has gates of one kind throughout.
    alternate = torch.arange(len(logits), device=logits.device) % 2 == 0
    return torch.where(alternate[:, None], hard, soft)


class HashingGate(Gate):
    """A gate that reads its logits, [N, num_gates], which are the gater's.

    Args:
        in_channels: Channels of the block's input.
        num_gates: Filters to switch.
    """

    log_odds = False

    def __init__(self, in_channels: int, num_gates: int, device=None, dtype=None) -> None:
        super().__init__()
        self._num_gates = num_gates

    @property
    def num_gates(self) -> int:
        return self._num_gates

    def extra_repr(self) -> str:
        return f'num_gates={self.num_gates}'

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        return semantic_hashing(logits)


@register_notrace_module
class Gater(Gating):
    """Reads the images, and gives the logits of all gates, [N, num_gates].

    Args:
        num_gates: Number of gates of all blocks.
        network: Name of the timm model that makes features of an image.
        network_args: Its options.
        hidden_channels: Width of the bottleneck.
        bias: Initial bias of the logits.
        in_chans: Number of input channels.
    """

    def __init__(
            self,
            num_gates: int,
            network: str,
            network_args: Optional[Mapping[str, Any]] = None,
            hidden_channels: int = 16,
            bias: float = 1.,
            in_chans: int = 3,
            device=None,
            dtype=None,
    ) -> None:
        dd = {'device': device, 'dtype': dtype}
        super().__init__()
        check_number(hidden_channels, 'gater_hidden', minimum=1, integer=True)
        reader: Any = timm.create_model(network, num_classes=0, in_chans=in_chans, **dd, **(network_args or {}))
        self.network = reader
        self.fc1 = nn.Linear(reader.head_hidden_size, hidden_channels, **dd)
        self.bn = nn.BatchNorm1d(hidden_channels, **dd)
        self.fc2 = nn.Linear(hidden_channels, num_gates, **dd)
        nn.init.constant_(self.fc2.bias, check_number(bias, 'gater_bias'))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.network(x)
        with full_precision(x):
            return two_layers(features.to(self.fc1.weight.dtype), self.fc1, self.bn, self.fc2)


class _GaterNet(CarryNet):
    """Mixin over a gated network of hashing gates: the gater runs first, and its logits go from block to block.

    Args:
        *args: Of the network.
        gater: Name of the timm model that reads the image.
        gater_args: Its options.
        gater_hidden: Width of the bottleneck after it.
        gater_bias: Initial bias of the gates' logits.
        in_chans: Number of input channels.
        **kwargs: Of the network.
    """

    gating_options = (*CarryNet.gating_options, 'gater', 'gater_args', 'gater_hidden', 'gater_bias')

    def __init__(
            self,
            *args,
            gater: str = 'resnet18',
            gater_args: Optional[Mapping[str, Any]] = None,
            gater_hidden: int = 256,
            gater_bias: float = 1.,
            in_chans: int = 3,
            device=None,
            dtype=None,
            **kwargs,
    ) -> None:
        dd = {'device': device, 'dtype': dtype}
        super().__init__(*args, in_chans=in_chans, **kwargs, **dd)
        num_gates = sum(gate.num_gates for _, gate in gates(self))
        self.gater = Gater(num_gates, gater, gater_args, gater_hidden, gater_bias, in_chans, **dd)
        self._modules = {'gater': self._modules.pop('gater'), **self._modules}  # in the order in which they run

    def begin(self, images: torch.Tensor) -> torch.Tensor:
        return self.gater(images)

    def prune_intermediate_layers(self, *args, **kwargs) -> List[int]:
        """As timm's, which makes a backbone of the network; what the classifier was trained with goes with the head."""
        indices = super().prune_intermediate_layers(*args, **kwargs)  # type: ignore[misc]
        if not self.num_classes:
            for name in [name for name, child in self.named_children() if isinstance(child, Objective)]:
                delattr(self, name)
        return indices


class GaterResNet(_GaterNet, GatedResNet):
    """GatedResNet whose gates are decided by a gater."""


class GaterCifarResNet(_GaterNet, GatedCifarResNet):
    """GatedCifarResNet whose gates are decided by a gater."""


class _GaterBlock(GatedBlock):
    """Mixin over gated blocks: their gates do not read the block's input, but what the gater says."""

    gate_pool: Any

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.gate_pool = nn.Identity()  # there is nothing to pool

    def step(self, x: torch.Tensor, logits: Optional[torch.Tensor]) -> Tuple[torch.Tensor, torch.Tensor]:
        """Run the block; the logits are those of this and of later blocks, and for the next one of later blocks."""
        if logits is None:
            raise RuntimeError('the gates were told nothing about this input: the gater has to read the images first.')
        count = sum(gate.num_gates for gate in self._gates().values())
        own, later = logits[:, :count], logits[:, count:]  # (first: to a tracer, what a stage does last is its output)
        return self(x, own), later

    def forward(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Run the block.

        Args:
            x: Its input.
            logits: Those of its gates, in the order of the maps, [N, num_gates].
        """
        masks: MapMasks = {}
        for index, gate in self._gates().items():
            masks[index], logits = gate(logits[:, :gate.num_gates]), logits[:, gate.num_gates:]
        return self.forward_masked(x, masks)

    def _gates(self) -> Dict[int, Any]:
        found = {index: getattr(self, f'gate{index}') for index in range(self.num_convs + 1)}
        return {index: gate for index, gate in found.items() if gate is not None}


class GaterBasicBlock(_GaterBlock, GatedBasicBlock):  # type: ignore[misc]
    """GatedBasicBlock whose gate is decided beforehand."""


class GaterBottleneck(_GaterBlock, GatedBottleneck):  # type: ignore[misc]
    """GatedBottleneck whose gates are decided beforehand."""


class GateSparsity(Objective):
    """L1 on the gates, divided by their number.

    Args:
        sparsity_weight: Weight of the loss.
    """

    def __init__(self, sparsity_weight: float = 0.1) -> None:
        super().__init__()
        self.sparsity_weight = check_number(sparsity_weight, 'sparsity_weight', minimum=0)

    def extra_repr(self) -> str:
        return f'sparsity_weight={self.sparsity_weight}'

    def terms(self, model: nn.Module, epoch: float, step: Optional[Step] = None) -> Dict[str, Term]:
        masks = self.gathered(torch.cat(list(gate_masks(model).values()), dim=1))
        return {'sparsity_loss': Term(masks.abs().mean(), self.sparsity_weight, 'sparsity_weight')}


default_cfgs = generate_default_cfgs({
    'gaternet_resnet50.untrained': imagenet_cfg(paper_ids='arXiv:1811.11205'),
    **{f'gaternet_resnet{depth}.untrained': cifar_cfg(paper_ids='arXiv:1811.11205') for depth in (20, 32)},
})

_METHOD: Dict[str, Any] = dict(gate_layer=HashingGate, objective=GateSparsity)
_CIFAR_GATER: Dict[str, Any] = dict(
    gater='cifar_resnet20', gater_args=dict(layers=(1, 1, 1), channels=(8, 16, 32)), gater_hidden=16)


def _by_getter(kwargs: Dict[str, Any]) -> Dict[str, Any]:
    """Options of an entry point by which features come from `forward_intermediates`, not from children run in turn."""
    feature_cls = kwargs.get('feature_cls', 'list')
    if not kwargs.get('features_only') or feature_cls not in ('list', 'dict'):
        return kwargs
    if feature_cls == 'dict':
        raise ValueError("feature_cls='dict' would run the network without its gater; use 'getter', the default.")
    return dict(kwargs, feature_cls='getter')


def _create_cifar(depth: int, pretrained: bool = False, **kwargs) -> GaterCifarResNet:
    model_args = dict(_CIFAR_GATER, block=GaterBasicBlock)
    return build_cifar_resnet(
        f'gaternet_resnet{depth}', depth, pretrained, GaterCifarResNet, **_METHOD,
        **_by_getter(dict(model_args, **kwargs)))


@register_model
def gaternet_resnet50(pretrained: bool = False, **kwargs) -> GaterResNet:
    """Constructs a ResNet-50 whose filters a ResNet-18 chooses."""
    model_args = dict(block=GaterBottleneck, layers=(3, 4, 6, 3))
    return build_imagenet_resnet(
        'gaternet_resnet50', 50, pretrained, GaterResNet, **_METHOD, **_by_getter(dict(model_args, **kwargs)))


@register_model
def gaternet_resnet20(pretrained: bool = False, **kwargs) -> GaterCifarResNet:
    """Constructs a CIFAR ResNet-20 whose filters a smaller one chooses."""
    return _create_cifar(20, pretrained, **kwargs)


@register_model
def gaternet_resnet32(pretrained: bool = False, **kwargs) -> GaterCifarResNet:
    """Constructs a CIFAR ResNet-32 whose filters a smaller one chooses."""
    return _create_cifar(32, pretrained, **kwargs)
