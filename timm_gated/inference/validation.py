"""Checks of programs that do not depend on the size of the images"""
from dataclasses import dataclass
from typing import Any, Dict, NoReturn, Optional, Sequence, Set

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
    pads_same,
)

__all__ = ['INT8_BIAS', 'INT8_DEPTH', 'INT8_RATIO', 'INT8_WEIGHT', 'validate']

# Limits of the native kernels (csrc/network.h)
_MAX_SIZE = 2 ** 20  # channels, maps, gates, dilation and padding
_MAX_KERNEL = 64  # kernel size and stride
_MAX_MACS = 2 ** 40  # of a gate

# Limits of int8 convolutions, whose sums then fit into 32 bits (csrc/operations.c)
INT8_WEIGHT = 63  # sums of two products fit into 16 bits
INT8_DEPTH = 3 * 2 ** 14  # input channels times taps
INT8_BIAS = 2 ** 30  # has room for what the zeros of the deepest input contribute
INT8_RATIO = 2 ** 20


def validate(in_channels: int, ops: Sequence[Op], num_maps: int, num_gates: int) -> None:
    """Raise a `ValueError` for an invalid program; the message names the operation and the value.

    Args:
        in_channels: Number of image channels.
        ops: Operations in execution order.
        num_maps: Number of maps, the image included.
        num_gates: Number of gates.
    """
    _check_int('program', 'in_channels', in_channels, 1)
    _check_int('program', 'num_maps', num_maps, 1)
    _check_int('program', 'num_gates', num_gates, 0)
    _Validator(in_channels, ops, num_maps, num_gates).run()


def _check_int(where: str, name: str, value: Any, low: int, high: int = _MAX_SIZE) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f'{where}: {name} must be an integer between {low} and {high}, got {value!r}.')


@dataclass
class _Map:
    """A map that has been written; with a gate, it holds only the channels that the gate has open.

    `zero` is that of a uint8 map. `is_pixel` is whether it has one pixel for images of any size.
    """
    channels: int
    gate: Optional[int] = None
    zero: Optional[int] = None
    is_pixel: bool = False


