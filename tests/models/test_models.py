"""The gated models behave like other timm models"""
import re

import pytest
import timm
import torch
import torch.nn as nn
from models import assert_gates_have_gradients, blueprint, create, dense_blueprint, dense_copy, images
from nets import (
    GATED,
    IMAGENET_DEPTHS,
    SMALL,
    TINY,
    depth,
    family,
    gate_loss,
    gating_keys,
    is_bottleneck,
    is_imagenet,
    without_gates,
)
from timm.data import resolve_model_data_config
from timm.models.resnet import ResNet

from timm_gated import CifarResNet, GatedNet, gates, list_gated_models
from timm_gated.models._family import RESNETS

CIFAR_DEPTHS = (20, 32, 38, 44, 56, 74, 110)
CHANNEL_GATED = [name for name in GATED if family(name) == 'gated']


def two_blocks(name: str) -> dict:
    """Options of a tiny network with two blocks per stage."""
    return dict(TINY[name], layers=(2,) * len(TINY[name]['layers']))


# The registry


def test_list_models():
    depths = [str(depth) for depth in (*IMAGENET_DEPTHS, *CIFAR_DEPTHS)] + ['20_w10', '20_w20']
    assert sorted(CHANNEL_GATED) == sorted(f'gated_resnet{depth}' for depth in depths)
    aig = [f'convnet_aig_resnet{depth}' for depth in (18, 34, 50, 101, 20, 32, 38, 110)]
    assert sorted(timm.list_models('convnet_aig_*')) == sorted(aig)
    skipnet = [f'skipnet_resnet{depth}' for depth in (18, 34, 50, 101, 38, 74, 110)]
    assert sorted(timm.list_models('skipnet_*')) == sorted(skipnet)
    assert sorted(timm.list_models('cifar_resnet*')) == sorted(f'cifar_resnet{depth}' for depth in CIFAR_DEPTHS)
    assert 'resnet18' in timm.list_models('resnet*')  # timm's own module of that name is unchanged


# default tags with weights
TRAINED = {'gated_resnet20': 'bas_c10', 'gated_resnet32': 'dense_e30_c10', 'convnet_aig_resnet20': 'aig_c10'}


def test_list_pretrained():
    dense = [f'gated_{name}' for name in timm.list_pretrained(RESNETS)]
    dense += [f'gated_resnet{depth}.dense_a1_in1k' for depth in IMAGENET_DEPTHS]
    dense += ['gated_resnet20.dense_e40_c10', 'gated_resnet32.dense_e30_c10']
    trained = ['gated_resnet20.bas_c10', 'gated_resnet20.l0_c10']
    assert sorted(timm.list_pretrained('gated_*')) == sorted(dense + trained)
    assert {name for name in list_gated_models() if timm.is_model_pretrained(name)} == TRAINED.keys()


@pytest.mark.parametrize('name', GATED)
def test_configuration(name):
    model = blueprint(name)
    assert isinstance(model, GatedNet) and isinstance(model, ResNet if is_imagenet(name) else CifarResNet)
    config = resolve_model_data_config(model)
    assert config['input_size'] == ((3, 224, 224) if is_imagenet(name) else (3, 32, 32))
    assert model.num_classes == (1000 if is_imagenet(name) else 10)
    assert model.pretrained_cfg['architecture'] == name
    assert model.pretrained_cfg['tag'] == TRAINED.get(name, 'untrained')
    assert model.get_submodule(model.pretrained_cfg['first_conv']) is model.conv1
    assert model.get_submodule(model.pretrained_cfg['classifier']) is model.get_classifier()
    assert repr(model)


# Structure


@pytest.mark.parametrize('name', GATED)
def test_state_dict_is_the_dense_one_plus_gate_keys(name):
    model, dense = blueprint(name), dense_blueprint(name)
    own, expected = model.state_dict(), dense.state_dict()
    gate_keys = gating_keys(model)
    assert gate_keys and not gate_keys & set(expected)
    assert all(own[key].shape == value.shape for key, value in expected.items())
    assert [key for key in own if key not in gate_keys] == list(expected)  # in the same order


@pytest.mark.parametrize('name', GATED)
def test_every_block_is_gated(name):
    model = blueprint(name)
    blocks = {n: m for n, m in model.named_modules() if re.fullmatch(r'layer\d\.\d+', n)}
    switching = [gate for block in blocks.values() for pair in block.gated_convs.values() for gate in pair]
    assert {id(gate) for gate in switching if gate is not None} == {id(gate) for _, gate in gates(model)}
    if family(name) == 'skipnet':
        assert not blocks.pop('layer1.0').gated_convs  # always executed
    assert all(any(gate for pair in block.gated_convs.values() for gate in pair) for block in blocks.values())
    for block in blocks.values():
        assert set(block.gated_convs) == {n for n, m in block.named_children() if isinstance(m, nn.Conv2d)}


@pytest.mark.parametrize('name', CHANNEL_GATED)
def test_every_inner_map_has_a_gate(name):
    model = blueprint(name)
    for n, gate in gates(model):
        block = model.get_submodule(n.rsplit('.', 1)[0])
        assert gate.fc1.in_features == block.conv1.in_channels
        assert gate.num_gates == getattr(block, 'conv' + n[-1]).out_channels


