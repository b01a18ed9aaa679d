"""Dense and gated checkpoints in gated models: every format and every way to load them"""
import argparse
import copy
import logging
import re
from pathlib import Path

import models
import pytest
import timm
import torch
import torch.nn as nn
from models import images
from nets import GATED, TINY, dense_counterpart, gate_loss, gating_keys, shuffle
from safetensors.torch import save_file
from timm.models import is_model_pretrained, load_checkpoint, save_for_hf
from timm.utils import CheckpointSaver, ModelEmaV3

from timm_gated import checkpoint_filter_fn, force_gates, gates

FRESH = 'keep their fresh initialisation'
NARROW = (16, 32, 64, 128)


def create(name: str, seed: int = 0, **kwargs) -> nn.Module:
    return models.create(name, seed, **kwargs).eval()


def assert_open_gates_equal(model: nn.Module, dense: nn.Module, x: torch.Tensor) -> None:
    with force_gates(model.eval(), 'open'), torch.no_grad():
        out = model(x)
    with torch.no_grad():
        expected = dense.eval()(x)
        assert not torch.allclose(model(x), expected, rtol=1e-2, atol=1e-2)  # the gates matter
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def gate_state(model: nn.Module) -> dict:
    state_dict = model.state_dict()
    return {key: state_dict[key].clone() for key in gating_keys(model)}


def assert_gates_untouched(model: nn.Module, before: dict) -> None:
    assert before and all(torch.equal(value, before[key]) for key, value in gate_state(model).items())


@pytest.fixture
def dense18() -> nn.Module:
    return create('resnet18')


@pytest.fixture
def dense18_path(dense18, tmp_path) -> Path:
    torch.save(dense18.state_dict(), tmp_path / 'dense.pth')
    return tmp_path / 'dense.pth'


# Dense weights


@pytest.mark.parametrize('depth', [18, 34, 50, 101])
def test_filtered_dense_weights_and_open_gates_are_the_dense_network(depth):
    dense = create(f'resnet{depth}', channels=NARROW)
    model = create(f'gated_resnet{depth}', seed=1, channels=NARROW)
    before = gate_state(model)
    state_dict = checkpoint_filter_fn(dense.state_dict(), model)
    assert set(state_dict) == set(dense.state_dict())
    result = model.load_state_dict(state_dict)
    assert not result.missing_keys and not result.unexpected_keys
    assert_gates_untouched(model, before)
    assert_open_gates_equal(model, dense, images(64))


@pytest.mark.parametrize('depth', [20, 32])
def test_dense_cifar_weights(depth):
    dense = create(f'cifar_resnet{depth}')
    model = create(f'gated_resnet{depth}', seed=1)
    model.load_state_dict(checkpoint_filter_fn(dense.state_dict(), model))
    assert_open_gates_equal(model, dense, images())


def test_filter_changes_neither_the_checkpoint_nor_the_model(dense18):
    state_dict = dense18.state_dict()
    keys, model = list(state_dict), create('gated_resnet18', seed=1)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    checkpoint_filter_fn(state_dict, model)
    assert list(state_dict) == keys
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize('nest', [
    lambda sd: {'state_dict': sd, 'best_prec1': 91.7},
    lambda sd: {'model': sd},
    lambda sd: {f'module.{k}': v for k, v in sd.items()},
    lambda sd: {'state_dict': {f'module.{k}': v for k, v in sd.items()}},
    lambda sd: {'state_dict': {f'_orig_mod.{k}': v for k, v in sd.items()}},
    lambda sd: {'state_dict': {f'module._orig_mod.{k}': v for k, v in sd.items()}},
    lambda sd: {re.sub('^fc', 'linear', k): v for k, v in sd.items()},
    lambda sd: {'state_dict': {'module.' + re.sub('^fc', 'linear', k): v for k, v in sd.items()}, 'best_prec1': 91.7},
    lambda sd: {k: v for k, v in sd.items() if 'num_batches_tracked' not in k},
], ids=['state_dict', 'model', 'ddp', 'nested_ddp', 'compiled', 'ddp_compiled', 'linear', 'cifar', 'old_torch'])
@pytest.mark.parametrize('target', ['gated_resnet20', 'cifar_resnet20'])
def test_formats_of_cifar_checkpoints(target, nest):
    dense = create('cifar_resnet20')
    model = create(target, seed=1)
    model.load_state_dict(checkpoint_filter_fn(nest(dict(dense.state_dict())), model))
    with force_gates(model, 'open'), torch.no_grad():
        torch.testing.assert_close(model(images()), dense(images()), rtol=1e-5, atol=1e-5)


