"""MAC counts, against hand arithmetic and against fvcore"""
import itertools
import logging
from collections import Counter

import pytest
import timm
import torch
import torch.nn as nn
from fvcore.nn import FlopCountAnalysis
from hypothesis import given
from hypothesis import strategies as st
from nets import NOT_BIG, SMALL, TINY, images, shuffle
from strategies import decisions, examples, sizes

from timm_gated import (
    GatedBasicBlock,
    GatedBottleneck,
    Gating,
    MacCounter,
    count_macs,
    force_gates,
    gates,
)

HIDDEN = 16


def gate_macs(in_channels: int, num_gates: int) -> int:
    return in_channels * HIDDEN + HIDDEN * num_gates


# By hand


def test_basic_block_by_hand():
    torch.manual_seed(0)
    block = GatedBasicBlock(8, 12, stride=2, downsample=nn.Conv2d(8, 12, 1, stride=2))
    x = images(3, 8, 10, 6)
    mask = torch.zeros(3, 12)
    mask[1, :5] = 1
    mask[2] = 1
    with force_gates(block, {'gate1': mask}):
        macs = count_macs(block, x)
    positions = 5 * 3
    conv1, conv2, shortcut = 9 * 8 * 12 * positions, 9 * 12 * 12 * positions, 8 * 12 * positions
    overhead = 8 * 10 * 6 + gate_macs(8, 12)
    assert macs.dense == conv1 + conv2 + shortcut
    assert macs.per_sample.tolist() == [
        shortcut + overhead,
        9 * 8 * 5 * positions + 9 * 5 * 12 * positions + shortcut + overhead,
        macs.dense + overhead,
    ]
    assert {name: m.dense for name, m in macs.by_module.items() if m.dense} == {
        'conv1': conv1, 'conv2': conv2, 'downsample': shortcut}
    assert macs.by_module['gate_pool'].per_sample.tolist() == [480] * 3
    assert macs.by_module['gate1.fc1'].per_sample.tolist() == [8 * HIDDEN] * 3
    assert macs.by_module['gate1.fc2'].per_sample.tolist() == [HIDDEN * 12] * 3


@pytest.mark.parametrize('gated_maps', [(1,), (2,), (1, 2)])
@pytest.mark.parametrize('stride', [1, 2])
def test_bottleneck_by_hand(gated_maps, stride):
    torch.manual_seed(0)
    block = GatedBottleneck(
        10, 6, stride=stride, downsample=nn.Conv2d(10, 24, 1, stride=stride), gated_maps=gated_maps)
    x = images(2, 10, 8, 8)
    num_open = {1: (2, 6), 2: (5, 0)}
    masks = {f'gate{i}': (torch.arange(6) < torch.tensor(num_open[i])[:, None]).float() for i in gated_maps}
    with force_gates(block, masks):
        macs = count_macs(block, x)
    before, after = 64, 64 // stride ** 2
    shortcut = 10 * 24 * after
    overhead = 10 * 64 + len(gated_maps) * gate_macs(10, 6)
    for n in range(2):
        open1 = num_open[1][n] if 1 in gated_maps else 6
        open2 = num_open[2][n] if 2 in gated_maps else 6
        conv1, conv2, conv3 = 10 * open1 * before, 9 * open1 * open2 * after, open2 * 24 * after
        assert macs.by_module['conv1'].per_sample[n] == conv1
        assert macs.by_module['conv2'].per_sample[n] == conv2
        assert macs.by_module['conv3'].per_sample[n] == conv3
        assert macs.per_sample[n] == conv1 + conv2 + conv3 + shortcut + overhead
    assert macs.dense == 10 * 6 * before + 9 * 6 * 6 * after + 6 * 24 * after + shortcut


def test_bottleneck_counts_the_decisions_of_this_very_pass():
    """The convolution before a gate must not use the gate's decisions for another batch."""
    torch.manual_seed(0)
    block = shuffle(GatedBottleneck(16, 4)).eval()
    first, second = images(4, 16, 6, 6), 3 * images(8, 16, 6, 6)[4:]
    block(first)
    macs = count_macs(block, second)
    open1 = block.gate1.decision.sum(1).long()
    block(first)
    assert not torch.equal(open1, block.gate1.decision.sum(1).long())  # the decisions differ
    assert torch.equal(macs.by_module['conv1'].per_sample, 16 * 36 * open1)


