"""Models of the tests of models, and images for them"""
import functools

import timm
import torch
import torch.nn as nn
from nets import dense_twin, shuffle

from timm_gated import Gating, gates


def images(size: int = 32, batch: int = 2, in_chans: int = 3) -> torch.Tensor:
    return torch.randn(batch, in_chans, size, size, generator=torch.Generator().manual_seed(0))


def create(name: str, **kwargs) -> nn.Module:
    torch.manual_seed(0)
    return shuffle(timm.create_model(name, **kwargs))


@functools.cache
def blueprint(name: str) -> nn.Module:
    """A model without data, to look at only."""
    return timm.create_model(name, device='meta')


@functools.cache
def dense_blueprint(name: str) -> nn.Module:
    return dense_twin(name, device='meta')


def gate_parameters(model: nn.Module) -> set:
    return {f'{name}.{parameter}' for name, gate in gates(model) for parameter, _ in gate.named_parameters()}


def assert_gates_have_gradients(model: nn.Module) -> None:
    for name, gating in model.named_modules():
        if isinstance(gating, Gating):
            for parameter in gating.parameters():
                assert parameter.grad is not None and parameter.grad.isfinite().all(), name
            assert all(parameter.grad.any() for parameter in list(gating.parameters())[-2:]), name  # of the last layer
