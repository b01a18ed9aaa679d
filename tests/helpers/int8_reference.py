"""Quantised programs in NumPy, as csrc/int8.h defines them: the bits that every instruction set must return

All channels of a map are kept. Those that a gate has closed are 0, the zero of a gated map. Operations in float32 are
included. Their results are known to the bit if the values are multiples of a small power of two, so that sums do not
depend on the order, or if csrc defines the order.
"""
from dataclasses import dataclass, replace
from typing import Any, Dict, List, Optional, Tuple

import numpy as np
import torch
import torch.nn.functional as F

from timm_gated.inference.program import (
    AdaptivePoolOp,
    BlurOp,
    ChannelConvOp,
    ConcatOp,
    ConvOp,
    DequantizeOp,
    GateOp,
    Int8ConvOp,
    Int8LinearOp,
    OutputOp,
    PoolOp,
    Program,
    QuantizeOp,
    ScaleOp,
    SkipOp,
    SubsampleOp,
)
from timm_gated.inference.sliced import binomial

__all__ = ['Map', 'Result', 'Sample', 'convolve', 'grid_images', 'linear', 'run_reference']

FINEST = 2**5  # sums of products of multiples of 1 / FINEST are exact, up to 2^24 / FINEST^2
SKIP_STEPS, LARGEST_RATIO = np.float32(2**14), np.float32(256)  # of skips


@dataclass
class Map:
    """Values of a map, [C, H, W]: float32, or integers from 0 to 255 if it has a scale.

    `exact` is whether its values are known to the bit.
    """
    values: np.ndarray
    scale: Optional[np.float32] = None
    zero: int = 0
    exact: bool = True

    def floats(self) -> np.ndarray:
        if self.scale is None:
            return self.values
        return (self.values - self.zero).astype(np.float32) * self.scale


@dataclass
class Result:
    """Outputs of a batch, the open channels by image and gate, and whether all are known to the bit."""
    outputs: List[torch.Tensor]
    num_open: torch.Tensor
    exact: bool


def grid_images(*shape: int, seed: int = 0) -> torch.Tensor:
    """Images whose sums are exact in float32."""
    return torch.randint(-64, 65, shape, generator=torch.Generator().manual_seed(seed)) / 16


def quantise(values: np.ndarray, scale: torch.Tensor, zero: int) -> np.ndarray:
    inverse = np.float32(1) / scale.numpy()
    with np.errstate(over='ignore'):
        scaled = np.nan_to_num(values * inverse, nan=-1024)
    return np.clip(np.rint(np.clip(scaled, -1024, 1024)).astype(np.int64) + zero, 0, 255)


def requantise(sums: np.ndarray, multiplier: np.ndarray, zero: int, relu: bool) -> np.ndarray:
    assert np.abs(sums).max(initial=0) < 2**31, 'the sums of valid programs have 32 bits'
    rounded = np.rint(sums.astype(np.float32) * multiplier[:, None, None]).astype(np.int64)
    return np.clip(rounded + zero, zero if relu else 0, 255)


def without_groups(weight: np.ndarray, groups: int) -> np.ndarray:
    """Weight over all inputs, with zeros for those of other groups."""
    outputs, inputs = weight.shape[0] // groups, weight.shape[1]
    complete = np.zeros((len(weight), inputs * groups, *weight.shape[2:]))
    for group in range(groups):
        rows = slice(group * outputs, (group + 1) * outputs)
        complete[rows, group * inputs:(group + 1) * inputs] = weight[rows]
    return complete


