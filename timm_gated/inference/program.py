"""Programs: a gated residual network as a short list of operations

The backends of `accelerate` run programs, `compile_trunk` makes them. A `Program` is validated when it is created, so
that backends need not check it again. Checks that depend on the size of the images are left to the backends.
"""
from dataclasses import dataclass
from typing import Any, Sequence

import torch

from .ops import (
    AdaptivePoolOp,
    BlurOp,
    ChannelConvOp,
    ConcatOp,
    ConvOp,
    DequantizeOp,
    GateOp,
    Int8ConvOp,
    Int8LinearOp,
    Op,
    OutputOp,
    PoolOp,
    QuantizeOp,
    ScaleOp,
    SkipOp,
    SubsampleOp,
    counts_pairs,
    pads_same,
)
from .validation import INT8_BIAS, INT8_DEPTH, INT8_RATIO, INT8_WEIGHT, validate

__all__ = [
    'AdaptivePoolOp', 'BlurOp', 'ChannelConvOp', 'ConcatOp', 'ConvOp', 'DequantizeOp', 'GateOp', 'INT8_BIAS',
    'INT8_DEPTH', 'INT8_RATIO', 'INT8_WEIGHT', 'Int8ConvOp', 'Int8LinearOp', 'Op', 'OutputOp', 'PoolOp', 'Program',
    'QuantizeOp', 'ScaleOp', 'SkipOp', 'SubsampleOp', 'check_images', 'counts_pairs', 'pads_same',
]


@dataclass(frozen=True)
class Program:
    """Operations on numbered maps. Map 0 is the image.

    Attributes:
        in_channels: Number of image channels.
        ops: Operations in execution order.
        num_maps: Number of maps, the image included.
        num_gates: Number of gates.

    Raises:
        ValueError: If an operation is invalid; the message names the operation and the value.
    """
    in_channels: int
    ops: Sequence[Op]
    num_maps: int = 1
    num_gates: int = 0

    def __post_init__(self) -> None:
        validate(self.in_channels, self.ops, self.num_maps, self.num_gates)

    @property
    def num_counts(self) -> int:
        """Number of counts per image: open channels by gate, then open pairs by operation that counts them."""
        return self.num_gates + sum(map(counts_pairs, self.ops))


def check_images(images: Any, channels: int) -> None:
    """Raise a `ValueError` for inputs that a network does not accept. The messages are the same on all backends."""
    if not isinstance(images, torch.Tensor) or images.layout != torch.strided:
        raise ValueError(f'images must be a dense tensor, got {getattr(images, "layout", type(images).__name__)}.')
    if not images.is_floating_point():
        raise ValueError(f'images must be floating point, got {images.dtype}.')
    if images.ndim != 4 or images.shape[1] != channels or 0 in images.shape[2:]:
        raise ValueError(f'images must have the shape [N, {channels}, H, W] and at least one pixel, '
                         f'got {tuple(images.shape)}.')