@pytest.mark.parametrize('name, parameters', [
    ('gated_resnet34', 21_915_880),
    ('gated_resnet50', 26_106_792),
    ('cifar_resnet20', 269_722),
    ('cifar_resnet32', 464_154),
    ('cifar_resnet44', 658_586),
    ('cifar_resnet56', 853_018),
    ('cifar_resnet110', 1_727_962),
])
def test_number_of_parameters(name, parameters):
    assert sum(p.numel() for p in blueprint(name).parameters()) == parameters


@pytest.mark.parametrize('name', CHANNEL_GATED)
def test_parameters_of_the_gates(name):
    model, dense = blueprint(name), dense_blueprint(name)
    extra = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in dense.parameters())
    assert extra == sum(
        16 * gate.fc1.in_features + 16 + 2 * 16 + 16 * gate.num_gates + gate.num_gates for _, gate in gates(model))


@pytest.mark.parametrize('name, width', [('gated_resnet20', 1), ('gated_resnet20_w10', 10), ('gated_resnet20_w20', 20)])
def test_inner_widths(name, width):
    model = blueprint(name)
    for stage, planes in enumerate((16, 32, 64), start=1):
        for block in model.get_submodule(f'layer{stage}'):
            assert block.conv1.out_channels == block.conv2.in_channels == block.gate1.num_gates == width * planes
            assert block.conv2.out_channels == planes


@pytest.mark.parametrize('gated_maps', [(1,), (2,), (1, 2), [1], (0, 3)])
def test_gated_maps(gated_maps):
    model = timm.create_model('gated_resnet50', gated_maps=gated_maps, num_classes=3, **two_blocks('gated_resnet50'))
    assert {n.rsplit('.', 1)[1] for n, _ in gates(model)} == {f'gate{i}' for i in gated_maps}
    assert len(gates(model)) == 8 * len(gated_maps)
    assert model.eval()(images()).shape == (2, 3)


@pytest.mark.parametrize('gated_maps', [(4,), (), (1, 1), 1])
def test_bad_gated_maps(gated_maps):
    with pytest.raises(ValueError, match=r'gated_maps .* one or more of \(0, 1, 2, 3\), got'):
        timm.create_model('gated_resnet50', gated_maps=gated_maps, device='meta')


def test_options_of_the_gates():
    model = timm.create_model('gated_resnet18', gate_hidden=4, gate_temperature=0.5, gate_bias=2.5)
    for _, gate in gates(model):
        assert gate.fc1.out_features == gate.bn.num_features == gate.fc2.in_features == 4
        assert gate.temperature == 0.5 and (gate.fc2.bias == 2.5).all()


