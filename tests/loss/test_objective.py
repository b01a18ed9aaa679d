"""Objectives: options of the gate losses, and batch shaping of features"""
import copy
import pickle
import re

import pytest
import timm
import torch
import torch.nn as nn
import yaml
from paths import ROOT
from timm.models import get_model_args
from timm.task import ClassificationTask

from timm_gated import GateLosses, Normal, Uniform, batch_shaping_loss, gates, objectives, shape_features
from timm_gated.utils.distributed import average_batches


def images(size: int = 4) -> torch.Tensor:
    return torch.randn(size, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize('kwargs, message', [
    (dict(prior='gamma'), "beta.*got 'gamma'"),
    (dict(prior={'type': 'beta', 'a': -1.}), '-1'),
    (dict(lam=-0.5), 'lam must be a number >= 0, got -0.5'),
    (dict(lam=float('nan')), 'lam .* nan'),
    (dict(gamma=-1), 'gamma must be a number >= 0, got -1'),
    (dict(lam_epochs=(20, 10)), 'lam_epochs .* start 20 and end 10'),
    (dict(gamma_epochs=(-1, 10)), 'gamma_epochs .* start -1'),
    (dict(gamma_epochs='later'), "'fixed' or a pair .* 'later'"),
    (dict(lam_epochs=(1, 2, 3)), 'pair'),
    (dict(lam_epochs=5), 'pair'),
    (dict(lam_reduction='none'), "'none'"),
    (dict(log_interval=0), 'log_interval must be a whole number >= 1, got 0'),
    (dict(gamma='5e-2'), "gamma must be a number >= 0, got '5e-2' .in YAML, write"),
    (dict(lam=True), 'lam must be a number >= 0, got True'),
    (dict(lam_epochs=(0, None)), 'end of lam_epochs must be a number, got None'),
    (dict(gate_bias=float('nan')), 'bias of a gate must be a number, got nan'),
    (dict(inner_width=1.5), 'inner_width must be a whole number >= 1, got 1.5'),
    (dict(gate_temperature=0.), 'temperature .* got 0.0'),
    (dict(gate_hidden=0), 'hidden_channels .* got 0'),
    (dict(noise_epochs=(3, 2)), 'noise_epochs must satisfy .* got start 3 and end 2'),
    (dict(from_dense=0), 'from_dense.* must be a number > 0, got 0'),
    (dict(gather_gates='true'), "gather_gates must be True or False, got 'true'"),
])
def test_bad_options_are_refused_when_the_model_is_made(kwargs, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model('gated_resnet20', **kwargs)


def test_defaults_are_the_papers():
    cifar, imagenet = (timm.create_model(name).gate_losses for name in ('gated_resnet20', 'gated_resnet18'))
    assert [cifar.weights(epoch) for epoch in (0, 50, 100, 200, 300, 499)] == [
        (0.75, 0.), (0.375, 0.), (0., 0.), (0., 0.025), (0., 0.05), (0., 0.05)]
    assert [imagenet.weights(epoch) for epoch in (0, 10, 20, 30, 45, 60, 149)] == [
        (0.75, 0.), (0.375, 0.), (0., 0.), (0., 0.), (0., 0.025), (0., 0.05), (0., 0.05)]
    assert (cifar.prior.a, cifar.prior.b) == (0.6, 0.4)


def test_one_option_leaves_the_rest_of_the_recipe():
    default, changed = (timm.create_model('gated_resnet20', **kw).gate_losses for kw in ({}, dict(gamma=0.2)))
    assert changed.weights(300) == (0., 0.2)
    for name in ('lam', 'lam_epochs', 'gamma_epochs', 'lam_reduction', 'gamma_reduction'):
        assert getattr(default, name) == getattr(changed, name)


@pytest.mark.parametrize('name', ['gated_resnet20', 'gated_resnet20_w10', 'gated_resnet18'])
def test_from_dense_scales_with_the_epochs_and_gives_way_to_other_options(name):
    model = timm.create_model(name, from_dense=16, gamma=0.5)
    losses = model.gate_losses
    assert [losses.weights(epoch) for epoch in (0, 4, 8, 15)] == [(0.003, 0.), (0.0015, 0.5), (0., 0.5), (0., 0.5)]
    assert all((gate.fc2.bias == 2).all() for _, gate in gates(model))
    other = timm.create_model(name, from_dense=16, gate_bias=1.)
    assert all((gate.fc2.bias == 1).all() for _, gate in gates(other))
    again = timm.create_model(name, **get_model_args(model))
    assert again.gate_losses.extra_repr() == losses.extra_repr()


def test_no_sorting_when_lambda_is_zero(monkeypatch):
    model = timm.create_model('gated_resnet20')
    model(images())
    monkeypatch.setattr('timm_gated.loss.objective.batch_shaping_loss', None)
    terms = model.gate_losses.terms(model, epoch=400)
    assert terms['batch_shaping_loss'].value == 0 and terms['l0_loss'].value > 0


def test_gathering_reaches_all_objectives_and_costs_one_process_nothing():
    for gather_gates in (False, True):
        model = timm.create_model('gated_resnet20', budget=0.5, gather_gates=gather_gates)
        assert [objective.gather_gates for objective in objectives(model)] == [gather_gates] * 2
    logits = torch.randn(4, 3)
    assert model.gate_losses.gathered(logits) is logits and average_batches(logits, 4) is logits


def test_gates_before_any_input():
    model = timm.create_model('gated_resnet20')
    with pytest.raises(RuntimeError, match='layer1.0.gate1.*no input'):
        model.gate_losses.terms(model, 0)


def test_fixed_weights():
    assert GateLosses(lam=0.3, gamma=0.1).weights(1000) == (0.3, 0.1)


def test_shape_features_of_a_dense_network():
    model = timm.create_model('resnet18')
    shaping = shape_features(model, {'layer3.1.act1': Normal(), 'global_pool': 'uniform'}, weight=0.1)
    kept = []
    model.layer3[1].act1.register_forward_hook(lambda module, args, output: kept.append(output.clone()))
    pooled = []
    model.global_pool.register_forward_hook(lambda module, args, output: pooled.append(output))
    task = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)
    result = task(images(), torch.arange(4))

    channels = kept[0].permute(0, 2, 3, 1).reshape(-1, 256)
    expected = batch_shaping_loss(channels, Normal(), 'mean') + batch_shaping_loss(pooled[0], Uniform(), 'mean')
    torch.testing.assert_close(result['feature_shaping_loss'], expected)
    torch.testing.assert_close(result['loss'], result['task_loss'] + 0.1 * expected)
    grads = torch.autograd.grad(result['feature_shaping_loss'], model.conv1.weight)
    assert grads[0].abs().sum() > 0
    assert objectives(model) == [shaping]


def test_feature_that_is_overwritten_in_place_is_kept_as_it_was():
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(inplace=True))
    shaping = shape_features(model, {'0': 'normal'})
    x = torch.randn(16, 3)
    model(x)
    expected = batch_shaping_loss(model[0](x), Normal(), 'mean')
    torch.testing.assert_close(shaping.terms(model, 0)['feature_shaping_loss'].value, expected)


