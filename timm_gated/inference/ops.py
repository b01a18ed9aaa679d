"""Operations of programs"""
from dataclasses import dataclass, field
from typing import Any, Optional, Tuple, Union

import torch

__all__ = [
    'AdaptivePoolOp', 'BlurOp', 'ChannelConvOp', 'ConcatOp', 'ConvOp', 'DequantizeOp', 'GateOp', 'Int8ConvOp',
    'Int8LinearOp', 'Op', 'OutputOp', 'PoolOp', 'QuantizeOp', 'ScaleOp', 'SkipOp', 'SubsampleOp', 'counts_pairs',
    'pads_same',
]


@dataclass
class ConvOp:
    """Convolution with bias, optionally followed by a shortcut and a ReLU.

    Gates select the input channels (`gate_in`) and the output channels (`gate_out`) that are computed. With `groups`,
    the channels of a gate are those of all groups, one group after the other.
    """
    source: int
    target: int
    weight: torch.Tensor
    bias: torch.Tensor
    stride: int = 1
    dilation: int = 1
    padding: int = 0
    relu: bool = False
    residual: Optional[int] = None
    gate_in: Optional[int] = None
    gate_out: Optional[int] = None
    groups: int = 1
    name: str = ''


@dataclass
class GateOp:
    """Gate: global average pooling, two linear layers with a ReLU between them, open where the logit is positive.

    `macs` counts the two layers of the original network, before batch norm is folded.
    """
    source: int
    gate: int
    weight1: torch.Tensor
    bias1: torch.Tensor
    weight2: torch.Tensor
    bias2: torch.Tensor
    macs: int = 0
    name: str = ''


@dataclass
class PoolOp:
    """Max pooling, or average pooling that excludes the padding. A gate of the source is one of the target."""
    source: int
    target: int
    average: bool
    kernel: int
    stride: int
    padding: int
    ceil_mode: bool


@dataclass
class AdaptivePoolOp:
    """Average pooling to `bins` x `bins` pixels, like torch's adaptive pooling."""
    source: int
    target: int
    bins: int


@dataclass
class BlurOp:
    """Blur pooling: a binomial filter of `kernel` x `kernel` taps, with a reflected border of `padding` pixels.

    A gate of the source is one of the target.
    """
    source: int
    target: int
    kernel: int
    stride: int
    padding: int
    name: str = ''


@dataclass
class ChannelConvOp:
    """Convolution over the channels of a map of one pixel, with zeros around them. The weight has an odd length."""
    source: int
    target: int
    weight: torch.Tensor
    name: str = ''


@dataclass
class ScaleOp:
    """Multiplication of a map with the sigmoid of `factors`, a map of one pixel.

    Optionally followed by a shortcut and a ReLU.
    """
    source: int
    factors: int
    target: int
    residual: Optional[int] = None
    relu: bool = False


@dataclass
class ConcatOp:
    """Concatenation of channels. Maps are resized bilinearly to the size of the first one."""
    sources: Tuple[int, ...]
    target: int
    align_corners: bool = False


@dataclass
class SubsampleOp:
    """Strided subsampling, with `before` and `after` channels of zeros added."""
    source: int
    target: int
    stride: int
    before: int
    after: int


@dataclass
class SkipOp:
    """Skips the next `count` convolutions if a gate is closed. `target` is then the ReLU of `source`, the shortcut."""
    source: int
    target: int
    gate: int
    count: int


@dataclass
class OutputOp:
    """Returns a map to the caller."""
    source: int


@dataclass
class QuantizeOp:
    """Turns a float32 map into a uint8 one: `clamp(round(value / scale) + zero)`. `scale` has one value."""
    source: int
    target: int
    scale: torch.Tensor
    zero: int


@dataclass
class DequantizeOp:
    """Turns a uint8 map into a float32 one."""
    source: int
    target: int


_NONE = torch.empty(0)


@dataclass
class Int8ConvOp(ConvOp):
    """Convolution of a uint8 map with int8 weights, to a uint8 map.

    `clamp(round(multiplier * sum) + zero)`, where the int32 sum is that of the products, of the int32 `bias` and, with
    a shortcut, of `round(ratio * shortcut)`. The bias includes what the zeros of input and shortcut contribute.

    Attributes:
        multiplier: Multiplier of each filter.
        ratio: Ratio of each filter, empty without a shortcut.
        scale: Scale of the output, one value.
        zero: Zero of the output.
    """
    multiplier: torch.Tensor = field(default_factory=_NONE.clone)
    ratio: torch.Tensor = field(default_factory=_NONE.clone)
    scale: torch.Tensor = field(default_factory=_NONE.clone)
    zero: int = 0


@dataclass
class Int8LinearOp(ConvOp):
    """1 x 1 convolution with int8 weights on a float32 map of one pixel, such as a classifier; the output is float32.

    The input is quantised: `multiplier * sum of weight * (q - zero) + bias`.

    Attributes:
        multiplier: Multiplier of each filter.
        scale: Scale of the quantised input, one value.
        zero: Zero of the quantised input.
    """
    multiplier: torch.Tensor = field(default_factory=_NONE.clone)
    scale: torch.Tensor = field(default_factory=_NONE.clone)
    zero: int = 0


Op = Union[
    ConvOp, GateOp, PoolOp, AdaptivePoolOp, BlurOp, ChannelConvOp, ScaleOp, ConcatOp, SubsampleOp, SkipOp, OutputOp,
    QuantizeOp, DequantizeOp]


def pads_same(op: ConvOp) -> bool:
    """Whether a convolution without a stride would keep the size of its map.

    Args:
        op: Convolution.
    """
    return op.padding * 2 == op.dilation * (op.weight.shape[2] - 1)


def counts_pairs(op: Any) -> bool:
    """Whether the MACs of an operation depend on how many pairs of an open input and output share a group.

    Args:
        op: Operation.
    """
    return isinstance(op, ConvOp) and op.groups > 1 and op.gate_in is not None and op.gate_out is not None
