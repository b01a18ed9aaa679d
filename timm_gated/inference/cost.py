"""MACs of a program as a function of its counts: open channels per gate, and open pairs per grouped convolution

The MAC convention is that of `timm_gated.count_macs`: an accelerated network reports the MACs of the original network.
"""
import math
from dataclasses import dataclass, field, replace
from typing import Any, Dict, Iterator, List, Optional, Sequence, Set, Tuple, Union

import torch
import torch.nn.functional as F

from ..layers import Macs
from .program import (
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
    Program,
    QuantizeOp,
    ScaleOp,
    SkipOp,
    SubsampleOp,
    counts_pairs,
)

__all__ = ['Cost', 'ProgramCost', 'output_shape', 'without_data']

_MAX_SIZES = 16  # cached image sizes


@dataclass
class Cost:
    """MACs per image for one image size.

    Gated MACs are grouped by the one or two counts that they are proportional to (`Program.num_counts`).

    Attributes:
        dense: MACs of the dense network.
        fixed: MACs that do not depend on gates, plus those of the gates.
        first: First count per group.
        second: Second count per group, or the number of counts if there is none.
        macs: MACs per group if each count is one.
        network: MACs of a batch through the complete network, the head included.
    """
    dense: int
    fixed: int
    first: torch.Tensor
    second: torch.Tensor
    macs: torch.Tensor
    network: Optional[Macs] = None

    def used(self, num_open: torch.Tensor) -> torch.Tensor:
        """Return the MACs per image, [N], int64, for the counts of each image, [N, counts]."""
        counts = F.pad(num_open.long(), (0, 1), value=1)  # a factor of 1 for groups with one count
        products = counts.index_select(1, self.first) * counts.index_select(1, self.second)
        return (products * self.macs).sum(1) + self.fixed


class ProgramCost:
    """MACs of a program for any image size. Keeps no weights.

    Args:
        program: Program to count.
    """

    def __init__(self, program: Program) -> None:
        self.in_channels = program.in_channels
        self.num_counts = program.num_counts
        self._num_gates = program.num_gates
        self._ops = [without_data(op) for op in program.ops]
        self._costs: Dict[Tuple[int, int], Cost] = {}

    def at(self, height: int, width: int) -> Cost:
        """Return the cost for one image size."""
        cost = self._costs.get((height, width))
        if cost is None:
            cost = self._count(height, width)
            if len(self._costs) >= _MAX_SIZES:
                self._costs.clear()
            self._costs[height, width] = cost
        return cost

    def by_operation(self, height: int, width: int, num_open: Sequence[int]) -> List[Tuple[str, str, int]]:
        """Return the layer name, a description and the MACs of each operation.

        Args:
            height: Height of the image.
            width: Width of the image.
            num_open: Counts of an image.
        """
        rows = []
        for step in self._walk(height, width):
            macs = step.macs + step.overhead
            for count, most in step.counts.items():
                macs = macs // most * num_open[count]
            size = '' if step.shape is None else f' @ {step.shape[1]} x {step.shape[2]}'
            rows.append((getattr(step.op, 'name', ''), _describe(step.op) + size, macs))
        return rows

    def _count(self, height: int, width: int) -> Cost:
        dense = fixed = 0
        groups: Dict[Tuple[int, int], int] = {}
        for step in self._walk(height, width):
            dense += step.macs
            fixed += step.overhead
            if step.counts:
                if len(step.counts) > 2:  # not compiled from a network
                    raise ValueError('MACs of convolutions with more than two gates cannot be counted.')
                macs = step.macs
                for most in step.counts.values():
                    macs //= most
                first, second, *_ = (*step.counts, self.num_counts)
                group = first, second
                groups[group] = groups.get(group, 0) + macs
            else:
                fixed += step.macs
        pairs = torch.tensor(list(groups), dtype=torch.int64).view(-1, 2)
        return Cost(dense, fixed, pairs[:, 0], pairs[:, 1], torch.tensor(list(groups.values()), dtype=torch.int64))

    def _walk(self, height: int, width: int) -> Iterator['_Step']:
        """Go through the operations for images of one size."""
        shapes = {0: (self.in_channels, height, width)}
        sizes: Dict[int, int] = {}  # number of channels by gate
        pooled: Set[int] = set()  # maps whose pooling is already counted
        skipping: List[int] = []  # gates of the next convolutions that may be skipped
        pairs = self._num_gates  # next count of pairs
        for op in self._ops:
            step = _Step(op)
            if isinstance(op, GateOp):
                step.overhead = op.macs + (0 if op.source in pooled else math.prod(shapes[op.source]))
                pooled.add(op.source)
                sizes[op.gate] = len(op.weight2)
            elif isinstance(op, SkipOp):
                skipping = [op.gate] * op.count
            elif not isinstance(op, OutputOp):
                sources = op.sources if isinstance(op, ConcatOp) else (op.source,)
                step.shape = shapes[op.target] = output_shape(op, *(shapes[source] for source in sources))
                pooled.discard(op.target)
                if isinstance(op, ConvOp):
                    step.macs = op.weight.numel() * step.shape[1] * step.shape[2]
                    gates = (op.gate_in, op.gate_out)
                    if counts_pairs(op):
                        step.counts[pairs] = op.weight.shape[0] * op.weight.shape[1]
                        gates, pairs = (None, None), pairs + 1
                    step.counts.update({gate: sizes[gate] for gate in (*gates, *skipping[:1]) if gate is not None})
                    skipping = skipping[1:]
                elif isinstance(op, ChannelConvOp):
                    step.macs = step.shape[0] * len(op.weight)
                elif isinstance(op, BlurOp):  # a depthwise convolution of all channels
                    step.macs = math.prod(step.shape) * op.kernel ** 2
            yield step