@pytest.mark.parametrize('depth', [20, 110])
def test_cifar_resnet_by_hand(depth):
    blocks = (depth - 2) // 6
    expected = 3 * 16 * 9 * 32 ** 2 + 64 * 10
    inplanes = 16
    for planes, size in ((16, 32), (32, 16), (64, 8)):
        expected += (inplanes + (2 * blocks - 1) * planes) * planes * 9 * size ** 2
        inplanes = planes
    x = images(2, 3, 32, 32)
    assert count_macs(timm.create_model(f'cifar_resnet{depth}'), x).dense == expected
    gated = timm.create_model(f'gated_resnet{depth}')
    macs = count_macs(gated, x)
    assert macs.dense == expected
    overhead = 0
    for (inplanes, planes), size, number in (
            ((16, 16), 32, blocks), ((16, 32), 32, 1), ((32, 32), 16, blocks - 1), ((32, 64), 16, 1),
            ((64, 64), 8, blocks - 1)):
        overhead += number * (inplanes * size ** 2 + gate_macs(inplanes, planes))
    with force_gates(gated, 'open'):
        assert count_macs(gated, x).per_sample.tolist() == [expected + overhead] * 2
    stem_and_head = 3 * 16 * 9 * 32 ** 2 + 64 * 10
    with force_gates(gated, 'closed'):
        assert count_macs(gated, x).per_sample.tolist() == [stem_and_head + overhead] * 2


def test_widened_resnet_by_hand():
    """Ten times the inner width gives ten times the MACs of every block."""
    x = images(1, 3, 32, 32)
    stem_and_head = 3 * 16 * 9 * 32 ** 2 + 64 * 10
    narrow = count_macs(timm.create_model('gated_resnet20'), x).dense
    wide = count_macs(timm.create_model('gated_resnet20_w10'), x).dense
    assert wide - stem_and_head == 10 * (narrow - stem_and_head)


def test_resnet34_of_the_paper():
    model = timm.create_model('gated_resnet34')
    with force_gates(model, 'open'):
        macs = count_macs(model, images(1, 3, 224, 224))
    assert macs.dense == 3663761408
    shares = {}
    for stage in range(1, 5):
        for index, block in enumerate(model.get_submodule(f'layer{stage}')):
            name = f'layer{stage}.{index}'
            inside = {n[len(name) + 1:]: m for n, m in macs.by_module.items() if n.startswith(f'{name}.')}
            convs = inside['conv1'].dense + inside['conv2'].dense
            overhead = sum(int(inside[n].per_sample) for n in ('gate_pool', 'gate1.fc1', 'gate1.fc2'))
            shares[name, block.conv1.stride[0]] = 100 * overhead / convs
    stride_1 = [share for (_, stride), share in shares.items() if stride == 1]
    assert len(stride_1) == 13
    assert min(stride_1) == pytest.approx(0.0179, abs=5e-5) and max(stride_1) == pytest.approx(0.0877, abs=5e-5)
    assert max(share for (_, stride), share in shares.items() if stride == 2) < 0.12


def test_resnet50_of_the_paper():
    assert count_macs(timm.create_model('gated_resnet50'), images(1, 3, 224, 224)).dense == pytest.approx(
        4.09e9, rel=1e-3)


