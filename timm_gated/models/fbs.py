"""Feature boosting and suppression: only the most salient channels are computed, and scaled by their saliency

A baseline for channel gating: `timm.create_model('fbs_resnet18', density=0.5)`. The saliency of each output channel of
a convolution is predicted from the convolution's input. A fixed share of the channels, the density, is computed.

Paper: Dynamic Channel Pruning: Feature Boosting and Suppression (https://arxiv.org/abs/1810.05331)

The output of a convolution is mask * (g * norm(conv(x)) + beta), with the saliency g = relu(FC(mean |x|)), the mask of
the largest g, and the norm's shift beta. The activation follows. Where the paper leaves a choice:

- Both convolutions of a block have a saliency over their outputs, the second one before the sum with the shortcut. The
  sum has all channels, so the first convolution of a block reads all channels, and the second one reads the winners.
  Stem and shortcuts have no saliency.
- The saliency replaces the norm's scale. Norms keep their scale too, as a factor that starts at 1, so that dense
  checkpoints load by name. With FC weights 0 and biases 1, every g is 1, and at density 1 the network equals the dense
  one. Winners are selected by g alone.
- The L1 loss is the sum of g over all channels, averaged over the batch.
"""
import math
from typing import Any, Callable, Dict, List, Optional

import torch
import torch.nn as nn
from timm.models import generate_default_cfgs, register_model
from timm.models.resnet import BasicBlock

from ..layers import Gate, GatedConvs, GatePool, add_shortcut, gate_scores
from ..loss import Epochs, Objective, Scheduled, Step, Term, check_epochs, linear_warmup
from ..utils import check_number
from ._method import GatingMethod
from .cifar_resnet import cifar_cfg
from .gated_cifar_resnet import GatedCifarResNet, build_cifar_resnet
from .gated_resnet import GatedResNet, build_imagenet_resnet, imagenet_cfg

__all__ = ['FbsBasicBlock', 'SaliencyGate', 'Suppression', 'boost', 'winners']

# Our choice: the density falls while the learning rate is high.
IMAGENET_RECIPE: Dict[str, Any] = dict(density_epochs=(0, 30))
CIFAR10_RECIPE: Dict[str, Any] = dict(density_epochs=(0, 100))