@dataclass
class _Step:
    """An operation with the shape of its output, its MACs with all gates open, and the counts they are proportional to.

    `counts` has the largest value of each count. The MACs of gates are overhead.
    """
    op: Op
    shape: Optional[Tuple[int, int, int]] = None
    macs: int = 0
    overhead: int = 0
    counts: Dict[int, int] = field(default_factory=dict)


def _describe(op: Op) -> str:
    if isinstance(op, ConvOp):
        c_out, c_in, kernel = op.weight.shape[0], op.weight.shape[1] * op.groups, op.weight.shape[2]
        options = [
            f'{op.groups} groups' if op.groups > 1 else '',
            f'stride {op.stride}' if op.stride > 1 else '', f'dilation {op.dilation}' if op.dilation > 1 else '',
            'gated' if op.gate_in is not None or op.gate_out is not None else '']
        kind = 'int8 conv' if isinstance(op, (Int8ConvOp, Int8LinearOp)) else 'conv'
        return ' '.join(filter(None, (f'{kind} {kernel} x {kernel}, {c_in} to {c_out}', *options)))
    if isinstance(op, GateOp):
        return f'gate, {len(op.weight2)} channels'
    if isinstance(op, ChannelConvOp):
        return f'conv over channels {len(op.weight)}'
    return type(op).__name__.removesuffix('Op').lower()


def without_data(op: Op) -> Op:
    """Copy of an operation with its tensors on the meta device."""
    tensors: Dict[str, Any] = {
        name: value.to('meta') for name, value in vars(op).items() if isinstance(value, torch.Tensor)}
    return replace(op, **tensors)


def output_shape(op: Any, *sources: Tuple[int, int, int]) -> Tuple[int, int, int]:
    """Return the shape of the output map of an operation.

    Args:
        op: Operation that writes a map.
        *sources: Shapes of the maps that it reads, without a shortcut.
    """
    channels, height, width = sources[0]
    if isinstance(op, ConcatOp):
        return sum(source[0] for source in sources), height, width
    if isinstance(op, SubsampleOp):
        return channels + op.before + op.after, -(-height // op.stride), -(-width // op.stride)
    if isinstance(op, AdaptivePoolOp):
        return channels, op.bins, op.bins
    if isinstance(op, (QuantizeOp, DequantizeOp, ChannelConvOp, ScaleOp)):
        return channels, height, width
    if isinstance(op, ConvOp):
        reach = op.dilation * (op.weight.shape[2] - 1) + 1
        sides = [(side + 2 * op.padding - reach) // op.stride + 1 for side in (height, width)]
        return op.weight.shape[0], sides[0], sides[1]
    sides = [_pooled_side(op, side) for side in (height, width)]
    return channels, sides[0], sides[1]


def _pooled_side(op: Union[PoolOp, BlurOp], side: int) -> int:
    beyond = side + 2 * op.padding - op.kernel
    if isinstance(op, BlurOp) or not op.ceil_mode:
        return beyond // op.stride + 1
    pooled = -(-beyond // op.stride) + 1
    return pooled - 1 if (pooled - 1) * op.stride >= side + op.padding else pooled  # no window starts in the padding