@pytest.mark.parametrize('name', ['gated_resnet18', 'gated_resnet20'])
@pytest.mark.parametrize('height, width', [(33, 65), (64, 32)])
def test_odd_image_sizes(name, height, width):
    model = timm.create_model(name)
    macs = count_macs(model, images(2, 3, height, width))
    dense = timm.create_model(name.replace('gated_resnet20', 'cifar_resnet20').replace('gated_', ''))
    assert macs.dense == count_macs(dense, images(2, 3, height, width)).dense
    stride = 1 if name == 'gated_resnet20' else 2
    positions = -(-height // stride) * -(-width // stride)
    assert macs.by_module['conv1'].dense == positions * model.conv1.weight.numel()


def test_output_stride():
    x = images(1, 3, 64, 64)
    models = [timm.create_model(name, output_stride=8) for name in ('gated_resnet18', 'resnet18')]
    gated, dense = (count_macs(model, x) for model in models)
    assert gated.dense == dense.dense
    assert gated.by_module['layer4.1.conv1'].dense == 9 * 512 * 512 * 8 * 8
    assert gated.by_module['layer4.1.gate_pool'].per_sample.tolist() == [512 * 8 * 8]


# Against fvcore


def fvcore_counts(model: nn.Module, x: torch.Tensor) -> Counter:
    logging.getLogger('fvcore').setLevel(logging.ERROR)
    analysis = FlopCountAnalysis(model.eval(), x).unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    return analysis.by_operator()


@pytest.mark.parametrize('name, size, kwargs', [
    ('resnet18', 64, {}),
    ('resnet50', 64, {}),
    ('cifar_resnet20', 32, {}),
    ('cifar_resnet32', 33, {}),
    ('resnext50_32x4d', 32, {}),
    ('resnetv2_50x1_bit', 32, {}),  # standardised weights, by functions
    ('mobilenetv3_small_050', 32, {}),
    ('efficientnet_b0', 32, {}),
    ('convnext_atto', 32, {}),
    ('vit_tiny_patch16_224', 32, dict(img_size=32, depth=2)),
    ('beit_base_patch16_224', 32, dict(img_size=32, depth=1, embed_dim=48, num_heads=3)),  # functional projections
    ('swin_tiny_patch4_window7_224', 112, dict(img_size=112, depths=(2, 2), num_heads=(2, 4), embed_dim=16)),
    ('maxvit_rmlp_pico_rw_256', 64, dict(img_size=64)),
])
def test_dense_total_agrees_with_fvcore(name, size, kwargs):
    model, x = timm.create_model(name, **kwargs), images(2, 3, size, size)
    reference = fvcore_counts(model, x)
    macs = count_macs(model, x)
    assert 2 * macs.dense == reference['conv'] + reference['linear']
    assert macs.per_sample.tolist() == [macs.dense] * 2
    assert macs.share == 1


@pytest.mark.parametrize('name, size', [('gated_resnet18', 64), ('gated_resnet50', 64), ('gated_resnet20', 32)])
def test_open_gates_agree_with_fvcore(name, size):
    model, x = timm.create_model(name), images(1, 3, size, size)
    reference = fvcore_counts(model, x)
    with force_gates(model, 'open'):
        macs = count_macs(model, x)
    pooling = sum(m.per_sample for n, m in macs.by_module.items() if n.endswith('gate_pool'))
    assert macs.per_sample - pooling == reference['conv'] + reference['linear']
    linear = sum(gate_macs(gate.fc1.in_features, gate.num_gates) for _, gate in gates(model))
    assert macs.dense == reference['conv'] + reference['linear'] - linear


# Every model


@pytest.mark.parametrize('name', NOT_BIG)
def test_bounds_and_sums(name):
    torch.manual_seed(0)
    model = shuffle(timm.create_model(name))
    x = images(2, 3, 32, 32)
    with force_gates(model, 'open'):
        opened = count_macs(model, x)
    with force_gates(model, 'closed'):
        closed = count_macs(model, x)
    free = count_macs(model, x)
    assert free.dense == opened.dense == closed.dense
    assert (closed.per_sample < free.per_sample).all() and (free.per_sample < opened.per_sample).all()
    assert (opened.per_sample > opened.dense).all()
    for macs in (free, opened, closed):
        assert macs.per_sample.dtype == torch.int64 and macs.per_sample.shape == (2,)
        assert sum(m.dense for m in macs.by_module.values()) == macs.dense
        assert torch.equal(sum(m.per_sample for m in macs.by_module.values()), macs.per_sample)
        assert macs.share == pytest.approx(macs.per_sample.double().mean().item() / macs.dense)
    modules = dict(model.named_modules())
    for module_name, macs in free.by_module.items():
        within = [name for name, module in modules.items() if isinstance(module, Gating)]
        assert (macs.dense == 0) == any(f'{module_name}.'.startswith(f'{name}.') for name in within), module_name


@examples(60)
@given(data=st.data(), name=st.sampled_from(SMALL), count=st.integers(1, 3), size=sizes())
def test_more_open_gates_never_cost_less(data, name, count, size):
    """Different masks per image: no gates open, some, more, and all."""
    model = timm.create_model(name, **TINY[name])
    x = images(count, 3, *size)
    some = {gate_name: data.draw(decisions(count, gate.num_gates)) for gate_name, gate in gates(model)}
    more = {gate_name: torch.maximum(mask, data.draw(decisions(*mask.shape))) for gate_name, mask in some.items()}
    counts = []
    for masks in ('closed', some, more, 'open'):
        with force_gates(model, masks):
            counts.append(count_macs(model, x).per_sample)
    for fewer, most in itertools.pairwise(counts):
        assert (fewer <= most).all()
    assert (counts[0] < counts[-1]).all()


@pytest.mark.parametrize('name', ['gated_resnet18', 'gated_resnet50', 'gated_resnet20'])
def test_samples_differ_and_do_not_depend_on_the_batch(name):
    torch.manual_seed(0)
    model = shuffle(timm.create_model(name))
    x = images(4, 3, 32, 32)
    x[1:] *= torch.tensor([0.2, 3., 10.])[:, None, None, None]
    macs = count_macs(model, x)
    assert len(set(macs.per_sample.tolist())) == 4
    alone = torch.cat([count_macs(model, x[n:n + 1]).per_sample for n in range(4)])
    assert torch.equal(alone, macs.per_sample)


def test_masks_per_sample_in_a_whole_model():
    model = timm.create_model('gated_resnet50')
    x = images(2, 3, 32, 32)
    with force_gates(model, 'open'):
        opened = count_macs(model, x)
        mask = torch.ones(2, 128)
        mask[1, 28:] = 0
        with force_gates(model, {'layer2.1.gate1': mask}):
            macs = count_macs(model, x)
    # layer2.1 has 512 -> 128 -> 128 -> 512 channels at 4 x 4
    assert (opened.per_sample - macs.per_sample).tolist() == [0, 100 * (512 + 9 * 128) * 16]


@pytest.mark.parametrize('feature_cls, prefix', [('list', ''), ('getter', 'model.')])
def test_features_only_model(feature_cls, prefix):
    x = images(2, 3, 64, 64)
    model = timm.create_model('gated_resnet18', features_only=True, out_indices=(1, 2), feature_cls=feature_cls)
    complete = timm.create_model('gated_resnet18')
    with force_gates(model, 'closed'), force_gates(complete, 'closed'):
        macs, reference = count_macs(model, x), count_macs(complete, x)
    names = [n for n in reference.by_module if n.split('.')[0] in ('conv1', 'layer1', 'layer2')]
    assert set(macs.by_module) == {prefix + n for n in names}
    assert macs.per_sample.tolist() == sum(reference.by_module[n].per_sample for n in names).tolist()


def test_traced_copy_without_blocks_is_refused():
    model = timm.create_model('gated_resnet20', features_only=True, feature_cls='fx')
    with pytest.raises(ValueError, match='cannot tell what gate'):
        count_macs(model, images(2, 3, 32, 32))


def test_counter_adds_up_several_passes():
    model = timm.create_model('gated_resnet20').eval()
    x = images(2, 3, 32, 32)
    with MacCounter(model) as counter:
        with force_gates(model, 'open'):
            model(x)
        with force_gates(model, 'closed'):
            model(x)
    with force_gates(model, 'open'):
        opened = count_macs(model, x)
    with force_gates(model, 'closed'):
        closed = count_macs(model, x)
    assert counter.macs().dense == 2 * opened.dense
    assert torch.equal(counter.macs().per_sample, opened.per_sample + closed.per_sample)


def test_counter_before_any_pass():
    with pytest.raises(RuntimeError, match='no MACs counted'):
        MacCounter(timm.create_model('cifar_resnet20')).macs()


def test_wrapped_model():
    """Names get a prefix, counts are unchanged."""
    model = timm.create_model('gated_resnet20')
    x = images(2, 3, 32, 32)
    inner, outer = count_macs(model, x), count_macs(nn.Sequential(model), x)
    assert inner.dense == outer.dense and torch.equal(inner.per_sample, outer.per_sample)
    assert list(outer.by_module) == [f'0.{name}' for name in inner.by_module]


# Parameters


def test_parameters_used_by_hand():
    block = GatedBottleneck(10, 6, downsample=nn.Conv2d(10, 24, 1))
    num_open = {1: (2, 6), 2: (5, 0)}
    masks = {f'gate{i}': (torch.arange(6) < torch.tensor(num_open[i])[:, None]).float() for i in (1, 2)}
    with force_gates(block.eval(), masks), MacCounter(block) as counter:
        block(images(2, 10, 8, 8))
    total = sum(p.numel() for p in block.parameters())
    expected = [
        total - 10 * (6 - open1) - 9 * (6 * 6 - open1 * open2) - 24 * (6 - open2)
        for open1, open2 in zip(*num_open.values(), strict=True)]
    assert counter.parameters().tolist() == pytest.approx(expected)


def test_a_dense_network_uses_all_parameters():
    model = timm.create_model('cifar_resnet20').eval()
    with MacCounter(model) as counter:
        model(images(2, 3, 16, 16))
    assert counter.parameters().tolist() == [sum(p.numel() for p in model.parameters())] * 2
