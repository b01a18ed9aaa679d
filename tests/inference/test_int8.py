"""Quantised programs on all instruction sets: the same bits as the reference in NumPy"""
import re
from collections import Counter
from dataclasses import replace
from typing import List

import numpy as np
import pytest
import torch
from deciding_gates import deciding_gate, numbered_images
from hypothesis import event, given
from hypothesis import strategies as st
from int8_programs import STYLES, int8_conv, int8_programs, quantised_scale, zeros
from int8_reference import grid_images, linear, run_reference
from strategies import decisions, examples, seeds

from timm_gated import instruction_sets
from timm_gated.inference.native import NativeRunner
from timm_gated.inference.program import (
    INT8_BIAS,
    INT8_DEPTH,
    INT8_WEIGHT,
    AdaptivePoolOp,
    ConvOp,
    DequantizeOp,
    GateOp,
    Int8ConvOp,
    Int8LinearOp,
    OutputOp,
    PoolOp,
    Program,
    QuantizeOp,
    SkipOp,
    SubsampleOp,
)

ISAS = instruction_sets('int8')
sizes = st.integers(1, 30)
threads_of_calls = st.sampled_from([1, 1, 2])


def run(program: Program, x: torch.Tensor, isa: str, threads: int = 1) -> tuple:
    num_open = torch.zeros(len(x), program.num_gates, dtype=torch.int32)
    torch.set_num_threads(threads)
    try:
        return NativeRunner(program, isa)(x, num_open), num_open
    finally:
        torch.set_num_threads(1)


def same(actual: List[torch.Tensor], expected: List[torch.Tensor], where: str) -> None:
    for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(
            ours, theirs, atol=0, rtol=0, equal_nan=True, msg=lambda text: f'{where}, output {index}: {text}')  # noqa: B023


def check(program: Program, x: torch.Tensor, threads: int = 1) -> None:
    """Outputs and gates of all instruction sets equal the reference bit for bit."""
    expected = run_reference(program, x)
    for isa in ISAS:
        outputs, num_open = run(program, x, isa, threads)
        assert torch.equal(num_open, expected.num_open), isa
        same(outputs, expected.outputs, isa)


FEATURES: dict = {
    'gated input': lambda op: isinstance(op, Int8ConvOp) and op.gate_in is not None,
    'shortcut': lambda op: isinstance(op, Int8ConvOp) and op.residual is not None,
    'stride': lambda op: isinstance(op, Int8ConvOp) and op.stride > 1,
    'dilation': lambda op: isinstance(op, Int8ConvOp) and op.dilation > 1,
    'linear': lambda op: isinstance(op, Int8LinearOp),
    'pool': lambda op: isinstance(op, PoolOp),
    'subsample': lambda op: isinstance(op, SubsampleOp),
    'dequantise': lambda op: isinstance(op, DequantizeOp),
    'float': lambda op: type(op) is ConvOp,
    'skip': lambda op: isinstance(op, SkipOp),
}
REFUSED = 'are too small|are too large|a shortcut of|out of memory'


def test_random_programs():
    seen: Counter = Counter()

    @examples(200)
    @given(arguments=int8_programs(), height=st.integers(1, 20), width=st.integers(1, 20),
           count=st.integers(1, 3), threads=threads_of_calls, seed=seeds)
    def run_program(arguments, height, width, count, threads, seed):
        seen['all'] += 1
        try:
            program = Program(*arguments)
        except ValueError as error:
            event(f'refused: {str(error).split(", ", 1)[1][:30]}')
            return
        x = grid_images(count, program.in_channels, height, width, seed=seed)
        try:
            run(program, x, ISAS[0])  # a valid program is one that the kernels accept
        except (ValueError, MemoryError) as error:
            assert re.search(REFUSED, str(error)), error
            event('refused for the size of the images')
            return
        seen.update(['runs', *(name for name, has in FEATURES.items() if any(map(has, program.ops)))])
        expected = run_reference(program, x)
        results = [run(program, x, isa, threads) for isa in ISAS]
        if expected.exact:  # otherwise sums in float32 depend on the order
            seen['exact'] += 1
            for isa, (outputs, num_open) in zip(ISAS, results, strict=True):
                assert torch.equal(num_open, expected.num_open), isa
                same(outputs, expected.outputs, isa)

    run_program()
    # Most programs run, and some are refused.
    assert 0.6 <= seen['runs'] / seen['all'] <= 0.95 and seen['exact'] >= 0.5 * seen['runs'], seen
    assert all(seen[name] >= 0.05 * seen['runs'] for name in FEATURES), seen


