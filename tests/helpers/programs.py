"""Hypothesis strategy for programs of `accelerate`, most of them valid"""
import math
from dataclasses import dataclass
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from hypothesis import strategies as st
from strategies import seeds

from timm_gated.inference.program import (
    AdaptivePoolOp,
    BlurOp,
    ChannelConvOp,
    ConcatOp,
    ConvOp,
    GateOp,
    Op,
    OutputOp,
    PoolOp,
    ScaleOp,
    SkipOp,
    SubsampleOp,
)

__all__ = ['programs']

NUM_MAPS, NUM_GATES = 5, 3
MOST_CHANNELS = 99  # of maps that are read, to limit the time of convolutions

some_channels = st.sampled_from([1, 2, 3, 4, 4, 5, 6])
any_map = st.integers(-1, NUM_MAPS)
odd = st.sampled_from([-7, -1, 0, 1, 5, 65, 2**20 - 1, 2**20 - 1, 2**20, 2**20, 2**20 + 1, 2**32 + 1])


@dataclass
class Map:
    """A map that was written.

    Attributes:
        channels: Number of channels.
        size: Identifier of its height and width; maps with the same identifier have the same size.
        gate: Gate whose open channels the map holds.
    """
    channels: int
    size: int
    gate: Optional[int] = None


