"""In which precision gates are computed: float32, or that of their weights, whatever the rest of a network runs in"""
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

__all__ = ['autocasts', 'full_precision', 'widen']


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
    return _Widen.apply(x)


class _Widen(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.dtype = x.dtype
        return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        limit = torch.finfo(ctx.dtype).max
        return grad.clamp(-limit, limit).to(ctx.dtype)
