"""Models as folders: saving, loading, and configs and weights that are refused"""
import json
import os
import pickle
import shutil
from functools import partial

import pytest
import timm
import torch
from hub_client import make, run
from models import create
from mutations import Call
from nets import SMALL, TINY
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from timm.models import save_for_hf

import timm_gated
from timm_gated import check_pretrained, gates, objectives, save_pretrained


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
    return save_pretrained(make(), tmp_path_factory.mktemp('hub') / 'saved')


@pytest.fixture
def folder(saved, tmp_path):
    """Copy of the folder, which a test may change."""
    return shutil.copytree(saved, tmp_path / 'folder')


def load(folder, **kwargs):
    return timm.create_model(f'local-dir:{folder}', **dict(dict(pretrained=True), **kwargs)).eval()


def rewrite(folder, change):
    """Change the config."""
    path = folder / 'config.json'
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def equal(one, other):
    return all(torch.equal(a, b) for a, b in zip(run(one), run(other), strict=True))


def test_saved_and_loaded(saved):
    assert sorted(path.name for path in saved.iterdir()) == ['README.md', 'config.json', 'model.safetensors']
    assert len({path.stat().st_mode for path in saved.iterdir()}) == 1  # all files have the same permissions
    model = make()
    assert equal(load(saved), model) and equal(check_pretrained(saved).eval(), model)
    assert any(0 < gate.decision.mean() < 1 for _, gate in gates(model))


# Every method, saved by this package and by timm


OPTIONS = {
    'gated_resnet20': dict(gated_maps=(1,), gate_before_act=True, prior='uniform'),
    'gated_resnet18': dict(from_dense=4, in_chans=4),
    'gaternet_resnet20': dict(gater='resnet18', gater_args={}),
    'skipnet_resnet38': dict(gate='ff2'),
    'fbs_resnet20': dict(density=0.3),
    'batch_shaped': dict(
        network='resnet18', features={'layer1.0.act1': 'normal'}, layers=(1, 1, 1, 1), num_classes=3),
}


@pytest.mark.parametrize('save', [save_pretrained, partial(save_for_hf, safe_serialization=True)], ids=['ours', 'timm'])
@pytest.mark.parametrize('name', [*SMALL, 'batch_shaped'])
def test_saved_and_loaded_by_every_method(name, save, tmp_path):
    model = create(name, **TINY.get(name, {}), **OPTIONS.get(name, {})).eval()
    save(model, tmp_path / 'saved')
    again = load(tmp_path / 'saved')
    images = torch.randn(2, model.in_chans, 64, 64)
    with torch.no_grad():
        assert torch.equal(again(images), model(images))
    assert [str(objective) for objective in objectives(again)] == [str(objective) for objective in objectives(model)]
    check_pretrained(tmp_path / 'saved')


# As written by this package with timm 1.0.30
OLD_CONFIG = {
    'architecture': 'gated_resnet20', 'num_classes': 7, 'num_features': 64,
    'model_args': {'layers': [1, 1, 1], 'gamma': 0.2, 'gate_bias': 1.5, 'in_chans': 4, 'global_pool': 'avg'},
    'pretrained_cfg': {
        'custom_load': False, 'input_size': [4, 32, 32], 'fixed_input_size': False, 'interpolation': 'bilinear',
        'crop_pct': 1.0, 'crop_mode': 'center', 'mean': [0.485, 0.456, 0.406], 'std': [0.229, 0.224, 0.225],
        'num_classes': 7, 'pool_size': [8, 8], 'first_conv': None, 'classifier': 'fc', 'license': 'apache-2.0',
        'paper_ids': 'arXiv:1907.06627'}}


def test_a_folder_of_an_earlier_timm(tmp_path):
    model = make(in_chans=4, num_classes=7)
    (tmp_path / 'config.json').write_text(json.dumps(OLD_CONFIG))
    save_file(model.state_dict(), tmp_path / 'model.safetensors')
    images = torch.randn(2, 4, 32, 32)
    for again in (load(tmp_path), check_pretrained(tmp_path).eval()):
        assert torch.equal(again(images), model(images)) and again.gate_losses.gamma == 0.2


# Contents of a config


@pytest.mark.parametrize('channels', [1, 2, 4])
def test_other_input_channels(channels, tmp_path):
    """timm would initialize a stem of two or four channels randomly and only log it."""
    model = make(in_chans=channels)
    again = load(save_pretrained(model, tmp_path / 'saved'))
    images = torch.randn(2, channels, 32, 32)
    assert torch.equal(again(images), model(images))
    assert again.pretrained_cfg['input_size'][0] == channels
    check_pretrained(tmp_path / 'saved')