def convolve(x: np.ndarray, op: ConvOp, outside: int = 0) -> np.ndarray:
    """Convolution in float64: sums of integers are exact. `outside` is the value of the padding."""
    weight = without_groups(op.weight.double().numpy(), op.groups)
    sides = ((0, 0), (op.padding, op.padding), (op.padding, op.padding))
    padded = np.pad(x.astype(np.float64), sides, constant_values=outside)
    kernel = weight.shape[2]
    height, width = ((side - op.dilation * (kernel - 1) - 1) // op.stride + 1 for side in padded.shape[1:])
    sums = np.zeros((len(weight), height, width))
    for i in range(kernel):
        for j in range(kernel):
            top, left = i * op.dilation, j * op.dilation
            taps = padded[
                :, top:top + (height - 1) * op.stride + 1:op.stride, left:left + (width - 1) * op.stride + 1:op.stride]
            sums += np.tensordot(weight[:, :, i, j], taps, 1)
    return sums


def on_grid(*arrays: np.ndarray) -> bool:
    scaled = [values.astype(np.float64) * FINEST for values in arrays]
    return all((values == np.rint(values)).all() for values in scaled)


def is_small(magnitudes: np.ndarray) -> bool:
    """Whether sums of products on the grid fit into the bits of a float32."""
    return bool((magnitudes * FINEST**2 < 2**24).all())


def average_pool(x: np.ndarray, op: PoolOp, height: int, width: int) -> np.ndarray:
    """Rows, then columns are added one after the other; the padding does not count."""
    out = np.zeros((len(x), height, width), np.float32)
    for i in range(height):
        top = i * op.stride - op.padding
        rows = x[:, max(top, 0):top + op.kernel]
        for j in range(width):
            left = j * op.stride - op.padding
            window = rows[:, :, max(left, 0):left + op.kernel]
            total = np.zeros(len(x), np.float32)
            for column in range(window.shape[2]):
                by_column = window[:, 0, column].copy()
                for row in range(1, window.shape[1]):
                    by_column += window[:, row, column]
                total = by_column if column == 0 else total + by_column
            out[:, i, j] = total / np.float32(window.shape[1] * window.shape[2])
    return out


def linear(x: np.ndarray, weight: torch.Tensor, bias: torch.Tensor) -> np.ndarray:
    """Bias, then input after input, each product rounded."""
    sums = bias.numpy().copy()
    for value, column in zip(x, weight.numpy().T, strict=True):
        sums += column * value
    return sums


class Sample:
    """Runs one image."""

    def __init__(self, program: Program, image: torch.Tensor) -> None:
        self.program = program
        self.maps: Dict[int, Map] = {0: Map(image.numpy())}
        self.open: Dict[int, np.ndarray] = {}
        self.outputs: List[Map] = []
        self.exact = True  # whether all decisions of gates are

    def run(self) -> None:
        index = 0
        while index < len(self.program.ops):
            op: Any = self.program.ops[index]
            if isinstance(op, GateOp):
                self.gate(op)
            elif isinstance(op, SkipOp):
                if not self.open[op.gate].any():
                    last: Any = self.program.ops[index + op.count]
                    self.maps[op.target] = self.skip(self.maps[op.source], last)
                    index += op.count
            elif isinstance(op, OutputOp):
                self.outputs.append(self.maps[op.source])
            elif isinstance(op, ConcatOp):
                self.maps[op.target] = self.concat(op)
            else:
                self.maps[op.target] = getattr(self, _STEPS[type(op)])(op, self.maps[op.source])
            index += 1

    def averages(self, x: Map) -> Tuple[np.ndarray, bool]:
        """Averages of channels, and whether they are exact."""
        if x.scale is None:
            exact = x.exact and on_grid(x.values) and is_small(np.abs(x.values).sum((1, 2)))
            return x.values.astype(np.float64).mean((1, 2)).astype(np.float32), exact
        totals = (x.values.sum((1, 2)) - x.values[0].size * x.zero).astype(np.float64)
        return (totals / x.values[0].size * np.float64(x.scale)).astype(np.float32), x.exact

    def gate(self, op: GateOp) -> None:
        pooled, exact = self.averages(self.maps[op.source])
        hidden = linear(pooled, op.weight1, op.bias1)
        self.open[op.gate] = linear(np.where(hidden < 0, np.float32(0), hidden), op.weight2, op.bias2) > 0
        self.exact = self.exact and exact

    def closed(self, values: np.ndarray, op: ConvOp) -> np.ndarray:
        """Values of open channels, and zeros."""
        return values if op.gate_out is None else values * self.open[op.gate_out][:, None, None].astype(values.dtype)

    def int8_conv(self, op: Int8ConvOp, x: Map) -> Map:
        sums, exact = convolve(x.values, op, x.zero).astype(np.int64), x.exact
        sums += op.bias.numpy()[:, None, None].astype(np.int64)
        if op.residual is not None:
            residual = self.maps[op.residual]
            sums += np.rint(residual.values.astype(np.float32) * op.ratio.numpy()[:, None, None]).astype(np.int64)
            exact = exact and residual.exact
        values = requantise(sums, op.multiplier.numpy(), op.zero, op.relu)
        return Map(self.closed(values, op), op.scale.numpy()[0], op.zero, exact)

    def int8_linear(self, op: Int8LinearOp, x: Map) -> Map:
        centred = quantise(x.values, op.scale, op.zero) - op.zero
        sums = convolve(centred, op).astype(np.float32)[:, 0, 0].astype(np.float64)
        values = sums * op.multiplier.double().numpy() + op.bias.double().numpy()
        return replace(x, values=values.astype(np.float32)[:, None, None])

    def conv(self, op: ConvOp, x: Map) -> Map:
        bias = op.bias.double().numpy()[:, None, None]
        sums = convolve(x.values, op) + bias
        magnitudes = convolve(np.abs(x.values), replace(op, weight=op.weight.abs())) + np.abs(bias)
        # Winograd's algorithm rounds; other convolutions add up products in some order.
        exact = x.exact and not (op.weight.shape[2] == 3 and op.stride == 1)
        exact = exact and on_grid(x.values, op.weight.numpy(), bias)
        if op.residual is not None:
            residual = self.maps[op.residual]
            sums += residual.values
            magnitudes += np.abs(residual.values)
            exact = exact and residual.exact and on_grid(residual.values)
        values = (np.maximum(sums, 0) if op.relu else sums).astype(np.float32)
        return Map(self.closed(values, op), exact=exact and is_small(magnitudes))

    def skip(self, x: Map, last: ConvOp) -> Map:
        """The ReLU of the shortcut, in steps of 2^-14 of the output's scale."""
        if not isinstance(last, Int8ConvOp):
            return replace(x, values=np.where(x.values < 0, np.float32(0), x.values))
        scale = last.scale.numpy()[0]
        ratio = min(x.scale / scale, LARGEST_RATIO) * SKIP_STEPS
        sums = np.rint(x.values.astype(np.float32) * ratio) - np.rint(ratio * np.float32(x.zero))
        multiplier = np.full(len(x.values), 1 / SKIP_STEPS)
        return Map(requantise(sums.astype(np.int64), multiplier, last.zero, True), scale, last.zero, x.exact)

    def pool(self, op: PoolOp, x: Map) -> Map:
        # Integers are exact in float32, and windows ignore their padding.
        values = torch.from_numpy(x.values.astype(np.float32))[None]
        pooled = F.max_pool2d(values, op.kernel, op.stride, op.padding, ceil_mode=op.ceil_mode)[0].numpy()
        if op.average:
            return replace(x, values=average_pool(x.values, op, *pooled.shape[1:]))
        return replace(x, values=pooled.astype(x.values.dtype))

    def adaptive_pool(self, op: AdaptivePoolOp, x: Map) -> Map:
        if op.bins == 1:
            values, exact = self.averages(x)
            return Map(values[:, None, None], exact=exact)
        return Map(F.adaptive_avg_pool2d(torch.from_numpy(x.values), op.bins).numpy(), exact=False)

    def blur(self, op: BlurOp, x: Map) -> Map:
        values = np.pad(x.values, ((0, 0), (op.padding,) * 2, (op.padding,) * 2), mode='reflect')
        weight = binomial(op.kernel)
        filters = torch.outer(weight, weight).expand(len(values), 1, -1, -1)
        blurred = F.conv2d(torch.from_numpy(values).double(), filters, stride=op.stride, groups=len(values))
        return Map(blurred.float().numpy(), exact=False)

    def channel_conv(self, op: ChannelConvOp, x: Map) -> Map:
        padded = np.pad(x.values[:, 0, 0].astype(np.float64), len(op.weight) // 2)
        values = np.correlate(padded, op.weight.double().numpy(), 'valid').astype(np.float32)
        return Map(values[:, None, None], exact=False)

    def scale(self, op: ScaleOp, x: Map) -> Map:
        values = x.values / (1 + np.exp(-self.maps[op.factors].values))
        if op.residual is not None:
            values = values + self.maps[op.residual].values
        return Map(np.maximum(values, np.float32(0)) if op.relu else values, exact=False)

    def concat(self, op: ConcatOp) -> Map:
        maps = [self.maps[source] for source in op.sources]
        size = maps[0].values.shape[1:]
        values = [
            x.values if x.values.shape[1:] == size else F.interpolate(
                torch.from_numpy(x.values)[None], size, mode='bilinear', align_corners=op.align_corners)[0].numpy()
            for x in maps]
        exact = all(x.exact and x.values.shape[1:] == size for x in maps)
        return Map(np.concatenate(values), exact=exact)

    def subsample(self, op: SubsampleOp, x: Map) -> Map:
        sides = ((op.before, op.after), (0, 0), (0, 0))
        return replace(x, values=np.pad(
            x.values[:, ::op.stride, ::op.stride], sides, constant_values=0 if x.scale is None else x.zero))

    def quantize(self, op: QuantizeOp, x: Map) -> Map:
        return Map(quantise(x.values, op.scale, op.zero), op.scale.numpy()[0], op.zero, x.exact)

    def dequantize(self, op: DequantizeOp, x: Map) -> Map:
        return Map(x.floats(), exact=x.exact)


_STEPS: Dict[type, str] = {
    ConvOp: 'conv', Int8ConvOp: 'int8_conv', Int8LinearOp: 'int8_linear', PoolOp: 'pool',
    AdaptivePoolOp: 'adaptive_pool', SubsampleOp: 'subsample', QuantizeOp: 'quantize',
    DequantizeOp: 'dequantize', BlurOp: 'blur', ChannelConvOp: 'channel_conv',
    ScaleOp: 'scale'}


def run_reference(program: Program, images: torch.Tensor) -> Result:
    """Run a batch.

    Args:
        program: Program to run.
        images: Batch of images.
    """
    samples = [Sample(program, image) for image in images]
    for sample in samples:
        sample.run()
    outputs = [
        torch.from_numpy(np.stack([output.floats() for output in maps]))
        for maps in zip(*(sample.outputs for sample in samples), strict=True)]
    num_open = torch.tensor(
        [[int(sample.open[gate].sum()) if gate in sample.open else 0 for gate in range(program.num_gates)]
         for sample in samples], dtype=torch.int32)
    return Result(
        outputs, num_open, all(sample.exact and all(output.exact for output in sample.outputs) for sample in samples))
