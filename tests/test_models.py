"""Tests of the gated models as timm models: all that a timm user expects of one."""
import copy
import functools
import re

import pytest
import timm
import torch
import torch.nn as nn
from nets import (
    GATED,
    IMAGENET_DEPTHS,
    NOT_BIG,
    ONE_EACH,
    SMALL,
    TINY,
    dense_twin,
    family,
    gate_loss,
    gating_keys,
    is_bottleneck,
    is_imagenet,
    shuffle,
    without_gates,
)
from timm.data import resolve_model_data_config
from timm.models import group_parameters
from timm.models.resnet import ResNet
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3, freeze

from timm_gated import CifarResNet, Gate, GatedBasicBlock, GatedNet, Gating, force_gates, gates

CIFAR_DEPTHS = (20, 32, 38, 44, 56, 74, 110)
CHANNEL_GATED = timm.list_models('gated_*')  # the paper's own


def images(size: int = 32, batch: int = 2, in_chans: int = 3) -> torch.Tensor:
    return torch.randn(batch, in_chans, size, size, generator=torch.Generator().manual_seed(0))


def create(name: str, **kwargs) -> nn.Module:
    torch.manual_seed(0)
    return shuffle(timm.create_model(name, **kwargs))


@functools.cache
def blueprint(name: str) -> nn.Module:
    """A model without data, to look at only."""
    return timm.create_model(name, device='meta')


@functools.cache
def dense_blueprint(name: str) -> nn.Module:
    return dense_twin(name, device='meta')


def gate_parameters(model: nn.Module) -> set:
    return {f'{name}.{parameter}' for name, gate in gates(model) for parameter, _ in gate.named_parameters()}


def assert_gates_have_gradients(model: nn.Module) -> None:
    for name, gating in model.named_modules():
        if isinstance(gating, Gating):
            for parameter in gating.parameters():
                assert parameter.grad is not None and parameter.grad.isfinite().all(), name
            assert all(parameter.grad.any() for parameter in list(gating.parameters())[-2:]), name  # of the last layer


# The registry


def test_list_models():
    depths = [str(depth) for depth in (*IMAGENET_DEPTHS, *CIFAR_DEPTHS)] + ['20_w10', '20_w20']
    assert sorted(CHANNEL_GATED) == sorted(f'gated_resnet{depth}' for depth in depths)
    aig = [f'convnet_aig_resnet{depth}' for depth in (18, 34, 50, 101, 20, 32, 38, 110)]
    assert sorted(timm.list_models('convnet_aig_*')) == sorted(aig)
    skipnet = [f'skipnet_resnet{depth}' for depth in (18, 34, 50, 101, 38, 74, 110)]
    assert sorted(timm.list_models('skipnet_*')) == sorted(skipnet)
    assert sorted(timm.list_models('cifar_resnet*')) == sorted(f'cifar_resnet{depth}' for depth in CIFAR_DEPTHS)
    assert 'resnet18' in timm.list_models('resnet*')  # timm's own module of that name is untouched


# by the default tag, whose weights come with the package
TRAINED = {'gated_resnet20': 'bas_c10', 'convnet_aig_resnet20': 'aig_c10'}


def test_list_pretrained():
    dense = [f'gated_resnet{depth}.dense_a1_in1k' for depth in IMAGENET_DEPTHS]
    trained = ['gated_resnet20.bas_c10', 'gated_resnet20.l0_c10']
    assert sorted(timm.list_pretrained('gated_*')) == sorted(dense + trained)
    assert {name for name in GATED if timm.is_model_pretrained(name)} == TRAINED.keys()


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
    own, twin = model.state_dict(), dense.state_dict()
    gate_keys = gating_keys(model)
    assert gate_keys and set(own) - gate_keys == set(twin) and not gate_keys & set(twin)
    assert all(own[key].shape == value.shape for key, value in twin.items())
    assert [key for key in own if key not in gate_keys] == list(twin)  # in the same order


