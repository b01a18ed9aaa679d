"""Accelerated variants of ResNets: groups, attention, pooling against aliasing, deep stems, wide networks"""
import math
from functools import partial

import pytest
import timm
import torch
import torch.nn as nn
from accelerated import backends, check, images
from nets import MECHANISMS, shuffle
from timm.layers import BlurPool2d, SEModule

from timm_gated import accelerate, force_gates, gates
from timm_gated.inference.cost import ProgramCost
from timm_gated.inference.native import NativeRunner
from timm_gated.inference.program import (
    AdaptivePoolOp,
    BlurOp,
    ChannelConvOp,
    ConvOp,
    GateOp,
    Int8ConvOp,
    OutputOp,
    Program,
    ScaleOp,
)
from timm_gated.inference.sliced import SlicedRunner

SMALL = dict(layers=(1, 1, 1, 1), channels=(32, 64, 128, 256))
VARIANTS = [(prefix + name.removeprefix('gated_'), SMALL) for prefix in ('gated_', '') for name in MECHANISMS]
OPTIONS = [(prefix + name, dict(SMALL, **kwargs)) for prefix in ('gated_', '') for name, kwargs in (
    ('resnext101_64x4d', dict(features_only=True, output_stride=8)),
    ('ecaresnet50d', dict(features_only=True)),
    ('resnetblur50', dict(output_stride=16, in_chans=1)),
    ('resnetaa34d', dict(num_classes=0)))]
networks = pytest.mark.parametrize(
    'name, kwargs', VARIANTS + OPTIONS, ids=lambda value: value if isinstance(value, str) else '')


def create(name: str, **kwargs) -> nn.Module:
    torch.manual_seed(0)
    return shuffle(timm.create_model(name, **kwargs)).eval()


def closing_gate(number: int, channels: int, mask: torch.Tensor) -> GateOp:
    return GateOp(0, number, torch.zeros(4, channels), torch.zeros(4), torch.zeros(len(mask), 4), mask.float() - 0.5)


@backends
@networks
def test_variants(name, kwargs, backend, isa):
    check(create(name, **kwargs), images(2, 64, 64, kwargs.get('in_chans', 3)), backend, isa)


@pytest.mark.parametrize('name', MECHANISMS)
@pytest.mark.parametrize('masks', ['open', 'closed'])
def test_forced_gates(name, masks):
    model = create(name, **SMALL)
    with force_gates(model, masks):
        check(model, images(1), 'native')


@pytest.mark.parametrize('name, num_int8', [
    ('resnext50_32x4d', 13),  # stem, 4 shortcuts, 2 convolutions per block; not the groups and the classifier
    ('seresnet50', 17),  # 3 convolutions per block, but none of its attention
    ('resnetblur18', 13), ('ecaresnet26t', 19)])
