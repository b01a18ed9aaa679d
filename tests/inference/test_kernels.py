"""Random programs on all backends, compared with masked convolutions of torch"""
import re
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from deciding_gates import constant_gate, deciding_gate, numbered_images
from hypothesis import event, given
from hypothesis import strategies as st
from programs import programs
from strategies import decisions, examples, seeds
from timm.layers import BlurPool2d

from timm_gated import instruction_sets
from timm_gated.inference.native import NativeRunner
from timm_gated.inference.program import (
    AdaptivePoolOp,
    BlurOp,
    ChannelConvOp,
    ConcatOp,
    ConvOp,
    GateOp,
    OutputOp,
    PoolOp,
    Program,
    ScaleOp,
    SkipOp,
    SubsampleOp,
)
from timm_gated.inference.sliced import SlicedRunner

sizes = st.integers(1, 40)


def all_runners(program: Program) -> list:
    return [*(NativeRunner(program, isa) for isa in instruction_sets()), SlicedRunner(program)]


def run_everywhere(program: Program, x: torch.Tensor, expected: torch.Tensor, threads: int = 1) -> None:
    scale = expected.nan_to_num().abs().max().clamp(min=1)
    opened = [SlicedRunner(program).run_together(image[None]).opened for image in x]
    num_open, num_sliced = torch.zeros(2, len(x), program.num_counts, dtype=torch.int32)
    SlicedRunner(program)(x, num_sliced)
    num_pairs = slice(program.num_gates, None)
    skips = any(isinstance(op, SkipOp) for op in program.ops)  # skipped pairs are not counted
    for runner in all_runners(program):
        torch.set_num_threads(threads)
        try:
            actual, = runner(x, num_open)
        finally:
            torch.set_num_threads(1)
        for found, gates in zip(num_open, opened, strict=True):
            assert {gate: int(found[gate]) for gate in gates} == {gate: len(kept) for gate, kept in gates.items()}
        assert skips or torch.equal(num_open[:, num_pairs], num_sliced[:, num_pairs])
        torch.testing.assert_close(
            actual / scale, expected / scale, atol=2e-5, rtol=0, equal_nan=True,
            msg=lambda text, runner=runner: f'{getattr(runner, "isa", "torch")}: {text}')


@examples(60)
@given(height=sizes, width=sizes, dilation=st.integers(1, 9), relu=st.booleans(), seed=seeds, count=st.integers(1, 3),
       threads=st.sampled_from([1, 1, 2]))
def test_dilated_convolutions(height, width, dilation, relu, seed, count, threads):
    """Convolutions that keep the size of the map, which Winograd's algorithm computes by phases."""
    torch.manual_seed(seed)
    x, weight, bias = torch.randn(count, 7, height, width), torch.randn(9, 7, 3, 3) / 8, torch.randn(9)
    shortcut, shortcut_bias = torch.randn(9, 7, 1, 1), torch.randn(9)
    program = Program(7, [
        ConvOp(0, 1, shortcut, shortcut_bias),
        ConvOp(0, 2, weight, bias, 1, dilation, dilation, relu=relu, residual=1), OutputOp(2)], num_maps=3)
    expected = F.conv2d(x, weight, bias, padding=dilation, dilation=dilation) + F.conv2d(x, shortcut, shortcut_bias)
    run_everywhere(program, x, expected.relu() if relu else expected, threads)


@examples(60)
@given(height=sizes, width=sizes, bins=st.lists(st.integers(1, 8), min_size=1, max_size=4), align=st.booleans(),
       seed=seeds, threads=st.sampled_from([1, 1, 2]))
def test_pyramid_pooling(height, width, bins, align, seed, threads):
    """Maps pooled to bins, resized to the size of the first and concatenated, as in a PSP head."""
    torch.manual_seed(seed)
    x = torch.randn(2, 5, height, width)
    pooled = [F.adaptive_avg_pool2d(x, size) for size in bins]
    resized = [F.interpolate(y, (height, width), mode='bilinear', align_corners=align) for y in pooled]
    maps = tuple(range(1, len(bins) + 1))
    program = Program(5, [
        *(AdaptivePoolOp(0, number, size) for number, size in zip(maps, bins, strict=True)),
        ConcatOp((0, *maps), len(bins) + 1, align), OutputOp(len(bins) + 1)], num_maps=len(bins) + 2)
    run_everywhere(program, x, torch.cat([x, *resized], dim=1), threads)