def test_plain_load_of_dense_weights_says_so(dense18, caplog):
    model = create('gated_resnet18', seed=1)
    before = gate_state(model)
    with caplog.at_level(logging.INFO, logger='timm_gated'):
        model.load_state_dict(dense18.state_dict())
    messages = [r.getMessage() for r in caplog.records if FRESH in r.getMessage()]
    assert len(messages) == 1
    assert '8 of 8 gates' in messages[0] and 'layer1.0.gate1' in messages[0] and 'layer4.1.gate1' in messages[0]
    assert_gates_untouched(model, before)
    assert_open_gates_equal(model, dense18, images(64))


def test_plain_load_of_gated_weights_says_nothing(caplog):
    model = create('gated_resnet18')
    with caplog.at_level(logging.INFO, logger='timm_gated'):
        model.load_state_dict(create('gated_resnet18', seed=1).state_dict())
    assert FRESH not in caplog.text


def test_dense_weights_inside_a_larger_module(dense18):
    """Keys of a backbone have a prefix."""
    state_dict = {f'0.{k}': v for k, v in dense18.state_dict().items()}
    larger = nn.Sequential(create('gated_resnet18', seed=1), nn.Identity())
    before = gate_state(larger)
    larger.load_state_dict(state_dict)
    assert_gates_untouched(larger, before)
    assert_open_gates_equal(larger, dense18, images(64))


def test_dense_weights_into_a_features_only_model(dense18):
    extractor = create('gated_resnet18', seed=1, features_only=True)
    reference = create('resnet18', seed=2, features_only=True)
    backbone = {k: v for k, v in dense18.state_dict().items() if not k.startswith('fc.')}
    extractor.load_state_dict(backbone)
    reference.load_state_dict(backbone)
    with force_gates(extractor, 'open'), torch.no_grad():
        for feature, expected in zip(extractor(images(64)), reference(images(64)), strict=True):
            torch.testing.assert_close(feature, expected, rtol=1e-5, atol=1e-5)


# timm.create_model(checkpoint_path=…), the option --initial-checkpoint of train.py


@pytest.mark.parametrize('depth', [18, 50])
def test_checkpoint_path(depth, tmp_path, caplog):
    dense = create(f'resnet{depth}', num_classes=5)
    torch.save(dense.state_dict(), tmp_path / 'dense.pth')
    with caplog.at_level(logging.INFO):
        model = timm.create_model(f'gated_resnet{depth}', num_classes=5, checkpoint_path=str(tmp_path / 'dense.pth'))
    assert FRESH in caplog.text
    for _, gate in gates(model):
        torch.testing.assert_close(gate.fc2.bias, torch.full_like(gate.fc2.bias, 0.405))
    shuffle_gates_only(model)
    assert_open_gates_equal(model, dense, images(64))


def shuffle_gates_only(model: nn.Module) -> None:
    for _, gate in gates(model):
        shuffle(gate)


def test_checkpoint_path_of_a_safetensors_file(dense18, tmp_path):
    save_file(dense18.state_dict(), tmp_path / 'model.safetensors')
    model = timm.create_model('gated_resnet18', checkpoint_path=str(tmp_path / 'model.safetensors'))
    shuffle_gates_only(model)
    assert_open_gates_equal(model, dense18, images(64))


def test_checkpoint_path_of_a_cifar_checkpoint(tmp_path):
    """The common CIFAR format, whose head is called `linear`, loaded without the filter."""
    dense = create('cifar_resnet20')
    state_dict = {'module.' + re.sub('^fc', 'linear', k): v for k, v in dense.state_dict().items()}
    torch.save({'state_dict': state_dict, 'best_prec1': 91.7}, tmp_path / 'resnet20.th')
    model = timm.create_model('gated_resnet20', checkpoint_path=str(tmp_path / 'resnet20.th'))
    shuffle_gates_only(model)
    assert_open_gates_equal(model, dense, images())


def test_load_checkpoint_with_the_filter(dense18, dense18_path):
    model = create('gated_resnet18', seed=1)
    load_checkpoint(model, str(dense18_path), filter_fn=checkpoint_filter_fn)
    assert_open_gates_equal(model, dense18, images(64))


@pytest.mark.parametrize('kind', ['gated_resnet20', 'cifar_resnet20'])
def test_checkpoint_of_a_timm_training_run(kind, tmp_path):
    """timm loads the EMA weights by default."""
    trained = create(kind, num_classes=4).train()
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    ema = ModelEmaV3(trained, decay=0.5)
    (trained(images()).pow(2).sum() + gate_loss(trained)).backward()
    optimizer.step()
    ema.update(trained)
    args = argparse.Namespace(model=kind)
    CheckpointSaver(trained, optimizer, args=args, model_ema=ema, checkpoint_dir=tmp_path).save_checkpoint(0, 1.)

    model = timm.create_model('gated_resnet20', num_classes=4, checkpoint_path=str(tmp_path / 'last.pth.tar'))
    own = model.state_dict()
    for key, value in ema.module.state_dict().items():
        assert torch.equal(own[key], value), key
    assert not torch.equal(own['layer1.0.conv1.weight'], trained.state_dict()['layer1.0.conv1.weight'])

    load_checkpoint(model, str(tmp_path / 'last.pth.tar'), use_ema=False)
    own = model.state_dict()
    assert all(torch.equal(own[key], value) for key, value in trained.state_dict().items())


