"""Feature boosting and suppression: the most salient channels are computed and scaled, the others are not

A rival of channel gating, in the same harness: `timm.create_model('fbs_resnet18', density=0.5)`. Before a convolution
runs, its input predicts how salient each of its output channels will be; a fixed share of them, the density, wins.

Paper: Dynamic Channel Pruning: Feature Boosting and Suppression (https://arxiv.org/abs/1810.05331)

A convolution puts out mask * (g * norm(conv(x)) + beta), with the saliency g = relu(FC(mean |x|)), the mask of the
largest of g, and the norm's shift beta; the activation follows. Ours, or our reading, are:

- Both convolutions of a block have a saliency over their outputs, the second one before the sum. What comes out of the
  sum is whole, so the first convolution of a block reads all channels, and the second those that won. Stem and
  shortcuts stay as they are.
- The saliency takes the place of the norm's scale. Norms keep theirs as well, a factor that starts at 1: dense
  checkpoints have it, and so load by name. Where FC weights are 0 and biases 1, every g is 1, and at density 1 the
  network is the dense one. Winners are chosen by g alone.
- The L1 loss is the sum of g over all channels, its mean over the batch.
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
from .cifar_resnet import cifar_cfg
from .gated_cifar_resnet import GatedCifarResNet, build_cifar_resnet
from .gated_resnet import GatedResNet, build_imagenet_resnet, imagenet_cfg

__all__ = ['FbsBasicBlock', 'SaliencyGate', 'Suppression', 'boost', 'winners']

# Ours: the density falls while the learning rate is high.
IMAGENET_RECIPE: Dict[str, Any] = dict(density_epochs=(0, 30))
CIFAR10_RECIPE: Dict[str, Any] = dict(density_epochs=(0, 100))


def winners(scores: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Mask of the largest values of each row; of equal ones, any.

    Args:
        scores: [N, channels].
        count: How many win, a number in a tensor: it changes in training, and a compiled graph need not.
    """
    order = scores.argsort(dim=1, descending=True)
    won = torch.arange(scores.shape[1], device=scores.device) < count
    return torch.zeros_like(scores).scatter(1, order, won.to(scores.dtype).expand_as(scores))


def boost(x: torch.Tensor, weights: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    """mask * (g * (x - shift) + shift): the saliency scales what a norm puts out, but not the norm's shift.

    Args:
        x: Output of the norm, [N, C, H, W].
        weights: mask * g and mask, [N, 2, C].
        shift: Of the norm, [C].
    """
    scale, mask = weights.to(x.dtype).unbind(1)
    return x * scale[:, :, None, None] + ((mask - scale) * shift.to(x.dtype))[:, :, None, None]


class SaliencyGate(Gate):
    """Keeps the most salient of a convolution's outputs, by the pooled magnitudes of its input, [N, in_channels].

    Its `logits` are the saliencies before their ReLU: where that leaves zeros, they tell which of them is the larger.
    What it hands to the block is [N, 2, num_gates]: mask * saliency, and the mask.

    Args:
        in_channels: Channels of the input.
        num_gates: Channels of the output.
        bias: Initial bias of the saliencies.

    Attributes:
        density: Share of the channels that win, see `set_density`.
        num_open: Their number, in a tensor.
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
        # Small, so that dense weights start as they are, and because saliencies grow with the maps that they scale:
        # from large ones, a residual network runs away.
        nn.init.normal_(self.fc.weight, std=1e-3)
        nn.init.constant_(self.fc.bias, check_number(bias, 'bias of a gate'))
        # Not part of a checkpoint: it follows from the option, or from the epoch of the training.
        self.register_buffer('num_open', torch.tensor(0, device=device), persistent=False)
        self.set_density(1.)

    @property
    def num_gates(self) -> int:
        return self.fc.out_features

    def set_density(self, density: float) -> None:
        """Let a share of the channels win, rounded up."""
        self.density = density
        self.init_non_persistent_buffers()

    def init_non_persistent_buffers(self) -> None:
        # (rounding errors must not add a channel: 0.07 * 100 is a little more than 7)
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
    """timm's BasicBlock with a saliency over the outputs of both convolutions, each read from the convolution's input.

    Args:
        inplanes: Input channel dimensionality.
        planes: Output channel dimensionality.
        stride: Stride of the first convolution.
        downsample: Optional downsample layer for the residual path.
        gate_layer: Makes a gate from (in_channels, num_gates).
        **kwargs: As for timm's BasicBlock.
    """

    bn1: Any
    bn2: Any

    def __init__(
            self,
            inplanes: int,
            planes: int,
            stride: int = 1,
            downsample: Optional[nn.Module] = None,
            gate_layer: Callable[..., Gate] = SaliencyGate,
            device=None,
            dtype=None,
            **kwargs,
    ) -> None:
        dd = {'device': device, 'dtype': dtype}
        super().__init__(inplanes, planes, stride, downsample, **kwargs, **dd)
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
    """L1 on the saliencies, and the density: it falls from 1 over some epochs of a training.

    Evaluation in between takes the density of the epoch; a network that is not being trained, the one at the end.

    Args:
        density: Share of each convolution's channels that win in the end, above 0 and at most 1; 0.6 leaves about half
            of the MACs of a ResNet.
        density_epochs: Epochs over which it falls linearly from 1, or 'fixed'.
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
        """Density of an epoch."""
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


def _options(recipe: Dict[str, Any], kwargs: Dict[str, Any]) -> Dict[str, Any]:
    if kwargs.get('budget') is not None:
        raise ValueError(
            f'how much a network of saliencies computes is decided by its density, not learnt: it cannot be trained to '
            f'a budget, got budget={kwargs["budget"]}.')
    return dict(dict(block=FbsBasicBlock, gate_layer=SaliencyGate, objective=Suppression, recipe=recipe), **kwargs)


def _create_imagenet(depth: int, pretrained: bool = False, **kwargs) -> GatedResNet:
    return build_imagenet_resnet(f'fbs_resnet{depth}', depth, pretrained, **_options(IMAGENET_RECIPE, kwargs))


def _create_cifar(depth: int, pretrained: bool = False, **kwargs) -> GatedCifarResNet:
    return build_cifar_resnet(f'fbs_resnet{depth}', depth, pretrained, **_options(CIFAR10_RECIPE, kwargs))


@register_model
def fbs_resnet18(pretrained: bool = False, **kwargs) -> GatedResNet:
    """Constructs a ResNet-18 of which the most salient channels are computed."""
    return _create_imagenet(18, pretrained, **dict(dict(layers=(2, 2, 2, 2)), **kwargs))


@register_model
def fbs_resnet34(pretrained: bool = False, **kwargs) -> GatedResNet:
    """Constructs a ResNet-34 of which the most salient channels are computed."""
    return _create_imagenet(34, pretrained, **dict(dict(layers=(3, 4, 6, 3)), **kwargs))


@register_model
def fbs_resnet20(pretrained: bool = False, **kwargs) -> GatedCifarResNet:
    """Constructs a CIFAR ResNet-20 of which the most salient channels are computed."""
    return _create_cifar(20, pretrained, **kwargs)


@register_model
def fbs_resnet32(pretrained: bool = False, **kwargs) -> GatedCifarResNet:
    """Constructs a CIFAR ResNet-32 of which the most salient channels are computed."""
    return _create_cifar(32, pretrained, **kwargs)