def test_channels_last(tmp_path):
    model = make().to(memory_format=torch.channels_last)
    assert equal(load(save_pretrained(model, tmp_path / 'saved')), make())
    assert model.conv1.weight.is_contiguous(memory_format=torch.channels_last)


def test_no_path_is_saved(saved, tmp_path):
    """Neither the source of the weights nor that of a network inside the model."""
    weights = tmp_path / 'weights.pth'
    torch.save(make().state_dict(), weights)
    one = load(saved)
    two = make(pretrained=True, pretrained_cfg_overlay=dict(file=str(weights)), cache_dir=str(tmp_path / 'cache'))
    three = make(pretrained=True, pretrained_cfg_overlay=dict(state_dict=make().state_dict()))
    four = timm.create_model(
        'gaternet_resnet20', gater_args=dict(checkpoint_path='', layers=(1, 1, 1), cache_dir=str(tmp_path)))
    assert one.pretrained_cfg['file'] == str(saved) and two.pretrained_cfg['file'] == str(weights)
    for index, model in enumerate((one, two, three, four)):
        folder = save_pretrained(model, tmp_path / f'saved{index}')
        config = (folder / 'config.json').read_text()
        assert not any(word in config for word in (str(tmp_path), str(saved), 'file', 'source', 'state_dict', 'tag'))
        assert check_pretrained(folder) is not None
    assert json.loads(config)['model_args']['gater_args'] == {'layers': [1, 1, 1]}


def test_a_gater_from_a_folder_cannot_be_saved(saved, tmp_path):
    model = timm.create_model('gaternet_resnet20', gater=f'local-dir:{saved}', layers=(1, 1, 1), gater_args={})
    with pytest.raises(ValueError, match=r"sets 'gater' to 'local-dir:"):
        save_pretrained(model, tmp_path / 'saved')
    assert not any(tmp_path.iterdir())


def test_names_of_outputs(tmp_path):
    model = make(num_classes=2)
    with pytest.raises(ValueError, match='the model has 2 outputs, got 3 names'):
        save_pretrained(model, tmp_path / 'saved', ['a', 'b', 'c'])
    again = load(save_pretrained(model, tmp_path / 'saved', ['a', 'b']))
    assert tuple(again.pretrained_cfg['label_names']) == ('a', 'b')
    twice = load(save_pretrained(again, tmp_path / 'twice'))
    assert tuple(twice.pretrained_cfg['label_names']) == ('a', 'b')
    again.reset_classifier(5)
    assert 'label_names' not in load(save_pretrained(again, tmp_path / 'other')).pretrained_cfg


def test_a_model_that_would_not_load_is_not_saved(tmp_path):
    model = make()
    model.extra = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r'unexpected: extra.bias, extra.weight'):
        save_pretrained(model, tmp_path / 'saved')
    assert not any(tmp_path.iterdir())


# Options that a config must not set


@pytest.mark.parametrize('option, value', [
    ('snapshot_dir', 'written'), ('recipe', {'snapshot_dir': 'written'}), ('block_args', {'cache_dir': 'written'}),
    ('checkpoint_path', 'weights.pth'), ('features', [{'pretrained': True}]),
])
def test_options_that_only_users_may_set(folder, option, value):
    rewrite(folder, lambda config: config['model_args'].update({option: value}))
    for action in (load, check_pretrained, lambda folder: load(folder, pretrained=False)):
        with pytest.raises(ValueError, match=rf"{folder}.* sets '{option}[.\w]*' to"):
            action(folder)


@pytest.mark.parametrize('option', ['pretrained', 'checkpoint_path', 'cache_dir', 'pretrained_cfg', 'model_name'])
def test_arguments_of_create_model_are_refused(folder, option):
    """timm itself refuses most of these."""
    rewrite(folder, lambda config: config['model_args'].update({option: 'x'}))
    with pytest.raises(ValueError, match=option):
        check_pretrained(folder)
    with pytest.raises((ValueError, TypeError)):
        load(folder)


def test_the_user_may_set_them(saved, tmp_path):
    model = load(saved, snapshot_dir=str(tmp_path / 'mine'), log_interval=7)
    assert model.gate_losses.snapshots.folder == tmp_path / 'mine'
    assert load(saved, num_classes=3).num_classes == 3