# pretrained=True


@pytest.mark.parametrize('suffix', ['pth', 'safetensors'])
def test_pretrained_from_a_file(suffix, dense18, tmp_path):
    path = tmp_path / f'dense.{suffix}'
    save_file(dense18.state_dict(), path) if suffix == 'safetensors' else torch.save(dense18.state_dict(), path)
    model = timm.create_model('gated_resnet18', pretrained=True, pretrained_cfg_overlay=dict(file=str(path)))
    shuffle_gates_only(model)
    assert_open_gates_equal(model, dense18, images(64))


def test_pretrained_with_another_head_and_input(dense18, dense18_path):
    model = timm.create_model(
        'gated_resnet18', pretrained=True, num_classes=7, in_chans=1,
        pretrained_cfg_overlay=dict(file=str(dense18_path)))
    reference = timm.create_model(
        'resnet18', pretrained=True, num_classes=7, in_chans=1,
        pretrained_cfg_overlay=dict(file=str(dense18_path)))
    assert model.fc.out_features == 7 and model.conv1.in_channels == 1
    own = model.state_dict()
    for key, value in reference.state_dict().items():
        assert key.startswith('fc.') or torch.equal(own[key], value), key
    assert torch.equal(own['conv1.weight'], dense18.conv1.weight.sum(1, keepdim=True))
    x = images(64, in_chans=1)
    shuffle_gates_only(model)
    with force_gates(model.eval(), 'open'), torch.no_grad():
        torch.testing.assert_close(
            model.forward_features(x), reference.eval().forward_features(x), rtol=1e-5, atol=1e-5)


def test_pretrained_cifar_with_another_head_and_input(tmp_path):
    dense = create('cifar_resnet20')
    torch.save({'state_dict': {re.sub('^fc', 'module.linear', k): v for k, v in dense.state_dict().items()}},
               tmp_path / 'resnet20.th')
    overlay = dict(file=str(tmp_path / 'resnet20.th'))
    model = timm.create_model('gated_resnet20', pretrained=True, pretrained_cfg_overlay=dict(overlay))
    shuffle_gates_only(model)
    assert_open_gates_equal(model, dense, images())
    model = timm.create_model(
        'gated_resnet20', pretrained=True, num_classes=100, in_chans=1, pretrained_cfg_overlay=dict(overlay))
    assert model.fc.out_features == 100
    assert torch.equal(model.conv1.weight, dense.conv1.weight.sum(1, keepdim=True))
    assert torch.equal(model.layer3[2].conv2.weight, dense.layer3[2].conv2.weight)


def test_pretrained_features_only(dense18, dense18_path):
    extractor = timm.create_model(
        'gated_resnet18', pretrained=True, features_only=True, pretrained_cfg_overlay=dict(file=str(dense18_path)))
    assert torch.equal(extractor.layer4[1].conv2.weight, dense18.layer4[1].conv2.weight)


def test_pretrained_of_a_gated_file(tmp_path):
    gated = create('gated_resnet20')
    torch.save(gated.state_dict(), tmp_path / 'gated.pth')
    overlay = dict(file=str(tmp_path / 'gated.pth'))
    model = timm.create_model('gated_resnet20', pretrained=True, pretrained_cfg_overlay=dict(overlay)).eval()
    assert torch.equal(model(images()), gated(images()))
    model = timm.create_model('gated_resnet20', pretrained=True, num_classes=3, pretrained_cfg_overlay=dict(overlay))
    assert_gates_untouched(model, gate_state(gated))


@pytest.mark.parametrize('name', [name for name in (*GATED, 'cifar_resnet32') if not is_model_pretrained(name)])
def test_pretrained_without_weights_gives_timms_message(name, monkeypatch):
    def no_network(*args, **kwargs):
        pytest.fail('the hub was asked for weights')

    monkeypatch.setattr('timm.models._builder.load_state_dict_from_hf', no_network)
    with pytest.raises(RuntimeError, match=f'No pretrained weights exist for {name}'):
        timm.create_model(name, pretrained=True, device='meta')


@pytest.mark.parametrize('depth', [18, 34, 50, 101, 152])
def test_configuration_of_the_dense_tags(depth):
    config = timm.models.get_pretrained_cfg(f'gated_resnet{depth}.dense_a1_in1k')
    reference = timm.models.get_pretrained_cfg(f'resnet{depth}.a1_in1k')
    assert config.hf_hub_id == f'timm/resnet{depth}.a1_in1k'
    for field in (
            'num_classes', 'input_size', 'test_input_size', 'crop_pct', 'test_crop_pct', 'interpolation', 'mean', 'std',
            'first_conv', 'classifier', 'pool_size', 'license'):
        assert getattr(config, field) == getattr(reference, field), field


