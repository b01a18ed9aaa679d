"""Packaged weights load with timm"""
import json
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from models import images
from nets import GATED, VARIANTS
from timm.models import get_arch_name, get_pretrained_cfg, save_for_hf, split_model_name_tag

from timm_gated.models._registry import WEIGHTS_DIR, entry_points, list_weights, weights_file

ENTRY_POINTS = entry_points()
OWN = [
    name for name in timm.list_models(include_tags=True) if '.' in name and get_arch_name(name) in ENTRY_POINTS]
ALL = {name: get_pretrained_cfg(name).file for name in OWN if get_pretrained_cfg(name).file}
FILES = {name: file for name, file in ALL.items() if Path(file).stem == name}
DENSE = {name: file for name, file in ALL.items() if name not in FILES}  # dense weights under fresh gates
DEFAULTS = {'cifar_resnet20': 'e40_c10', 'gated_resnet20': 'bas_c10'}  # of models with several trained tags
packaged = pytest.mark.parametrize('name', FILES)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def asked(*args, **kwargs):
        pytest.fail('the network was asked for weights')

    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    for function in ('load_state_dict_from_hf', 'load_state_dict_from_url', 'download_cached_file'):
        monkeypatch.setattr(f'timm.models._builder.{function}', asked)


def assert_loaded(model: torch.nn.Module, stored: dict, without: tuple = ()) -> None:
    own = model.state_dict()
    compared = [key for key in own if not key.startswith(without)] if without else list(own)
    assert compared and all(torch.equal(own[key], stored[key]) for key in compared)


def test_entry_points_are_those_of_this_package():
    others = timm.list_models(['cifar_resnet*', 'slim_*'])
    assert {*GATED, *VARIANTS, *others, 'batch_shaped'} == set(entry_points())
    assert 'resnet18' not in entry_points() and entry_points()['gated_resnet20'].__name__ == 'gated_resnet20'


def test_files_and_configs_correspond():
    expected = {f'{name}.{suffix}' for name in FILES for suffix in ('safetensors', 'md')}
    assert {path.name for path in WEIGHTS_DIR.iterdir() if path.suffix != '.png'} == expected
    assert {path.name.rsplit('.', 2)[0] for path in WEIGHTS_DIR.glob('*.png')} == {*FILES}
    assert all(FILES[name] == weights_file(name) for name in FILES)
    assert {split_model_name_tag(name)[1] for name in {*OWN} - {*list_weights()}} <= {'untrained'}


def test_weights_that_are_missing_are_not_offered(tmp_path, monkeypatch):
    monkeypatch.setattr('timm_gated.models._registry.WEIGHTS_DIR', tmp_path)
    assert weights_file('gated_resnet20.bas_c10') is None
    (tmp_path / 'gated_resnet20.bas_c10.safetensors').touch()
    assert weights_file('gated_resnet20.bas_c10') == str(tmp_path / 'gated_resnet20.bas_c10.safetensors')


def test_listing():
    assert set(FILES) <= set(list_weights()) == set(timm.list_pretrained(list(entry_points())))
    assert 'gated_resnet18.dense_a1_in1k' in list_weights()  # on the hub
    assert not any(name.endswith('.untrained') for name in list_weights())
    for model in {get_arch_name(name) for name in FILES}:
        tags = [split_model_name_tag(name)[1] for name in FILES if get_arch_name(name) == model]
        assert get_pretrained_cfg(model).tag == (tags[0] if len(tags) == 1 else DEFAULTS[model])


@packaged
def test_file(name):
    path = Path(FILES[name])
    assert path.is_absolute() and path.parent == WEIGHTS_DIR and path.name == f'{name}.safetensors'
    assert path.stat().st_size < 3e6
    stored = safetensors.torch.load_file(path)
    own = timm.create_model(name, device='meta').state_dict()
    assert {k: (v.shape, v.dtype) for k, v in stored.items()} == {k: (v.shape, v.dtype) for k, v in own.items()}
    assert all(value.isfinite().all() for value in stored.values())
    assert all(stored[key].min() > 0 for key in stored if key.endswith('running_var'))  # after training


@packaged
def test_pretrained(name):
    stored = safetensors.torch.load_file(FILES[name])
    model = timm.create_model(name, pretrained=True).eval()
    assert_loaded(model, stored)
    assert model.num_classes == 10 and model(images()).shape == (2, 10) and model(images()).isfinite().all()

    with_other_head = timm.create_model(name, pretrained=True, num_classes=5)
    assert with_other_head.fc.out_features == 5
    assert_loaded(with_other_head, stored, without=('fc.',))

    grey = timm.create_model(name, pretrained=True, in_chans=1)
    assert torch.equal(grey.conv1.weight, stored['conv1.weight'].sum(1, keepdim=True))
    assert_loaded(grey, stored, without=('conv1.',))

    features = timm.create_model(name, pretrained=True, features_only=True, out_indices=(1, 2)).eval()
    assert_loaded(features, stored)
    with torch.no_grad():
        expected = model.forward_intermediates(images(), indices=[1, 2], intermediates_only=True)
        for ours, theirs in zip(features(images()), expected, strict=True):
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize('name', DENSE)
def test_dense_weights_under_fresh_gates(name):
    stored = safetensors.torch.load_file(DENSE[name])
    assert name.split('.')[1].startswith('dense_') and Path(DENSE[name]).stem in FILES
    model = timm.create_model(name, pretrained=True)
    assert stored.keys() < model.state_dict().keys() and model.fresh_gates
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in stored.items())


@packaged
def test_by_tag_by_default_and_by_an_overlay(name, tmp_path):
    model, tag = split_model_name_tag(name)
    stored = safetensors.torch.load_file(FILES[name])
    assert_loaded(timm.create_model(model, pretrained=True, pretrained_cfg=tag), stored)
    if get_pretrained_cfg(model).tag == tag:
        assert_loaded(timm.create_model(model, pretrained=True), stored)
    others = {key: value + 1 if value.is_floating_point() else value for key, value in stored.items()}
    safetensors.torch.save_file(others, tmp_path / 'other.safetensors')
    overlay = dict(file=str(tmp_path / 'other.safetensors'))
    assert_loaded(timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay), others)
    untrained = timm.create_model(name)
    assert not torch.equal(untrained.conv1.weight, stored['conv1.weight'])


@packaged
def test_another_depth_or_width_is_refused(name):
    cases = ((dict(layers=(1, 1, 1)), r'\d-\d-\d blocks.*1-1-1'), (dict(inner_width=2), 'other shapes'))
    for options, message in cases:
        with pytest.raises(ValueError, match=message):
            timm.create_model(name, pretrained=True, **options)


@packaged
def test_saved_config_holds_no_path(name, tmp_path):
    model = timm.create_model(name, pretrained=True)
    save_for_hf(model, str(tmp_path), model_args={})
    config = (tmp_path / 'config.json').read_text()
    assert str(WEIGHTS_DIR) not in config and 'safetensors' not in config
    assert json.loads(config)['pretrained_cfg']['tag'] == split_model_name_tag(name)[1]
    assert_loaded(timm.create_model(f'local-dir:{tmp_path}', pretrained=True), safetensors.torch.load_file(FILES[name]))
