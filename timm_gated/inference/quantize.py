"""Quantisation: programs whose convolutions run in int8

Post-training quantisation: weights are int8, symmetric, with one scale per filter; activations are uint8, with one
scale and zero per map, from the range of its values on calibration images. Batch norm is folded before. Gates and
classifier stay in float32, on the averages of quantised maps. csrc/int8.h defines the arithmetic.

Convolutions that the int8 kernels do not support stay in float32, with conversions around them.
"""
from dataclasses import replace
from typing import Any, Dict, Iterable, Iterator, List, Optional, Set, Tuple

import torch

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
    check_images,
    pads_same,
)
from .sliced import SlicedRunner

__all__ = ['RANGES', 'Range', 'calibrate', 'calibration_images', 'quantize', 'tied_convolutions']

RANGES = ('percentile', 'mse', 'max')  # ways to choose the range of a map

_BINS = 2048
_PERCENTILE = 0.9999
_IMAGE = -1  # index of the operation that writes map 0


class Range:
    """Histogram of the values of a map, from which a scale and a zero are chosen.

    Values are counted by magnitude, negative and positive ones separately. The bins double in width whenever a value is
    beyond the last one.
    """

    def __init__(self) -> None:
        self.width = 0.  # of a bin
        self.counts = torch.zeros(2, _BINS, dtype=torch.float64)  # of negative and of positive values
        self.most = [0., 0.]

    def add(self, values: torch.Tensor) -> None:
        """Count the values of a map.

        Args:
            values: Finite values.
        """
        low, high = (float(value) for value in values.aminmax())
        largest = max(-low, high, 0.)
        self.most = [max(self.most[0], -low), max(self.most[1], high)]
        if largest == 0:
            return
        if self.width == 0:
            self.width = largest / _BINS
        while largest > self.width * _BINS:
            self.counts = torch.cat(
                [self.counts.view(2, -1, 2).sum(2), torch.zeros(2, _BINS // 2, dtype=torch.float64)], dim=1)
            self.width *= 2
        for index, side in enumerate((-values, values)):
            if self.most[index] > 0:
                # Zeros and values of the other sign are not counted: they do not decide about a range.
                histogram = torch.histc(side[side > 0].float(), _BINS, 0, self.width * _BINS)
                self.counts[index] += histogram.double()

    def choose(self, method: str) -> Tuple[float, int]:
        """Return a scale and a zero.

        Args:
            method: One of RANGES.
        """
        low, high = (self._limit(index, method) for index in range(2))
        if method == 'mse':
            low, high = self._least_squares(low, high)
        scale = max((low + high) / 255, 1e-12)
        zero = min(max(round(low / scale), 0), 255)
        # The rounded zero must not cut off one of the ends.
        return max(scale, high / (255 - zero) if zero < 255 else 0., low / zero if zero else 0.), zero

    def _limit(self, index: int, method: str) -> float:
        if method != 'percentile' or not self.counts[index].sum():
            return self.most[index]
        share = self.counts[index].cumsum(0) / self.counts[index].sum()
        return min(self.most[index], (int((share < _PERCENTILE).sum()) + 1) * self.width)

    def _least_squares(self, low: float, high: float) -> Tuple[float, float]:
        """Limits, in proportion, with the least squared error of rounding and clipping."""
        centres = (torch.arange(_BINS, dtype=torch.float64) + 0.5) * self.width
        errors = []
        shares = torch.linspace(0.3, 1., 71).tolist()
        for share in shares:
            step = share * (low + high) / 255
            rounding = self.counts.sum() * step ** 2 / 12
            clipped = sum(
                float((counts * (centres - share * most).clamp(min=0) ** 2).sum())
                for counts, most in zip(self.counts, (low, high), strict=True))
            errors.append(float(rounding) + clipped)
        best = shares[errors.index(min(errors))]
        return best * low, best * high


def calibration_images(calibration: Any) -> Iterator[torch.Tensor]:
    """Yield the batches of a loader, at least one.

    Args:
        calibration: Tensor of images, or iterable of batches: tensors, or tuples that begin with one.
    """
    is_empty = True
    for batch in [calibration] if isinstance(calibration, torch.Tensor) else calibration:
        images = batch[0] if isinstance(batch, (tuple, list)) else batch
        if len(images):
            is_empty = False
            yield images
    if is_empty:
        raise ValueError('the calibration data are empty: int8 needs some images, a few hundred for a good range.')


def calibrate(program: Program, images: Iterable[torch.Tensor]) -> Dict[int, Range]:
    """Return the ranges of the values of all maps, by the index of the operation that writes them; -1 is the image.

    Args:
        program: Program in float32.
        images: Batches of images.
    """
    ranges: Dict[int, Range] = {}
    runner = SlicedRunner(program)
    count = 0

    def observe(index: int, values: torch.Tensor) -> None:
        if values.numel():
            if not torch.isfinite(values).all():
                where = 'the image' if index == _IMAGE else f'the output of operation {index} ' \
                    f"{getattr(program.ops[index], 'name', '')}".rstrip()
                raise ValueError(f'calibration image {count} has values in {where} that are not finite.')
            ranges.setdefault(index, Range()).add(values)

    for batch in images:
        check_images(batch, program.in_channels)
        for image in batch.float():
            observe(_IMAGE, image)
            runner.run_together(image[None], observe)
            count += 1
    return ranges


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
        ranges: Ranges from `calibrate`.
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
        writer = gated.get(getattr(op, 'source', _IMAGE))
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

    These are the ones that are not supported, those of single pixels, such as classifiers and attention, those whose
    gated map is pooled, those that the caller keeps, and those that are tied to one of them.
    """
    kept = set(kept)
    kept.update(
        writer for index, writer in _gated_writers(program).items() if isinstance(program.ops[index], (PoolOp, BlurOp)))
    pixels: Set[int] = set()  # maps of a single pixel
    for index, op in enumerate(program.ops):
        is_pixel = getattr(op, 'source', None) in pixels
        if isinstance(op, ConvOp) and (not _is_supported(op) or is_pixel):
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
        self.writers: Dict[int, int] = {0: _IMAGE}
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
        self.scales.pop(op.target, None)
        for quantised in (False, True):
            self.copies.pop((op.target, quantised), None)
        if scale is not None:
            self.scales[op.target] = scale

    def _map(self, index: int, op: Any) -> None:
        """An operation that copies or pools channels."""
        scale = self.scales.get(op.source)
        keeps = (
            isinstance(op, PoolOp) and not op.average
            or isinstance(op, AdaptivePoolOp) and op.bins == 1
            or isinstance(op, SubsampleOp) and op.before % 4 == 0 and self._channels(op.source) % 4 == 0)
        if scale is not None and not keeps:
            op, scale = replace(op, source=self._form(op.source, False)), None
        self._add(index, op, None if isinstance(op, AdaptivePoolOp) else scale)

    def _channels(self, number: int) -> int:
        writer = self.writers[number]
        while writer != _IMAGE:
            op: Any = self.program.ops[writer]
            if isinstance(op, ConvOp):
                return len(op.weight)
            if isinstance(op, SubsampleOp):
                return self._channels(op.source) + op.before + op.after
            number = op.source
            writer = self.writers[number]
        return self.program.in_channels

    def _skip(self, index: int, op: SkipOp) -> None:
        """Conversions must not be among the skipped operations, so they come before."""
        for other in range(index + 1, index + 1 + op.count):
            conv: Any = self.program.ops[other]
            for number in (conv.source, conv.residual):
                if number in self.writers and conv.gate_in is None:
                    self._form(number, other not in self.kept)
        last = index + op.count
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
            if quantised:
                scale, zero = self.scales[copy] = self._choose(self.writers[number])
                self.ops.append(QuantizeOp(number, copy, torch.tensor([scale]), zero))
            else:
                self.ops.append(DequantizeOp(number, copy))
        return copy

    def _conv(self, index: int, op: ConvOp, is_int8: bool) -> None:
        if index == self.classifier:
            self._add(index, _int8_linear(op, *self._choose(self.writers[op.source])))
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
        quantised = _int8_conv(op, self.scales[op.source], shortcut, scale, zero)
        self._add(index, quantised, (float(quantised.scale), zero))


def _quantize_weight(op: ConvOp, least: float = 1e-30) -> Tuple[torch.Tensor, torch.Tensor]:
    """Weights in int8, and the scale of each filter."""
    weight = op.weight.detach().double()
    if not (torch.isfinite(weight).all() and torch.isfinite(op.bias).all()):
        raise ValueError(f"the weights of '{op.name}' are not finite, so it cannot be quantised.")
    scales = (weight.abs().amax((1, 2, 3)) / INT8_WEIGHT).clamp(min=least)
    return (weight / scales[:, None, None, None]).round().to(torch.int8), scales


def _int8_linear(op: ConvOp, scale: float, zero: int) -> Int8LinearOp:
    """Quantise a classifier whose input is quantised with a scale and a zero."""
    values, scales = _quantize_weight(op)
    inputs = torch.tensor([scale])
    return Int8LinearOp(
        source=op.source, target=op.target, weight=values, bias=op.bias.detach().float(), name=op.name,
        multiplier=(float(inputs) * scales).float(), scale=inputs, zero=zero)


def _int8_conv(
        op: ConvOp,
        source: Tuple[float, int],
        shortcut: Optional[Tuple[float, int]],
        scale: float,
        zero: int,
) -> Int8ConvOp:
    """Quantise a convolution.

    Args:
        op: Convolution in float32.
        source: Scale and zero of the input.
        shortcut: Scale and zero of the shortcut, if there is one.
        scale: Scale of the output. The result has a larger one where a multiplier would be more than 1.
        zero: Zero of the output.
    """
    bias = op.bias.detach().double()
    x_scale, x_zero = source
    # Weights so small that bias or shortcut would be out of range are rounded to zero.
    shortcut_scale, shortcut_zero = shortcut or (0., 0)
    least = max(scale / INT8_RATIO, bias.abs().max().item() / (INT8_BIAS // 4), shortcut_scale * 2 / INT8_RATIO)
    values, scales = _quantize_weight(op, least / x_scale)
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