def winners(scores: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Mask of the largest values of each row. Ties are broken arbitrarily.

    Args:
        scores: Saliencies, [N, channels].
        count: Number of winners per row, as a tensor, so that a compiled graph need not change with it.
    """
    order = scores.argsort(dim=1, descending=True)
    won = torch.arange(scores.shape[1], device=scores.device) < count
    return torch.zeros_like(scores).scatter(1, order, won.to(scores.dtype).expand_as(scores))


def boost(x: torch.Tensor, weights: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """Scale the output of a norm by the saliency, but not the norm's shift: mask * (g * (x - shift) + shift).

    Args:
        x: Output of the norm, [N, C, H, W].
        weights: mask * g and mask, [N, 2, C].
        shift: Bias of the norm, [C].
    """
    scale, mask = weights.to(x.dtype).unbind(1)
    return x * scale[:, :, None, None] + ((mask - scale) * shift.to(x.dtype))[:, :, None, None]


class SaliencyGate(Gate):
    """Selects the most salient outputs of a convolution, from the pooled magnitudes of its input [N, in_channels].

    `logits` are the saliencies before the ReLU, so that they also order channels with a saliency of zero. `forward`
    returns mask * saliency and the mask, [N, 2, num_gates].

    Args:
        in_channels: Number of input channels of the convolution.
        num_gates: Number of output channels of the convolution.
        bias: Initial bias of the saliencies.

    Attributes:
        density: Share of the channels that are computed, see `set_density`.
        num_open: Number of these channels, as a tensor.
    """

    log_odds = False
    num_open: torch.Tensor

    def __init__(
            self,
            in_channels: int,
            num_gates: int,
            bias: float = 1.,
            device=None,
            dtype=None,
    ) -> None:
        super().__init__()
        self.fc = nn.Linear(in_channels, num_gates, device=device, dtype=dtype)
        # Small weights keep a dense checkpoint close to itself. Large ones make a residual network diverge, because
        # saliencies grow with the maps that they scale.
        nn.init.normal_(self.fc.weight, std=1e-3)
        nn.init.constant_(self.fc.bias, check_number(bias, 'bias of a gate'))
        # Not part of a checkpoint: the option or the training epoch determines it.
        self.register_buffer('num_open', torch.tensor(0, device=device), persistent=False)
        self.set_density(1.)

    @property
    def num_gates(self) -> int:
        return self.fc.out_features

    def set_density(self, density: float) -> None:
        """Set the share of the channels that are computed, rounded up to a whole number of channels."""
        self.density = density
        self.init_non_persistent_buffers()

    def init_non_persistent_buffers(self) -> None:
        # Rounding errors must not add a channel: 0.07 * 100 is slightly more than 7.
        self.num_open.fill_(math.ceil(round(self.density * self.num_gates, 6)))

    def extra_repr(self) -> str:
        return f'density={self.density:.3g}'

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x)

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        return self.decide(logits)

    def decide(self, logits: torch.Tensor) -> torch.Tensor:
        return winners(logits.detach(), self.num_open)

    def weigh(self, mask: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return torch.stack((mask * torch.relu(logits), mask), dim=1)


class FbsBasicBlock(BasicBlock):
    """timm's BasicBlock with a saliency over the outputs of both convolutions.

    Args:
        *args: Arguments of timm's BasicBlock.
        gate_layer: Factory of the gates, called with (in_channels, num_gates).
        **kwargs: Keyword arguments of timm's BasicBlock.
    """

    bn1: Any
    bn2: Any

    def __init__(
            self,
            *args,
            gate_layer: Callable[..., Gate] = SaliencyGate,
            device=None,
            dtype=None,
            **kwargs,
    ) -> None:
        dd = {'device': device, 'dtype': dtype}
        super().__init__(*args, **kwargs, **dd)  # type: ignore[misc]
        self.gate_pool = GatePool()
        self.gate1 = gate_layer(self.conv1.in_channels, self.conv1.out_channels, **dd)
        self.gate2 = gate_layer(self.conv2.in_channels, self.conv2.out_channels, **dd)

    @property
    def gated_convs(self) -> GatedConvs:
        return {'conv1': (None, self.gate1), 'conv2': (self.gate1, self.gate2)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shortcut = x

        weights = self.gate1(self.gate_pool(x.abs()))
        x = self.conv1(x)
        x = self.bn1(x)
        x = boost(x, weights, self.bn1.bias)
        x = self.drop_block(x)
        x = self.act1(x)
        x = self.aa(x)  # type: ignore[misc]

        weights = self.gate2(self.gate_pool(x.abs()))
        x = self.conv2(x)
        x = self.bn2(x)
        x = boost(x, weights, self.bn2.bias)

        return add_shortcut(self, x, shortcut, self.act2)


class Suppression(Objective):
    """L1 loss on the saliencies, and the schedule of the density.

    During training, evaluation uses the density of the current epoch. A network that is not trained has the final one.

    Args:
        density: Final share of the channels of each convolution that are computed, above 0 and at most 1. A density of
            0.6 leaves about half of the MACs of a ResNet.
        density_epochs: Epochs over which the density falls linearly from 1, or 'fixed'.
        saliency_weight: Weight of the L1 loss.
    """

    def __init__(
            self,
            density: float = 0.6,
            density_epochs: Epochs = 'fixed',
            saliency_weight: float = 1e-8,
    ) -> None:
        super().__init__()
        self.density = check_number(density, 'density', above=0, maximum=1)
        self.density_epochs = check_epochs(density_epochs, 'density_epochs')
        self.saliency_weight = check_number(saliency_weight, 'saliency_weight', minimum=0)

    def extra_repr(self) -> str:
        return (
            f'density={self.density}, density_epochs={self.density_epochs}, '
            f'saliency_weight={self.saliency_weight}')

    def schedule(self) -> List[Scheduled]:
        return [Scheduled('gates', 'density', 1., self.density, self.density_epochs, evaluated=True)]

    def density_at(self, epoch: float) -> float:
        """Density at an epoch."""
        if self.density_epochs == 'fixed':
            return self.density
        return 1 - linear_warmup(epoch, 1 - self.density, *self.density_epochs)

    def attach(self, network: nn.Module) -> None:
        _set_density(network, self.density)

    def begin_epoch(self, model: nn.Module, epoch: int) -> None:
        _set_density(model, self.density_at(epoch))

    def terms(self, model: nn.Module, epoch: float, step: Optional[Step] = None) -> Dict[str, Term]:
        saliencies = self.gathered(torch.relu(gate_scores(model)))
        return {'saliency_loss': Term(saliencies.sum(1).mean(), self.saliency_weight, 'saliency_weight')}


def _set_density(model: nn.Module, density: float) -> None:
    for module in model.modules():
        if isinstance(module, SaliencyGate):
            module.set_density(density)


default_cfgs = generate_default_cfgs({
    **{f'fbs_resnet{depth}.untrained': imagenet_cfg(paper_ids='arXiv:1810.05331') for depth in (18, 34)},
    **{f'fbs_resnet{depth}.untrained': cifar_cfg(paper_ids='arXiv:1810.05331') for depth in (20, 32)},
})


METHOD = GatingMethod(
    gate_layer=SaliencyGate,
    gate_options=dict(gate_bias='bias'),
    objective=Suppression,
    objective_options=('density', 'density_epochs', 'saliency_weight'),
)


def _create(create: Callable[..., Any], depth: int, pretrained: bool = False, **kwargs) -> Any:
    if kwargs.get('budget') is not None:
        raise ValueError(
            f'the MACs of this network are decided by its density, not learnt: it cannot be trained to a budget, got '
            f'budget={kwargs["budget"]}.')
    model_args = dict(block=FbsBasicBlock)
    return create(f'fbs_resnet{depth}', depth, pretrained, method=METHOD, **dict(model_args, **kwargs))


def _create_imagenet(depth: int, pretrained: bool = False, **kwargs) -> GatedResNet:
    return _create(build_imagenet_resnet, depth, pretrained, **dict(dict(recipe=IMAGENET_RECIPE), **kwargs))


def _create_cifar(depth: int, pretrained: bool = False, **kwargs) -> GatedCifarResNet:
    return _create(build_cifar_resnet, depth, pretrained, **dict(dict(recipe=CIFAR10_RECIPE), **kwargs))


@register_model
def fbs_resnet18(pretrained: bool = False, **kwargs) -> GatedResNet:
    """Constructs a ResNet-18 with feature boosting and suppression."""
    return _create_imagenet(18, pretrained, **dict(dict(layers=(2, 2, 2, 2)), **kwargs))


@register_model
def fbs_resnet34(pretrained: bool = False, **kwargs) -> GatedResNet:
    """Constructs a ResNet-34 with feature boosting and suppression."""
    return _create_imagenet(34, pretrained, **dict(dict(layers=(3, 4, 6, 3)), **kwargs))


@register_model
def fbs_resnet20(pretrained: bool = False, **kwargs) -> GatedCifarResNet:
    """Constructs a CIFAR ResNet-20 with feature boosting and suppression."""
    return _create_cifar(20, pretrained, **kwargs)


@register_model
def fbs_resnet32(pretrained: bool = False, **kwargs) -> GatedCifarResNet:
    """Constructs a CIFAR ResNet-32 with feature boosting and suppression."""
    return _create_cifar(32, pretrained, **kwargs)
