"""In which precision gates are computed: float32, or that of their weights, whatever the rest of a network runs in"""
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ['autocasts', 'check_floating', 'full_precision', 'widen']


def full_precision(x: torch.Tensor) -> AbstractContextManager:
    """Context without autocast where `x` is: gates are too small to gain from it, and their decisions would suffer."""
    return torch.autocast(x.device.type, enabled=False) if autocasts(x) else nullcontext()


def autocasts(x: torch.Tensor) -> bool:
    """Whether autocast is on where `x` is."""
    device_type = x.device.type
    if device_type == 'meta':
        return False
    # (The compiler of torch 2.9 cannot trace that question, and has no other devices for which the answer is no.)
    available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device_type)
    return available and torch.is_autocast_enabled(device_type)


def widen(x: torch.Tensor) -> torch.Tensor:
    """Half precision to float32. Backward, a gradient too large for x's dtype is clamped instead of being infinite."""
    return _Widen.apply(check_floating(x))


def check_floating(x: torch.Tensor) -> torch.Tensor:
    """Return a floating-point tensor; refuse others, whose results would be rounded to their dtype."""
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