@pytest.mark.parametrize('change, name', [
    (dict(gater='hf-hub:me/other'), 'gater'), (dict(gater='LOCAL-DIR:/tmp/other'), 'gater'),
    (dict(gater='https://example.org/x.pth'), 'gater'), (dict(gater='batch_shaped', gater_args=dict(network='./x')),
     'gater_args.network'), (dict(gater=['resnet18']), 'gater'),
    (dict(gater_args=dict(pretrained=True)), 'gater_args.pretrained'),
    (dict(gater_args=dict(checkpoint_path='x.pth')), 'gater_args.checkpoint_path'),
    (dict(gater_args=dict(pretrained_cfg=dict(file='x'))), 'gater_args.pretrained_cfg'),
])
def test_a_gater_is_not_downloaded(change, name, tmp_path):
    folder = save_pretrained(timm.create_model('gaternet_resnet20', layers=(1, 1, 1)), tmp_path / 'saved')
    check_pretrained(folder)
    rewrite(folder, lambda config: config['model_args'].update(change))
    for action in (load, check_pretrained):
        with pytest.raises(ValueError, match=f"sets '{name}' to"):
            action(folder)


@pytest.mark.parametrize('change', [
    dict(network='hf-hub:me/other'), dict(network=' hf_hub:me/other'), dict(checkpoint_path='x'),
    dict(snapshot_dir='x')])
def test_a_shaped_network_is_not_downloaded(folder, change):
    options = {'network': 'gated_resnet20', 'features': {'layer1.0.act1': 'normal'}, 'layers': [1, 1, 1]}
    rewrite(folder, lambda config: config.update(architecture='batch_shaped', model_args=options))
    assert equal(load(folder), make())
    rewrite(folder, lambda config: config['model_args'].update(change))
    for action in (load, check_pretrained):
        with pytest.raises(ValueError, match=f"sets '{next(iter(change))}' to"):
            action(folder)


def test_unknown_options_are_up_to_timm(folder):
    rewrite(folder, lambda config: config['model_args'].update(gama=0.1))
    with pytest.raises(TypeError, match='gama'):
        load(folder)
    with pytest.raises(ValueError, match='does not make a model: .*gama'):
        check_pretrained(folder)


def test_other_options_are_up_to_timm(folder):
    """A newer timm may write additional options."""
    rewrite(folder, lambda config: config['model_args'].update(drop_rate=0.1, zero_init_last=False, log_interval=7))
    model = load(folder)
    assert model.drop_rate == 0.1 and model.gate_losses.log_interval == 7 and equal(model, make())


# Malformed configs


@pytest.mark.parametrize('text, message', [
    ('{', r'config.json is not JSON'), ('[' * 100_000, 'is not JSON'), ('[1]', r'must hold an object.*got a list'),
    ('{"architecture": 3}', r"'architecture' of .* must be the name of a timm model, got 3"),
    ('{"architecture": "gated_resnet20", "model_args": [1]}', r"'model_args' of .* must be an object of options"),
    ('{"architecture": "gated_resnet20", "pretrained_cfg": "x"}', r"'pretrained_cfg' of .* must be an object"),
    ('{"architecture": "gated_resnet21"}', r"is of 'gated_resnet21', which is not a model of this package"),
    ('{"architecture": "resnet18"}', r"is of 'resnet18', which is not a model of this package"),
    ('{}', r"is of ''"),
    ('{"architecture": "gated_resnet20", "pretrained_cfg": {"x": 1}}', r'does not make a model: .*\(TypeError\)'),
    ('{"architecture": "gated_resnet20", "model_args": {"layers": "many"}}', 'does not make a model'),
])
def test_configs_that_are_refused(folder, text, message):
    (folder / 'config.json').write_text(text)
    with pytest.raises(ValueError, match=message):
        check_pretrained(folder)


def test_a_large_config_takes_no_memory(folder, monkeypatch):
    """A model that does not fit its weights is only built on the meta device."""
    rewrite(folder, lambda config: config['model_args'].update(channels=[20, 40, 80]))
    devices, create_model = [], timm.create_model

    def watched(*args, **kwargs):
        devices.append(kwargs.get('device'))
        return create_model(*args, **kwargs)
    monkeypatch.setattr(timm, 'create_model', watched)
    with pytest.raises(ValueError, match=r'other shapes: .*20'):
        check_pretrained(folder)
    assert devices == ['meta']


def test_no_config(folder):
    (folder / 'config.json').unlink()
    with pytest.raises(ValueError, match=r'config.json does not exist'):
        check_pretrained(folder)


# Weights that do not fit


def drop(weights, *prefixes):
    return {name: value for name, value in weights.items() if not name.startswith(prefixes)}