widths = st.sampled_from([1, 3, 16, 33, 64, 65, 130, 300])  # some span several groups of filters


@examples(50)
@given(data=st.data(), height=sizes, width=sizes, kernel=st.sampled_from([1, 2, 3, 3, 5, 7]), stride=st.integers(1, 4),
       dilation=st.integers(1, 5), relu=st.booleans(), style=st.sampled_from(STYLES), seed=seeds,
       count=st.integers(1, 3), threads=threads_of_calls)
def test_gated_convolutions(data, height, width, kernel, stride, dilation, relu, style, seed, count, threads):
    """A convolution with gated outputs, one with gated inputs and outputs, and one with gated inputs and a shortcut."""
    torch.manual_seed(seed)
    channels, inner1, inner2 = data.draw(st.integers(1, 40)), data.draw(widths), data.draw(widths)
    if inner1 * inner2 > 5000:
        height, width = min(height, 9), min(width, 12)
    if stride == 1:
        kernel = kernel // 2 * 2 + 1
        window = dict(dilation=dilation, padding=kernel // 2 * dilation)
    else:
        padding = data.draw(st.integers(0, kernel))
        window = dict(stride=stride, padding=padding if min(height, width) + 2 * padding >= kernel else kernel)
    zero, between, last = (data.draw(zeros) for _ in range(3))
    program = Program(channels, [
        deciding_gate(0, channels, data.draw(decisions(count, inner1))),
        deciding_gate(1, channels, data.draw(decisions(count, inner2))),
        QuantizeOp(0, 1, quantised_scale(-5), zero),
        int8_conv(1, 2, (channels, channels, kernel, kernel), seed, style, between, zero, relu=relu, **window),
        int8_conv(1, 3, (inner1, channels, kernel, kernel), seed + 1, style, 0, zero, gate_out=0, **window),
        int8_conv(3, 4, (inner2, inner1, 3, 3), seed + 2, style, padding=2, dilation=2, gate_in=0, gate_out=1),
        int8_conv(4, 5, (channels, inner2, 1, 1), seed + 3, style, last, residual=2, residual_zero=between, relu=relu,
                  gate_in=1),
        int8_conv(1, 6, (channels, channels, kernel, kernel), seed + 4, style, last, zero, residual=5,
                  residual_zero=last, **window),
        OutputOp(5), OutputOp(6)], num_maps=7, num_gates=2)
    check(program, numbered_images(count, channels, height, width), threads)


@pytest.mark.parametrize('sign', [-1, 1])
def test_largest_sums(sign):
    """All products, the bias and the shortcut have their largest values: the sum fits into 32 bits."""
    channels = INT8_DEPTH // 9
    weight = torch.full((1, channels, 3, 3), INT8_WEIGHT, dtype=torch.int8)
    parameters = dict(padding=1, multiplier=torch.tensor([2.**-23]), scale=torch.ones(1), zero=100)
    shortcut = Int8ConvOp(
        1, 2, weight, torch.tensor([INT8_BIAS], dtype=torch.int32), **{**parameters, 'multiplier': torch.ones(1)})
    program = Program(channels, [
        QuantizeOp(0, 1, torch.ones(1), 0), shortcut, Int8ConvOp(
            1, 3, sign * weight, torch.tensor([sign * INT8_BIAS], dtype=torch.int32), residual=2,
            ratio=torch.tensor([2.**20]), **parameters),
        OutputOp(3)], num_maps=4)
    total = sign * (9 * channels * INT8_WEIGHT * 255 + INT8_BIAS) + 2**20 * 255
    assert 2**30 < abs(total) < 2**31
    x = torch.full((1, channels, 3, 3), 255.)
    check(program, x)
    (output,), _ = run(program, x, ISAS[0])
    assert output[0, 0, 1, 1] == min(max(round(total / 2**23), -100), 155)


SPECIAL = [
    0., -0., 0.5, 1.5, 2.5, -0.5, -1.5, 254.5, 255.5, 1e-45, 3e38, -3e38, float('inf'), -float('inf'), float('nan')]


@examples(40)
@given(scale=st.sampled_from([1., 0.5, 1e-30, 1e29, 3.0]) | st.floats(2**-10, 2**10, width=32),
       zero=st.integers(0, 255), channels=st.integers(1, 9), width=sizes, seed=seeds)
def test_quantisation(scale, zero, channels, width, seed):
    """Halves go to even, values beyond the range to its ends, and NaN to the lowest value."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(2, channels, 3, width, generator=generator) * 300 * scale
    chosen = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), x.shape, generator=generator)]
    x = torch.where(torch.rand(x.shape, generator=generator) < 0.5, chosen * (scale if seed % 2 else 1), x)
    check(Program(channels, [QuantizeOp(0, 1, torch.tensor([scale]), zero), OutputOp(1)], num_maps=2), x)


def test_quantisation_by_hand():
    x = torch.tensor([0., 0.24, 0.25, 0.26, 0.75, -0.25, -63.6, -70., 64, 63.5, float('nan')])
    program = Program(1, [QuantizeOp(0, 1, torch.tensor([0.5]), 127), OutputOp(1)], num_maps=2)
    expected = torch.tensor([0., 0., 0., 0.5, 1., 0., -63.5, -63.5, 64., 63.5, -63.5])
    for isa in ISAS:
        (output,), _ = run(program, x.view(1, 1, 1, -1), isa)
        assert torch.equal(output.flatten(), expected), isa


def test_a_convolution_by_hand():
    """Sums of 5, -5 and 15 are halved, halves go to even, and ReLU cuts at the zero of the output."""
    weight = torch.tensor([[1, 2], [-1, -2], [1, 2]], dtype=torch.int8)[:, :, None, None]
    for relu, expected in ((False, [2., -2., 8.]), (True, [2., 0., 8.])):
        program = Program(2, [
            QuantizeOp(0, 1, torch.ones(1), 10),
            Int8ConvOp(
                1, 2, weight, torch.tensor([-30, 30, -20], dtype=torch.int32), relu=relu,
                multiplier=torch.tensor([0.5, 0.5, 0.5]), scale=torch.ones(1), zero=7),
            OutputOp(2)], num_maps=3)
        for isa in ISAS:
            (output,), _ = run(program, torch.tensor([3., 1.]).view(1, 2, 1, 1), isa)
            assert output.flatten().tolist() == expected, (isa, relu)


@examples(40)
@given(source_scale=st.sampled_from([1., 1e-30, 1e30]) | st.floats(2**-10, 2**10, width=32), zero=zeros, last=zeros,
       ratio=st.floats(-12, 12), opened=st.booleans(), seed=seeds)
def test_skips(source_scale, zero, last, ratio, opened, seed):
    """Shortcuts of all values, with any ratio of the scales."""
    x = torch.arange(256.).view(1, 1, 16, 16) * source_scale
    scale = torch.tensor([min(max(source_scale * 2**ratio, 1e-30), 9e29)])
    conv = int8_conv(1, 2, (1, 1, 1, 1), seed, zero=last, source_zero=zero, residual=1, residual_zero=zero, relu=True)
    program = Program(1, [
        QuantizeOp(0, 1, torch.tensor([min(source_scale, 9e29)]), zero),
        GateOp(0, 0, torch.zeros(1, 1), torch.zeros(1), torch.zeros(1, 1), torch.tensor([opened - 0.5])),
        SkipOp(1, 2, 0, 1), replace(conv, scale=scale), OutputOp(2), OutputOp(1)], num_maps=3, num_gates=1)
    for shifted in (x, x - zero * source_scale):
        check(program, shifted)
        if not opened:  # the ReLU of the shortcut, to half a step of the output
            found, shortcut = run(program, shifted, ISAS[0])[0]
            limited = shortcut.double().clamp(0, float(scale) * (255 - last))
            assert ((found - limited).abs() <= 0.5001 * float(scale)).all()


@examples(60)
@given(height=sizes, width=sizes, channels=st.integers(1, 20), kernel=st.integers(1, 6), stride=st.integers(1, 5),
       ceil_mode=st.booleans(), zero=zeros, threads=threads_of_calls, data=st.data())
def test_pooling_and_subsampling(height, width, channels, kernel, stride, ceil_mode, zero, threads, data):
    padding = data.draw(st.integers(0, kernel // 2))
    if min(height, width) + 2 * padding < kernel:
        height, width = height + kernel, width + kernel
    channels, before, after = 4 * channels, 4 * data.draw(st.integers(0, 3)), data.draw(st.integers(0, 9))
    program = Program(channels, [
        QuantizeOp(0, 1, quantised_scale(-6), zero), PoolOp(1, 2, False, kernel, stride, padding, ceil_mode),
        SubsampleOp(1, 3, stride, before, after), AdaptivePoolOp(3, 4, 1), DequantizeOp(1, 5),
        PoolOp(5, 6, True, kernel, stride, padding, ceil_mode), *map(OutputOp, range(1, 7))], num_maps=7)
    check(program, grid_images(2, channels, height, width), threads)


@examples(60)
@given(channels=st.integers(1, 150), hidden=st.integers(1, 40), size=st.integers(1, 150), height=sizes, zero=zeros,
       seed=seeds, threads=threads_of_calls)
def test_gates_whose_logits_are_rounding_errors(channels, hidden, size, height, zero, seed, threads):
    """The last hidden unit cancels the others: the sign of a logit depends on the order of all sums."""
    generator = torch.Generator().manual_seed(seed)
    x, w1, b1, w2, b2, identity = (torch.randn(*shape, generator=generator) for shape in (
        (1, channels, height, 7), (hidden, channels), (hidden,), (size, hidden), (size,), (size, channels, 1, 1)))
    b1[-1] = 50.  # open
    quantize = QuantizeOp(0, 1, torch.tensor([0.03]), zero)
    average, = run_reference(Program(channels, [quantize, AdaptivePoolOp(1, 2, 1), OutputOp(2)], 3), x).outputs
    inner = np.maximum(linear(average.numpy().ravel(), w1, b1), np.float32(0))
    w2[:, -1] = torch.from_numpy(-linear(inner[:-1], w2[:, :-1], b2) / inner[-1])
    shape = size, channels, 1, 1
    program = Program(channels, [
        quantize, GateOp(1, 0, w1, b1, w2, b2), int8_conv(1, 2, shape, seed, source_zero=zero, gate_out=0),
        int8_conv(2, 3, (size, size, 1, 1), seed, gate_in=0), OutputOp(3)], num_maps=4, num_gates=1)
    logits = linear(inner, w2, b2)
    assert (np.abs(logits) < 1e-3).all()
    check(program, x, threads)


@examples(40)
@given(channels=st.integers(1, 600), filters=st.integers(1, 40), style=st.sampled_from(STYLES), zero=zeros, seed=seeds,
       threads=threads_of_calls)
def test_classifiers(channels, filters, style, zero, seed, threads):
    generator = torch.Generator().manual_seed(seed)
    conv = int8_conv(1, 2, (filters, channels, 1, 1), seed, style)
    bias = torch.randn(filters, generator=generator) * 10.**torch.randint(-9, 9, (filters,), generator=generator)
    program = Program(channels, [
        AdaptivePoolOp(0, 1, 1), Int8LinearOp(
            1, 2, conv.weight, bias, multiplier=conv.multiplier, scale=torch.tensor([0.013]), zero=zero),
        OutputOp(2)], num_maps=3)
    check(program, torch.randn(2, channels, 1, 1, generator=generator), threads)


@pytest.mark.parametrize('threads', [1, 2, 5])
@pytest.mark.parametrize('count', [1, 3])
def test_threads_and_batches(count, threads):
    program = Program(8, [
        QuantizeOp(0, 1, quantised_scale(-5), 128), GateOp(
            1, 0, torch.eye(8) * 9, torch.zeros(8), torch.ones(70, 8).tril() - 0.5, torch.zeros(70)),
        int8_conv(1, 2, (70, 8, 3, 3), 1, source_zero=128, padding=1, gate_out=0),
        int8_conv(2, 3, (8, 70, 3, 3), 2, zero=9, padding=1, gate_in=0, residual=1, residual_zero=128),
        int8_conv(3, 4, (20, 8, 3, 3), 3, source_zero=9, stride=2, padding=1), OutputOp(4)], num_maps=5, num_gates=1)
    check(program, grid_images(count, 8, 33, 31), threads)
