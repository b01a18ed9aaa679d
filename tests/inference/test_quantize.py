"""Ranges, calibration and the quantisation of programs"""
import itertools
from dataclasses import replace
from typing import Any, List

import numpy as np
import pytest
import torch
from accelerated import images
from hypothesis import assume, given
from hypothesis import strategies as st
from int8_reference import Map, Sample, convolve, grid_images, run_reference
from programs import programs
from saved_networks import NET, SHALLOW, make
from strategies import examples, seeds

from timm_gated import accelerate, instruction_sets
from timm_gated.inference import mixed, native
from timm_gated.inference.calibration import IMAGE, RANGES, Range, observe_ranges
from timm_gated.inference.compiler import compile_trunk
from timm_gated.inference.mixed import quantize_slow_layers
from timm_gated.inference.native import NativeRunner
from timm_gated.inference.program import (
    INT8_DEPTH,
    INT8_WEIGHT,
    ConvOp,
    DequantizeOp,
    Int8ConvOp,
    Int8LinearOp,
    OutputOp,
    PoolOp,
    Program,
    QuantizeOp,
    SubsampleOp,
)
from timm_gated.inference.quantize import quantize, tied_convolutions
from timm_gated.inference.trunks import find_trunk

ranges = pytest.mark.parametrize('method', RANGES)


def range_of(*batches: Any) -> Range:
    found = Range()
    for batch in batches:
        found.add(torch.as_tensor(batch, dtype=torch.float32).view(1, 1, -1))
    return found


@ranges
@pytest.mark.parametrize('values, scale, zero', [
    ([0., 1., 255.], 1., 0), ([-255., -1.], 1., 255), ([-100., 155.], 1., 100), ([-1., 254.], 1., 1),
    ([0., 0.], 1e-12, 0), ([7.], 7 / 255, 0), ([-7.], 7 / 255, 255), ([0.5] * 10, 0.5 / 255, 0)])
def test_ranges_by_hand(values, scale, zero, method):
    """The largest value of a few is their range, and constant maps are exact. 'mse' may clip a little."""
    found, found_zero = range_of(values).choose(method)
    assert found == pytest.approx(scale, rel=0.35 if method == 'mse' else 1e-3)
    assert found_zero == zero or (method == 'mse' and abs(found_zero - zero) <= 1)


def test_outliers():
    """20,000 values up to 1 and one of 100: the percentile ignores it, and so does the squared error up to a point."""
    values = torch.cat([torch.linspace(0, 1, 20000), torch.tensor([100.])])
    scales = {method: range_of(values).choose(method)[0] for method in RANGES}
    assert scales['max'] == pytest.approx(100 / 255)
    assert scales['percentile'] == pytest.approx(1 / 255, rel=0.06)  # a bin
    assert scales['percentile'] < scales['mse'] < scales['max']


def test_percentile_by_hand():
    """1,000,000 values in equal bins: 0.01 % of them are above the range."""
    values = (torch.arange(1000000, dtype=torch.float64) + 0.5) / 1000000
    scale, zero = range_of(values).choose('percentile')
    assert zero == 0 and scale * 255 == pytest.approx(0.9999, abs=1 / 2048)


