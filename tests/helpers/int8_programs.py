"""Hypothesis strategies for quantised programs, most of them valid"""
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from hypothesis import strategies as st
from programs import NUM_GATES, NUM_MAPS, Author
from strategies import seeds

from timm_gated.inference.program import (
    INT8_BIAS,
    INT8_RATIO,
    INT8_WEIGHT,
    AdaptivePoolOp,
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
    SkipOp,
    SubsampleOp,
)

__all__ = ['int8_conv', 'int8_programs', 'quantised_channels', 'quantised_scale']

STYLES = ('usual', 'usual', 'usual', 'saturating', 'extreme')
quantised_channels = st.sampled_from([4, 8, 1, 3, 5, 16, 20, 67])
zeros = st.sampled_from([0, 0, 128, 255, 1, 77])


def quantised_scale(exponent: int) -> torch.Tensor:
    """A scale that is a power of two, so that dequantised values can be added up without rounding."""
    return torch.tensor([2.**exponent])


def int8_conv(
        source: int,
        target: int,
        shape: Tuple[int, int, int, int],
        seed: int,
        style: str = 'usual',
        zero: int = 0,
        source_zero: int = 0,
        residual: Optional[int] = None,
        residual_zero: int = 0,
        exponent: int = -4,
        **kwargs: Any,
) -> Int8ConvOp:
    """An int8 convolution with random parameters.

    'usual' ones spread their outputs over all values. 'saturating' ones have the largest weights, so that sums are as
    large as they can be. 'extreme' ones have parameters at their limits.

    Args:
        source: Map that is read.
        target: Map that is written.
        shape: Shape of the weight.
        seed: Seed of the parameters.
        style: One of STYLES.
        zero: Zero of the output.
        source_zero: Zero of the input.
        residual: Map of the shortcut.
        residual_zero: Zero of the shortcut.
        exponent: Power of two that is the scale of the output.
        **kwargs: Other fields.
    """
    generator = torch.Generator().manual_seed(seed)
    c_out, depth = shape[0], max(shape[1] * shape[2] ** 2, 1)

    def integers(low: int, high: int, *size: int) -> torch.Tensor:
        return torch.randint(low, high + 1, size, generator=generator)

    def uniform(low: float, high: float) -> torch.Tensor:
        return low + (high - low) * torch.rand(c_out, generator=generator)

    weight = integers(-INT8_WEIGHT, INT8_WEIGHT, *shape)
    if style == 'saturating':  # filters of one sign, and of both
        signs = torch.where(integers(0, 2, c_out, 1, 1, 1) > 0, integers(0, 1, c_out, 1, 1, 1), integers(0, 1, *shape))
        weight = INT8_WEIGHT * (2 * signs - 1)
    spread = 36. * 74 * depth ** 0.5  # of sums
    multiplier = uniform(0.2, 2) * 100 / spread
    ratio = uniform(0., 1.) / multiplier
    bias = integers(-1000, 1000, c_out) * int(spread / 1000 + 1) - source_zero * weight.sum((1, 2, 3))
    bias = bias - (ratio * residual_zero).round().long()
    if style == 'extreme':
        def choice(*values: float) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float64)[integers(0, len(values) - 1, c_out)]

        multiplier = choice(1, 0.5, 0, 2**-30, 1e-40, 1 / 3, 2**-22).float()
        ratio = choice(INT8_RATIO, 0, 0.5, 1.5, 1e-40, 2**-9).float()
        bias = choice(INT8_BIAS, -INT8_BIAS, 0, 127, -1, 2**24 + 1).long()
    return Int8ConvOp(
        source, target, weight.to(torch.int8), bias.clamp(-INT8_BIAS, INT8_BIAS).int(), residual=residual,
        multiplier=multiplier.clamp(max=1), ratio=torch.empty(0) if residual is None else ratio.clamp(max=INT8_RATIO),
        scale=quantised_scale(exponent), zero=zero, **kwargs)