@pytest.mark.parametrize('kwargs, message', [
    (dict(gate_temperature=0.), 'temperature'),
    (dict(gate_hidden=0), 'hidden_channels'),
    (dict(output_stride=3), 'output_stride must be 1, 2, 4, 8, 16 or 32, got 3'),
    (dict(inner_width=0), 'inner_width must be a whole number >= 1, got 0'),
])
def test_bad_options(kwargs, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model('gated_resnet20', **kwargs)


# Forward and backward


@pytest.mark.parametrize('name', GATED)
def test_forward(name):
    model = create(name).eval()
    with torch.no_grad():
        out = model(images())
    assert out.shape == (2, model.num_classes) and out.isfinite().all()
    decisions = torch.cat([gate.decision for _, gate in gates(model)], 1)
    assert set(decisions.unique().tolist()) == {0., 1.}


@pytest.mark.parametrize('name', SMALL)
def test_backward_reaches_every_parameter(name):
    model = create(name, num_classes=4, **two_blocks(name)).train()
    model(images()).pow(2).sum().backward()
    without = {n for n, p in model.named_parameters() if p.grad is None}
    assert not without
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert_gates_have_gradients(model)


@pytest.mark.parametrize('training', [False, True])
@pytest.mark.parametrize('name', SMALL)
def test_open_gates_are_exactly_the_dense_network(name, training):
    """Outputs and running statistics are equal; gradients are close."""
    model = create(name, num_classes=4, **TINY[name]).train(training)
    dense = dense_copy(name, model, num_classes=4, **TINY[name])
    x = images(64)
    with without_gates(model):
        out, dense_out = model(x), dense(x)
    assert torch.equal(out, dense_out)
    assert all(torch.equal(model.get_buffer(n), b) for n, b in dense.named_buffers())
    out.sum().backward()
    dense_out.sum().backward()
    for n, p in dense.named_parameters():
        torch.testing.assert_close(model.get_parameter(n).grad, p.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('name, kwargs', [
    (name, kwargs) for name in SMALL for kwargs in (
        dict(stem_type='deep', stem_width=32, avg_down=True),
        dict(block_args=dict(attn_layer='se')),
        dict(aa_layer=nn.AvgPool2d),
        dict(base_width=32, replace_stem_pool=True) if is_bottleneck(name) else dict(act_layer='silu'),
    ) if is_imagenet(name)
] + [(name, dict(act_layer='silu', channels=(8, 16, 32))) for name in SMALL if not is_imagenet(name)])
def test_options_of_timms_resnet(name, kwargs):
    kwargs = dict(TINY[name], num_classes=4, **kwargs)
    model = create(name, **kwargs).eval()
    dense = dense_copy(name, model, **kwargs)
    with without_gates(model), torch.no_grad():
        torch.testing.assert_close(model(images()), dense(images()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('name', SMALL)
def test_evaluation_does_not_depend_on_the_batch_or_on_seeds(name):
    model = create(name, num_classes=4, **two_blocks(name)).eval()
    x = images(batch=4)
    with torch.no_grad():
        out = model(x)
        assert torch.equal(out, model(x))
        torch.testing.assert_close(model(x[:1]), out[:1], rtol=1e-4, atol=1e-4)


# Heads and inputs


@pytest.mark.parametrize('name', SMALL)
def test_num_classes_and_in_chans(name):
    model = timm.create_model(name, num_classes=7, in_chans=1, **TINY[name]).eval()
    assert model.num_classes == 7 and model.conv1.in_channels == 1
    assert model(images(in_chans=1)).shape == (2, 7)


@pytest.mark.parametrize('name', SMALL)
def test_no_classifier(name):
    model = timm.create_model(name, num_classes=0, **TINY[name]).eval()
    assert model(images()).shape == (2, model.num_features)
    model = timm.create_model(name, num_classes=0, global_pool='', **TINY[name]).eval()
    assert model(images(64)).shape == model.forward_features(images(64)).shape
    assert model(images(64)).ndim == 4


@pytest.mark.parametrize('global_pool', ['avg', 'max', 'avgmax', 'catavgmax'])
@pytest.mark.parametrize('name', SMALL)
def test_global_pool(name, global_pool):
    model = create(name, num_classes=7, global_pool=global_pool, **TINY[name]).eval()
    x = images(64)
    with torch.no_grad():
        features = model.forward_features(x)
        average, largest = features.mean((2, 3)), features.amax((2, 3))
        pooled = {
            'avg': average, 'max': largest, 'avgmax': (average + largest) / 2,
            'catavgmax': torch.cat([average, largest], 1)}[global_pool]
        torch.testing.assert_close(model.forward_head(features, pre_logits=True), pooled)
        torch.testing.assert_close(model(x), model.fc(pooled))


@pytest.mark.parametrize('name', SMALL)
def test_classifier(name):
    """The head changes in the same way as that of timm's ResNet."""
    model = timm.create_model(name, **TINY[name]).eval()
    resnet = timm.create_model(f'resnet{depth(name)}' if is_imagenet(name) else 'resnet18', layers=(1, 1, 1, 1)).eval()
    assert model.get_classifier() is model.fc and model.get_classifier(name_only=True) == 'fc'
    for change in ((5,), (0, 'max'), (6, 'catavgmax'), (7,), (3, 'avg'), (0, '')):
        for network in (model, resnet):
            network.reset_classifier(*change)
        ours, theirs = model(images()), resnet(images())
        assert ours.shape[0] == theirs.shape[0] and ours.ndim == theirs.ndim
        assert ours.shape[1] / (model.num_features if not change[0] else 1) == (
            theirs.shape[1] / (resnet.num_features if not change[0] else 1))
        assert model.head_hidden_size / model.num_features == resnet.head_hidden_size / resnet.num_features
        for attribute in ('num_classes', 'training'):
            assert getattr(model, attribute) == getattr(resnet, attribute)
        assert type(model.fc) is type(resnet.fc) and model.global_pool.pool_type == resnet.global_pool.pool_type


@pytest.mark.parametrize('name', SMALL)
def test_drop_rate(name):
    model = create(name, num_classes=4, drop_rate=0.5, **TINY[name])
    features = torch.ones(2, model.num_features, 2, 2)
    dropped = model.train().forward_head(features, pre_logits=True)
    assert set(dropped.unique().tolist()) == {0., 2.}
    assert torch.equal(model.eval().forward_head(features, pre_logits=True), torch.ones(2, model.num_features))


@pytest.mark.parametrize('name', SMALL)
def test_drop_path_rate(name):
    model = create(name, num_classes=4, drop_path_rate=0.3, **two_blocks(name))
    blocks = [m for n, m in model.named_modules() if re.fullmatch(r'layer\d\.\d+', n)]
    rates = [getattr(block.drop_path, 'drop_prob', 0.) for block in blocks]
    assert rates == pytest.approx([0.3 * i / (len(blocks) - 1) for i in range(len(blocks))])
    model.train()(images(batch=8)).pow(2).sum().backward()
    assert_gates_have_gradients(model)


@pytest.mark.parametrize('name', [name for name in SMALL if is_imagenet(name)])
def test_drop_block_rate(name):
    model = create(name, num_classes=4, drop_block_rate=0.1, **TINY[name])
    (model.train()(images(64)).pow(2).sum() + gate_loss(model)).backward()
    assert_gates_have_gradients(model)
    assert torch.equal(model.eval()(images()), model(images()))
