"""Tests of the MAC counts, against arithmetic by hand and against fvcore."""
import itertools
import logging
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from fvcore.nn import FlopCountAnalysis
from hypothesis import given
from hypothesis import strategies as st
from nets import NOT_BIG, SMALL, TINY, images, shuffle
from strategies import decisions, examples, sizes

from timm_gated import (
    ChannelGate,
    GatedBasicBlock,
    GatedBottleneck,
    Gating,
    MacCounter,
    count_macs,
    force_gates,
    gates,
    mac_formula,
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
    """The convolution before a gate must not see what the gate decided for another batch."""
    torch.manual_seed(0)
    block = shuffle(GatedBottleneck(16, 4)).eval()
    first, second = images(4, 16, 6, 6), 3 * images(8, 16, 6, 6)[4:]
    block(first)
    macs = count_macs(block, second)
    open1 = block.gate1.decision.sum(1).long()
    block(first)
    assert not torch.equal(open1, block.gate1.decision.sum(1).long())  # the test means something
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
    """Ten times the inner width is ten times the MACs of every block."""
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


# What holds for every model


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
    """Image by image: from none over some and more of them to all."""
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
    whole = timm.create_model('gated_resnet18')
    with force_gates(model, 'closed'), force_gates(whole, 'closed'):
        macs, reference = count_macs(model, x), count_macs(whole, x)
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
    """Names get a prefix, counts stay."""
    model = timm.create_model('gated_resnet20')
    x = images(2, 3, 32, 32)
    inner, outer = count_macs(model, x), count_macs(nn.Sequential(model), x)
    assert inner.dense == outer.dense and torch.equal(inner.per_sample, outer.per_sample)
    assert list(outer.by_module) == [f'0.{name}' for name in inner.by_module]


def test_a_module_that_runs_twice_counts_twice():
    conv = nn.Conv2d(3, 3, 1)
    assert count_macs(nn.Sequential(conv, nn.ReLU(), conv), images(1, 3, 4, 4)).dense == 2 * 9 * 16


@pytest.mark.parametrize('module, shape, expected', [
    (nn.Conv2d(6, 4, (3, 1), stride=2, padding=(1, 0), groups=2), (2, 6, 7, 9), 4 * 3 * 3 * 4 * 5),
    (nn.Conv1d(4, 6, 3, dilation=2), (2, 4, 10), 6 * 4 * 3 * 6),
    (nn.ConvTranspose2d(4, 6, 2, stride=2), (2, 4, 5, 5), 4 * 6 * 4 * 25),
    (nn.Linear(7, 5), (2, 7), 35),
    (nn.Linear(7, 5), (2, 3, 7), 3 * 35),
])
def test_other_layers(module, shape, expected):
    macs = count_macs(module, images(*shape))
    assert macs.dense == expected and macs.per_sample.tolist() == [expected] * 2


class Functions(nn.Module):
    """Layers without modules."""

    def __init__(self):
        super().__init__()
        self.kernel, self.matrix = nn.Parameter(torch.ones(5, 3, 3, 3)), nn.Parameter(torch.ones(4, 5))

    def forward(self, x):
        x = F.conv2d(input=x, weight=self.kernel - self.kernel.mean(), stride=2)
        return F.linear(weight=self.matrix, input=x.mean((2, 3)))


def test_functions_count():
    macs = count_macs(nn.Sequential(Functions()), images(2, 3, 9, 9))
    assert macs.dense == 5 * 27 * 16 + 20 and macs.per_sample.tolist() == [macs.dense] * 2
    assert list(macs.by_module) == ['0']


@pytest.mark.parametrize('call', [
    lambda x, weight: torch.convolution(x, weight, None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1),
    lambda x, weight: torch.ops.aten.conv2d(x, weight),
    lambda x, weight: torch.ops.aten.conv2d.default(x, weight),
    lambda x, weight: torch.ops.aten.convolution.default(
        input=x, weight=weight.transpose(0, 1), bias=None, stride=(1, 1), padding=(0, 0), dilation=(1, 1),
        transposed=True, output_padding=(0, 0), groups=1),
    lambda x, weight: torch.ops.aten.linear.default(x.movedim(1, -1), weight.flatten(1)),
    lambda x, weight: torch.vmap(lambda image: F.conv2d(image, weight))(x),
    lambda x, weight: torch.vmap(torch.vmap(lambda pixel: F.linear(pixel, weight.flatten(1))))(x.flatten(2).mT),
], ids=['convolution', 'packet', 'overload', 'transposed', 'linear', 'vmap', 'vmaps'])
def test_other_ways_to_call_a_function(call):
    class Call(nn.Module):
        def __init__(self):
            super().__init__()
            self.kernel = nn.Parameter(torch.ones(5, 3, 1, 1))

        def forward(self, x):
            return call(x, self.kernel)

    macs = count_macs(nn.Sequential(nn.Conv2d(3, 3, 1), Call()), images(2, 3, 4, 4))
    assert macs.by_module['1'].per_sample.tolist() == [15 * 16] * 2 and not macs.uncounted


def test_keyword_inputs():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.fc = nn.Conv2d(3, 5, 1), nn.Linear(5, 7)

        def forward(self, images):
            return self.fc(input=self.conv(input=images).mean((2, 3)))

    with MacCounter(model := Named()) as counter:
        model(images=images(2, 3, 4, 4))
    assert counter.macs().per_sample.tolist() == [15 * 16 + 35] * 2
    assert list(counter.macs().by_module) == ['conv', 'fc']


@pytest.mark.parametrize('kwargs, projections', [
    (dict(batch_first=True), 8 * 8 * (5 + 7 + 7 + 5)),
    (dict(batch_first=False), 8 * 8 * (5 + 7 + 7 + 5)),
    (dict(batch_first=True, kdim=6, vdim=4), 8 * (8 * 5 + 6 * 7 + 4 * 7 + 8 * 5)),
])
@pytest.mark.parametrize('need_weights', [True, False])
def test_projections_of_attention(kwargs, projections, need_weights):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn = nn.MultiheadAttention(8, 2, **kwargs)

        def forward(self, x):
            sizes = (5, 8), (7, kwargs.get('kdim', 8)), (7, kwargs.get('vdim', 8))
            inputs = [x[:, :length, :dim] for length, dim in sizes]
            if not self.attn.batch_first:
                inputs = [part.transpose(0, 1) for part in inputs]
            return self.attn(*inputs, need_weights=need_weights)

    macs = count_macs(Attention(), images(3, 7, 8))
    assert macs.per_sample.tolist() == [projections] * 3 and list(macs.by_module) == ['attn']
    assert macs.uncounted == {'multi_head_attention_forward': ['attn']}


def test_encoder_layers_are_seen_in_evaluation():
    """torch has a single operator for them, which hides what it does."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    assert count_macs(layer, images(3, 7, 8)).per_sample.tolist() == [7 * (4 * 64 + 2 * 128)] * 3


# What is a sample


class Windows(nn.Module):
    """Runs a module on the quarters of the images."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        n, c, h, w = x.shape
        x = x.view(n, c, 2, h // 2, 2, w // 2).permute(0, 2, 4, 1, 3, 5).reshape(n * 4, c, h // 2, w // 2)
        return self.inner(x)


def test_windows_are_no_samples():
    macs = count_macs(Windows(nn.Conv2d(3, 5, 3)), images(2, 3, 8, 8))
    assert macs.per_sample.tolist() == [4 * 5 * 27 * 4] * 2 and macs.dense == 4 * 5 * 27 * 4


def test_swin_tiny():
    """Published: 4.5 G with the products of attention, which do not count."""
    formula = mac_formula(timm.create_model('swin_tiny_patch4_window7_224'), (3, 224, 224))
    assert formula.dense == formula.fixed == 4350425088


def test_work_that_the_batch_shares():
    """It is done once, so the MACs of a batch are more than those of its images alone, but not by so much."""
    class Table(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 6)

        def forward(self, x):
            return self.fc(torch.ones(10, 4)).sum() + x

    assert [count_macs(Table(), images(n, 3)).per_sample.tolist() for n in (1, 2)] == [[240], [120] * 2]


def test_gates_over_windows():
    model = Windows(shuffle(GatedBasicBlock(8, 8)))
    x = images(2, 8, 8, 8)
    with pytest.raises(ValueError, match="'inner.conv1' decided about 8 inputs in a batch of 2 images"):
        count_macs(model, x)
    for image in x.split(1):
        macs = count_macs(model, image)
        num_open = int(model.inner.gate1.decision.sum())
        assert macs.per_sample.tolist() == [2 * 9 * 8 * 16 * num_open + 4 * (8 * 16 + gate_macs(8, 8))]
        assert macs.dense == 4 * 2 * 9 * 8 * 8 * 16


def test_number_of_samples_can_be_given():
    conv = nn.Conv2d(3, 5, 1)
    with MacCounter(conv, num_samples=2) as counter:
        conv(images(8, 3, 4, 4))
    assert counter.macs().per_sample.tolist() == [4 * 15 * 16] * 2


# What is not counted is named


def test_products_are_named():
    class Products(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            x = self.fc(x) @ x.transpose(1, 2)
            x = torch.bmm(x, x) + torch.einsum('bij,bjk->bik', x, x)
            return F.scaled_dot_product_attention(x, x, x)

    macs = count_macs(nn.Sequential(Products()), images(2, 5, 4))
    assert macs.dense == 5 * 16
    assert macs.uncounted == {name: ['0'] for name in ('matmul', 'bmm', 'einsum', 'scaled_dot_product_attention')}


def test_layers_that_nobody_saw_are_named():
    class Extension(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

        def forward(self, x):
            return torch.from_numpy(x.numpy() @ self.weight.detach().numpy())

    model = nn.Sequential(nn.Embedding(7, 4), Extension(), nn.LayerNorm((5, 4)), nn.Linear(4, 3))
    macs = count_macs(model, torch.ones(2, 5, dtype=torch.long))
    assert macs.dense == 5 * 12 and macs.uncounted == {'Extension': ['1']}
    assert not count_macs(timm.create_model('gated_resnet20'), images(1, 3, 32, 32)).uncounted


@pytest.mark.filterwarnings('ignore')  # (torch is about to part with its quantization)
def test_quantized_layers_are_named():
    layers = nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(64, 5)
    dynamic = torch.ao.quantization.quantize_dynamic(nn.Sequential(*layers), {nn.Linear})
    macs = count_macs(dynamic, images(2, 3, 4, 4))
    assert macs.dense == 12 * 16 and macs.uncounted == {'Linear': ['2']}

    static = nn.Sequential(nn.Conv2d(3, 3, 1), torch.ao.quantization.QuantStub(), nn.Conv2d(3, 4, 1)).eval()
    static[1].qconfig = static[2].qconfig = torch.ao.quantization.get_default_qconfig()
    torch.ao.quantization.prepare(static, inplace=True)
    static(images(2, 3, 4, 4))
    torch.ao.quantization.convert(static, inplace=True)
    macs = count_macs(static, images(2, 3, 4, 4))
    assert macs.dense == 9 * 16 and macs.uncounted == {'Conv2d': ['2']}


# Other threads, and other ways to run a model


def in_another_thread(function) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_calls_of_another_thread_do_not_count():
    """Not even in the middle of a pass, when they have overwritten what the gates had decided."""
    torch.manual_seed(0)
    model = shuffle(timm.create_model('gated_resnet20', layers=(1, 1, 1))).eval()
    x = images(2, 3, 16, 16)
    expected = count_macs(model, x)
    others = []

    def interrupt(*args) -> None:
        if threading.current_thread() is threading.main_thread():
            in_another_thread(lambda: others.append(model(5 * images(4, 3, 16, 16))))

    model.layer2[0].gate1.register_forward_hook(interrupt)
    macs = count_macs(model, x)
    assert len(others) == 1 and model.layer2[0].gate1.mask.shape[0] == 4  # the test means something
    assert macs.dense == expected.dense and torch.equal(macs.per_sample, expected.per_sample)


def test_threads_count_for_themselves():
    torch.manual_seed(0)
    model = shuffle(timm.create_model('gated_resnet20', layers=(1, 1, 1))).eval()
    batches = [scale * images(n, 3, 16, 16) for n, scale in ((1, 1), (2, 5), (3, 0.2), (4, 2))]
    expected = [count_macs(model, x).per_sample.tolist() for x in batches]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: count_macs(model, x).per_sample.tolist(), batches * 10))
    assert found == expected * 10


def test_nothing_is_left_on_the_modules_while_counting():
    """Where another thread would run into it."""
    model = timm.create_model('gated_resnet20', layers=(1, 1, 1)).eval()
    before = [dict(vars(module)) for module in model.modules()]
    with MacCounter(model):
        assert hooks(model) == 0 and [dict(vars(module)) for module in model.modules()] == before


def test_what_else_runs_in_the_context_does_not_count():
    model, other = nn.Conv2d(3, 5, 1), nn.Conv2d(3, 5, 1)
    x = images(2, 3, 4, 4)
    with MacCounter(model) as counter:
        F.conv2d(other(x), torch.ones(5, 5, 1, 1))
        model(x)
    assert counter.macs().per_sample.tolist() == [15 * 16] * 2


def test_counters_within_each_other():
    model = shuffle(timm.create_model('gated_resnet20', layers=(1, 1, 1))).eval()
    x = images(2, 3, 16, 16)
    with MacCounter(model) as outer:
        with MacCounter(model.layer1) as inner:
            model(x)
    expected = count_macs(model, x)
    assert torch.equal(outer.macs().per_sample, expected.per_sample)
    assert {f'layer1.{name}' for name in inner.macs().by_module} == {
        name for name in expected.by_module if name.startswith('layer1.')}


def test_compiled_model():
    torch._dynamo.reset()
    block, x = shuffle(GatedBasicBlock(8, 8)).eval(), images(2, 8, 6, 6)
    compiled = torch.compile(block, backend='eager')
    with torch.no_grad():
        compiled(x)
    assert torch.equal(count_macs(compiled, x).per_sample, count_macs(block, x).per_sample)


def test_autocast():
    model = shuffle(timm.create_model('gated_resnet20', layers=(1, 1, 1))).eval()
    x = images(2, 3, 16, 16)
    with force_gates(model, 'open'):
        expected = count_macs(model, x)
        with torch.autocast('cpu', dtype=torch.bfloat16):
            macs = count_macs(model, x)
    assert torch.equal(macs.per_sample, expected.per_sample) and list(macs.by_module) == list(expected.by_module)


# The model is left as it was


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


@pytest.mark.parametrize('fails', [False, True])
def test_modes_and_hooks_are_restored(fails):
    model = timm.create_model('gated_resnet20').train()
    model.layer2.eval()
    model.layer3[0].gate1.eval()
    model.layer2[1].bn1.train()
    seen = []
    model.layer1[0].conv1.register_forward_hook(lambda *args: seen.append(1))
    modes = [module.training for module in model.modules()]
    assert 0 < sum(modes) < len(modes)
    if fails:
        with pytest.raises(RuntimeError, match='channels'):
            count_macs(model, images(2, 4, 32, 32))
    else:
        count_macs(model, images(2, 3, 32, 32))
        assert seen == [1]
    assert [module.training for module in model.modules()] == modes
    assert hooks(model) == 1


def test_counting_in_training_mode_leaves_no_trace():
    model = shuffle(timm.create_model('gated_resnet20')).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    epoch_begins = model.gate_losses.epoch_begins = False
    x = images(2, 3, 32, 32)
    macs = count_macs(model, x)
    assert torch.equal(macs.per_sample, count_macs(model.eval(), x).per_sample)  # evaluation's gates, no noise
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.gate_losses.epoch_begins == epoch_begins  # counting begins no epoch
    assert all(p.grad is None for p in model.parameters())


def test_a_lone_gate():
    macs = count_macs(ChannelGate(8, 12), images(2, 8))
    assert macs.dense == 0 and macs.per_sample.tolist() == [gate_macs(8, 12)] * 2


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