@examples(120)
@given(data=st.data(), height=sizes, width=sizes, kernel=st.sampled_from([1, 2, 3, 3, 3, 5, 7]),
       stride=st.integers(1, 3), dilation=st.integers(1, 3), relu=st.booleans(), seed=seeds,
       count=st.integers(1, 3), threads=st.sampled_from([1, 1, 1, 2, 3]))
def test_gated_convolutions(data, height, width, kernel, stride, dilation, relu, seed, count, threads):
    """A convolution with gated outputs, one with gated inputs and outputs, and one with a shortcut."""
    torch.manual_seed(seed)
    padding = data.draw(st.integers(0, kernel))
    if min(height, width) + 2 * padding < dilation * (kernel - 1) + 1:
        padding = dilation * kernel
    channels, inner1, inner2 = (data.draw(st.integers(1, most)) for most in (40, 40, 24))
    mask1, mask2 = data.draw(decisions(count, inner1)), data.draw(decisions(count, inner2))
    x = numbered_images(count, channels, height, width)

    def weights(out: int, into: int, side: int) -> tuple:
        return torch.randn(out, into, side, side) / (into * side * side) ** 0.5, torch.randn(out)

    first, second, third = weights(inner1, channels, kernel), weights(inner2, inner1, 3), weights(channels, inner2, 3)
    shortcut = weights(channels, channels, kernel)
    window = dict(stride=stride, dilation=dilation, padding=padding)
    program = Program(channels, [
        deciding_gate(0, channels, mask1),
        deciding_gate(1, channels, mask2),
        ConvOp(0, 4, *shortcut, **window),
        ConvOp(0, 1, *first, **window, relu=relu, gate_out=0),
        ConvOp(1, 2, *second, padding=1, relu=True, gate_in=0, gate_out=1),
        ConvOp(2, 3, *third, padding=1, relu=relu, residual=4, gate_in=1),
        OutputOp(3)], num_maps=5, num_gates=2)
    y = F.conv2d(x, *first, **window)
    y = (y.relu() if relu else y) * mask1[..., None, None]
    y = F.conv2d(y, *second, padding=1).relu() * mask2[..., None, None]
    y = F.conv2d(y, *third, padding=1) + F.conv2d(x, *shortcut, **window)
    run_everywhere(program, x, y.relu() if relu else y, threads)


@examples(80)
@given(data=st.data(), height=sizes, width=sizes, groups=st.sampled_from([2, 3, 8, 32]),
       kernel=st.sampled_from([1, 2, 3, 3, 3, 5]), stride=st.integers(1, 3), dilation=st.integers(1, 2),
       relu=st.booleans(), seed=seeds, count=st.integers(1, 3), threads=st.sampled_from([1, 1, 2, 3]))
