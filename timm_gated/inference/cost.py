"""MACs of a program as a function of the number of open channels per gate

The MAC convention is that of `timm_gated.count_macs`: an accelerated network reports the MACs of the original network.
"""
from dataclasses import dataclass, replace
from typing import Any, Dict, List, Optional, Set, Tuple

import torch
import torch.nn.functional as F

from ..layers import Macs
from .program import AdaptivePoolOp, ConcatOp, ConvOp, GateOp, Op, PoolOp, Program, SkipOp, SubsampleOp

__all__ = ['Cost', 'ProgramCost']

_MAX_SIZES = 16  # cached image sizes


@dataclass
class Cost:
    """MACs per image for one image size.

    Gated MACs are grouped by the one or two gates whose numbers of open channels they are proportional to.

    Attributes:
        dense: MACs of the dense network.
        fixed: MACs that do not depend on gates, plus those of the gates.
        first: First gate per group.
        second: Second gate per group, or the number of gates if there is none.
        macs: MACs per group for one open channel of each gate.
        network: MACs of a batch through the complete network, the head included.
    """
    dense: int
    fixed: int
    first: torch.Tensor
    second: torch.Tensor
    macs: torch.Tensor
    network: Optional[Macs] = None

    def used(self, num_open: torch.Tensor) -> torch.Tensor:
        """Return the MACs per image, [N], int64, for the number of open channels per gate, [N, gates]."""
        counts = F.pad(num_open.long(), (0, 1), value=1)  # a factor of 1 for groups with one gate
        products = counts.index_select(1, self.first) * counts.index_select(1, self.second)
        return (products * self.macs).sum(1) + self.fixed


class ProgramCost:
    """MACs of a program for any image size. Keeps no weights.

    Args:
        program: Program to count.
    """

    def __init__(self, program: Program) -> None:
        self.in_channels = program.in_channels
        self.num_gates = program.num_gates
        self._ops = [_without_data(op) for op in program.ops]
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

    def _count(self, height: int, width: int) -> Cost:
        shapes = {0: (self.in_channels, height, width)}
        gates: Dict[int, int] = {}  # number of channels by gate
        pooled: Set[int] = set()  # maps whose pooling is already counted
        skipping: List[Optional[int]] = []  # gates of the next convolutions that may be skipped
        dense = fixed = 0
        groups: Dict[Tuple[int, int], int] = {}
        for op in self._ops:
            if isinstance(op, GateOp):
                fixed += op.macs
                if op.source not in pooled:
                    channels, height, width = shapes[op.source]
                    fixed += channels * height * width
                    pooled.add(op.source)
                gates[op.gate] = len(op.weight2)
            elif isinstance(op, SkipOp):
                skipping = [op.gate] * op.count
            elif isinstance(op, ConcatOp):
                channels = sum(shapes[source][0] for source in op.sources)
                shapes[op.target] = (channels, *shapes[op.sources[0]][1:])
                pooled.discard(op.target)
            elif isinstance(op, (ConvOp, PoolOp, AdaptivePoolOp, SubsampleOp)):
                shapes[op.target] = shape = _shape(op, *shapes[op.source])
                pooled.discard(op.target)
                if isinstance(op, ConvOp):
                    macs = op.weight.numel() * shape[1] * shape[2]
                    dense += macs
                    switches = [gate for gate in (op.gate_in, op.gate_out, *skipping[:1]) if gate is not None]
                    skipping = skipping[1:]
                    if switches:
                        assert len(switches) <= 2, 'a block is gated as a unit or per channel, not both'
                        for gate in switches:
                            macs //= gates[gate]
                        group = switches[0], (*switches, self.num_gates)[1]
                        groups[group] = groups.get(group, 0) + macs
                    else:
                        fixed += macs
        pairs = torch.tensor(list(groups), dtype=torch.int64).view(-1, 2)
        return Cost(dense, fixed, pairs[:, 0], pairs[:, 1], torch.tensor(list(groups.values()), dtype=torch.int64))


def _without_data(op: Op) -> Op:
    tensors: Dict[str, Any] = {
        name: value.to('meta') for name, value in vars(op).items() if isinstance(value, torch.Tensor)}
    return replace(op, **tensors)


def _shape(op: Any, channels: int, height: int, width: int) -> Tuple[int, int, int]:
    """Return the shape of the output map of an operation."""
    if isinstance(op, SubsampleOp):
        return channels + op.before + op.after, -(-height // op.stride), -(-width // op.stride)
    if isinstance(op, AdaptivePoolOp):
        return channels, op.bins, op.bins
    if isinstance(op, ConvOp):
        reach = op.dilation * (op.weight.shape[2] - 1) + 1
        sides = [(side + 2 * op.padding - reach) // op.stride + 1 for side in (height, width)]
        return op.weight.shape[0], sides[0], sides[1]
    sides = [_pooled_side(op, side) for side in (height, width)]
    return channels, sides[0], sides[1]


def _pooled_side(op: PoolOp, side: int) -> int:
    beyond = side + 2 * op.padding - op.kernel
    if not op.ceil_mode:
        return beyond // op.stride + 1
    pooled = -(-beyond // op.stride) + 1
    return pooled - 1 if (pooled - 1) * op.stride >= side + op.padding else pooled  # no window starts in the padding