def test_shaping_trains_the_feature_towards_its_prior():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3))
    shaping = shape_features(model, {'0': Normal()})
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    x = 3 * torch.randn(256, 4) + 2
    for _ in range(200):
        optimizer.zero_grad()
        model(x)
        shaping.terms(model, 0)['feature_shaping_loss'].value.backward()
        optimizer.step()
    out = model(x)
    torch.testing.assert_close(out.mean(0), torch.zeros(3), atol=0.15, rtol=0)
    torch.testing.assert_close(out.std(0), torch.ones(3), atol=0.15, rtol=0)


def test_shape_features_replaces_and_removes():
    model = timm.create_model('cifar_resnet20')
    shape_features(model, {'act1': Normal()})
    second = shape_features(model, {'layer1': Normal()})
    assert objectives(model) == [second] and not model.act1._forward_hooks
    second.remove()
    assert second.terms(model, 0) == {} and not model.layer1._forward_hooks


def test_shape_features_unknown_name():
    with pytest.raises(ValueError, match="'layer3.1.act9'.*layer3.1.act"):
        shape_features(timm.create_model('resnet18'), {'layer3.1.act9': Normal()})


def test_shape_features_anneals():
    model = nn.Sequential(nn.Linear(3, 5))
    shaping = shape_features(model, {'0': Normal()}, weight=0.4, epochs=(0, 4))
    weights = []
    for epoch in (0, 2, 4):
        model(torch.randn(8, 3))
        weights.append(shaping.terms(model, epoch)['feature_shaping_loss'].weight)
    assert weights == [0.4, 0.2, 0.]