class Int8Author(Author):
    """Draws programs of quantised maps, with maps in float32 between them."""

    def __init__(self, draw: Callable) -> None:
        super().__init__(draw)
        self.zeros: Dict[int, int] = {}  # of quantised maps

    def write(self, number: int, channels: int, size: Optional[int] = None, gate: Optional[int] = None) -> None:
        super().write(number, channels, size, gate)
        self.zeros.pop(number, None)

    def write_quantised(self, number: int, zero: int, *args: Any) -> None:
        self.write(number, *args)
        if number in self.maps:
            self.zeros[number] = zero

    def zero_of(self, number: Optional[int]) -> int:
        return self.zeros.get(number, 0)  # type: ignore[call-overload]

    def quantised_maps(self) -> List[int]:
        return [number for number in self.plain_maps() if number in self.zeros]

    def float_maps(self) -> List[int]:
        return [number for number in self.plain_maps() if number not in self.zeros]

    def exponent(self) -> int:
        return self.draw(st.integers(-5, -3))

    def quantize(self) -> None:
        source = self.source(self.float_maps())
        target, zero = self.target(source), self.mostly(zeros)
        known = self.known(source)
        self.ops.append(QuantizeOp(source, target, quantised_scale(self.exponent()), zero))
        self.write_quantised(target, zero, known.channels, known.size)

    def dequantize(self) -> None:
        source = self.source(self.quantised_maps())
        target = self.target(source)
        self.ops.append(DequantizeOp(source, target))
        self.write(target, self.known(source).channels, self.known(source).size)

    def write_int8(self, source: int, target: int, channels: int, keep_size: bool, **kwargs: Any) -> None:
        known = self.known(source)
        kernel = self.draw(st.sampled_from([1, 3, 3, 5] if keep_size else [1, 2, 3, 3, 4, 7]))
        if keep_size:
            dilation = self.mostly(st.sampled_from([1, 1, 2, 5]), st.just(2**20))
            window = dict(dilation=dilation, padding=self.mostly(st.just(kernel // 2 * dilation), st.integers(0, 9)))
        else:
            window = dict(stride=self.mostly(st.integers(2, 4), st.just(1)), padding=self.draw(st.integers(0, 3)))
        gate_in = self.mostly(st.just(known.gate), st.sampled_from([None, *self.gates]))
        zero = self.mostly(zeros if kwargs.get('gate_out') is None else st.just(0), zeros)
        self.ops.append(int8_conv(
            source, target, (channels, known.channels, kernel, kernel), self.draw(seeds),
            self.draw(st.sampled_from(STYLES)), zero, self.zero_of(source),
            residual_zero=self.zero_of(kwargs.get('residual')), exponent=self.exponent(), gate_in=gate_in,
            **window, **kwargs))
        self.write_quantised(target, zero, channels, known.size if keep_size else None, kwargs.get('gate_out'))

    def quantised_or_gated(self) -> List[int]:
        return [number for number in self.maps if number in self.zeros]

    def int8_conv(self) -> None:
        source = self.source(self.quantised_or_gated())
        gate = self.draw(st.sampled_from([*self.gates, None]))
        channels = self.draw(quantised_channels) if gate is None else self.gates[gate]
        self.write_int8(
            source, self.target(source), channels, keep_size=self.draw(st.booleans()), relu=self.draw(st.booleans()),
            gate_out=gate)

    def int8_shortcut(self) -> None:
        residual = self.source(self.quantised_maps())
        known = self.known(residual)
        source = self.source([
            number for number in self.quantised_or_gated() if self.known(number).size == known.size] or [residual])
        self.write_int8(
            source, self.target(source, residual), known.channels, keep_size=True, relu=self.draw(st.booleans()),
            residual=residual)

    def int8_skip(self) -> None:
        source = self.source(self.quantised_maps())
        target = self.target(source)
        channels, count = self.known(source).channels, self.draw(st.integers(1, 2))
        self.ops.append(SkipOp(source, target, self.mostly(st.sampled_from(self.gates_of(1))), count))
        between = source
        if count == 2:
            between = self.target(source, target)
            inner = self.draw(st.sampled_from([*self.gates, None]))
            width = self.draw(quantised_channels) if inner is None else self.gates[inner]
            self.write_int8(source, between, width, keep_size=True, gate_out=inner, relu=True)
        self.write_int8(between, target, channels, keep_size=True, residual=source, relu=True)
        if count == 2:
            self.write(between, channels=0)  # may not exist

    def some_gate(self) -> None:
        source = self.source(self.plain_maps())
        channels = self.known(source).channels
        gate = self.mostly(st.sampled_from([number for number in range(NUM_GATES) if number not in self.gates]))
        width = self.draw(st.sampled_from([1, 1, 70]) | quantised_channels)
        bias2 = self.weight(width) + self.draw(st.sampled_from([0., 0., 9., -9.]))  # some, all, no channels
        self.ops.append(GateOp(
            source, gate, self.weight(3, channels), self.weight(3), self.weight(width, 3) / 4, bias2))
        self.gates.setdefault(gate, width)

    def int8_pool(self) -> None:
        source = self.source(self.plain_maps())
        target, kernel = self.target(source), self.draw(st.integers(1, 3))
        padding = self.draw(st.sampled_from([kernel // 2, 0]))
        average = self.mostly(st.just(False)) if source in self.zeros else self.draw(st.booleans())
        self.ops.append(PoolOp(
            source, target, bool(average), kernel, self.mostly(st.integers(1, 4)), padding, self.draw(st.booleans())))
        if source in self.zeros:
            self.write_quantised(target, self.zeros[source], self.known(source).channels)
        else:
            self.write(target, self.known(source).channels)

    def int8_subsample(self) -> None:
        source = self.newest()
        target, channels = self.target(source), self.known(source).channels
        before, after = self.draw(st.sampled_from([0, 4, 8])), self.draw(st.integers(0, 5))
        self.ops.append(SubsampleOp(source, target, self.mostly(st.integers(1, 4)), before, after))
        if source in self.zeros:
            self.write_quantised(target, self.zeros[source], channels + before + after)
        else:
            self.write(target, channels + before + after)

    def float_conv(self) -> None:
        """1 x 1 convolutions with weights that make exact sums."""
        source = self.source(self.float_maps())
        known, channels = self.known(source), self.draw(quantised_channels)
        weight = torch.randint(
            -4, 5, (channels, known.channels, 1, 1), generator=torch.Generator().manual_seed(self.draw(seeds))) / 4
        target = self.target(source)
        self.ops.append(ConvOp(source, target, weight, torch.ones(channels), relu=self.draw(st.booleans())))
        self.write(target, channels, known.size)

    def classifier(self) -> None:
        """Global average pooling and a linear layer. Further operations may follow."""
        source = self.source(self.plain_maps())
        pooled, channels = self.target(source), self.draw(quantised_channels)
        target = self.target(source, pooled)
        like = int8_conv(pooled, target, (channels, self.known(source).channels, 1, 1), self.draw(seeds))
        self.ops += [AdaptivePoolOp(source, pooled, 1), Int8LinearOp(
            pooled, target, like.weight, self.weight(channels), multiplier=like.multiplier, scale=like.scale,
            zero=self.mostly(zeros))]
        self.write(pooled, self.known(source).channels)
        self.write(target, channels, self.known(pooled).size)

    def side_by_side(self) -> None:
        """Concatenation of maps of the same size."""
        first = self.source(self.float_maps())
        size = self.known(first).size
        sources = (first, *(number for number in self.float_maps() if self.known(number).size == size))
        target = self.target(*sources)
        self.ops.append(ConcatOp(sources, target))
        self.write(target, sum(self.known(source).channels for source in sources), size)

    def operation(self) -> None:
        operations = [self.quantize]
        if self.quantised_or_gated():
            operations = [self.int8_conv] * 4
        if self.newest() in self.quantised_maps():  # otherwise only a convolution can read it
            operations += [self.int8_shortcut] * 3
            operations += [self.int8_pool, *[self.dequantize] * 2, *[self.classifier] * 2]
            operations += [self.int8_subsample] * 3 * (self.known(self.newest()).channels % 4 == 0)
            operations += [self.some_gate] * 6 * (NUM_GATES - len(self.gates))
            operations += [self.int8_skip] * (12 if self.gates_of(1) else 0)
        elif self.newest() in self.float_maps() and self.zeros:
            operations = [self.quantize] * 3
            operations += [self.float_conv] * 3 + [self.int8_pool, self.int8_subsample]
            operations += [self.some_gate] * 3 * (NUM_GATES - len(self.gates))
            operations += [self.side_by_side] * (len(self.float_maps()) < 3)
        elif self.zeros:  # the newest map is gated
            operations += [self.int8_shortcut] * 3 * bool(self.quantised_maps())
        self.draw(st.sampled_from(operations))()

    def end(self) -> None:
        """Output all maps that hold all their channels."""
        self.ops += [OutputOp(number) for number in self.plain_maps()]


@st.composite
def int8_programs(draw) -> Tuple[int, List[Op], int, int]:
    """Arguments of a `Program`."""
    author = Int8Author(draw)
    for _ in range(draw(st.integers(3, 9))):
        author.operation()
    author.end()
    return author.in_channels, author.ops, NUM_MAPS, NUM_GATES