@pytest.mark.parametrize('depth', [18, 50])
def test_dense_tag_loads_timms_weights_under_fresh_gates(depth, monkeypatch, caplog):
    dense = create(f'resnet{depth}')
    asked = []

    def hub(model_id, *args, **kwargs):
        asked.append(model_id)
        return dict(dense.state_dict())

    monkeypatch.setattr('timm.models._builder.load_state_dict_from_hf', hub)
    with caplog.at_level(logging.INFO):
        model = timm.create_model(f'gated_resnet{depth}.dense_a1_in1k', pretrained=True)
    assert asked == [f'timm/resnet{depth}.a1_in1k']
    assert FRESH in caplog.text
    assert model.pretrained_cfg['tag'] == 'dense_a1_in1k'
    shuffle_gates_only(model)
    assert_open_gates_equal(model, dense, images(64))


# Gated weights


@pytest.mark.parametrize('name, kwargs', [*TINY.items(), ('gated_resnet20_w10', {})])
def test_dense_weights_under_the_gates_of_any_method(name, kwargs, caplog):
    dense, model = dense_counterpart(name, num_classes=3, **kwargs), create(name, num_classes=3, **kwargs)
    before = gate_state(model)
    model.load_state_dict(checkpoint_filter_fn(dense.state_dict(), model))
    assert FRESH in caplog.text
    assert_gates_untouched(model, before)
    own = model.state_dict()
    assert all(torch.equal(own[key], value) for key, value in dense.state_dict().items())


@pytest.mark.parametrize('name, kwargs', [*TINY.items(), ('gated_resnet20_w10', {})])
def test_gated_round_trip(name, kwargs, tmp_path):
    model = create(name, num_classes=3, **kwargs)
    torch.save(model.state_dict(), tmp_path / 'gated.pth')
    loaded = create(name, seed=1, num_classes=3, **kwargs)
    result = loaded.load_state_dict(torch.load(tmp_path / 'gated.pth', weights_only=True), strict=True)
    assert not result.missing_keys and not result.unexpected_keys
    assert torch.equal(loaded(images()), model(images()))
    filtered = checkpoint_filter_fn(model.state_dict(), loaded)
    assert list(filtered) == list(model.state_dict())


def test_hub_folder_round_trip(tmp_path):
    """A folder written by timm loads as `local-dir:`."""
    model = create('gated_resnet20', num_classes=3)
    save_for_hf(model, tmp_path)
    loaded = timm.create_model(f'local-dir:{tmp_path}', pretrained=True).eval()
    assert loaded.num_classes == 3
    assert torch.equal(loaded(images()), model(images()))


def test_checkpoint_with_some_gates(caplog):
    """The checkpoint has one gate per block, the model has two."""
    one = create('gated_resnet50', gated_maps=(1,), num_classes=3, layers=(1, 1, 1, 1))
    two = create('gated_resnet50', seed=1, num_classes=3, layers=(1, 1, 1, 1))
    before = gate_state(two)
    with caplog.at_level(logging.INFO, logger='timm_gated'):
        two.load_state_dict(checkpoint_filter_fn(one.state_dict(), two))
    assert '4 of 8 gates' in caplog.text
    after = gate_state(two)
    assert all(torch.equal(after[k], v) for k, v in gate_state(one).items())
    assert all(torch.equal(after[k], before[k]) for k in after if 'gate2' in k)


def test_gates_without_weights_are_listed(dense18):
    model = timm.create_model('gated_resnet18')
    model.load_state_dict(dense18.state_dict())
    assert len(model.fresh_gates) == 8
    model.load_state_dict(create('gated_resnet18').state_dict())
    assert not model.fresh_gates
    model.load_state_dict(dense18.state_dict())
    assert not model.fresh_gates  # they keep the weights of the previous checkpoint


# Objectives with parameters


def test_dense_weights_into_a_model_with_a_prior_that_learns(dense18, dense18_path):
    model = timm.create_model(
        'gated_resnet18', prior=dict(type='beta', learnable=True), checkpoint_path=str(dense18_path))
    model.load_state_dict(checkpoint_filter_fn(dense18.state_dict(), model))
    assert torch.equal(model.layer4[1].conv2.weight, dense18.layer4[1].conv2.weight)


def test_deepcopy_of_a_loaded_model(dense18):
    model = create('gated_resnet18', seed=1)
    model.load_state_dict(dense18.state_dict())
    assert torch.equal(copy.deepcopy(model)(images(64)), model(images(64)))
