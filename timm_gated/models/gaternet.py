"""GaterNet: a second network selects the filters of the first

A baseline for channel gating: `timm.create_model('gaternet_resnet50')`. A second network, the gater, reads the image
and decides on all filters before the network runs. Other methods decide block by block, from the features so far.

Paper: You Look Twice: GaterNet for Dynamic Filter Selection in CNNs (https://arxiv.org/abs/1811.11205)

The gater's features go through a bottleneck (FC, BN, ReLU) and an FC to one logit per filter. Improved semantic hashing
turns the logits into gates. The inner maps of all blocks are gated after the ReLU, as in `GatedBasicBlock` and
`GatedBottleneck`. All MACs of the gater count as overhead. The following choices are ours:

- The gater is a ResNet-18 for ImageNet. For CIFAR it is a ResNet-20 with one block per stage and half the width; a
  complete ResNet-20 would cost as much as the gated network.
- The width of the bottleneck, the weight of the loss, and the initial bias, with which most gates start open.
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
from ._method import NETWORK_OPTIONS, GatingMethod
from .cifar_resnet import cifar_cfg
from .gated_cifar_resnet import GatedCifarResNet, build_cifar_resnet
from .gated_resnet import GatedResNet, build_imagenet_resnet, imagenet_cfg

__all__ = ['Gater', 'GaterCifarResNet', 'GaterResNet', 'GateSparsity', 'HashingGate', 'semantic_hashing']


def semantic_hashing(logits: torch.Tensor) -> torch.Tensor:
    """Noisy gates by improved semantic hashing: 0 or 1 for every other image of the batch, soft for the rest.

    All gates have the gradient of the soft ones.

    Args:
        logits: Logits of the gates, [N, gates].
    """
    noisy = logits + torch.randn_like(logits)
    soft = (1.2 * torch.sigmoid(noisy) - 0.1).clamp(0, 1)
    hard = (noisy > 0).to(soft.dtype) + (soft - soft.detach())  # the bracket is exactly zero
    # All gates of an image are of the same kind. Batches are shuffled, so the choice of images does not matter.
    alternate = torch.arange(len(logits), device=logits.device) % 2 == 0
    return torch.where(alternate[:, None], hard, soft)


class HashingGate(Gate):
    """Gate whose input is its logits, [N, num_gates], computed by the gater.

    Args:
        in_channels: Number of input channels of the block, not used.
        num_gates: Number of gated filters.
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
    """Network that computes the logits of all gates, [N, num_gates], from the images.

    Args:
        num_gates: Number of gates of all blocks.
        network: Name of the timm model that extracts the features.
        network_args: Options of that model.
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
    """Mixin over a network of hashing gates. The gater runs first, and its logits are passed from block to block.

    Args:
        *args: Arguments of the network.
        gater: Name of the timm model that reads the images.
        gater_args: Options of that model.
        gater_hidden: Width of the bottleneck after it.
        gater_bias: Initial bias of the logits.
        in_chans: Number of input channels.
        **kwargs: Keyword arguments of the network.
    """

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
        self._modules = {'gater': self._modules.pop('gater'), **self._modules}  # in the order of execution

    def begin(self, images: torch.Tensor) -> torch.Tensor:
        return self.gater(images)

    @property
    def logit_biases(self) -> Dict[str, torch.Tensor]:
        """Parts of the bias of the gater's last layer, by name of the gate."""
        bias: Any = self.gater.fc2.bias
        found = {}
        for name, gate in gates(self):  # in the order in which blocks take logits
            found[name], bias = bias[:gate.num_gates], bias[gate.num_gates:]
        return found

    def prune_intermediate_layers(self, *args, **kwargs) -> List[int]:
        """Prune layers as timm does. Without the head the objectives of the classifier are removed too."""
        indices = super().prune_intermediate_layers(*args, **kwargs)  # type: ignore[misc]
        if not self.num_classes:
            for name in [name for name, child in self.named_children() if isinstance(child, Objective)]:
                delattr(self, name)
        return indices


class GaterResNet(_GaterNet, GatedResNet):
    """GatedResNet whose gates a gater controls."""


class GaterCifarResNet(_GaterNet, GatedCifarResNet):
    """GatedCifarResNet whose gates a gater controls."""


