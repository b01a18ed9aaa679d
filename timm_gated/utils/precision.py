"""Full precision for gates and their losses, regardless of autocast"""
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ['autocasts', 'check_floating', 'full_precision', 'widen']


def full_precision(x: torch.Tensor) -> AbstractContextManager:
    """Context without autocast on the device of `x`. Gates gain no speed from autocast, and lose accuracy."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else nullcontext()


def autocasts(x: torch.Tensor) -> bool:
    """Whether autocast is enabled on the device of `x`."""
    device_type = x.device.type
    if device_type == 'meta':
        return False
    # The compiler of torch 2.9 cannot trace `is_autocast_available`, and supports only devices that have autocast.
    available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device_type)
    return available and torch.is_autocast_enabled(device_type)


def widen(x: torch.Tensor) -> torch.Tensor:
    """Cast half precision to float32. Gradients are clamped to the range of the dtype of `x`."""
    return _Widen.apply(check_floating(x))


def check_floating(x: torch.Tensor) -> torch.Tensor:
    """Return a floating-point tensor; raise a ValueError for any other dtype."""
    if not x.is_floating_point():
        raise ValueError(f'x must be a floating-point tensor, got {x.dtype}.')
    return x


class _Widen(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        ctx.dtype = inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        limit = torch.finfo(ctx.dtype).max
        return grad.clamp(-limit, limit).to(ctx.dtype)