def test_features_are_kept_in_training_only():
    model = nn.Sequential(nn.Linear(3, 5))
    shaping = shape_features(model, {'0': Normal()})
    model.eval()(torch.randn(8, 3))
    assert shaping.taps[0].feature is None
    with pytest.raises(RuntimeError, match="feature '0' has seen no input"):
        shaping.terms(model, 0)


@pytest.mark.parametrize('channel_dim, shape, expected', [
    (None, (4, 6), (4, 6)),
    (None, (4, 6, 5, 7), (4 * 5 * 7, 6)),
    (None, (4, 9, 6), (4 * 9, 6)),  # tokens
    (-1, (4, 5, 7, 6), (4 * 5 * 7, 6)),  # channels last
    (1, (4, 6, 9), (4 * 9, 6)),
])
def test_channels_of_a_feature(monkeypatch, channel_dim, shape, expected):
    seen = []
    monkeypatch.setattr(
        'timm_gated.loss.feature_shaping.batch_shaping_loss', lambda x, *args: seen.append(x) or x.sum())
    model = nn.Sequential(nn.Identity())
    shaping = shape_features(model, {'0': Normal()}, channel_dim=channel_dim)
    x = torch.randn(shape)
    model(x)
    shaping.terms(model, 0)
    assert seen[0].shape == expected
    channel = (1 if len(shape) != 3 else -1) if channel_dim is None else channel_dim
    torch.testing.assert_close(seen[0].mean(0), x.movedim(channel, 0).flatten(1).mean(1))


def test_shape_tokens_of_a_transformer():
    model = timm.create_model('vit_tiny_patch16_224', img_size=32)
    shape_features(model, {'blocks.0.mlp.act': 'normal'})
    result = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)(images(), torch.arange(4))
    assert result['feature_shaping_loss'] > 0


def test_feature_that_is_no_tensor():
    model = nn.Sequential(nn.LSTM(3, 5))
    shape_features(model, {'0': Normal()})
    with pytest.raises(ValueError, match="feature '0' must be one tensor .* got tuple"):
        model(torch.randn(8, 2, 3))


def test_copies_listen_to_their_own_features():
    model = nn.Sequential(nn.Linear(3, 5))
    shape_features(model, {'0': Normal()})
    model(torch.randn(8, 3))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        copied(torch.full((8, 3), 7.))
        assert torch.equal(copied.feature_shaping.taps[0].feature, copied[0](torch.full((8, 3), 7.)))
        assert not torch.equal(model.feature_shaping.taps[0].feature, copied.feature_shaping.taps[0].feature)


def test_any_network_from_model_kwargs():
    kwargs = dict(network='resnet18', features={'layer2': {'type': 'normal', 'scale': 2.}}, weight=0.5)
    model = timm.create_model('batch_shaped', num_classes=10, **kwargs)
    assert model.num_classes == 10 and model.feature_shaping.weight == 0.5
    assert type(model) is type(timm.create_model('resnet18'))

    gated = timm.create_model('batch_shaped', network='gated_resnet20', features={'layer2': 'normal'}, gamma=0.3)
    assert gated.gate_losses.gamma == 0.3 and gates(gated)
    result = ClassificationTask(gated, nn.CrossEntropyLoss(), verbose=False)(images(), torch.arange(4))
    assert {'feature_shaping_loss', 'batch_shaping_loss'} <= set(result)

    # arguments that train.py adds to the model_kwargs of the YAML
    page = (ROOT / 'docs' / 'reference' / 'model_options.md').read_text()
    config = yaml.safe_load(re.search(r'```yaml\n(model: batch_shaped.*?)```', page, re.DOTALL).group(1))
    model = timm.create_model(
        config['model'], pretrained=False, in_chans=3, num_classes=10, drop_rate=0., drop_path_rate=None,
        global_pool=None, scriptable=False, checkpoint_path='', **config['model_kwargs'])
    result = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)(images(), torch.arange(4))
    assert result['feature_shaping_loss'] > 0

    with pytest.raises(ValueError, match='needs `features`'):
        timm.create_model('batch_shaped', network='resnet18')


def test_shaped_network_compiles():
    model = timm.create_model(
        'batch_shaped', network='cifar_resnet20', layers=(1, 1, 1), features={'layer2': 'normal'})
    compiled = torch.compile(model, backend='aot_eager')
    compiled(images())
    assert model.feature_shaping.taps[0].feature.shape == (4, 32, 16, 16)
    assert model.feature_shaping.terms(model, 0)['feature_shaping_loss'].value.requires_grad
