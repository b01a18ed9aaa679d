"""Quantisation: programs whose convolutions run in int8

Post-training quantisation: weights are int8, symmetric, with one scale per filter; activations are uint8, with one
scale and zero per map, from the range of its values on calibration images. Batch norm is folded before. Biases are
corrected such that rounded weights give the same mean output on these images: gates read means. Gates stay in float32,
on the averages of quantised maps. csrc/int8.h defines the arithmetic.

Paper: bias correction is from Data-Free Quantization Through Weight Equalization and Bias Correction
(https://arxiv.org/abs/1906.04721), here with the means of calibration images.

Convolutions that the int8 kernels do not support stay in float32, with conversions around them.
"""
from dataclasses import replace
from typing import Any, Dict, Iterable, List, Optional, Set, Tuple

import torch

from .calibration import IMAGE, RANGES, Range
from .program import (
    INT8_BIAS,
    INT8_DEPTH,
    INT8_RATIO,
    INT8_WEIGHT,
    AdaptivePoolOp,
    BlurOp,
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
    pads_same,
)

__all__ = ['quantize', 'tied_convolutions']


def quantize(
        program: Program,
        ranges: Dict[int, Range],
        method: str = 'percentile',
        keep: Iterable[int] = (),
) -> Program:
    """Return a program whose convolutions run in int8 where the kernels support it.

    The convolutions have the same order as those of the program.

    Args:
        program: Program in float32.
        ranges: Ranges from `observe_ranges`.
        method: How the range of a map is chosen: 'percentile', which ignores the 0.01 % largest values, 'mse', the
            least squared error, or 'max'.
        keep: Indices of convolutions that stay in float32, and all that are tied to them.
    """
    if method not in RANGES:
        raise ValueError(f"the range must be chosen by one of {', '.join(RANGES)}, got '{method}'.")
    return _Rewriter(program, ranges, method, set(keep)).run()


def _is_supported(op: ConvOp) -> bool:
    c_in, kernel = op.weight.shape[1:3]
    if op.groups > 1 or c_in * kernel ** 2 > INT8_DEPTH:
        return False
    return pads_same(op) if op.stride == 1 else op.dilation == 1


def tied_convolutions(program: Program) -> List[Set[int]]:
    """Return the indices of the convolutions in sets that are quantised together, or not at all.

    Convolutions are tied by a gated map between them, pooled or not, or by a skip of both.

    Args:
        program: Program in float32.
    """
    tied: Dict[int, Set[int]] = {}  # by index
    writers = _gated_writers(program)

    def tie(*indices: int) -> None:
        together = set().union(*(tied[index] for index in indices))
        tied.update(dict.fromkeys(together, together))

    skipped: List[int] = []
    for index, op in enumerate(program.ops):
        if isinstance(op, SkipOp):
            skipped = list(range(index + 1, index + 1 + op.count))
        if isinstance(op, ConvOp):
            tied[index] = {index}
            if op.gate_in is not None:
                tie(writers[index], index)
            if index in skipped[1:]:
                tie(index - 1, index)
    return [members for index, members in tied.items() if index == min(members)]


def _gated_writers(program: Program) -> Dict[int, int]:
    """Convolutions that write gated maps, by the operations that read these, pooled or not."""
    gated: Dict[int, int] = {}  # convolution by map
    found: Dict[int, int] = {}
    for index, op in enumerate(program.ops):
        writer = gated.get(getattr(op, 'source', IMAGE))
        if writer is not None:
            found[index] = writer
        if hasattr(op, 'target'):
            gated.pop(op.target, None)
            if isinstance(op, ConvOp) and op.gate_out is not None:
                gated[op.target] = index
            elif isinstance(op, (PoolOp, BlurOp)) and writer is not None:
                gated[op.target] = writer
    return found


def _float_convolutions(program: Program, kept: Set[int]) -> Set[int]:
    """Indices of the convolutions that stay in float32.

    These are the ones that are not supported, those with gated outputs but no ReLU or with pooled ones, those of single
    pixels, such as classifiers and attention, those that the caller keeps, and those that are tied to one of them.
    """
    kept = set(kept)
    kept.update(
        writer for index, writer in _gated_writers(program).items() if isinstance(program.ops[index], (PoolOp, BlurOp)))
    pixels: Set[int] = set()  # maps of a single pixel
    for index, op in enumerate(program.ops):
        is_pixel = getattr(op, 'source', None) in pixels
        if isinstance(op, ConvOp):
            has_any_sign = op.gate_out is not None and not op.relu  # gated maps have a zero of 0
            if not _is_supported(op) or has_any_sign or is_pixel:
                kept.add(index)
        if hasattr(op, 'target'):
            is_pixel = is_pixel or (isinstance(op, AdaptivePoolOp) and op.bins == 1)
            (pixels.add if is_pixel else pixels.discard)(op.target)
    return set().union(*(tied for tied in tied_convolutions(program) if tied & kept))