def test_least_squares():
    """No other range has a clearly smaller squared error."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(50000, generator=generator)

    def error(scale: float, zero: int) -> float:
        quantised = ((values / scale).round() + zero).clamp(0, 255)
        return float(((quantised - zero) * scale - values).square().mean())

    scale, zero = range_of(values).choose('mse')
    others = [error(scale * factor / 20, zero) for factor in range(10, 31)]
    assert error(scale, zero) < 1.03 * min(others) and max(others) > 1.5 * min(others)


@examples(60)
@given(low=st.floats(-1e4, 1e4), high=st.floats(-1e4, 1e4), count=st.integers(1, 200), seed=seeds,
       method=st.sampled_from(RANGES), split=st.integers(0, 200))
def test_every_value_is_near_a_step(low, high, count, seed, method, split):
    """Zero is exact, the scale positive; with 'max', the error of a value is half a step. The order does not matter."""
    values = low + (high - low) * torch.rand(count, generator=torch.Generator().manual_seed(seed))
    scale, zero = range_of(values).choose(method)
    assert 0 <= zero <= 255 and type(zero) is int and scale > 0
    assert range_of(*(part for part in (values[:split], values[split:]) if len(part))).choose('max') == pytest.approx(
        range_of(values).choose('max'))
    if method == 'max':
        quantised = ((values.double() / scale).round() + zero).clamp(0, 255)
        assert (((quantised - zero) * scale - values).abs() <= 0.501 * scale + 1e-7).all()


def test_values_near_the_ends_of_float32():
    found = range_of([2e38], [-3.3e38], [3e38], [1e-38])
    assert found.choose('max')[0] == pytest.approx(6.3e38 / 255, rel=0.01)
    tiny = range_of([1e-40], [3e-40]).choose('max')
    assert tiny == (1e-12, 0)  # the smallest scale


def conv_program(scale: float = 1.) -> Program:
    weight = torch.tensor([[2., -1.], [0.5, 0.]])[:, :, None, None] * scale
    return Program(2, [ConvOp(0, 1, weight, torch.tensor([1., -1.]), relu=True, name='conv'), OutputOp(1)], num_maps=2)


def test_a_convolution_by_hand():
    program = conv_program()
    x = torch.tensor([[0., 255.], [0., 51.]]).view(1, 2, 1, 2)  # outputs: 1, 460 and 0, 126.5
    quantised = quantize(program, observe_ranges(program, [x]), 'max')
    first, conv, output = quantised.ops
    assert isinstance(first, QuantizeOp) and (float(first.scale), first.zero) == (1., 0)
    assert isinstance(conv, Int8ConvOp) and (conv.zero, conv.name, conv.relu) == (0, 'conv', True)
    assert conv.weight[:, :, 0, 0].tolist() == [[63, -32], [63, 0]]  # -31.5 is rounded to even
    scales = torch.tensor([2 / 63, 0.5 / 63])
    # The rounded weight is too low by 1/63, its input 25.5 on average: 31.5 + 25.5/63 * 63/2 = 44.25.
    assert conv.bias.tolist() == [44, -126]
    assert float(conv.scale) == pytest.approx(460 / 255)
    assert torch.allclose(conv.multiplier, scales / conv.scale) and not conv.ratio.numel()
    assert torch.allclose(NativeRunner(quantised)(x)[0], NativeRunner(program)(x)[0], atol=2)


@examples(40)
@given(arguments=programs(), method=st.sampled_from(RANGES), keep=st.just(()) | st.sets(st.integers(0, 12)), seed=seeds)
def test_random_programs(arguments, method, keep, seed):
    """Every program can be quantised and runs; where no sums in float32 remain, with the bits of the reference."""
    try:
        program = Program(*arguments)
    except ValueError:
        assume(False)
    x = grid_images(3, program.in_channels, 9, 7, seed=seed)
    try:
        NativeRunner(program)(x)
    except (ValueError, MemoryError):  # the images are too small for the program, or too large
        assume(False)
    quantised = quantize(program, observe_ranges(program, [x[:2]]), method, keep)
    expected = run_reference(quantised, x)
    for isa in instruction_sets('int8'):
        outputs = NativeRunner(quantised, isa)(x)
        if expected.exact:
            assert all(torch.equal(ours, theirs) for ours, theirs in zip(outputs, expected.outputs, strict=True)), isa


def test_kept_convolutions():
    program = Program(1, [
        ConvOp(0, 1, torch.ones(1, 1, 1, 1), torch.zeros(1)), ConvOp(1, 2, torch.ones(1, 1, 1, 1), torch.zeros(1)),
        ConvOp(2, 3, torch.ones(1, 1, 1, 1), torch.zeros(1)), OutputOp(3)], num_maps=4)
    ranges = observe_ranges(program, [images(1, 4, 4, 1)])
    kinds = [type(op) for op in quantize(program, ranges, keep=[1]).ops]
    assert kinds == [QuantizeOp, Int8ConvOp, DequantizeOp, ConvOp, QuantizeOp, Int8ConvOp, OutputOp]
    assert quantize(program, ranges, keep=range(3)).ops == program.ops


def test_blocks_that_are_skipped_may_stay_in_float32():
    """Each block for itself: the maps between its convolutions are those of other blocks in the other form."""
    x = images(3, 32, 32)
    for name in ('convnet_aig_resnet20', 'convnet_aig_resnet50'):
        program = compile_trunk(find_trunk(make(name, **(SHALLOW if name.endswith('50') else {}))).modules)
        expected, = NativeRunner(program)(x)
        ranges = observe_ranges(program, [x])
        for kept in tied_convolutions(program):
            output, = NativeRunner(quantize(program, ranges, 'max', kept))(x)
            assert (output - expected).norm() < 0.5 * expected.norm(), (name, kept)


def test_deepest_input_with_the_largest_zero():
    """Weights of one sign and an input that is rarely negative: the bias has its largest value."""
    program = Program(INT8_DEPTH, [
        ConvOp(0, 1, torch.ones(2, INT8_DEPTH, 1, 1), torch.tensor([1., -1.])), OutputOp(1)], num_maps=2)
    x = torch.zeros(1, INT8_DEPTH, 1, 3)
    x[0, 0, 0, 0] = -1
    quantised = quantize(program, observe_ranges(program, [x]), 'max')
    conv = quantised.ops[1]
    assert quantised.ops[0].zero == 255 and conv.bias.min() <= -255 * INT8_WEIGHT * INT8_DEPTH
    for isa in instruction_sets('int8'):
        output, = NativeRunner(quantised, isa)(x)
        assert torch.equal(output, run_reference(quantised, x).outputs[0])
    assert torch.allclose(output, NativeRunner(program)(x)[0], atol=0.01)


class Layers(Sample):
    """Runs a quantised program and compares each convolution with the original one on the same inputs."""

    def __init__(self, program: Program, image: torch.Tensor, original: Program, ranges: Any) -> None:
        super().__init__(program, image)
        convs = [op for op in program.ops if isinstance(op, ConvOp)]
        indices = [index for index, op in enumerate(original.ops) if isinstance(op, ConvOp)]
        self.originals = {id(op): original.ops[index] for op, index in zip(convs, indices, strict=True)}
        writers = {0: IMAGE}
        self.means = {}  # of the inputs of the original convolutions
        for index, op in enumerate(original.ops):
            if isinstance(op, ConvOp) and writers[op.source] in ranges:
                self.means[id(op)] = ranges[writers[op.source]].means.numpy()
            if hasattr(op, 'target'):
                writers[op.target] = index
        self.count = 0

    def int8_conv(self, op: Int8ConvOp, x: Map) -> Map:
        found, original = super().int8_conv(op, x), self.originals[id(op)]
        inputs, step = x.floats().astype(np.float64), float(op.scale)
        weight, unit = original.weight.double().numpy(), op.multiplier.double().numpy() * step  # unit: of the sums
        errors = weight - op.weight.double().numpy() * (unit / float(x.scale))[:, None, None, None]
        expected = convolve(inputs, original) + original.bias.double().numpy()[:, None, None]
        if op.residual is not None:
            expected = expected + self.maps[op.residual].floats()
        expected = np.clip(
            np.maximum(expected, 0 if op.relu else -np.inf), -op.zero * step, (255 - op.zero) * step)
        correction = np.abs(errors.sum((2, 3)) @ self.means[id(original)])
        # Half a step; bias, shortcut and its zero are rounded; and what rounded weights make of these inputs.
        bound = convolve(np.abs(inputs), replace(original, weight=torch.from_numpy(np.abs(errors))))
        bound += 0.51 * step + (1.01 * correction + 1.51 * unit)[:, None, None] + 1e-6 * np.abs(expected)
        is_open = slice(None) if op.gate_out is None else self.open[op.gate_out]
        assert (np.abs(found.floats() - expected) <= bound)[is_open].all(), op.name
        self.count += 1
        return found


@ranges
@pytest.mark.parametrize('name, kwargs', [
    ('gated_resnet20', {}), ('gated_resnet50', SHALLOW), ('convnet_aig_resnet20', {}), ('resnet26d', SHALLOW)])
def test_layers_are_close_to_float32(name, kwargs, method):
    program = compile_trunk(find_trunk(make(name, **kwargs)).modules)
    ranges = observe_ranges(program, [images(3, 33, 37)])
    for image in images(2, 45, 39):
        sample = Layers(quantize(program, ranges, method), image, program, ranges)
        sample.run()
        assert sample.count > 5


def test_a_busy_machine_does_not_decide(monkeypatch):
    """Layers take 2 ms in float32, and in int8 1 ms, but 50 ms in most calls."""
    calls = itertools.count()

    def profile(runner: NativeRunner, *args: Any, **kwargs: Any) -> list:
        ops = runner.program.ops
        is_int8 = any(isinstance(op, Int8ConvOp) for op in ops)
        return [('', 2. if not is_int8 else 1. if next(calls) % 5 == 3 else 50.)] * len(ops)

    monkeypatch.setattr(NativeRunner, 'profile', profile)
    monkeypatch.setattr(mixed, '_is_faster', lambda *args: True)
    program, x = conv_program(), images(1, 4, 4, 2)
    ops = quantize_slow_layers(program, observe_ranges(program, [x]), 'max', x).ops
    assert [type(op) for op in ops] == [QuantizeOp, Int8ConvOp, OutputOp]


@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16])
def test_networks_of_other_types(dtype, monkeypatch):
    monkeypatch.setattr(mixed, '_MARGIN', 0.)
    model, x = make(**NET).to(dtype), images(2, 16, 16)
    expected = accelerate(make(**NET).to(dtype).float(), precision='int8', calibration=x)(x)
    output = accelerate(model, precision='int8', calibration=x.to(dtype).requires_grad_())(x)
    assert (output - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize('isa', ['avxvnni', 'avx2'])
def test_fastest_instruction_set(isa, monkeypatch):
    """AVX-VNNI is chosen in int8, although it is not listed for float32."""
    if isa not in instruction_sets('int8'):
        pytest.skip(f'no {isa}')
    monkeypatch.setattr(native, 'instruction_sets', lambda precision='float32': [
        name for name in (isa, 'avx2', 'portable') if precision == 'int8' or name != 'avxvnni'])
    program, x = conv_program(), images(1, 4, 4, 2)
    assert NativeRunner(program).isa == 'avx2'
    assert NativeRunner(quantize(program, observe_ranges(program, [x]))).isa == isa


# Mistakes


@pytest.mark.parametrize('calibration, message', [
    ([], 'the calibration data are empty: int8 needs some images, a few hundred'),
    (torch.zeros(0, 3, 32, 32), 'the calibration data are empty'),
    (iter([]), 'the calibration data are empty'),
    (None, r'needs calibration=\.\.\., a loader of a few hundred images'),
    (torch.full((1, 3, 8, 8), torch.nan), 'calibration image 0 has values in the image that are not finite'),
    ([torch.zeros(2, 3, 8, 8), torch.full((1, 3, 8, 8), torch.inf)], 'calibration image 2 has values in the image'),
    ([torch.zeros(1, 4, 8, 8)], r'images must have the shape \[N, 3, H, W\] .*, got \(1, 4, 8, 8\)'),
    ([torch.zeros(3, 8, 8)], r'images must have the shape \[N, 3, H, W\]'),
    ([torch.zeros(1, 3, 8, 8, dtype=torch.uint8)], 'images must be floating point, got torch.uint8'),
    ([{'images': 1}], 'images must be a dense tensor, got dict'),
    ([None], 'images must be a dense tensor, got NoneType'),
    (torch.full((1, 3, 8, 8), 1e38), 'has values in the output of operation|scale must be one positive value'),
])
def test_bad_calibration(calibration, message):
    with pytest.raises(ValueError, match=message):
        accelerate(make(**NET), precision='int8', calibration=calibration)


@pytest.mark.parametrize('kwargs, message', [
    (dict(precision='int4'), "precision must be one of float32, int8, got 'int4'"),
    (dict(calibration=[]), "calibration is an option of precision='int8'"),
    (dict(precision='int8', calibration=[], calibration_range='min'), "one of percentile, mse, max, got 'min'"),
    (dict(precision='int8', calibration=[], backend='torch'),
     "precision='int8' needs the native backend, and the network on the CPU"),
    (dict(precision='int8', calibration=torch.zeros(1, 3, 8, 8), isa='sse9'), "no instruction set 'sse9'"),
])
def test_bad_options(kwargs, message):
    with pytest.raises(ValueError, match=message):
        accelerate(make(**NET), **kwargs)


@pytest.mark.parametrize('value', [float('nan'), float('inf')])
@pytest.mark.parametrize('name', ['weight', 'bias'])
def test_weights_that_are_not_finite(name, value):
    program = conv_program()
    ranges = observe_ranges(program, [images(1, 4, 4, 2)])
    getattr(program.ops[0], name).view(-1)[0] = value
    with pytest.raises(ValueError, match="the weights of 'conv' are not finite"):
        quantize(program, ranges)
    with pytest.raises(ValueError, match='calibration image 0 has values in the output of operation 0 conv that are'):
        observe_ranges(program, [images(1, 4, 4, 2)])


def test_loaders(monkeypatch):
    """Tensors, batches, tuples with labels, and generators give the same network."""
    monkeypatch.setattr(mixed, '_MARGIN', 0.)
    model, x = make(**NET), images(4, 16, 16)
    loaders: List[Any] = [
        x, [x], [x[:1], x[1:]], [(x[:3], torch.zeros(3)), [x[3:], torch.zeros(1)]], (part for part in x.split(2)),
        x.double(), torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, torch.zeros(4)), 3)]
    expected, *others = (
        accelerate(model, precision='int8', calibration=calibration)(x) for calibration in loaders)
    assert all(torch.equal(expected, other) for other in others)


@pytest.mark.parametrize('value', [0., 3., -1e-30, 1e30])
def test_constant_images(value):
    program = conv_program(1e-3)
    x = torch.full((1, 2, 4, 4), value)
    output, = NativeRunner(quantize(program, observe_ranges(program, [x])))(x)
    expected, = NativeRunner(program)(x)
    assert ((output - expected).abs() <= 0.03 * expected.abs().max()).all()


# Programs


def conv8(source: int = 1, target: int = 2, shape: tuple = (4, 4, 1, 1), **kwargs: Any) -> Int8ConvOp:
    size = shape[0]
    options: dict = dict(multiplier=torch.ones(size), scale=torch.ones(1))
    return Int8ConvOp(
        source, target, torch.zeros(shape, dtype=torch.int8), kwargs.pop('bias', torch.zeros(size, dtype=torch.int32)),
        **{**options, **kwargs})


def linear8(**kwargs: Any) -> Int8LinearOp:
    options: dict = dict(multiplier=torch.ones(4), scale=torch.ones(1))
    return Int8LinearOp(0, 1, torch.zeros(4, 4, 1, 1, dtype=torch.int8), torch.zeros(4), **{**options, **kwargs})


first = QuantizeOp(0, 1, torch.ones(1), 0)
WRONG_WEIGHT = conv8()
WRONG_WEIGHT.weight[0] = INT8_WEIGHT + 1


@pytest.mark.parametrize('ops, message', [
    ([conv8(0)], 'operation 0, Int8ConvOp: source 0 is not quantised'),
    ([first, conv8(residual=0, ratio=torch.ones(4))], 'residual 0 is not quantised'),
    ([first, conv8(residual=1)], r'ratio must have the shape \(4,\), got \(0,\)'),
    ([first, conv8(ratio=torch.ones(4))], r'ratio must have the shape \(0,\), got \(4,\)'),
    ([first, conv8(multiplier=torch.ones(3))], r'multiplier must have the shape \(4,\), got \(3,\)'),
    ([first, conv8(multiplier=torch.full((4,), 1.01))], 'multiplier must be between 0 and 1'),
    ([first, conv8(multiplier=torch.full((4,), torch.nan))], 'multiplier must be between 0 and 1'),
    ([first, conv8(multiplier=torch.ones(4).double())], 'multiplier must be torch.float32, got torch.float64'),
    ([first, conv8(residual=1, ratio=torch.full((4,), -1.))], 'ratio must be between 0 and 1048576'),
    ([first, conv8(bias=torch.full((4,), 2**30 + 1, dtype=torch.int32))], f'bias must be between -{2**30} and {2**30}'),
    ([first, conv8(bias=torch.zeros(4))], 'bias must be torch.int32, got torch.float32'),
    ([first, WRONG_WEIGHT], f'weight must be between -{INT8_WEIGHT} and {INT8_WEIGHT}'),
    ([first, conv8(scale=torch.zeros(1))], r'scale must be one positive value, got \[0.0\]'),
    ([first, conv8(scale=torch.ones(2))], r'scale must be one positive value, got \[1.0, 1.0\]'),
    ([first, conv8(zero=256)], 'zero must be an integer between 0 and 255, got 256'),
    ([first, conv8(shape=(4, 4, 3, 3))], 'padding 0 changes the size of the map'),
    ([first, conv8(shape=(4, 4, 3, 3), stride=2, dilation=2)], 'stride 2 and dilation 2 cannot be combined in int8'),
    ([QuantizeOp(0, 1, torch.ones(1), -1)], 'operation 0, QuantizeOp: zero must be an integer .*, got -1'),
    ([QuantizeOp(0, 1, torch.tensor([torch.nan]), 0)], r'scale must be one positive value, got \[nan\]'),
    ([QuantizeOp(0, 1, torch.tensor([1e31]), 0)], 'scale must be one positive value'),
    ([first, QuantizeOp(1, 2, torch.ones(1), 0)], 'map 1 is quantised'),
    ([DequantizeOp(0, 1)], 'source 0 is not quantised'),
    ([first, ConvOp(1, 2, torch.zeros(4, 4, 1, 1), torch.zeros(4))], 'operation 1, ConvOp: map 1 is quantised'),
    ([first, ConvOp(0, 2, torch.zeros(4, 4, 1, 1), torch.zeros(4), residual=1)], 'map 1 is quantised'),
    ([first, PoolOp(1, 2, True, 2, 2, 0, False)], 'PoolOp: map 1 is quantised'),
    ([first, SubsampleOp(1, 2, 2, 3, 0)], 'channels and before must be multiples of 4 in a quantised map, got 3'),
    ([linear8(stride=2)], 'only a plain 1 x 1 convolution is a linear layer'),
    ([linear8(multiplier=torch.ones(3))], r'multiplier must have the shape \(4,\), got \(3,\)'),
    ([linear8(zero=999)], 'zero must be an integer between 0 and 255, got 999'),
])
def test_invalid_programs(ops, message):
    with pytest.raises(ValueError, match=message):
        Program(4, ops, num_maps=3)


def test_deep_convolutions_stay_in_float32():
    channels = INT8_DEPTH // 9 + 1
    program = Program(1, [
        SubsampleOp(0, 1, 1, 0, channels - 1),
        ConvOp(1, 2, torch.zeros(1, channels, 3, 3), torch.zeros(1), padding=1), OutputOp(2)], num_maps=3)
    assert quantize(program, observe_ranges(program, [images(1, 2, 2, 1)])).ops == program.ops
    with pytest.raises(ValueError, match=f'{channels} channels times 9 taps are more than {INT8_DEPTH}'):
        Program(channels, [first, conv8(shape=(1, channels, 3, 3), padding=1)], num_maps=3)