def test_int8(name, num_int8):
    """Groups, attention and blur pooling stay in float32."""
    model, x = create(name, **SMALL), images(4)
    fast = accelerate(model, precision='int8', calibration=images(12))
    assert sum(isinstance(op, Int8ConvOp) for op in fast.runner.program.ops) == num_int8
    with torch.no_grad():
        expected = model(x)
    assert (fast(x) - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize('name', MECHANISMS)
def test_gated_int8(name):
    model, x = create(name, **SMALL), images(4)
    with force_gates(model, {gate_name: torch.arange(gate.num_gates) % 3 > 0 for gate_name, gate in gates(model)}):
        fast = accelerate(model, precision='int8', calibration=images(12))
        with torch.no_grad():
            expected = model(x)
    assert (fast(x) - expected).norm() < 0.05 * expected.norm()


def test_plan():
    layers = accelerate(create('seresnext26d_32x4d', **SMALL), 'native').plan(images(1), runs=1).layers
    operations = {layer.name: (layer.operation, layer.algorithm, layer.macs) for layer in layers}
    assert operations['layer2.0.conv2'] == (
        'conv 3 x 3, 128 to 128 32 groups stride 2 @ 8 x 8', 'grouped', 128 * 4 * 9 * 64)
    assert operations['layer1.0.se.fc1'][0] == 'conv 1 x 1, 128 to 8 @ 1 x 1'
    blurred = accelerate(create('resnetblur18', **SMALL), 'native').plan(images(1), runs=1).layers
    assert [layer.macs for layer in blurred if layer.name == 'layer2.0.aa'] == [64 * 8 * 8 * 9]


@backends
def test_closed_filters_of_groups_are_not_computed(backend, isa):
    """Closed weights are NaN; the outputs must not change."""
    torch.manual_seed(0)
    first, second, third = torch.randn(12, 6, 1, 1), torch.randn(18, 2, 3, 3), torch.randn(6, 3, 1, 1)
    mask1, mask2 = torch.arange(12) % 3 > 0, torch.arange(18) // 3 != 2  # group 2 has no outputs
    mask1[8:10] = False  # group 4 has no inputs

    def program(second: torch.Tensor, third: torch.Tensor) -> Program:
        return Program(6, [
            closing_gate(0, 6, mask1), closing_gate(1, 6, mask2),
            ConvOp(0, 1, first, torch.ones(12), gate_out=0),
            ConvOp(1, 2, second, torch.ones(18), padding=1, gate_in=0, gate_out=1, groups=6),
            ConvOp(2, 3, third, torch.ones(6), gate_in=1, groups=6), OutputOp(3)], num_maps=4, num_gates=2)

    x = images(2, 9, 7, 6)
    expected, = SlicedRunner(program(second, third))(x)
    second = second.clone()
    second[~mask2] = torch.nan
    for channel in (~mask1).nonzero()[:, 0].tolist():
        second[channel // 2 * 3:channel // 2 * 3 + 3, channel % 2] = torch.nan
    third[2] = torch.nan  # reads only closed channels
    changed = program(second, third)
    actual, = (NativeRunner(changed, isa) if backend == 'native' else SlicedRunner(changed))(x)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


@backends
def test_macs_by_hand(backend, isa):
    """Groups of 2 inputs and 3 outputs; blur pooling and attention count in full."""
    mask1, mask2 = torch.tensor([1, 1, 0, 1, 0, 0, 0, 0]), torch.tensor([1, 1, 0, 1, 1, 1, 0, 0, 1, 0, 0, 0])
    program = Program(3, [
        closing_gate(0, 3, mask1), closing_gate(1, 3, mask2),
        ConvOp(0, 1, torch.ones(8, 3, 1, 1), torch.ones(8), gate_out=0),
        ConvOp(1, 2, torch.ones(12, 2, 3, 3), torch.ones(12), padding=1, gate_in=0, gate_out=1, groups=4, relu=True),
        BlurOp(2, 3, 3, 2, 1),
        ConvOp(3, 4, torch.ones(5, 12, 1, 1), torch.ones(5), gate_in=1),
        AdaptivePoolOp(4, 1, 1), ChannelConvOp(1, 2, torch.ones(3)),
        ConvOp(2, 1, torch.ones(5, 5, 1, 1), torch.ones(5)), ScaleOp(4, 1, 3), OutputOp(3)], num_maps=5, num_gates=2)
    counts = torch.zeros(2, program.num_counts, dtype=torch.int32)
    (NativeRunner(program, isa) if backend == 'native' else SlicedRunner(program))(images(2, 8, 8), counts)
    assert counts.tolist() == [[3, 6, 2 * 2 + 1 * 3]] * 2
    cost = ProgramCost(program).at(8, 8)
    gates_macs, fixed = 3 * 64, 12 * 16 * 9 + 5 * 3 + 5 * 5  # the gates only pool
    assert cost.dense == 64 * 8 * 3 + 64 * 9 * 12 * 2 + 16 * 5 * 12 + fixed
    assert cost.used(counts).tolist() == [64 * 3 * 3 + 64 * 9 * 7 + 16 * 5 * 6 + fixed + gates_macs] * 2


def other_block(**kwargs) -> nn.Module:
    model = timm.create_model('resnet18')
    for name, module in kwargs.items():
        setattr(model.layer2[0], name, module)
    return model


class OtherBlur(BlurPool2d):
    """A subclass without changes."""


@pytest.mark.parametrize('make, message', [
    (lambda: timm.create_model('resnet18', block_args=dict(attn_layer='ecam')), 'EcaModule.* with these options'),
    (lambda: timm.create_model('resnet18', block_args=dict(attn_layer='ceca')), 'CecaModule'),
    (lambda: timm.create_model('resnet18', block_args=dict(attn_layer='ese')), 'EffectiveSEModule'),
    (lambda: timm.create_model('resnet18', block_args=dict(attn_layer='gc')), 'GlobalContext'),
    (lambda: other_block(se=SEModule(128, act_layer=nn.SiLU)), 'SEModule.* with these options'),
    (lambda: other_block(se=SEModule(128, gate_layer='hard_sigmoid')), 'SEModule.* with these options'),
    (lambda: other_block(se=SEModule(128, add_maxpool=True)), 'SEModule.* with these options'),
    (lambda: other_block(se=SEModule(128, norm_layer=partial(nn.GroupNorm, 1))), 'GroupNorm'),
    (lambda: other_block(aa=BlurPool2d(128, pad_mode='constant')), 'BlurPool2d.* with constant padding'),
    (lambda: other_block(aa=OtherBlur(128)), 'OtherBlur'),
    (lambda: other_block(aa=nn.Conv2d(128, 128, 1)), 'Conv2d'),
    (lambda: timm.create_model('resnet18', aa_layer=BlurPool2d, replace_stem_pool=True), 'BatchNorm2d'),
    (lambda: timm.create_model('resnet50_gn'), 'GroupNorm'),
    (lambda: timm.create_model('convnet_aig_resnet18', block_args=dict(attn_layer='se')),
     'SEModule.* in a block that is skipped as a unit'),
    (lambda: timm.create_model('convnet_aig_resnet18', aa_layer=BlurPool2d), 'BlurPool2d.* skipped as a unit'),
])
def test_errors_name_the_part(make, message):
    with pytest.raises(ValueError, match=message):
        accelerate(make())


def test_a_changed_filter_is_refused():
    model = timm.create_model('resnetblur18')
    model.layer2[0].aa.filt[0, 0, 1, 1] *= math.e
    with pytest.raises(ValueError, match='BlurPool2d.* with a filter of its own'):
        accelerate(model)


def test_maps_too_small_to_be_blurred():
    """As in timm's network, whose padding needs more pixels."""
    model = create('resnetblur18', **SMALL)
    for backend, error in (('native', ValueError), ('torch', RuntimeError)):
        with pytest.raises(error, match='too small|Padding size should be less'):
            accelerate(model, backend)(images(1, 4, 4))
    with pytest.raises(RuntimeError, match='Padding size should be less'):
        model(images(1, 4, 4))


def test_normalised_attention():
    model = other_block(se=SEModule(128, norm_layer=nn.BatchNorm2d))
    check(shuffle(model).eval(), images(1), 'native')