@pytest.mark.parametrize('name', GATED)
def test_every_block_is_gated(name):
    model = blueprint(name)
    blocks = {n: m for n, m in model.named_modules() if re.fullmatch(r'layer\d\.\d+', n)}
    switching = [gate for block in blocks.values() for pair in block.gated_convs.values() for gate in pair]
    assert {id(gate) for gate in switching if gate is not None} == {id(gate) for _, gate in gates(model)}
    if family(name) == 'skipnet':
        assert not blocks.pop('layer1.0').gated_convs  # it always runs
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
    model = timm.create_model('gated_resnet50', gated_maps=gated_maps, num_classes=3)
    assert {n.rsplit('.', 1)[1] for n, _ in gates(model)} == {f'gate{i}' for i in gated_maps}
    assert len(gates(model)) == 16 * len(gated_maps)
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


@pytest.mark.parametrize('name', NOT_BIG)
def test_backward_reaches_every_parameter(name):
    model = create(name, num_classes=4).train()
    model(images()).pow(2).sum().backward()
    without = {n for n, p in model.named_parameters() if p.grad is None}
    assert not without
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert_gates_have_gradients(model)


@pytest.mark.parametrize('name', SMALL)
def test_open_gates_are_the_dense_network_in_training(name):
    """Outputs, gradients and running statistics."""
    model = create(name, num_classes=4, **TINY[name])
    dense = dense_twin(name, num_classes=4, **TINY[name])
    dense.load_state_dict({k: v for k, v in model.state_dict().items() if k in dense.state_dict()})
    x = images(64)
    with without_gates(model):
        out, dense_out = model.train()(x), dense.train()(x)
    torch.testing.assert_close(out, dense_out, rtol=1e-5, atol=1e-5)
    out.sum().backward()
    dense_out.sum().backward()
    for n, p in dense.named_parameters():
        torch.testing.assert_close(model.get_parameter(n).grad, p.grad, rtol=1e-4, atol=1e-4)
    for n, b in dense.named_buffers():
        torch.testing.assert_close(model.get_buffer(n), b, rtol=1e-5, atol=1e-5)


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
    dense = dense_twin(name, **kwargs).eval()
    dense.load_state_dict({k: v for k, v in model.state_dict().items() if k in dense.state_dict()})
    with without_gates(model), torch.no_grad():
        torch.testing.assert_close(model(images()), dense(images()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('name', SMALL)
def test_evaluation_does_not_depend_on_the_batch_or_on_seeds(name):
    model = create(name, num_classes=4).eval()
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
    model = timm.create_model(name, **TINY[name]).eval()
    assert model.get_classifier() is model.fc and model.get_classifier(name_only=True) == 'fc'
    model.reset_classifier(5)
    assert model.num_classes == 5 and model.fc.out_features == 5
    assert model(images()).shape == (2, 5)
    model.reset_classifier(0, 'max')
    assert isinstance(model.fc, nn.Identity) and model(images()).shape == (2, model.num_features)
    model.reset_classifier(6, 'catavgmax')
    assert model(images()).shape == (2, 6)
    assert model.head_hidden_size == model.num_features


@pytest.mark.parametrize('name', SMALL)
def test_drop_rate(name):
    model = create(name, num_classes=4, drop_rate=0.5, **TINY[name])
    features = torch.ones(2, model.num_features, 2, 2)
    dropped = model.train().forward_head(features, pre_logits=True)
    assert set(dropped.unique().tolist()) == {0., 2.}
    assert torch.equal(model.eval().forward_head(features, pre_logits=True), torch.ones(2, model.num_features))


@pytest.mark.parametrize('name', SMALL)
def test_drop_path_rate(name):
    model = create(name, num_classes=4, drop_path_rate=0.3)
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


# Features


def family_info(name: str) -> tuple:
    """Channels and reductions of the features."""
    if not is_imagenet(name):
        return [16, 16, 32, 64], [1, 1, 2, 4]
    wide = 4 if is_bottleneck(name) else 1
    return [64] + [wide * c for c in (64, 128, 256, 512)], [2, 4, 8, 16, 32]


@pytest.mark.parametrize('name', NOT_BIG)
def test_features_only(name):
    model = timm.create_model(name, features_only=True).eval()
    channels, reductions = family_info(name)
    assert model.feature_info.channels() == channels and model.feature_info.reduction() == reductions
    with torch.no_grad():
        features = model(images(64))
    assert [f.shape for f in features] == [(2, c, 64 // r, 64 // r) for c, r in zip(channels, reductions, strict=True)]
    assert len(gates(model)) == len(gates(blueprint(name)))


@pytest.mark.parametrize('name', SMALL)
@pytest.mark.parametrize('out_indices', [(1, 2), (0, 3), (-1,), (-2, -1)])
def test_out_indices(name, out_indices):
    model = timm.create_model(name, features_only=True, out_indices=out_indices, **TINY[name]).eval()
    channels, reductions = family_info(name)
    assert model.feature_info.channels() == [channels[i] for i in out_indices]
    assert [f.shape[1:] for f in model(images(64))] == [
        (channels[i], 64 // reductions[i], 64 // reductions[i]) for i in out_indices]


@pytest.mark.parametrize('feature_cls', ['list', 'dict', 'hook', 'fx', 'getter'])
@pytest.mark.parametrize('name', SMALL)
def test_feature_classes_equal_forward_intermediates(name, feature_cls):
    model = create(name, **TINY[name]).eval()
    kwargs = dict(TINY[name], features_only=True, feature_cls=feature_cls)
    if not is_imagenet(name):
        kwargs.update(out_indices=(0, 1, 2, 3))
    extractor = create(name, **kwargs).eval()
    prefix = dict(hook='body.', fx='graph_module.', getter='model.').get(feature_cls, '')
    extractor.load_state_dict({prefix + k: v for k, v in model.state_dict().items() if not k.startswith('fc.')})
    x = images(64)
    with torch.no_grad():
        features = extractor(x)
        expected = model.forward_intermediates(x, intermediates_only=True)
    features = list(features.values()) if isinstance(features, dict) else features
    assert len(features) == len(expected) == len(family_info(name)[0])
    for feature, intermediate in zip(features, expected, strict=True):
        torch.testing.assert_close(feature, intermediate)
    assert len(gates(extractor)) == len(gates(model))


@pytest.mark.parametrize('feature_cls', ['list', 'fx', 'getter'])
def test_features_train(feature_cls):
    model = create('gated_resnet18', features_only=True, feature_cls=feature_cls, **TINY['gated_resnet18']).train()
    loss = sum(f.pow(2).mean() for f in model(images(64)))
    (loss + gate_loss(model)).backward()
    assert_gates_have_gradients(model)


@pytest.mark.parametrize('name', NOT_BIG)
def test_forward_intermediates(name):
    model = create(name).eval()
    x = images(32)
    with torch.no_grad():
        final, intermediates = model.forward_intermediates(x)
        assert len(intermediates) == len(family_info(name)[0])
        assert torch.equal(final, model.forward_features(x)) and torch.equal(final, intermediates[-1])


@pytest.mark.parametrize('name', SMALL)
def test_options_of_forward_intermediates(name):
    model = create(name, **TINY[name]).eval()
    x = images(32)
    with torch.no_grad():
        everything = model.forward_intermediates(x, intermediates_only=True)
        last_two = model.forward_intermediates(x, indices=2, intermediates_only=True)
        chosen = model.forward_intermediates(x, indices=[0, 2], intermediates_only=True)
        stopped, _ = model.forward_intermediates(x, indices=[1], stop_early=True)
    assert [f.shape for f in last_two] == [f.shape for f in everything[-2:]]
    assert torch.equal(last_two[0], everything[-2]) and torch.equal(last_two[1], everything[-1])
    assert torch.equal(chosen[0], everything[0]) and torch.equal(chosen[1], everything[2])
    assert torch.equal(stopped, everything[1])
    with pytest.raises(AssertionError, match='NCHW'):
        model.forward_intermediates(x, output_fmt='NHWC')
    assert model.prune_intermediate_layers([0, 1]) == [0, 1]
    assert isinstance(model.layer2, nn.Identity) and isinstance(model.fc, nn.Identity)
    assert torch.equal(model.forward_intermediates(x, indices=[1], intermediates_only=True)[0], everything[1])


@pytest.mark.parametrize('output_stride', [8, 16, 32])
@pytest.mark.parametrize('name', [name for name in SMALL if is_imagenet(name)])
def test_output_stride_of_imagenet_models(name, output_stride):
    kwargs = dict(output_stride=output_stride, num_classes=4, layers=(2, 2, 2, 2))
    model = create(name, **kwargs).eval()
    dense = dense_twin(name, **kwargs).eval()
    dense.load_state_dict({k: v for k, v in model.state_dict().items() if k in dense.state_dict()})
    x = images(64)
    with without_gates(model), torch.no_grad():
        torch.testing.assert_close(model(x), dense(x), rtol=1e-5, atol=1e-5)
    extractor = timm.create_model(name, output_stride=output_stride, features_only=True, **TINY[name]).eval()
    reductions = [min(r, output_stride) for r in (2, 4, 8, 16, 32)]
    assert extractor.feature_info.reduction() == reductions
    assert [64 // f.shape[-1] for f in extractor(x)] == reductions


@pytest.mark.parametrize('output_stride, reductions', [(1, [1, 1, 1, 1]), (2, [1, 1, 2, 2]), (4, [1, 1, 2, 4]),
                                                       (8, [1, 1, 2, 4]), (32, [1, 1, 2, 4])])
def test_output_stride_of_cifar_models(output_stride, reductions):
    extractor = timm.create_model('gated_resnet20', output_stride=output_stride, features_only=True).eval()
    assert extractor.feature_info.reduction() == reductions
    assert [32 // f.shape[-1] for f in extractor(images())] == reductions
    dilations = {m.dilation[0] for m in extractor['layer3'].modules() if isinstance(m, nn.Conv2d)}
    assert max(dilations) == 4 // reductions[-1]


# Training


@pytest.mark.parametrize('name', SMALL)
def test_gradient_checkpointing_changes_nothing(name):
    model = create(name, num_classes=4, drop_path_rate=0.1, layers=[2] * len(TINY[name]['layers'])).train()
    twin = copy.deepcopy(model)
    twin.set_grad_checkpointing()
    x, target = images(batch=4), torch.tensor([0, 1, 2, 3])
    losses = []
    for m in (model, twin):
        torch.manual_seed(5)
        loss = nn.functional.cross_entropy(m(x), target) + gate_loss(m)
        loss.backward()
        losses.append(loss)
    torch.testing.assert_close(*losses, rtol=0, atol=1e-6)
    for (n, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6, msg=n)
    assert_gates_have_gradients(twin)
    twin.set_grad_checkpointing(False)
    assert not twin.grad_checkpointing


@pytest.mark.parametrize('name', SMALL)
def test_gate_losses_train_the_gates_under_gradient_checkpointing(name):
    """Without any other loss: the kept logits have a graph, though the blocks are recomputed."""
    model = create(name, num_classes=4).train()
    model.set_grad_checkpointing()
    model(images(batch=4))
    gate_loss(model).backward()
    assert_gates_have_gradients(model)
    first = model.conv1 if family(name) != 'gaternet' else model.gater.network.conv1
    assert first.weight.grad.any()  # through what the gates read


@pytest.mark.parametrize('coarse', [False, True])
@pytest.mark.parametrize('name', GATED)
def test_group_matcher(name, coarse):
    model = blueprint(name)
    groups = group_parameters(model, model.group_matcher(coarse=coarse))
    grouped = [n for names in groups.values() for n in names]
    assert sorted(grouped) == sorted(n for n, _ in model.named_parameters())
    blocks = [n for n, _ in model.named_modules() if re.fullmatch(r'layer\d\.\d+', n)]
    stages = {n.split('.')[0] for n in blocks}
    assert len(groups) == 2 + len(stages if coarse else blocks)  # with stem and head
    group_of = {n: index for index, names in groups.items() for n in names}
    for n in blocks:  # with all that is in them
        assert {group_of[key] for key in grouped if key.startswith(f'{n}.')} == {group_of[f'{n}.conv1.weight']}
    assert {n for n in grouped if group_of[n] == min(group_of.values())} == {'conv1.weight', 'bn1.weight', 'bn1.bias'}
    last = {n for n in grouped if group_of[n] == max(group_of.values())}
    assert last - gating_keys(model) == {'fc.weight', 'fc.bias'}


@pytest.mark.parametrize('name', GATED)
def test_no_weight_decay_is_exactly_the_gates(name):
    model = blueprint(name)
    assert model.no_weight_decay() == gate_parameters(model)


@pytest.mark.parametrize('kwargs', [
    dict(filter_bias_and_bn=True), dict(filter_bias_and_bn=False),
    dict(filter_bias_and_bn=True, layer_decay=0.75), dict(filter_bias_and_bn=False, layer_decay=0.75)])
@pytest.mark.parametrize('name', SMALL)
def test_optimizer_decays_no_gate(name, kwargs):
    model = timm.create_model(name)
    optimizer = create_optimizer_v2(model, opt='sgd', lr=0.1, weight_decay=5e-4, momentum=0.9, **kwargs)
    names = {p: n for n, p in model.named_parameters()}
    decay = {names[p]: group['weight_decay'] for group in optimizer.param_groups for p in group['params']}
    assert set(decay) == set(names.values())
    assert all(decay[n] == 0. for n in gate_parameters(model))
    others = set(decay) - gate_parameters(model)
    for n in others:
        exempt = kwargs['filter_bias_and_bn'] and model.get_parameter(n).ndim <= 1
        assert decay[n] == (0. if exempt else 5e-4), n


def test_optimizer_trains_the_gates():
    model = create('gated_resnet20', num_classes=4).train()
    optimizer = create_optimizer_v2(model, opt='momentum', lr=0.1, weight_decay=5e-4)
    before = {n: p.clone() for n, p in model.named_parameters()}
    (model(images(batch=4)).pow(2).sum() + gate_loss(model)).backward()
    optimizer.step()
    assert not any(torch.equal(model.get_parameter(n), before[n]) for n in gate_parameters(model) if 'fc1.b' not in n)


def test_ema_after_a_training_step():
    model = create('gated_resnet20', num_classes=4).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(images(batch=4)).pow(2).sum() + gate_loss(model)).backward()
    before = copy.deepcopy(model.state_dict())
    ema = ModelEmaV3(model, decay=0.75)
    optimizer.step()
    ema.update(model)
    for n, p in model.named_parameters():
        expected = 0.75 * before[n] + 0.25 * p
        torch.testing.assert_close(ema.module.get_parameter(n), expected, msg=n)
    assert not torch.equal(ema.module.layer1[0].gate1.fc2.weight, before['layer1.0.gate1.fc2.weight'])
    assert ema.module(images()).isfinite().all()
    assert len(gates(ema)) == 9


def test_freeze():
    model = create('gated_resnet18', num_classes=4)
    freeze(model, ['conv1', 'bn1', 'layer1'])
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    assert any('gate1' in n for n in frozen)
    model.train()
    (model(images(64)).sum() + gate_loss(model)).backward()
    assert all(model.get_parameter(n).grad is None for n in frozen)
    assert model.layer2[0].gate1.fc2.weight.grad.any()


def test_sync_batch_norm_conversion():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(create('gated_resnet20', num_classes=4))
    assert all(isinstance(gate.bn, nn.SyncBatchNorm) for _, gate in gates(model))
    assert model.eval()(images()).isfinite().all()


# Formats and precisions


@pytest.mark.parametrize('name', SMALL)
def test_channels_last(name):
    model = create(name, num_classes=4).eval()
    x = images(64)
    with torch.no_grad():
        expected = model(x)
        out = model.to(memory_format=torch.channels_last)(x.to(memory_format=torch.channels_last))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('name', SMALL)
def test_channels_last_is_kept_through_the_blocks(name):
    model = create(name).train().to(memory_format=torch.channels_last)
    features = model.forward_features(images(64).to(memory_format=torch.channels_last))
    assert features.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('name', SMALL)
def test_autocast(name, dtype):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=4, zero_init_last=False, **TINY[name]).train()
    with torch.autocast('cpu', dtype=dtype):
        out = model(images())
        loss = nn.functional.cross_entropy(out, torch.tensor([1, 3]))
    assert out.dtype == dtype and out.isfinite().all()
    assert all(gate.logits.dtype == torch.float32 for _, gate in gates(model))
    (loss + gate_loss(model)).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert_gates_have_gradients(model)
    with torch.autocast('cpu', dtype=dtype), torch.no_grad():
        assert model.eval()(images()).isfinite().all()


@pytest.mark.parametrize('name', SMALL)
def test_bfloat16_model(name):
    model = timm.create_model(name, num_classes=4, dtype=torch.bfloat16, **TINY[name])
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    out = model.train()(images().bfloat16())
    assert out.dtype == torch.bfloat16 and out.isfinite().all()
    (out.float().mean() + gate_loss(model)).backward()
    assert_gates_have_gradients(model)
    assert model.eval()(images().bfloat16()).isfinite().all()


def test_float64_model():
    model = create('gated_resnet20', dtype=torch.float64).train()
    assert model(images().double()).dtype == torch.float64
    assert all(gate.logits.dtype == torch.float64 for _, gate in gates(model))


@pytest.mark.parametrize('name', GATED)
def test_meta_device(name):
    model = timm.create_model(name, num_classes=7, in_chans=1, device='meta')
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {'meta'}
    assert model.eval()(images(in_chans=1).to('meta')).shape == (2, 7)


@pytest.mark.parametrize('name', SMALL)
def test_meta_device_by_context(name):
    with torch.device('meta'):
        model = timm.create_model(name, drop_path_rate=0.1)
    assert {t.device.type for t in (*model.parameters(), *model.buffers())} == {'meta'}


# Export and compilation


@pytest.mark.parametrize('name', SMALL)
def test_export(name):
    model = create(name, num_classes=4, **TINY[name]).eval()
    x = images()
    exported = torch.export.export(model, (x,))
    torch.testing.assert_close(exported.module()(x), model(x), rtol=1e-5, atol=1e-5)
    assert set(exported.state_dict) == set(model.state_dict())


@pytest.mark.parametrize('name', SMALL)
def test_export_with_a_dynamic_batch(name):
    model = create(name, num_classes=4, **TINY[name]).eval()
    batch = torch.export.Dim('batch', min=1, max=64)
    exported = torch.export.export(model, (images(),), dynamic_shapes=({0: batch},)).module()
    for size in (1, 2, 5):
        x = images(batch=size)
        torch.testing.assert_close(exported(x), model(x), rtol=1e-5, atol=1e-5)


def test_export_with_forced_gates():
    model = create('gated_resnet20', num_classes=4, **TINY['gated_resnet20']).eval()
    masks = {name: torch.arange(gate.num_gates) % 3 == 0 for name, gate in gates(model)}
    with force_gates(model, masks):
        exported = torch.export.export(model, (images(),)).module()
        expected = model(images())
    torch.testing.assert_close(exported(images()), expected, rtol=1e-5, atol=1e-5)


def test_export_leaves_the_model_usable():
    model = create('gated_resnet20', num_classes=4, **TINY['gated_resnet20']).eval()
    torch.export.export(model, (images(),))
    copy.deepcopy(model)
    (model.train()(images()).sum() + gate_loss(model)).backward()
    assert_gates_have_gradients(model)


@pytest.mark.parametrize('name', sorted({'gated_resnet50', *ONE_EACH}))
def test_compile(name):
    torch._dynamo.reset()
    model = create(name, num_classes=4, **TINY[name]).eval()
    compiled = torch.compile(model, backend='aot_eager', fullgraph=True)
    x = images(batch=4)
    with torch.no_grad():
        expected = model(x)
        decisions = [gate.decision for _, gate in gates(model)]
        torch.testing.assert_close(compiled(x), expected, rtol=1e-4, atol=1e-4)
    for (_, gate), decision in zip(gates(model), decisions, strict=True):
        assert torch.equal(gate.decision, decision)

    model.train()
    out = compiled(x)
    assert {v for _, gate in gates(model) for v in gate.decision.unique().tolist()} == {0., 1.}
    assert all(gate.logits.requires_grad for _, gate in gates(model))
    (out.pow(2).mean() + gate_loss(model)).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert_gates_have_gradients(model)
    first = [gate.decision for _, gate in gates(model)]
    compiled(x)
    same = all(torch.equal(a, gate.decision) for a, (_, gate) in zip(first, gates(model), strict=True))
    noiseless = all(torch.equal(*(gate.sample(gate.logits) for _ in range(2))) for _, gate in gates(model))
    assert same == noiseless  # new noise, where there is any


def test_compile_with_inductor():
    """Training, of one block: inductor has a C++ compiler to run."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = shuffle(GatedBasicBlock(8, 8)).train()
    twin = copy.deepcopy(block)
    x = torch.randn(4, 8, 8, 8)
    out = torch.compile(block, fullgraph=True)(x)
    twin(x)
    torch.testing.assert_close(block.gate1.logits, twin.gate1.logits, rtol=1e-4, atol=1e-4)
    assert set(block.gate1.decision.unique().tolist()) == {0., 1.}
    (out.pow(2).mean() + gate_loss(block)).backward()
    assert all(p.grad.isfinite().all() for p in block.parameters())
    assert_gates_have_gradients(block)


def test_compiled_gradients_are_the_eager_ones():
    torch._dynamo.reset()
    model = create('gated_resnet20', num_classes=4, layers=(1, 1), channels=(8, 16)).train()
    twin = copy.deepcopy(model)
    compiled = torch.compile(twin, backend='aot_eager')
    for m, run in ((model, model), (twin, compiled)):
        torch.manual_seed(7)
        (run(images(batch=4)).pow(2).mean() + gate_loss(m)).backward()
    for (n, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6, msg=n)


def test_forcing_a_compiled_model():
    torch._dynamo.reset()
    model = create('gated_resnet20', num_classes=4, **TINY['gated_resnet20']).eval()
    compiled = torch.compile(model, backend='aot_eager')
    x = images()
    with torch.no_grad():
        free = compiled(x)
        for masks in ('open', 'closed'):
            with force_gates(compiled, masks):
                out = compiled(x)
            with force_gates(model, masks):
                torch.testing.assert_close(out, model(x), rtol=1e-4, atol=1e-4)
            assert not torch.allclose(out, free)
        torch.testing.assert_close(compiled(x), free)


@pytest.mark.parametrize('name', ONE_EACH)
def test_no_gate_is_traced_by_fx(name):
    """What an fx feature extractor returns still has gates that decide image by image."""
    model = create(name, features_only=True, feature_cls='fx', out_indices=(3,)).eval()
    model(images())
    assert all(isinstance(gate, Gate) and gate.logits.shape[0] == 2 for _, gate in gates(model))
    with force_gates(model, 'closed'):
        closed = model(images())[0]
    assert not torch.allclose(closed, model(images())[0])