class Author:
    """Draws the operations of a program and keeps track of its maps and gates."""

    def __init__(self, draw: Callable) -> None:
        self.draw = draw
        self.in_channels = draw(st.integers(1, 4))
        self.maps = {0: Map(self.in_channels, size=0)}  # newest last
        self.num_sizes = 1
        self.gates: Dict[int, int] = {}  # number of channels by gate
        self.ops: List[Op] = []

    def mostly(self, values: st.SearchStrategy, others: st.SearchStrategy = odd) -> Any:
        """Draw from `others` in 1 of 100 cases. (Hypothesis prefers the ends of a range, so not 0 or 99.)"""
        return self.draw(values if self.draw(st.integers(0, 99)) != 63 else others)

    def weight(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(self.draw(seeds)))

    def newest(self) -> int:
        return list(self.maps)[-1]

    def plain_maps(self) -> List[int]:
        """Maps that hold all their channels."""
        return [number for number, known in self.maps.items() if known.gate is None]

    def gates_of(self, width: int) -> List[int]:
        return [gate for gate, gate_width in self.gates.items() if gate_width == width]

    def source(self, numbers: List[int]) -> int:
        return self.mostly(st.sampled_from([*numbers, *numbers[-1:] * 2]), any_map)

    def target(self, *taken: Optional[int]) -> int:
        return self.mostly(st.sampled_from([number for number in range(1, NUM_MAPS) if number not in taken]), any_map)

    def known(self, number: int) -> Map:
        return self.maps.get(number, Map(3, size=0))

    def write(self, number: int, channels: int, size: Optional[int] = None, gate: Optional[int] = None) -> None:
        if number not in range(1, NUM_MAPS):  # invalid
            return
        self.maps.pop(number, None)
        if size is None:
            size, self.num_sizes = self.num_sizes, self.num_sizes + 1
        if channels in range(1, MOST_CHANNELS + 1):
            self.maps[number] = Map(channels, size, gate)

    def write_conv(self, source: int, target: int, channels: int, keep_size: bool, **kwargs: Any) -> None:
        known = self.known(source)
        kernel = self.draw(st.sampled_from([1, 3, 3] if keep_size else [1, 2, 3, 3]))
        dilation = self.mostly(st.integers(1, 2))
        stride, padding = 1, kernel // 2 * dilation
        if not keep_size:
            stride, padding = self.mostly(st.integers(1, 2)), self.mostly(st.integers(kernel // 2, 2))
        gate_in = self.mostly(st.just(known.gate), st.sampled_from([None, *self.gates]))
        common = math.gcd(channels, known.channels)
        groups = self.mostly(st.sampled_from([1, *(size for size in range(1, common + 1) if common % size == 0)]))
        inputs = known.channels // groups if 1 <= groups <= known.channels else known.channels
        self.ops.append(ConvOp(
            source, target, self.weight(channels, inputs, kernel, kernel), self.weight(channels), stride, dilation,
            padding, gate_in=gate_in, groups=groups, **kwargs))
        self.write(target, channels, known.size if keep_size else None, kwargs.get('gate_out'))

    def conv(self) -> None:
        source = self.source(list(self.maps))
        gate = self.draw(st.sampled_from([*self.gates, None]))
        channels = self.mostly(some_channels if gate is None else st.just(self.gates[gate]), some_channels)
        self.write_conv(
            source, self.target(source), channels, keep_size=self.draw(st.booleans()), relu=self.draw(st.booleans()),
            gate_out=gate)

    def conv_with_shortcut(self) -> None:
        residual = self.source(self.plain_maps())
        source = self.source([number for number, known in self.maps.items() if known.size == self.known(residual).size])
        channels = self.mostly(st.just(self.known(residual).channels), some_channels)
        self.write_conv(
            source, self.target(source, residual), channels, keep_size=True, relu=self.draw(st.booleans()),
            residual=residual)

    def gate(self) -> None:
        source = self.source(self.plain_maps())
        channels = self.known(source).channels
        gate = self.mostly(st.sampled_from([number for number in range(NUM_GATES) if number not in self.gates]))
        width = self.draw(st.sampled_from([1, 1, channels]) | some_channels)
        self.ops.append(GateOp(
            source, gate, self.weight(3, channels), self.weight(3), self.weight(width, 3), self.weight(width)))
        self.gates.setdefault(gate, width)

    def pool(self) -> None:
        source = self.source(list(self.maps))
        target = self.target(source)
        kernel = self.mostly(st.integers(1, 3))
        padding = self.mostly(st.sampled_from([kernel // 2, kernel // 2, 0]))
        self.ops.append(PoolOp(
            source, target, self.draw(st.booleans()), kernel, self.mostly(st.integers(1, 2)), padding,
            self.draw(st.booleans())))
        self.write(target, self.known(source).channels, gate=self.known(source).gate)

    def blur(self) -> None:
        source = self.source(list(self.maps))
        target = self.target(source)
        kernel = self.mostly(st.sampled_from([1, 2, 3, 3]))
        self.ops.append(BlurOp(
            source, target, kernel, self.mostly(st.integers(1, 3)), self.mostly(st.sampled_from([kernel // 2, 0]))))
        self.write(target, self.known(source).channels, gate=self.known(source).gate)

    def attention(self) -> None:
        """Scale a map by factors from its averages."""
        source = self.source(self.plain_maps())
        channels, size = self.known(source).channels, self.known(source).size
        pooled = self.target(source)
        self.ops.append(AdaptivePoolOp(source, pooled, self.mostly(st.just(1))))
        self.write(pooled, channels)
        factors = self.target(source, pooled)
        if self.draw(st.booleans()):
            length = self.mostly(st.sampled_from([1, 3, 5]), st.integers(0, 70))
            self.ops.append(ChannelConvOp(pooled, factors, self.weight(length)))
        else:
            self.ops.append(ConvOp(
                pooled, factors, self.weight(channels, channels, 1, 1), self.weight(channels),
                relu=self.draw(st.booleans())))
        self.write(factors, channels)
        like = [number for number in self.plain_maps() if self.maps[number] == self.known(source)]
        residual = self.mostly(st.sampled_from([None, *like]), any_map)
        target = self.target(source, factors, residual)
        self.ops.append(ScaleOp(source, factors, target, residual, self.draw(st.booleans())))
        self.write(target, channels, size)

    def adaptive_pool(self) -> None:
        source = self.source(self.plain_maps())
        target = self.target(source)
        self.ops.append(AdaptivePoolOp(source, target, self.mostly(st.integers(1, 6))))
        self.write(target, self.known(source).channels)

    def concat(self) -> None:
        sources = tuple(self.source(self.plain_maps()) for _ in range(self.draw(st.integers(1, 2))))
        target = self.target(*sources)
        self.ops.append(ConcatOp(sources, target, self.draw(st.booleans())))
        self.write(target, sum(self.known(source).channels for source in sources), self.known(sources[0]).size)

    def subsample(self) -> None:
        source = self.source(self.plain_maps())
        target = self.target(source)
        before, after = self.mostly(st.integers(0, 2)), self.mostly(st.integers(0, 2))
        self.ops.append(SubsampleOp(source, target, self.mostly(st.integers(1, 2)), before, after))
        self.write(target, self.known(source).channels + before + after)

    def skip(self) -> None:
        """Skip one or two convolutions."""
        source = self.source(self.plain_maps())
        target = self.target(source)
        channels = self.known(source).channels
        gate = self.mostly(st.sampled_from(self.gates_of(1)))
        count = self.draw(st.integers(1, 2))
        self.ops.append(SkipOp(source, target, gate, self.mostly(st.just(count))))
        between = source
        if count == 2:
            between = self.target(source, target)
            inner = self.draw(st.sampled_from([*self.gates, None]))
            width = self.draw(some_channels) if inner is None else self.gates[inner]
            self.write_conv(source, between, width, keep_size=True, gate_out=inner, relu=True)
        self.write_conv(between, target, channels, keep_size=True, residual=source, relu=True)
        if count == 2:
            self.write(between, channels=0)  # may not exist

    def operation(self) -> None:
        operations = [*[self.conv] * 5, self.pool, self.blur]
        if self.newest() in self.plain_maps():  # otherwise only a convolution or a pooling can read it
            operations += [self.conv_with_shortcut, self.adaptive_pool, self.concat, *[self.subsample] * 2]
            operations += [self.attention] * 2
            operations += [self.gate] * (3 * (NUM_GATES - len(self.gates)))
            operations += [self.skip] * (14 if self.gates_of(1) else 0)
        self.draw(st.sampled_from(operations))()

    def end(self) -> None:
        """Output the newest map, or a convolution of it if it is gated."""
        newest = self.newest()
        if newest not in self.plain_maps():
            self.write_conv(newest, self.target(newest), self.draw(some_channels), keep_size=True)
        self.ops.append(OutputOp(self.source(self.plain_maps()[-1:])))


@st.composite
def programs(draw) -> Tuple[int, List[Op], int, int]:
    """Arguments of a `Program`."""
    author = Author(draw)
    for _ in range(draw(st.integers(3, 9))):
        author.operation()
    author.end()
    return author.in_channels, author.ops, NUM_MAPS, NUM_GATES