def test_grouped_convolutions(data, height, width, groups, kernel, stride, dilation, relu, seed, count, threads):
    """Gated on both sides, with gated inputs and a shortcut, with gated outputs, and without gates."""
    torch.manual_seed(seed)
    padding = data.draw(st.integers(0, kernel))
    if min(height, width) + 2 * padding < dilation * (kernel - 1) + 1:
        padding = dilation * kernel
    channels, inner, outer = (groups * data.draw(st.integers(1, max(1, 24 // groups))) for _ in range(3))
    mask1, mask2 = data.draw(decisions(count, inner)), data.draw(decisions(count, outer))
    x = numbered_images(count, channels, height, width)

    def weights(out: int, into: int, side: int = 3) -> tuple:
        return torch.randn(out, into // groups, side, side) / (into * side * side) ** 0.5, torch.randn(out)

    first, second, third, shortcut = (
        weights(inner, channels), weights(outer, inner, kernel), weights(inner, outer),
        weights(inner, channels, kernel))
    window = dict(stride=stride, dilation=dilation, padding=padding, groups=groups)
    program = Program(channels, [
        deciding_gate(0, channels, mask1),
        deciding_gate(1, channels, mask2),
        ConvOp(0, 4, *shortcut, **window),
        ConvOp(0, 1, *first, padding=1, relu=relu, gate_out=0, groups=groups),
        ConvOp(1, 2, *second, **window, relu=True, gate_in=0, gate_out=1),
        ConvOp(2, 3, *third, padding=1, relu=relu, residual=4, gate_in=1, groups=groups),
        OutputOp(3)], num_maps=5, num_gates=2)
    y = F.conv2d(x, *first, padding=1, groups=groups)
    y = (y.relu() if relu else y) * mask1[..., None, None]
    y = F.conv2d(y, *second, **window).relu() * mask2[..., None, None]
    y = F.conv2d(y, *third, padding=1, groups=groups) + F.conv2d(x, *shortcut, **window)
    run_everywhere(program, x, y.relu() if relu else y, threads)
    counts = torch.zeros(count, 3, dtype=torch.int32)
    NativeRunner(program)(x, counts)
    by_group = [mask.unflatten(1, (groups, -1)).sum(2) for mask in (mask1, mask2)]
    assert torch.equal(counts[:, 2], (by_group[0] * by_group[1]).sum(1).int())


@examples(40)
@given(data=st.data(), height=sizes, width=sizes, kernel=st.integers(1, 5), stride=st.integers(1, 3), seed=seeds,
       threads=st.sampled_from([1, 1, 2]))
def test_blur_pooling(data, height, width, kernel, stride, seed, threads):
    """Under a gate, by the filter of timm; then averages and the largest values under the same gate."""
    torch.manual_seed(seed)
    padding = data.draw(st.integers(0, min(kernel, height - 1, width - 1)))
    if min(height, width) + 2 * padding < kernel:
        height, width = height + kernel, width + kernel
    mask = data.draw(decisions(2, 11))
    x, last = numbered_images(2, 5, height, width), (torch.randn(3, 11, 1, 1), torch.randn(3))
    first = torch.randn(11, 5, 1, 1), torch.randn(11)
    program = Program(5, [
        deciding_gate(0, 5, mask), ConvOp(0, 1, *first, gate_out=0), BlurOp(1, 2, kernel, stride, padding),
        PoolOp(2, 1, True, 3, 1, 1, False), PoolOp(1, 2, False, 2, 1, 1, True), ConvOp(2, 1, *last, gate_in=0),
        OutputOp(1)], num_maps=3, num_gates=1)
    y = F.conv2d(x, *first)
    if kernel > 1:
        blur = BlurPool2d(11, kernel, stride)
        blur.padding = [padding] * 4
        y = blur(y)
    else:
        y = F.pad(y, [padding] * 4, mode='reflect')[:, :, ::stride, ::stride]
    y = F.avg_pool2d(y, 3, 1, 1, count_include_pad=False)
    y = F.max_pool2d(y, 2, 1, 1, ceil_mode=True)
    run_everywhere(program, x, F.conv2d(y * mask[..., None, None], *last), threads)


@examples(30)
@given(height=sizes, width=sizes, channels=st.integers(1, 70), length=st.sampled_from([1, 3, 5, 9]), seed=seeds,
       relu=st.booleans(), residual=st.booleans(), threads=st.sampled_from([1, 1, 2]))
def test_attention(height, width, channels, length, seed, relu, residual, threads):
    """Factors from a convolution over channels, then from a linear layer."""
    torch.manual_seed(seed)
    x, kernel = torch.randn(2, channels, height, width), torch.randn(length)
    weight, bias = torch.randn(channels, channels, 1, 1) / channels ** 0.5, torch.randn(channels)
    shortcut = 0 if residual else None
    program = Program(channels, [
        AdaptivePoolOp(0, 1, 1), ChannelConvOp(1, 2, kernel), ScaleOp(0, 2, 3, shortcut, relu),
        AdaptivePoolOp(3, 1, 1), ConvOp(1, 2, weight, bias), ScaleOp(3, 2, 4, shortcut, relu), OutputOp(4)], num_maps=5)

    def scaled(y: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        y = y * factors.view(2, channels, 1, 1).sigmoid() + (x if residual else 0)
        return y.relu() if relu else y

    y = scaled(x, F.conv1d(x.mean((2, 3))[:, None], kernel[None, None], padding=length // 2))
    run_everywhere(program, x, scaled(y, F.linear(y.mean((2, 3)), weight[:, :, 0, 0], bias)), threads)


@examples(60)
@given(height=sizes, width=sizes, kernel=st.integers(1, 4), stride=st.integers(1, 3), average=st.booleans(),
       ceil_mode=st.booleans(), data=st.data())
def test_pooling(height, width, kernel, stride, average, ceil_mode, data):
    padding = data.draw(st.integers(0, kernel // 2))
    if min(height, width) + 2 * padding < kernel - (stride - 1 if ceil_mode else 0):
        height, width = height + kernel, width + kernel
    x = torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(0))
    if not average:
        x[0, 0, height // 2, width // 2] = torch.nan
    program = Program(3, [PoolOp(0, 1, average, kernel, stride, padding, ceil_mode), OutputOp(1)], num_maps=2)
    if average:
        expected = F.avg_pool2d(x, kernel, stride, padding, ceil_mode, count_include_pad=False)
    else:
        expected = F.max_pool2d(x, kernel, stride, padding, ceil_mode=ceil_mode)
    run_everywhere(program, x, expected)


@examples(30)
@given(height=sizes, width=sizes, stride=st.integers(1, 3), before=st.integers(0, 5), after=st.integers(0, 5))
def test_subsampling(height, width, stride, before, after):
    x = torch.randn(1, 3, height, width, generator=torch.Generator().manual_seed(0))
    program = Program(3, [SubsampleOp(0, 1, stride, before, after), OutputOp(1)], num_maps=2)
    run_everywhere(program, x, F.pad(x[:, :, ::stride, ::stride], (0, 0, 0, 0, before, after)))


def test_gates_without_convolutions():
    x, mask = torch.randn(2, 3, 8, 8), torch.tensor([True, False, True])
    run_everywhere(Program(3, [constant_gate(0, 3, mask), OutputOp(0)], 1, 1), x, x)


def test_largest_number_of_channels():
    x = torch.ones(1, 1, 1, 1)
    program = Program(1, [SubsampleOp(0, 1, 1, 2**20 - 1, 0), OutputOp(1)], num_maps=2)
    run_everywhere(program, x, F.pad(x, (0, 0, 0, 0, 2**20 - 1, 0)))


@examples(30)
@given(channels=st.integers(1, 70), hidden=st.integers(1, 20), size=st.integers(1, 70), seed=seeds)
def test_gates_decide_from_the_pooled_map(channels, hidden, size, seed):
    generator = torch.Generator().manual_seed(seed)
    x, w1, b1, w2, b2, identity = (torch.randn(*shape, generator=generator) for shape in (
        (3, channels, 6, 7), (hidden, channels), (hidden,), (size, hidden), (size,), (size, channels, 1, 1)))
    logits = F.linear(F.linear(x.mean((2, 3)), w1, b1).relu(), w2, b2)
    undecided = logits.abs() < 1e-4
    ops = [GateOp(0, 0, w1, b1, w2, b2), ConvOp(0, 1, identity, torch.zeros(size), gate_out=0),
           ConvOp(1, 2, torch.eye(size)[:, :, None, None], torch.zeros(size), gate_in=0), OutputOp(2)]
    expected = F.conv2d(x, identity) * (logits > 0)[:, :, None, None]
    for runner in all_runners(Program(channels, ops, num_maps=3, num_gates=1)):
        actual, = runner(x)
        torch.testing.assert_close(actual[~undecided], expected[~undecided], atol=1e-4, rtol=1e-4)


@examples(40)
@given(height=sizes, width=sizes, channels=st.integers(1, 40), opened=decisions(3, 1), seed=seeds)
def test_skips(height, width, channels, opened, seed):
    """Two skippable convolutions with a shortcut, and one after them."""
    torch.manual_seed(seed)
    x = numbered_images(3, channels, height, width)
    first, second, third = ((torch.randn(channels, channels, 3, 3) / (9 * channels) ** 0.5, torch.randn(channels))
                            for _ in range(3))
    program = Program(channels, [
        deciding_gate(0, channels, opened),
        SkipOp(0, 2, 0, 2),
        ConvOp(0, 1, *first, padding=1, relu=True),
        ConvOp(1, 2, *second, padding=1, relu=True, residual=0),
        ConvOp(2, 3, *third, padding=1),
        OutputOp(3)], num_maps=4, num_gates=1)
    y = F.conv2d(F.conv2d(x, *first, padding=1).relu(), *second, padding=1) * opened[..., None, None]
    run_everywhere(program, x, F.conv2d((y + x).relu(), *third, padding=1))


def conv(source: int, target: int, **kwargs) -> ConvOp:
    return ConvOp(source, target, torch.zeros(3, 3, 1, 1), torch.zeros(3), **kwargs)


def gate(width: int, number: int = 0) -> GateOp:
    return constant_gate(number, 3, torch.ones(width))


def add(source: int, target: int, residual: int, **kwargs) -> ConvOp:
    return conv(source, target, residual=residual, relu=True, **kwargs)


# Programs of 3 channels, 3 maps and 1 gate that would access memory out of bounds
UNSAFE = [
    ([conv(1, 2), OutputOp(2)], 'operation 0, ConvOp: source 1 is read before it is written'),
    ([ConvOp(0, 1, torch.zeros(2, 4, 1, 1), torch.zeros(2)), OutputOp(1)], 'source 0 has 3 channels, the weight has 4'),
    ([ConvOp(0, 1, torch.zeros(2, 3, 1, 1), torch.zeros(2), residual=0)], 'residual 0 has 3 channels, .* has 2'),
    ([conv(0, 0)], 'target must be an integer between 1 and 2, got 0'),
    ([conv(0, 1), conv(1, 1)], 'operation 1, ConvOp: target 1 is also read'),
    ([conv(0, 9)], 'target must be an integer between 1 and 2, got 9'),
    ([conv(0, 1), conv(0, 1, residual=1)], 'target 1 is also read'),
    ([conv(0, 1, residual=9)], 'residual must be an integer between 0 and 2, got 9'),
    ([ConvOp(0, 1, torch.zeros(2, 3, 1, 1), torch.zeros(2), groups=2)], 'source 0 has 3 channels, the weight has 6'),
    ([ConvOp(0, 1, torch.zeros(2, 1, 1, 1), torch.zeros(2), groups=3)], '2 output channels cannot be split into 3'),
    ([conv(0, 1, groups=0)], 'groups must be an integer between 1 and 1048576, got 0'),
    ([conv(0, 1, groups=2**20)], '3 output channels cannot be split into 1048576 groups'),
    ([BlurOp(0, 1, 65, 1, 0)], 'BlurOp: kernel must be an integer between 1 and 64, got 65'),
    ([BlurOp(0, 1, 3, 1, 4)], 'BlurOp: padding must be an integer between 0 and 3, got 4'),
    ([gate(3), conv(0, 1, gate_out=0), BlurOp(1, 2, 3, 1, 1), OutputOp(2)], 'written under gate 0'),
    ([gate(3), conv(0, 1, gate_out=0), PoolOp(1, 2, True, 3, 1, 1, False), OutputOp(2)], 'written under gate 0'),
    ([ChannelConvOp(0, 1, torch.zeros(3))], 'source 0 must be a map of one pixel'),
    ([ChannelConvOp(0, 1, torch.zeros(2))], r'weight must have an odd length of at most 64, got \(2,\)'),
    ([ScaleOp(0, 0, 1)], 'factors 0 must be a map of one pixel'),
    ([ScaleOp(0, 1, 2)], 'factors 1 is read before it is written'),
    ([AdaptivePoolOp(0, 1, 1), ScaleOp(0, 9, 2)], 'factors must be an integer between 0 and 2, got 9'),
    ([AdaptivePoolOp(0, 1, 1), ScaleOp(0, 1, 1)], 'target 1 is also read'),
    ([AdaptivePoolOp(0, 1, 2), ScaleOp(0, 1, 2)], 'factors 1 must be a map of one pixel'),
    ([AdaptivePoolOp(0, 1, 1), SubsampleOp(1, 2, 1, 1, 0), ScaleOp(0, 2, 1)], 'factors 2 has 4 channels, .* has 3'),
    ([AdaptivePoolOp(0, 1, 1), ScaleOp(0, 1, 2, residual=9)], 'residual must be an integer between 0 and 2, got 9'),
    ([gate(3), AdaptivePoolOp(0, 1, 1), conv(1, 2, gate_out=0), ScaleOp(0, 2, 1)], 'written under gate 0'),
    ([gate(1), SkipOp(0, 1, 0, 1), ScaleOp(0, 2, 1, 0, True)], 'only convolutions can be skipped, got ScaleOp'),
    ([conv(0, 1, gate_out=0)], 'gate_out 0 is used before it is defined'),
    ([conv(0, 1, gate_out=5)], 'gate_out must be an integer between 0 and 0, got 5'),
    ([gate(2), conv(0, 1, gate_out=0)], 'operation 1, ConvOp: gate_out 0 has 2 channels, the convolution has 3'),
    ([gate(3), conv(0, 1, gate_out=0), OutputOp(1)], 'is read under gate None, but was written under gate 0'),
    ([gate(3), conv(0, 1, gate_in=0)], 'is read under gate 0, but was written under gate None'),
    ([gate(3), conv(0, 1, gate_out=0, residual=0)], 'residual 0 cannot be added under gate_out 0'),
    ([gate(3), gate(3)], 'operation 1, GateOp: gate 0 is defined twice'),
    ([gate(3, number=5)], 'gate must be an integer between 0 and 0, got 5'),
    ([conv(0, 1, stride=0)], 'stride must be an integer between 1 and 64, got 0'),
    ([conv(0, 1, padding=-1)], 'padding must be an integer between 0 and 1048576, got -1'),
    ([PoolOp(0, 1, False, 2, 1, 2, False)], 'PoolOp: padding must be an integer between 0 and 1, got 2'),
    ([PoolOp(0, 1, False, 2, 1, 2**30, False)], 'padding .* got 1073741824'),
    ([AdaptivePoolOp(0, 1, 0)], 'AdaptivePoolOp: bins must be an integer between 1 and 64, got 0'),
    ([AdaptivePoolOp(1, 2, 3)], 'source 1 is read before it is written'),
    ([ConcatOp((0, 1), 2), OutputOp(2)], 'ConcatOp: source 1 is read before it is written'),
    ([conv(0, 1), ConcatOp((0, 1), 1)], 'target 1 is also read'),
    ([SubsampleOp(0, 1, 1, 2**20 - 3, 0), ConcatOp((1, 0), 2), OutputOp(2)], 'number of output channels .* 1048579'),
    ([gate(3), conv(0, 1, gate_out=0), ConcatOp((0, 1), 2)], 'is read under gate None, but was written under gate 0'),
    ([SubsampleOp(0, 1, 0, 0, 0)], 'SubsampleOp: stride must be an integer between 1 and 64, got 0'),
    ([SubsampleOp(0, 1, 1, 2**20 - 2, 0), OutputOp(1)], 'number of output channels .* got 1048577'),
    # The sum of the channels would overflow
    ([SubsampleOp(0, 1, 1, 2**20, 2**20), *(SubsampleOp(1 + i % 2, 2 - i % 2, 1, 2**20, 2**20) for i in range(1029)),
      OutputOp(2)], 'number of output channels .* got 2097155'),
    ([SkipOp(0, 1, 0, 1), add(0, 1, 0)], 'SkipOp: gate 0 is used before it is defined'),
    ([gate(3), SkipOp(0, 1, 0, 1), add(0, 1, 0)], 'gate 0 must have 1 channel, got 3'),
    ([gate(1), SkipOp(0, 1, 0, 0), add(0, 1, 0)], 'count must be an integer between 1 and 1, got 0'),
    ([gate(1), SkipOp(0, 1, 0, 2), add(0, 1, 0)], 'count must be an integer between 1 and 1, got 2'),
    ([gate(1), SkipOp(0, 1, 0, 1), OutputOp(0)], 'only convolutions can be skipped, got OutputOp'),
    ([gate(1), SkipOp(0, 1, 0, 1), add(0, 2, 0)], 'target 1, residual 0 and a ReLU, got target 2'),
    ([gate(1), SkipOp(0, 1, 0, 1), conv(0, 1, relu=True)], 'got target 1, residual None'),
    ([gate(1), conv(0, 1), SkipOp(1, 2, 0, 2), conv(0, 1, stride=2), add(0, 2, 1, stride=2)],
     'source 1 is overwritten by a skipped convolution'),
    # Maps that do not exist yet, or only if the convolutions are not skipped
    ([gate(1), SkipOp(0, 1, 0, 2), conv(1, 2), add(2, 1, 0)], 'operation 2, ConvOp: source 1 is read before'),
    ([gate(1), SkipOp(0, 1, 0, 2), conv(0, 2), add(2, 1, 0), OutputOp(2)], 'OutputOp: source 2 is read before'),
]

# Programs that the kernels cannot tell from valid ones
INVALID = [
    ([conv(0, 1, residual=-1)], 'residual must be an integer between 0 and 2, got -1'),
    ([conv(0, 1, gate_in=-1)], 'gate_in must be an integer between 0 and 0, got -1'),
    ([conv(0, 1, stride=1.)], 'stride must be an integer between 1 and 64, got 1.0'),
    ([conv(0, True)], 'target must be an integer between 1 and 2, got True'),
    ([SubsampleOp(0, 1, 2**32 + 1, 0, 0)], 'stride must be .*, got 4294967297'),  # 1 as a C int
    ([OutputOp(2**32)], 'OutputOp: source must be .*, got 4294967296'),  # 0 as a C int
    ([ConvOp(0, 1, torch.zeros(3, 3, 1, 2), torch.zeros(3))], r'weight must have the shape \(3, 3, 1, 1\)'),
    ([ConvOp(0, 1, torch.zeros(3, 3), torch.zeros(3))], r'weight must have 4 dimensions, got the shape \(3, 3\)'),
    ([ConvOp(0, 1, torch.zeros(3, 3, 1, 1), torch.zeros(2))], r'bias must have the shape \(3,\), got \(2,\)'),
    ([GateOp(0, 0, torch.zeros(4, 3), torch.zeros(4), torch.zeros(3, 5), torch.zeros(3))],
     r'weight2 must have the shape \(3, 4\), got \(3, 5\)'),
    ([gate(1), SkipOp(0, 1, 0, 1), conv(0, 1, residual=0)], 'relu=False'),
    ([ConcatOp((), 1)], r'sources must be a tuple of one or more maps, got \(\)'),
    (['conv'], 'operation 0, str: unknown operation'),
]


@pytest.mark.parametrize('ops, message', UNSAFE + INVALID)
def test_invalid_programs(ops, message):
    with pytest.raises(ValueError, match=message):
        Program(3, ops, num_maps=3, num_gates=1)


@pytest.mark.parametrize('kwargs', [
    dict(in_channels=0), dict(num_maps=0), dict(num_maps=2**32 + 1), dict(num_gates=-1), dict(in_channels=3.)])
def test_invalid_numbers_of_a_program(kwargs):
    (name, value), = kwargs.items()
    with pytest.raises(ValueError, match=f'program: {name} must be an integer .*, got {value}'):
        Program(**{**dict(in_channels=3, ops=[]), **kwargs})


@pytest.mark.parametrize('ops', [ops for ops, _ in UNSAFE])
def test_kernels_guard_memory(ops):
    """The kernels refuse unsafe programs by themselves, without the validation of `Program`."""
    program = object.__new__(Program)
    vars(program).update(in_channels=3, ops=ops, num_maps=3, num_gates=1)
    with pytest.raises(ValueError, match='native kernels: '):
        NativeRunner(program)(torch.zeros(1, 3, 8, 8))


@pytest.mark.parametrize('op, message', [
    (ConvOp(0, 1, torch.zeros(2, 3, 9, 9), torch.zeros(2)), 'images of 8 x 8 are too small'),
    (conv(0, 1, stride=2, residual=0), 'a shortcut of 3 x 8 x 8'),
    (conv(0, 1, padding=2**13), 'images of 8 x 8 are too large'),
    (ConvOp(0, 1, torch.zeros(3, 1, 9, 9), torch.zeros(3), groups=3), 'images of 8 x 8 are too small'),
    (BlurOp(0, 1, 9, 1, 8), 'images of 8 x 8 are too small'),
])
def test_images_that_do_not_fit_the_program(op, message):
    with pytest.raises(ValueError, match=message):
        NativeRunner(Program(3, [op, OutputOp(1)], num_maps=2))(torch.zeros(1, 3, 8, 8))


@pytest.mark.parametrize('ops', [
    # One padded map: more than 2^64 bytes
    [SubsampleOp(0, 1, 1, 2**20 - 1, 0), constant_gate(0, 1, torch.ones(1)),
     ConvOp(1, 2, torch.zeros(1, 2**20, 3, 3), torch.zeros(1), dilation=2**20 - 1, padding=2**20 - 1, gate_out=0)],
    # The padded maps of a group
    [SubsampleOp(0, 1, 1, 2**20 - 1, 0),
     ConvOp(1, 2, torch.zeros(2, 2**19, 3, 3), torch.zeros(2), dilation=2**20 - 1, padding=2**20 - 1, groups=2)],
    # One map
    [constant_gate(0, 1, torch.ones(2**20)),
     ConvOp(0, 1, torch.zeros(2**20, 1, 1, 1), torch.zeros(2**20), padding=4000, gate_out=0)],
    # All maps together
    [SubsampleOp(0, 1, 1, 2**20 - 1, 0), *(PoolOp(i, i + 1, False, 1, 1, 0, False) for i in range(1, 2**15))],
])
def test_excessive_memory_is_refused(ops):
    with pytest.raises(MemoryError, match='1099511627776 bytes or more for 1 samples'):
        NativeRunner(Program(1, ops, num_maps=2**15 + 1, num_gates=1))(torch.zeros(1, 1, 1, 2))


def test_images_with_too_many_pixels():
    with pytest.raises(ValueError, match='up to 67108864 pixels, got 4294967297 x 1'):
        NativeRunner(Program(1, [OutputOp(0)]))(torch.zeros(0, 1, 2**32 + 1, 1))


FEATURES: dict = {
    'gated convolution': lambda op: isinstance(op, ConvOp) and op.gate_in is not None,
    'shortcut': lambda op: isinstance(op, ConvOp) and op.residual is not None,
    'pool': lambda op: isinstance(op, PoolOp),
    'adaptive pool': lambda op: isinstance(op, AdaptivePoolOp),
    'concat': lambda op: isinstance(op, ConcatOp),
    'subsample': lambda op: isinstance(op, SubsampleOp),
    'skip': lambda op: isinstance(op, SkipOp),
    'groups': lambda op: isinstance(op, ConvOp) and op.groups > 1,
    'blur': lambda op: isinstance(op, BlurOp),
    'attention': lambda op: isinstance(op, ScaleOp),
}


def test_random_programs_run_or_are_refused():
    seen: Counter = Counter()

    @examples(300)
    @given(arguments=programs(), height=st.integers(1, 16), width=st.integers(1, 16),
           threads=st.sampled_from([1, 1, 2]))
    def run(arguments, height, width, threads):
        seen['all'] += 1
        try:
            program = Program(*arguments)
        except ValueError as error:
            event(f'refused: {str(error).split(", ", 1)[1][:30]}')
            return
        runner = NativeRunner(program)  # a valid program is one that the kernels accept
        x = torch.randn(2, program.in_channels, height, width, generator=torch.Generator().manual_seed(0))
        try:
            runner(x)
        except (ValueError, MemoryError) as error:
            assert re.search('are too small|are too large|a shortcut of|out of memory', str(error)), error
            event('refused for the size of the images')
            return
        seen.update(['runs', *(name for name, has in FEATURES.items() if any(map(has, program.ops)))])
        expected, = SlicedRunner(program)(x)
        run_everywhere(program, x, expected, threads)

    run()
    # Most programs run, some are refused, and the operations that are hard to run are frequent.
    assert 0.6 <= seen['runs'] / seen['all'] <= 0.9, seen
    assert all(seen[name] >= 0.1 * seen['runs'] for name in FEATURES), seen
