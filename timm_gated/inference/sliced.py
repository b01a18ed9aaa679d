"""The torch backend: runs a program with slices of its weights

Runs on any device and does not need the native kernels. For each image, the open filters are selected from the weights
and only those are convolved.
"""
from dataclasses import dataclass, fields
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from .program import (
    AdaptivePoolOp,
    ConcatOp,
    ConvOp,
    GateOp,
    Op,
    OutputOp,
    PoolOp,
    Program,
    SkipOp,
    SubsampleOp,
    check_images,
)

__all__ = ['SlicedRunner']


class SlicedRunner(nn.Module):
    """Runs a program with torch's convolutions.

    Args:
        program: Program to run.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._in_channels, self._num_maps, self._num_gates = program.in_channels, program.num_maps, program.num_gates
        unknown = [op for op in program.ops if type(op) not in _STEPS]
        if unknown:
            raise ValueError(f'a quantised network needs the native backend ({type(unknown[0]).__name__}).')
        self.steps = nn.ModuleList(_STEPS[type(op)](op) for op in program.ops)
        sizes = {op.gate: len(op.weight2) for op in program.ops if isinstance(op, GateOp)}
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
            num_open: Output tensor for the number of open channels per image and gate, [N, gates], int32.
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
                observe(index, _with_closed(state, step))
            index += 1
        return state


@dataclass
class State:
    """Maps, open channels by gate, and outputs so far."""
    maps: Dict[int, torch.Tensor]
    opened: Dict[int, torch.Tensor]
    outputs: List[torch.Tensor]


def _with_closed(state: State, step: Any) -> torch.Tensor:
    """The map that a step has written, with all channels."""
    values, gate = state.maps[step.target], getattr(step, 'gate_out', None)
    if gate is None:
        return values
    complete = values.new_zeros(len(values), len(step.weight), *values.shape[2:])
    complete[:, state.opened[gate]] = values
    return complete


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

    def forward(self, state: State) -> None:
        weight, bias = self.weight, self.bias
        if self.gate_out is not None:  # index_select is faster than indexing
            weight, bias = (tensor.index_select(0, state.opened[self.gate_out]) for tensor in (weight, bias))
        if self.gate_in is not None:
            weight = weight.index_select(1, state.opened[self.gate_in])
        x = state.maps[self.source]
        if weight.shape[0] and weight.shape[1]:
            y = F.conv2d(x, weight, bias, self.stride, self.padding, self.dilation)
        else:  # conv2d refuses empty weights
            reach = self.dilation * (weight.shape[2] - 1) + 1
            size = [(n + 2 * self.padding - reach) // self.stride + 1 for n in x.shape[2:]]
            y = bias[None, :, None, None].repeat(len(x), 1, *size)
        if self.residual is not None:
            y += state.maps[self.residual]
        state.maps[self.target] = F.relu_(y) if self.relu else y


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
        x, size = state.maps[self.source], (self.kernel, self.stride, self.padding)
        if self.average:
            y = F.avg_pool2d(x, *size, ceil_mode=self.ceil_mode, count_include_pad=False)
        else:
            y = F.max_pool2d(x, *size, ceil_mode=self.ceil_mode)
        state.maps[self.target] = y


class _AdaptivePool(_Step):
    bins: int

    def forward(self, state: State) -> None:
        state.maps[self.target] = F.adaptive_avg_pool2d(state.maps[self.source], self.bins)


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
    SubsampleOp: _Subsample, SkipOp: _Skip, OutputOp: _Output}
