"""Names of the gated models for parametrised tests, and random weights for them"""
import re
from contextlib import AbstractContextManager
from typing import Set

import timm
import torch
import torch.nn as nn
from torch.nn.modules.batchnorm import _BatchNorm

from timm_gated import Gating, force_gates, gates, list_gated_models
from timm_gated.models.fbs import SaliencyGate
from timm_gated.models.gated_resnet import FIRST
from timm_gated.models.gaternet import Gater

# ResNets of timm that are gated by one mechanism. tests/models/test_variants.py is parametrised by these names.
VARIANTS = [name for name in timm.list_models(module='gated_resnet') if name.removeprefix('gated_') not in FIRST]
# One variant of each mechanism: stems, downsampling, wide and grouped blocks, attention, anti-aliasing, mixed blocks.
MECHANISMS = [f'gated_{name}' for name in (
    'resnet18d', 'resnet14t', 'wide_resnet50_2', 'resnext50_32x4d', 'seresnet18', 'ecaresnext26t_32x4d', 'senet154',
    'resnetblur18', 'resnetblur50d', 'seresnextaa101d_32x8d', 'resnetrs50', 'test_resnet')]
# Every other gated model of every method. New methods join all tests that are parametrised by these names.
GATED = [name for name in list_gated_models() if name not in VARIANTS]
IMAGENET_DEPTHS = (18, 34, 50, 101, 152)


def family(name: str) -> str:
    """The method of a model."""
    return name.split('_resnet')[0]


def depth(name: str) -> int:
    return int(re.search(r'_resnet(\d+)', name).group(1))


def is_imagenet(name: str) -> bool:
    return depth(name) in IMAGENET_DEPTHS


def is_bottleneck(name: str) -> bool:
    return depth(name) in (50, 101, 152)


NOT_BIG = [name for name in GATED if depth(name) not in (101, 152, 110) and not name.endswith('_w20')]
# The smallest model of each method, data set and block.
SMALL = sorted({
    (family(name), is_imagenet(name), is_bottleneck(name)): name for name in sorted(GATED, key=depth, reverse=True)
    if re.fullmatch(r'\w+_resnet\d+', name)}.values())
ONE_EACH = sorted({family(name): name for name in SMALL}.values())  # one model of each method
# The smallest model of each method and block. DGNet is left out: its networks are those of the paper.
BLOCKS = sorted({
    (family(name), is_bottleneck(name)): name for name in sorted(SMALL, key=is_imagenet, reverse=True)
    if family(name) != 'dgnet'}.values())
# Options that give these models few blocks and few channels.
TINY = {
    name: dict(layers=(1, 1, 1, 1), channels=(16, 32, 64, 128)) if is_imagenet(name) else dict(layers=(1, 1, 1))
    for name in SMALL}


def images(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def is_binary(mask: torch.Tensor) -> bool:
    return set(mask.unique().tolist()) == {0., 1.}


def dense_counterpart(name: str, **kwargs) -> nn.Module:
    if is_imagenet(name):
        return timm.create_model(f'resnet{depth(name)}', **kwargs)
    width = re.search(r'_w(\d+)$', name)
    return timm.create_model(f'cifar_resnet{depth(name)}', inner_width=int(width.group(1)) if width else 1, **kwargs)


def gating_keys(model: nn.Module) -> Set[str]:
    """Keys that the state dict of a gated model has in addition to those of its dense counterpart."""
    return {
        f'{name}.{key}' for name, module in model.named_modules() if isinstance(module, Gating)
        for key in module.state_dict()}


@torch.no_grad()
def shuffle(model: nn.Module, seed: int = 0) -> nn.Module:
    """Give norms random affine parameters and statistics, and gates logits of both signs. In place.

    Initial values would hide many errors: norms are the identity and most gates are open.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(tensor: torch.Tensor, low: float, high: float) -> None:
        tensor.copy_(torch.rand(tensor.shape, generator=generator) * (high - low) + low)

    for module in model.modules():
        if isinstance(module, _BatchNorm):
            uniform(module.weight, 0.5, 1.)
            uniform(module.bias, -0.3, 0.3)
            uniform(module.running_mean, -0.3, 0.3)
            uniform(module.running_var, 0.5, 1.5)
    for _, gate in gates(model):
        layers = [module for module in gate.modules() if isinstance(module, (nn.Linear, nn.Conv2d))]
        for layer in layers:
            # Saliencies scale the maps in every block: large ones would overflow.
            bound = 1 / layer.in_features if isinstance(gate, SaliencyGate) else 1.
            uniform(layer.weight, -bound, bound)
        if layers:
            uniform(layers[-1].bias, -1., 1.)
        if hasattr(gate, 'lstm'):  # all gates share its output layer, so the bias would decide the sign of all
            layers[-1].bias.zero_()
            for parameter in gate.lstm.parameters():
                uniform(parameter, -2., 2.)
    for module in model.modules():
        if isinstance(module, Gater):
            uniform(module.fc2.weight, -1., 1.)
            uniform(module.fc2.bias, -1., 1.)
    return model


@torch.no_grad()
def without_gates(model: nn.Module) -> AbstractContextManager:
    """Context in which a model equals its dense counterpart: gates are open. Saliencies stay 1 afterwards."""
    for _, gate in gates(model):
        if isinstance(gate, SaliencyGate):
            gate.fc.weight.zero_()
            gate.fc.bias.fill_(1.)
    return force_gates(model, 'open')


def gate_loss(model: nn.Module) -> torch.Tensor:
    """Loss on the logits of the last forward pass."""
    return sum(torch.sigmoid(gate.logits).mean() for _, gate in gates(model))
