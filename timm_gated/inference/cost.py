"""What a program costs: MACs as a function of the channels that its gates have open

By the convention of `timm_gated.count_macs`, so that an accelerated network reports what its original would.
"""
from dataclasses import dataclass, replace
from typing import Any, Dict, List, Optional, Set, Tuple

import torch
import torch.nn.functional as F

from ..layers import Macs
from .program import ConvOp, GateOp, Op, PoolOp, Program, SkipOp, SubsampleOp

__all__ = ['Cost', 'ProgramCost']

_MAX_SIZES = 16  # of images, to remember the cost of


@dataclass
class Cost:
    """MACs of an image of one size.

    Attributes:
        dense: MACs without gates and with everything open.
        fixed: MACs that every image uses, those of the gates included.
        first: For each group of gated MACs, the gate that they are proportional to the open channels of.
        second: A second such gate, or the number of gates if there is none.
        macs: MACs of the group for one open channel of each.
        whole: MACs of some batch through the whole network, with what comes after the program.
    """
    dense: int
    fixed: int
    first: torch.Tensor
    second: torch.Tensor
    macs: torch.Tensor
    whole: Optional[Macs] = None

    def used(self, num_open: torch.Tensor) -> torch.Tensor:
        """MACs of each image, [N], int64, from its open channels by gate, [N, gates]."""
        counts = F.pad(num_open.long(), (0, 1), value=1)  # (a last one, for groups of one gate)
        products = counts.index_select(1, self.first) * counts.index_select(1, self.second)
        return (products * self.macs).sum(1) + self.fixed


class ProgramCost:
    """Costs of a program, for images of any size. It keeps no weights.

    Args:
        program: The program.
    """

    def __init__(self, program: Program) -> None:
        self.in_channels = program.in_channels
        self.num_gates = program.num_gates
        self._ops = [_without_data(op) for op in program.ops]
        self._costs: Dict[Tuple[int, int], Cost] = {}

    def at(self, height: int, width: int) -> Cost:
        """Of images of one size."""
        cost = self._costs.get((height, width))
        if cost is None:
            cost = self._count(height, width)
            if len(self._costs) >= _MAX_SIZES:
                self._costs.clear()
            self._costs[height, width] = cost
        return cost

    def _count(self, height: int, width: int) -> Cost:
        shapes = {0: (self.in_channels, height, width)}
        gates: Dict[int, int] = {}  # their widths
        pooled: Set[int] = set()  # maps that a gate has pooled for others as well
        skipping: List[Optional[int]] = []  # for the convolutions to come, the gate that may leave them out
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
            elif isinstance(op, (ConvOp, PoolOp, SubsampleOp)):
                shapes[op.target] = shape = _shape(op, *shapes[op.source])
                pooled.discard(op.target)
                if isinstance(op, ConvOp):
                    macs = op.weight.numel() * shape[1] * shape[2]
                    dense += macs
                    switches = [gate for gate in (op.gate_in, op.gate_out, *skipping[:1]) if gate is not None]
                    skipping = skipping[1:]
                    if switches:
                        assert len(switches) <= 2, 'a block is switched whole, or channel by channel'
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
    """Of the map that an operation makes."""
    if isinstance(op, SubsampleOp):
        return channels + op.before + op.after, -(-height // op.stride), -(-width // op.stride)
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
    return pooled - 1 if (pooled - 1) * op.stride >= side + op.padding else pooled  # no window begins in the padding