def _classifier(program: Program) -> Optional[int]:
    """Index of the linear layer after global average pooling, whose output is the last one."""
    if len(program.ops) < 3:
        return None
    pool, linear, output = program.ops[-3:]
    if not (isinstance(pool, AdaptivePoolOp) and isinstance(linear, ConvOp) and isinstance(output, OutputOp)):
        return None
    options = linear.weight.shape[2], linear.stride, linear.padding, linear.relu, linear.residual, linear.groups
    is_linear = options == (1, 1, 0, False, None, 1)
    supported = linear.weight.shape[1] <= INT8_DEPTH
    return len(program.ops) - 2 if pool.bins == 1 and linear.source == pool.target and is_linear and supported else None


class _Rewriter:
    """Goes through a program and keeps track of which maps are quantised, with which scale and zero."""

    def __init__(self, program: Program, ranges: Dict[int, Range], method: str, kept: Set[int]) -> None:
        self.program, self.ranges, self.method = program, ranges, method
        self.kept = _float_convolutions(program, kept)
        self.classifier = _classifier(program)
        self.ops: List[Op] = []
        self.num_maps = program.num_maps
        self.scales: Dict[int, Tuple[float, int]] = {}  # scale and zero by quantised map
        self.writers: Dict[int, int] = {0: IMAGE}
        self.channels: Dict[int, int] = {0: program.in_channels}
        self.copies: Dict[Tuple[int, bool], int] = {}  # maps in the other form

    def run(self) -> Program:
        for index, op in enumerate(self.program.ops):
            if isinstance(op, ConvOp):
                self._conv(index, op, index not in self.kept)
            elif isinstance(op, SkipOp):
                self._skip(index, op)
            elif isinstance(op, ConcatOp):
                self._add(index, replace(op, sources=tuple(self._form(source, False) for source in op.sources)))
            elif isinstance(op, ScaleOp):
                residual = None if op.residual is None else self._form(op.residual, False)
                source, factors = self._form(op.source, False), self._form(op.factors, False)
                self._add(index, replace(op, source=source, factors=factors, residual=residual))
            elif isinstance(op, (GateOp, OutputOp)):
                self.ops.append(op)
            else:
                self._map(index, op)
        return Program(self.program.in_channels, self.ops, self.num_maps, self.program.num_gates)

    def _add(self, index: int, op: Any, scale: Optional[Tuple[float, int]] = None) -> None:
        """Add an operation that writes a map."""
        self.ops.append(op)
        self.writers[op.target] = index
        self.channels[op.target] = self._num_channels(op)
        self.scales.pop(op.target, None)
        for quantised in (False, True):
            self.copies.pop((op.target, quantised), None)
        if scale is not None:
            self.scales[op.target] = scale

    def _map(self, index: int, op: Any) -> None:
        """An operation that copies or pools channels."""
        scale = self.scales.get(op.source)
        if scale is not None and not self._reads_quantised(op):
            op, scale = replace(op, source=self._form(op.source, False)), None
        self._add(index, op, None if isinstance(op, AdaptivePoolOp) else scale)

    def _reads_quantised(self, op: Any) -> bool:
        if isinstance(op, SubsampleOp):
            return op.before % 4 == 0 and self.channels[op.source] % 4 == 0
        return isinstance(op, PoolOp) and not op.average or isinstance(op, AdaptivePoolOp) and op.bins == 1

    def _num_channels(self, op: Any) -> int:
        """Number of channels of the map that an operation writes."""
        if isinstance(op, ConvOp):
            return len(op.weight)
        if isinstance(op, ConcatOp):
            return sum(self.channels[source] for source in op.sources)
        return self.channels[op.source] + (op.before + op.after if isinstance(op, SubsampleOp) else 0)

    def _skip(self, index: int, op: SkipOp) -> None:
        """Conversions must not be among the skipped operations, so they come before."""
        last = index + op.count
        written: Set[Optional[int]] = {None}  # by the skipped operations, which have the same form
        for other in range(index + 1, last + 1):
            conv: Any = self.program.ops[other]
            for number in {conv.source, conv.residual} - written:
                self._form(number, other not in self.kept)
            written.add(conv.target)
        self.ops.append(replace(op, source=self._form(op.source, last not in self.kept)))

    def _choose(self, index: int) -> Tuple[float, int]:
        return self.ranges[index].choose(self.method) if index in self.ranges else (1., 0)  # never executed

    def _form(self, number: int, quantised: bool) -> int:
        """The map, or a copy of it in the other form."""
        if (number in self.scales) == quantised:
            return number
        copy = self.copies.get((number, quantised))
        if copy is None:
            copy = self.copies[number, quantised] = self.num_maps
            self.num_maps += 1
            self.channels[copy] = self.channels[number]
            if quantised:
                scale, zero = self.scales[copy] = self._choose(self.writers[number])
                self.ops.append(QuantizeOp(number, copy, torch.tensor([scale]), zero))
            else:
                self.ops.append(DequantizeOp(number, copy))
        return copy

    def _conv(self, index: int, op: ConvOp, is_int8: bool) -> None:
        read = self.ranges.get(self.writers[op.source])
        means = torch.zeros(op.weight.shape[1], dtype=torch.float64) if read is None else read.means
        if index == self.classifier:
            self._add(index, _int8_linear(op, means, *self._choose(self.writers[op.source])))
            return
        if op.gate_in is None:
            op = replace(op, source=self._form(op.source, is_int8))
        if op.residual is not None:
            op = replace(op, residual=self._form(op.residual, is_int8))
        if not is_int8:
            self._add(index, op)
            return
        shortcut = None if op.residual is None else self.scales[op.residual]
        scale, zero = self._choose(index)
        if op.relu:
            zero = 0
        quantised = _int8_conv(op, means, self.scales[op.source], shortcut, scale, zero)
        self._add(index, quantised, (float(quantised.scale), zero))


