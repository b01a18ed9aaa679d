"""The torch backend: runs a program with slices of its weights

Runs on any device and does not need the native kernels. For each image, the open filters are selected from the weights
and only those are convolved.
"""
from dataclasses import dataclass, fields
from math import comb
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from .program import (
    AdaptivePoolOp,
    BlurOp,
    ChannelConvOp,
    ConcatOp,
    ConvOp,
    GateOp,
    Op,
    OutputOp,
    PoolOp,
    Program,
    ScaleOp,
    SkipOp,
    SubsampleOp,
    check_images,
    counts_pairs,
)

__all__ = ['SlicedRunner', 'check_float']


class SlicedRunner(nn.Module):
    """Runs a program with torch's convolutions.

    Args:
        program: Program to run.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._in_channels, self._num_maps, self._num_gates = program.in_channels, program.num_maps, program.num_gates
        check_float(program)
        self.steps = nn.ModuleList(_STEPS[type(op)](op) for op in program.ops)
        self._counts_pairs = [index for index, op in enumerate(program.ops) if counts_pairs(op)]
        self._target_gates = _target_gates(program.ops)
        self._gate_sizes = sizes = {op.gate: len(op.weight2) for op in program.ops if isinstance(op, GateOp)}
        self._first_channels = {gate: sum(sizes[other] for other in sizes if other < gate) for gate in sizes}

    @property
    def program(self) -> Program:
        """The program that is run, with its current tensors."""
        steps: Any = self.steps
        return Program(self._in_channels, [step.op() for step in steps], self._num_maps, self._num_gates)

    def forward(
            self,
            images: torch.Tensor,
            num_open: Optional[torch.Tensor] = None,
            is_open: Optional[torch.Tensor] = None,
    ) -> List[torch.Tensor]:
        """Run a batch and return the output maps of the program.

        Args:
            images: Batch of images.
            num_open: Output tensor for the counts of each image, [N, counts], int32.
            is_open: Output tensor for the decisions, [N, channels of all gates], bool.
        """
        check_images(images, self._in_channels)
        if len(images) == 0:
            return [maps[:0] for maps in self.run_together(images.new_zeros(1, *images.shape[1:])).outputs]
        samples = []
        for index, image in enumerate(images):
            state = self.run_together(image[None])
            samples.append(state.outputs)
            if num_open is not None:
                for gate, opened in state.opened.items():
                    num_open[index, gate] = len(opened)
                for place, step in enumerate(self._counts_pairs, self._num_gates):
                    steps: Any = self.steps
                    num_open[index, place] = steps[step].num_pairs(state)
            if is_open is not None:
                is_open[index] = False
                for gate, opened in state.opened.items():
                    is_open[index, self._first_channels[gate] + opened] = True
        return [torch.cat(maps) for maps in zip(*samples, strict=True)]

    def run_together(
            self,
            images: torch.Tensor,
            observe: Optional[Callable[[int, torch.Tensor], None]] = None,
    ) -> 'State':
        """Run a batch with the gate decisions of its first image and return the final state.

        Args:
            images: Batch of images.
            observe: Called with the index of each operation that writes a map, and the map, in which closed channels
                are zero. Skipped operations count as one, the last of them.
        """
        state = State({0: images}, {}, [])
        steps: Any = self.steps
        index = 0
        while index < len(steps):
            step = steps[index]
            skipped = step(state) or 0
            index += skipped
            if observe is not None and hasattr(step, 'target') and (skipped or not isinstance(step, _Skip)):
                observe(index, self._with_closed(state, index, step.target))
            index += 1
        return state

    def _with_closed(self, state: 'State', index: int, target: int) -> torch.Tensor:
        """The map that an operation has written, with all channels."""
        values, gate = state.maps[target], self._target_gates[index]
        if gate is None:
            return values
        complete = values.new_zeros(len(values), self._gate_sizes[gate], *values.shape[2:])
        complete[:, state.opened[gate]] = values
        return complete


def check_float(program: Program, why: str = '') -> None:
    """Raise a `ValueError` for quantised programs.

    Args:
        program: Program to run.
        why: Why the native backend is not available, if so.
    """
    unknown = [op for op in program.ops if type(op) not in _STEPS]
    if unknown:
        problem = f'a quantised network needs the native backend ({type(unknown[0]).__name__})'
        raise ValueError(f'{problem}: {why}' if why else f'{problem}.')


@dataclass
class State:
    """Maps, open channels by gate, and outputs so far."""
    maps: Dict[int, torch.Tensor]
    opened: Dict[int, torch.Tensor]
    outputs: List[torch.Tensor]


def _target_gates(ops: Sequence[Op]) -> List[Optional[int]]:
    """The gates of the maps that operations write."""
    by_map: Dict[int, Optional[int]] = {}
    found: List[Optional[int]] = []
    for op in ops:
        found.append(by_map.get(op.source) if isinstance(op, (PoolOp, BlurOp)) else getattr(op, 'gate_out', None))
        if hasattr(op, 'target'):
            by_map[op.target] = found[-1]
    return found


class _Step(nn.Module):
    """One operation, with its fields as attributes and its tensors as buffers."""
    source: int
    target: int

    def __init__(self, op: Op) -> None:
        super().__init__()
        for name, value in vars(op).items():
            if isinstance(value, torch.Tensor):
                self.register_buffer(name, value, persistent=False)
            else:
                setattr(self, name, value)
        self._kind = type(op)

    def op(self) -> Op:
        return self._kind(**{field.name: getattr(self, field.name) for field in fields(self._kind)})


class _Conv(_Step):
    weight: torch.Tensor
    bias: torch.Tensor
    stride: int
    dilation: int
    padding: int
    relu: bool
    residual: Optional[int]
    gate_in: Optional[int]
    gate_out: Optional[int]
    groups: int

    def forward(self, state: State) -> None:
        if self.groups > 1 and (self.gate_in is not None or self.gate_out is not None):
            y = self._grouped(state)
        else:
            weight, bias = self.weight, self.bias
            if self.gate_out is not None:  # index_select is faster than indexing
                weight, bias = (tensor.index_select(0, state.opened[self.gate_out]) for tensor in (weight, bias))
            if self.gate_in is not None:
                weight = weight.index_select(1, state.opened[self.gate_in])
            y = self._convolve(state.maps[self.source], weight, bias)
        if self.residual is not None:
            y += state.maps[self.residual]
        state.maps[self.target] = F.relu_(y) if self.relu else y

    def _convolve(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        if weight.shape[0] and weight.shape[1]:
            return F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        # conv2d refuses empty weights
        reach = self.dilation * (weight.shape[2] - 1) + 1
        size = [(n + 2 * self.padding - reach) // self.stride + 1 for n in x.shape[2:]]
        return bias[None, :, None, None].repeat(len(x), 1, *size)

    def _grouped(self, state: State) -> torch.Tensor:
        """A convolution whose groups have as many inputs and outputs as the groups with the most open ones."""
        x, kernel = state.maps[self.source], self.weight.shape[2]
        inputs, outputs = self._channels(state, self.gate_in, 1), self._channels(state, self.gate_out, 0)
        weight = self.weight.unflatten(0, (self.groups, -1))
        bias = self.bias.unflatten(0, (self.groups, -1))
        gathered = weight.new_zeros(self.groups, outputs.most, weight.shape[2], kernel, kernel)
        gathered[outputs.group, outputs.slot] = weight[outputs.group, outputs.index]
        slots = weight.new_zeros(self.groups, inputs.most, outputs.most, kernel, kernel)
        slots[inputs.group, inputs.slot] = gathered.transpose(1, 2)[inputs.group, inputs.index]
        biases = bias.new_zeros(self.groups, outputs.most)
        biases[outputs.group, outputs.slot] = bias[outputs.group, outputs.index]
        spread = x.new_zeros(len(x), self.groups * inputs.most, *x.shape[2:])
        spread[:, inputs.group * inputs.most + inputs.slot] = x
        y = self._convolve(spread, slots.transpose(1, 2).flatten(0, 1), biases.flatten())
        return y[:, outputs.group * outputs.most + outputs.slot]

    def _channels(self, state: State, gate: Optional[int], side: int) -> '_Channels':
        size = self.weight.shape[1] if side else self.weight.shape[0] // self.groups
        if gate is None:
            return _Channels(torch.arange(size * self.groups, device=self.weight.device), size, self.groups)
        return _Channels(state.opened[gate], size, self.groups)

    def num_pairs(self, state: State) -> int:
        """Number of pairs of an open input and an open output in the same group."""
        counts = self._channels(state, self.gate_in, 1).counts * self._channels(state, self.gate_out, 0).counts
        return int(counts.sum())


class _Channels:
    """Open channels of a grouped convolution.

    Args:
        opened: Numbers of the channels, ascending.
        size: Number of channels per group.
        groups: Number of groups.

    Attributes:
        group: Group of each channel.
        index: Number of each channel in its group.
        slot: The same among the open ones.
        counts: Number of open channels per group.
        most: The largest of them.
    """

    def __init__(self, opened: torch.Tensor, size: int, groups: int) -> None:
        self.group, self.index = opened // size, opened % size
        self.counts = torch.bincount(self.group, minlength=groups)
        before = self.counts.cumsum(0) - self.counts
        self.slot = torch.arange(len(opened), device=opened.device) - before[self.group]
        self.most = int(self.counts.max())


class _Gate(_Step):
    gate: int
    weight1: torch.Tensor
    bias1: torch.Tensor
    weight2: torch.Tensor
    bias2: torch.Tensor

    def forward(self, state: State) -> None:
        pooled = state.maps[self.source].mean((2, 3))
        logits = F.linear(F.relu_(F.linear(pooled, self.weight1, self.bias1)), self.weight2, self.bias2)
        state.opened[self.gate] = (logits[0] > 0).nonzero()[:, 0]


class _Pool(_Step):
    average: bool
    kernel: int
    stride: int
    padding: int
    ceil_mode: bool

    def forward(self, state: State) -> None:
        # Channels as a batch: torch pools a batch of 0, but not 0 channels.
        x, size = state.maps[self.source].transpose(0, 1), (self.kernel, self.stride, self.padding)
        if self.average:
            y = F.avg_pool2d(x, *size, ceil_mode=self.ceil_mode, count_include_pad=False)
        else:
            y = F.max_pool2d(x, *size, ceil_mode=self.ceil_mode)
        state.maps[self.target] = y.transpose(0, 1)


class _AdaptivePool(_Step):
    bins: int

    def forward(self, state: State) -> None:
        state.maps[self.target] = F.adaptive_avg_pool2d(state.maps[self.source], self.bins)


class _Blur(_Step):
    kernel: int
    stride: int
    padding: int

    def forward(self, state: State) -> None:
        x = state.maps[self.source]
        weight = binomial(self.kernel).to(x)
        y = F.pad(x.flatten(0, 1)[:, None], [self.padding] * 4, mode='reflect')  # channels as a batch
        y = F.conv2d(y, torch.outer(weight, weight)[None, None], stride=self.stride)
        state.maps[self.target] = y.view(*x.shape[:2], *y.shape[2:])


def binomial(size: int) -> torch.Tensor:
    """Return the coefficients of a binomial filter, whose sum is 1, in double precision.

    Args:
        size: Number of coefficients.
    """
    return torch.tensor([comb(size - 1, k) / 2 ** (size - 1) for k in range(size)], dtype=torch.float64)


class _ChannelConv(_Step):
    weight: torch.Tensor

    def forward(self, state: State) -> None:
        x = state.maps[self.source].flatten(1)[:, None]
        y = F.conv1d(x, self.weight[None, None], padding=len(self.weight) // 2)
        state.maps[self.target] = y[:, 0, :, None, None]


class _Scale(_Step):
    factors: int
    residual: Optional[int]
    relu: bool

    def forward(self, state: State) -> None:
        y = state.maps[self.source] * state.maps[self.factors].sigmoid()
        if self.residual is not None:
            y += state.maps[self.residual]
        state.maps[self.target] = F.relu_(y) if self.relu else y


class _Concat(_Step):
    sources: Tuple[int, ...]
    align_corners: bool

    def forward(self, state: State) -> None:
        maps = [state.maps[source] for source in self.sources]
        size = maps[0].shape[2:]
        state.maps[self.target] = torch.cat([
            x if x.shape[2:] == size else
            F.interpolate(x, size, mode='bilinear', align_corners=self.align_corners) for x in maps], dim=1)


class _Subsample(_Step):
    stride: int
    before: int
    after: int

    def forward(self, state: State) -> None:
        x = state.maps[self.source][:, :, ::self.stride, ::self.stride]
        state.maps[self.target] = F.pad(x, (0, 0, 0, 0, self.before, self.after))


class _Skip(_Step):
    gate: int
    count: int

    def forward(self, state: State) -> int:
        if len(state.opened[self.gate]):
            return 0
        state.maps[self.target] = F.relu(state.maps[self.source])
        return self.count


class _Output(_Step):
    def forward(self, state: State) -> None:
        state.outputs.append(state.maps[self.source])


_STEPS: Dict[Any, Any] = {
    ConvOp: _Conv, GateOp: _Gate, PoolOp: _Pool, AdaptivePoolOp: _AdaptivePool, ConcatOp: _Concat,
    SubsampleOp: _Subsample, SkipOp: _Skip, OutputOp: _Output, BlurOp: _Blur, ChannelConvOp: _ChannelConv,
    ScaleOp: _Scale}