class _Validator:
    """Goes through the operations of a program and keeps track of the maps and gates that exist."""

    def __init__(self, in_channels: int, ops: Sequence[Op], num_maps: int, num_gates: int) -> None:
        self.ops, self.num_maps, self.num_gates = ops, num_maps, num_gates
        self.maps: Dict[int, _Map] = {0: _Map(in_channels)}
        self.gates: Dict[int, int] = {}  # number of channels by gate
        self.skipped: Dict[int, Set[int]] = {}  # by index of the last skipped operation: maps that may be missing then
        self.index = 0  # of the operation
        self.where = ''

    def run(self) -> None:
        for index, op in enumerate(self.ops):
            self.index = index
            self.where = f'operation {index}, {type(op).__name__}'
            check = _CHECKS.get(type(op))
            if check is None:
                self._fail('unknown operation')
            getattr(self, check)(op)
            for number in self.skipped.pop(index, ()):
                self.maps.pop(number, None)

    def _fail(self, problem: str) -> NoReturn:
        raise ValueError(f'{self.where}: {problem}.')

    def _int(self, op: Op, name: str, low: int, high: int = _MAX_SIZE) -> int:
        value = getattr(op, name)
        _check_int(self.where, name, value, low, high)
        return value

    def _shape(self, op: Op, name: str, *shape: int) -> None:
        actual = tuple(getattr(op, name).shape)
        if actual != shape:
            self._fail(f'{name} must have the shape {shape}, got {actual}')

    def _gate_channels(self, op: Op, name: str) -> int:
        gate = self._int(op, name, 0, self.num_gates - 1)
        if gate not in self.gates:
            self._fail(f'{name} {gate} is used before it is defined')
        return self.gates[gate]

    def _read(self, name: str, number: Any, gate: Optional[int] = None) -> int:
        """Check that a map can be read under a gate; returns its number of channels."""
        _check_int(self.where, name, number, 0, self.num_maps - 1)
        if number not in self.maps:
            self._fail(f'{name} {number} is read before it is written')
        known = self.maps[number]
        if known.gate != gate:
            self._fail(f'{name} {number} is read under gate {gate}, but was written under gate {known.gate}')
        return known.channels

    def _check_target(self, op: Any, *sources: Optional[int]) -> None:
        self._int(op, 'target', 1, self.num_maps - 1)
        if op.target in sources:
            self._fail(f'target {op.target} is also read')

    def _check_conv(self, op: ConvOp) -> None:
        if op.weight.ndim != 4:
            self._fail(f'weight must have 4 dimensions, got the shape {tuple(op.weight.shape)}')
        c_out, per_group, kernel = op.weight.shape[:3]
        c_in = per_group * self._int(op, 'groups', 1)
        self._shape(op, 'weight', c_out, per_group, kernel, kernel)
        self._shape(op, 'bias', c_out)
        _check_int(self.where, 'number of output channels', c_out, 1)
        if c_out % op.groups:
            self._fail(f'{c_out} output channels cannot be split into {op.groups} groups')
        _check_int(self.where, 'kernel size', kernel, 1, _MAX_KERNEL)
        self._int(op, 'stride', 1, _MAX_KERNEL)
        self._int(op, 'dilation', 1)
        self._int(op, 'padding', 0)
        for name, channels in (('gate_in', c_in), ('gate_out', c_out)):
            gate = getattr(op, name)
            if gate is not None and self._gate_channels(op, name) != channels:
                self._fail(f'{name} {gate} has {self.gates[gate]} channels, the convolution has {channels}')
        self._check_channels(op.source, self._read('source', op.source, op.gate_in), c_in)
        self._check_target(op, op.source, op.residual)
        if op.residual is not None and op.gate_out is not None:
            self._fail(f'residual {op.residual} cannot be added under gate_out {op.gate_out}')
        self._check_residual(op, c_out)
        is_pixel = self.maps[op.source].is_pixel and kernel == 1 and op.padding == 0
        self.maps[op.target] = _Map(c_out, op.gate_out, is_pixel=is_pixel)

    def _check_float_conv(self, op: ConvOp) -> None:
        self._check_conv(op)
        self._check_float(op.source, op.residual)

    def _check_residual(self, op: Any, channels: int) -> None:
        if op.residual is not None:
            known = self._read('residual', op.residual)
            if known != channels:
                self._fail(f'residual {op.residual} has {known} channels, the output has {channels}')

    def _check_float(self, *numbers: Optional[int]) -> None:
        for number in numbers:
            if number is not None and self.maps[number].zero is not None:
                self._fail(f'map {number} is quantised')

    def _check_quantised(self, name: str, number: int) -> int:
        zero = self.maps[number].zero
        if zero is None:
            self._fail(f'{name} {number} is not quantised')
        return zero

    def _check_scale(self, scale: torch.Tensor) -> None:
        if scale.shape != (1,) or not 1e-30 <= float(scale) <= 1e30:
            self._fail(f'scale must be one positive value, got {scale.tolist()}')

    def _check_quantize(self, op: QuantizeOp) -> None:
        channels = self._read('source', op.source)
        self._check_float(op.source)
        self._check_scale(op.scale)
        self._check_target(op, op.source)
        self.maps[op.target] = _Map(channels, zero=self._int(op, 'zero', 0, 255))

    def _check_dequantize(self, op: DequantizeOp) -> None:
        channels = self._read('source', op.source)
        self._check_quantised('source', op.source)
        self._check_target(op, op.source)
        self.maps[op.target] = _Map(channels)

    def _check_tensor(self, name: str, tensor: torch.Tensor, dtype: torch.dtype, limit: float, low: float = 0) -> None:
        if tensor.dtype != dtype:
            self._fail(f'{name} must be {dtype}, got {tensor.dtype}')
        if not bool(((tensor >= low) & (tensor <= limit)).all()):
            self._fail(f'{name} must be between {low} and {limit}')

    def _check_int8_linear(self, op: Int8LinearOp) -> None:
        self._check_conv(op)
        self._check_float(op.source)
        options = op.weight.shape[2], op.stride, op.dilation, op.padding, op.relu, op.residual, op.gate_in, op.gate_out
        if options != (1, 1, 1, 0, False, None, None, None) or op.groups > 1:
            self._fail('only a plain 1 x 1 convolution is a linear layer')
        self._shape(op, 'multiplier', len(op.weight))
        self._check_tensor('weight', op.weight, torch.int8, INT8_WEIGHT, -INT8_WEIGHT)
        if op.weight.shape[1] > INT8_DEPTH:
            self._fail(f'{op.weight.shape[1]} channels are more than {INT8_DEPTH}')
        self._check_scale(op.scale)
        self._int(op, 'zero', 0, 255)

    def _check_int8_conv(self, op: Int8ConvOp) -> None:
        self._check_conv(op)
        source_zero = self._check_quantised('source', op.source)
        if op.residual is not None:
            self._check_quantised('residual', op.residual)
        if op.gate_in is not None and source_zero:
            self._fail(f'source {op.source} is gated, so its zero must be 0, got {source_zero}')
        if op.stride == 1 and not pads_same(op):
            self._fail(f'padding {op.padding} changes the size of the map')
        if op.groups > 1:
            self._fail(f'groups must be 1 in int8, got {op.groups}')
        if op.stride > 1 and op.dilation > 1:
            self._fail(f'stride {op.stride} and dilation {op.dilation} cannot be combined in int8')
        c_out, c_in, kernel = op.weight.shape[:3]
        if c_in * kernel ** 2 > INT8_DEPTH:
            self._fail(f'{c_in} channels times {kernel ** 2} taps are more than {INT8_DEPTH}')
        self._shape(op, 'multiplier', c_out)
        self._shape(op, 'ratio', 0 if op.residual is None else c_out)
        self._check_tensor('weight', op.weight, torch.int8, INT8_WEIGHT, -INT8_WEIGHT)
        self._check_tensor('bias', op.bias, torch.int32, INT8_BIAS, -INT8_BIAS)
        self._check_tensor('multiplier', op.multiplier, torch.float32, 1)
        self._check_tensor('ratio', op.ratio, torch.float32, INT8_RATIO)
        self._check_scale(op.scale)
        self.maps[op.target] = _Map(c_out, op.gate_out, self._int(op, 'zero', 0, 255))

    def _check_channels(self, source: int, channels: int, expected: int) -> None:
        if channels != expected:
            self._fail(f'source {source} has {channels} channels, the weight has {expected}')

    def _check_gate(self, op: GateOp) -> None:
        self._int(op, 'gate', 0, self.num_gates - 1)
        if op.gate in self.gates:
            self._fail(f'gate {op.gate} is defined twice')
        if op.weight1.ndim != 2:
            self._fail(f'weight1 must have 2 dimensions, got the shape {tuple(op.weight1.shape)}')
        (hidden, c_in), size = op.weight1.shape, len(op.weight2)
        _check_int(self.where, 'number of hidden units', hidden, 1)
        _check_int(self.where, 'number of gated channels', size, 1)
        self._shape(op, 'bias1', hidden)
        self._shape(op, 'weight2', size, hidden)
        self._shape(op, 'bias2', size)
        self._int(op, 'macs', 0, _MAX_MACS)
        self._check_channels(op.source, self._read('source', op.source), c_in)
        self.gates[op.gate] = size

    def _check_pool(self, op: PoolOp) -> None:
        self._int(op, 'kernel', 1, _MAX_KERNEL)
        self._int(op, 'stride', 1, _MAX_KERNEL)
        self._int(op, 'padding', 0, op.kernel // 2)
        known = self._read_under_any_gate(op.source)
        if op.average or known.gate is not None:
            self._check_float(op.source)
        self._check_target(op, op.source)
        self.maps[op.target] = _Map(known.channels, known.gate, known.zero)

    def _read_under_any_gate(self, source: Any) -> _Map:
        known = self.maps.get(source) if type(source) is int else None
        self._read('source', source, None if known is None else known.gate)
        return self.maps[source]

    def _check_blur(self, op: BlurOp) -> None:
        self._int(op, 'kernel', 1, _MAX_KERNEL)
        self._int(op, 'stride', 1, _MAX_KERNEL)
        self._int(op, 'padding', 0, op.kernel)
        known = self._read_under_any_gate(op.source)
        self._check_float(op.source)
        self._check_target(op, op.source)
        self.maps[op.target] = _Map(known.channels, known.gate)

    def _check_pixel(self, name: str, number: int) -> None:
        if not self.maps[number].is_pixel:
            self._fail(f'{name} {number} must be a map of one pixel, by average pooling')

    def _check_channel_conv(self, op: ChannelConvOp) -> None:
        if op.weight.ndim != 1 or len(op.weight) % 2 == 0 or len(op.weight) > _MAX_KERNEL:
            self._fail(f'weight must have an odd length of at most {_MAX_KERNEL}, got {tuple(op.weight.shape)}')
        channels = self._read('source', op.source)
        self._check_pixel('source', op.source)
        self._check_float(op.source)
        self._check_target(op, op.source)
        self.maps[op.target] = _Map(channels, is_pixel=True)

    def _check_scale_op(self, op: ScaleOp) -> None:
        channels, factors = self._read('source', op.source), self._read('factors', op.factors)
        if factors != channels:
            self._fail(f'factors {op.factors} has {factors} channels, the source has {channels}')
        self._check_pixel('factors', op.factors)
        self._check_residual(op, channels)
        self._check_float(op.source, op.factors, op.residual)
        self._check_target(op, op.source, op.factors, op.residual)
        self.maps[op.target] = _Map(channels, is_pixel=self.maps[op.source].is_pixel)

    def _check_adaptive_pool(self, op: AdaptivePoolOp) -> None:
        self._int(op, 'bins', 1, _MAX_KERNEL)
        channels = self._read('source', op.source)
        if op.bins != 1:
            self._check_float(op.source)
        self._check_target(op, op.source)
        self.maps[op.target] = _Map(channels, is_pixel=op.bins == 1)

    def _check_concat(self, op: ConcatOp) -> None:
        if not isinstance(op.sources, tuple) or not op.sources:
            self._fail(f'sources must be a tuple of one or more maps, got {op.sources!r}')
        channels = sum(self._read('source', source) for source in op.sources)
        _check_int(self.where, 'number of output channels', channels, 1)
        self._check_float(*op.sources)
        self._check_target(op, *op.sources)
        self.maps[op.target] = _Map(channels)

    def _check_subsample(self, op: SubsampleOp) -> None:
        self._int(op, 'stride', 1, _MAX_KERNEL)
        channels = self._read('source', op.source) + self._int(op, 'before', 0) + self._int(op, 'after', 0)
        _check_int(self.where, 'number of output channels', channels, 1)
        zero = self.maps[op.source].zero
        if zero is not None and (self.maps[op.source].channels % 4 or op.before % 4):
            self._fail(f'channels and before must be multiples of 4 in a quantised map, got {op.before} before')
        self._check_target(op, op.source)
        self.maps[op.target] = _Map(channels, zero=zero)

    def _check_skip(self, op: SkipOp) -> None:
        index, ops = self.index, self.ops
        if self._gate_channels(op, 'gate') != 1:
            self._fail(f'gate {op.gate} must have 1 channel, got {self.gates[op.gate]}')
        self._int(op, 'count', 1, len(ops) - index - 1)
        self._read('source', op.source)
        self._check_target(op, op.source)
        skipped: Sequence[Any] = ops[index + 1:index + 1 + op.count]
        for other in skipped:
            if not isinstance(other, ConvOp) or isinstance(other, Int8LinearOp):
                self._fail(f'only convolutions can be skipped, got {type(other).__name__}')
            if other.target == op.source:
                self._fail(f'source {op.source} is overwritten by a skipped convolution')
        last = skipped[-1]
        if (last.target, last.residual, last.relu) != (op.target, op.source, True):
            self._fail(
                f'the last skipped convolution must have target {op.target}, residual {op.source} and a ReLU, got '
                f'target {last.target}, residual {last.residual} and relu={last.relu}')
        self.skipped[index + op.count] = {other.target for other in skipped} - {op.target}

    def _check_output(self, op: OutputOp) -> None:
        self._read('source', op.source)


_CHECKS: Dict[type, str] = {
    ConvOp: '_check_float_conv', Int8ConvOp: '_check_int8_conv', Int8LinearOp: '_check_int8_linear',
    QuantizeOp: '_check_quantize', DequantizeOp: '_check_dequantize', GateOp: '_check_gate', PoolOp: '_check_pool',
    AdaptivePoolOp: '_check_adaptive_pool', BlurOp: '_check_blur', ChannelConvOp: '_check_channel_conv',
    ScaleOp: '_check_scale_op', ConcatOp: '_check_concat', SubsampleOp: '_check_subsample', SkipOp: '_check_skip',
    OutputOp: '_check_output'}