def _quantize_weight(op: ConvOp, least: float = 1e-30) -> Tuple[torch.Tensor, torch.Tensor]:
    """Weights in int8, and the scale of each filter."""
    weight = op.weight.detach().double()
    if not (torch.isfinite(weight).all() and torch.isfinite(op.bias).all()):
        raise ValueError(f"the weights of '{op.name}' are not finite, so it cannot be quantised.")
    scales = (weight.abs().amax((1, 2, 3)) / INT8_WEIGHT).clamp(min=least)
    return (weight / scales[:, None, None, None]).round().to(torch.int8), scales


def _corrected_bias(op: ConvOp, means: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The bias with which the rounded weights have the mean output of the original ones, up to padding."""
    errors = op.weight.detach().double() - values * scales[:, None, None, None]
    return op.bias.detach().double() + errors.sum((2, 3)) @ means


def _int8_linear(op: ConvOp, means: torch.Tensor, scale: float, zero: int) -> Int8LinearOp:
    """Quantise a classifier whose input has these means, and is quantised with a scale and a zero."""
    values, scales = _quantize_weight(op)
    inputs = torch.tensor([scale])
    return Int8LinearOp(
        source=op.source, target=op.target, weight=values, name=op.name,
        bias=_corrected_bias(op, means, values, scales).float(), multiplier=(float(inputs) * scales).float(),
        scale=inputs, zero=zero)


def _int8_conv(
        op: ConvOp,
        means: torch.Tensor,
        source: Tuple[float, int],
        shortcut: Optional[Tuple[float, int]],
        scale: float,
        zero: int,
) -> Int8ConvOp:
    """Quantise a convolution.

    Args:
        op: Convolution in float32.
        means: Mean of each input channel.
        source: Scale and zero of the input.
        shortcut: Scale and zero of the shortcut, if there is one.
        scale: Scale of the output. The result has a larger one where a multiplier would be more than 1.
        zero: Zero of the output.
    """
    bias = op.bias.detach().double()
    x_scale, x_zero = source
    # Weights so small that bias or shortcut would be out of range are rounded to zero.
    shortcut_scale, shortcut_zero = shortcut or (0., 0)
    least = max(scale / INT8_RATIO, bias.abs().max().item() / (INT8_BIAS // 8), shortcut_scale * 2 / INT8_RATIO)
    values, scales = _quantize_weight(op, least / x_scale)
    bias = _corrected_bias(op, means, values, scales)
    sums = values.long().sum((1, 2, 3))
    scale = max(scale, float((x_scale * scales).max()))
    # A kernel sees the scale as float32.
    scale = float(torch.tensor(scale, dtype=torch.float32))
    ratio = (shortcut_scale / (x_scale * scales)).float()
    zeros = (ratio * shortcut_zero).round().long() + x_zero * sums  # what the zeros of input and shortcut contribute
    return Int8ConvOp(
        source=op.source, target=op.target, weight=values,
        bias=((bias / (x_scale * scales)).round().long() - zeros).to(torch.int32),
        stride=op.stride, dilation=op.dilation, padding=op.padding, relu=op.relu, residual=op.residual,
        gate_in=op.gate_in, gate_out=op.gate_out, name=op.name,
        multiplier=(x_scale * scales / scale).clamp(max=1).float(),
        ratio=torch.empty(0) if shortcut is None else ratio,
        scale=torch.tensor([scale]), zero=zero)