@pytest.mark.parametrize('change, message, stock', [
    (lambda w: drop(w, 'layer1.0.conv1.weight'), 'missing: layer1.0.conv1.weight', 'missing'),
    (lambda w: drop(w, 'fc.bias'), 'missing: fc.bias', 'Missing key'),
    (lambda w: drop(w, 'layer1.0.gate1.fc1.bias'), 'missing: layer1.0.gate1.fc1.bias', 'is incomplete'),
    (lambda w: drop(w, 'layer1.0.gate1.'), 'missing: layer1.0.gate1', None),
    (lambda w: {**w, 'more': torch.ones(1)}, 'unexpected: more', 'unexpected: more'),
    (lambda w: {**w, 'fc.bias': torch.ones(3)}, r'other shapes: fc.bias \(3,\) instead of \(10,\)',
     'size mismatch'),
    (lambda w: {**w, 'layer2.0.bn1.weight': torch.ones(3)}, r'layer2.0.bn1.weight \(3,\) instead of \(32,\)',
     'other shapes'),
    (lambda w: make(layers=(2, 2, 2)).state_dict(),
     r"not those of its config, a 'gated_resnet20'; unexpected: layer1.1", 'another depth'),
])
def test_weights_that_are_refused(folder, change, message, stock):
    save_file(change(load_file(folder / 'model.safetensors')), folder / 'model.safetensors')
    with pytest.raises(ValueError, match=message):
        check_pretrained(folder)
    if stock:  # timm refuses it too, except for missing gates, which it logs
        with pytest.raises((RuntimeError, ValueError), match=stock):
            load(folder)


def test_another_family(folder):
    rewrite(folder, lambda config: config.update(architecture='gated_resnet32', model_args={}))
    with pytest.raises(ValueError, match="are not those of its config, a 'gated_resnet32'; missing"):
        check_pretrained(folder)
    with pytest.raises(ValueError, match='another depth'):
        load(folder)


@pytest.mark.parametrize('size', [0, 5, 2000, -1])
def test_truncated_weights(folder, size):
    path = folder / 'model.safetensors'
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r'model.safetensors is not complete'):
        check_pretrained(folder)
    with pytest.raises(SafetensorError, match=f'{path} is .* the disk was full'):
        load(folder)


def test_weights_that_timm_changes(folder):
    """label_offset makes timm truncate the head."""
    rewrite(folder, lambda config: (config.pop('num_classes'), config['pretrained_cfg'].update(num_classes=10)))
    check_pretrained(folder)
    rewrite(folder, lambda config: config['pretrained_cfg'].update(label_offset=1))
    with pytest.raises(ValueError, match=r'does not make a model: (.|\n)*size mismatch'):
        check_pretrained(folder)


def test_a_head_that_timm_initializes(folder):
    """The config has another number of classes for the weights than for the model."""
    rewrite(folder, lambda config: (config.pop('num_classes'), config['pretrained_cfg'].update(num_classes=7)))
    with pytest.raises(ValueError, match='weights that timm does not load as they are: fc.'):
        check_pretrained(folder)


def test_half_precision(folder):
    weights = load_file(folder / 'model.safetensors')
    save_file({k: v.half() if v.is_floating_point() else v for k, v in weights.items()}, folder / 'model.safetensors')
    check_pretrained(folder)


# Pickles



@pytest.mark.parametrize('name', ['pytorch_model.bin', 'model.pth', 'other.pth.tar'])
@pytest.mark.parametrize('as_torch', [True, False], ids=['torch', 'pickle'])
def test_a_malicious_pickle(folder, tmp_path, name, as_torch):
    (folder / 'model.safetensors').unlink()
    content = {'state_dict': Call(os.mkdir, str(tmp_path / 'marker'))}
    if as_torch:
        torch.save(content, folder / name)
    else:
        (folder / name).write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=rf'holds no model.safetensors, but {name}. Pickled weights are not read'):
        check_pretrained(folder)
    with pytest.raises(RuntimeError, match='weights_only=True blocked'):
        load(folder)
    assert not (tmp_path / 'marker').exists()


def test_a_truncated_pickle(folder):
    (folder / 'model.safetensors').unlink()
    torch.save(make().state_dict(), folder / 'pytorch_model.bin')
    assert equal(load(folder), make())  # timm loads pickled tensors
    content = (folder / 'pytorch_model.bin').read_bytes()
    for size in (0, 100, len(content) // 2):
        (folder / 'pytorch_model.bin').write_bytes(content[:size])
        with pytest.raises((RuntimeError, EOFError), match='pytorch_model.bin is .* the disk was full'):
            load(folder)


def test_public_names():
    assert all(hasattr(timm_gated, name) for name in ('push_to_hub', 'pull_from_hub', 'model_card'))