class _GaterBlock(GatedBlock):
    """Mixin over gated blocks whose gates read the logits of the gater instead of the block's input."""

    gate_pool: Any

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.gate_pool = nn.Identity()

    def step(self, x: torch.Tensor, logits: Optional[torch.Tensor]) -> Tuple[torch.Tensor, torch.Tensor]:
        """Run the block with the first of the logits; returns its output and the logits of the later blocks."""
        if logits is None:
            raise RuntimeError('the gates have no logits for this input: the gater has to read the images first.')
        count = sum(gate.num_gates for gate in self._gates().values())
        own, later = logits[:, :count], logits[:, count:]  # before the call: fx takes the last node as the output
        return self(x, own), later

    def forward(self, x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """Run the block.

        Args:
            x: Input of the block.
            logits: Logits of its gates, in the order of the maps, [N, num_gates].
        """
        masks: MapMasks = {}
        for index, gate in self._gates().items():
            masks[index], logits = gate(logits[:, :gate.num_gates]), logits[:, gate.num_gates:]
        return self.forward_masked(x, masks)

    def _gates(self) -> Dict[int, Any]:
        found = {index: getattr(self, f'gate{index}') for index in range(self.num_convs + 1)}
        return {index: gate for index, gate in found.items() if gate is not None}


class GaterBasicBlock(_GaterBlock, GatedBasicBlock):  # type: ignore[misc]
    """GatedBasicBlock whose gate reads the logits of the gater."""


class GaterBottleneck(_GaterBlock, GatedBottleneck):  # type: ignore[misc]
    """GatedBottleneck whose gates read the logits of the gater."""


class GateSparsity(Objective):
    """L1 loss on the gates, divided by their number.

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

METHOD = GatingMethod(
    gate_layer=HashingGate,
    gate_options={},
    objective=GateSparsity,
    objective_options=('sparsity_weight',),
    block_options=('gated_maps', 'gate_before_act'),
    network_options=(*NETWORK_OPTIONS, 'gater', 'gater_args', 'gater_hidden', 'gater_bias'),
)
_CIFAR_GATER: Dict[str, Any] = dict(
    gater='cifar_resnet20', gater_args=dict(layers=(1, 1, 1), channels=(8, 16, 32)), gater_hidden=16)


def _by_getter(kwargs: Dict[str, Any]) -> Dict[str, Any]:
    """Let features_only use `forward_intermediates` instead of running the children one after the other."""
    feature_cls = kwargs.get('feature_cls', 'list')
    if not kwargs.get('features_only') or feature_cls not in ('list', 'dict'):
        return kwargs
    if feature_cls == 'dict':
        raise ValueError("feature_cls='dict' would run the network without its gater; use 'getter', the default.")
    return dict(kwargs, feature_cls='getter')


def _create_cifar(depth: int, pretrained: bool = False, **kwargs) -> GaterCifarResNet:
    model_args = dict(_CIFAR_GATER, block=GaterBasicBlock)
    return build_cifar_resnet(
        f'gaternet_resnet{depth}', depth, pretrained, GaterCifarResNet, method=METHOD,
        **_by_getter(dict(model_args, **kwargs)))


@register_model
def gaternet_resnet50(pretrained: bool = False, **kwargs) -> GaterResNet:
    """Constructs a GaterNet ResNet-50 with a ResNet-18 as gater."""
    model_args = dict(block=GaterBottleneck, layers=(3, 4, 6, 3))
    return build_imagenet_resnet(
        'gaternet_resnet50', 50, pretrained, GaterResNet, method=METHOD, **_by_getter(dict(model_args, **kwargs)))


@register_model
def gaternet_resnet20(pretrained: bool = False, **kwargs) -> GaterCifarResNet:
    """Constructs a GaterNet CIFAR ResNet-20 with a smaller one as gater."""
    return _create_cifar(20, pretrained, **kwargs)


@register_model
def gaternet_resnet32(pretrained: bool = False, **kwargs) -> GaterCifarResNet:
    """Constructs a GaterNet CIFAR ResNet-32 with a smaller ResNet-20 as gater."""
    return _create_cifar(32, pretrained, **kwargs)
