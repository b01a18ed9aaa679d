"""Checkpoints that do not fit a model are refused with an error that names the difference"""
import pytest
import timm
import torch
import torch.nn as nn
from models import create
from timm.task import ClassificationTask

from timm_gated import checkpoint_filter_fn

NO_DATA = 'ignore:for .* copying from a non-meta parameter:UserWarning'  # for tests that only compare names and shapes


@pytest.mark.parametrize('strict', [True, False])
@pytest.mark.parametrize('lost', ['fc1.weight', 'fc2.bias', 'bn.running_mean'])
def test_half_a_gate_is_an_error(lost, strict):
    model = create('gated_resnet20')
    state_dict = model.state_dict()
    del state_dict[f'layer2.1.gate1.{lost}']
    with pytest.raises(RuntimeError, match=rf'layer2\.1\.gate1 is incomplete.*layer2\.1\.gate1\.{lost}'):
        model.load_state_dict(state_dict, strict=strict)
    with pytest.raises(RuntimeError, match=rf'layer2\.1\.gate1\.{lost}'):
        model.load_state_dict(checkpoint_filter_fn(state_dict, model), strict=strict)


@pytest.mark.parametrize('strict', [True, False])
def test_a_gate_of_one_key_is_an_error(strict):
    model = create('gated_resnet20')
    state_dict = create('cifar_resnet20').state_dict()
    state_dict['layer1.0.gate1.fc1.weight'] = model.layer1[0].gate1.fc1.weight
    with pytest.raises(RuntimeError, match=r'layer1\.0\.gate1 is incomplete.*fc2\.weight'):
        model.load_state_dict(state_dict, strict=strict)


@pytest.mark.filterwarnings(NO_DATA)
@pytest.mark.parametrize('strict', [True, False])
@pytest.mark.parametrize('theirs, ours, message', [
    ('resnet34', 'gated_resnet18', '3-4-6-3.*2-2-2-2'),
    ('resnet18', 'gated_resnet34', '2-2-2-2.*3-4-6-3'),
    ('resnet101', 'gated_resnet50', '3-4-23-3.*3-4-6-3'),
    ('gated_resnet34', 'gated_resnet18', '3-4-6-3.*2-2-2-2'),
    ('cifar_resnet32', 'gated_resnet20', '5-5-5.*3-3-3'),
    ('gated_resnet20', 'gated_resnet32', '3-3-3.*5-5-5'),
    ('cifar_resnet20', 'gated_resnet18', '3-3-3.*2-2-2-2'),
    ('resnet34', 'gated_resnet50', '2 convolutions.*3'),  # the same number of blocks
    ('gated_resnet50', 'gated_resnet34', '3 convolutions.*2'),
    ('resnet50', 'skipnet_resnet34', '3 convolutions.*2'),
])
def test_another_depth_is_an_error_that_names_both(theirs, ours, message, strict, caplog):
    state_dict = timm.create_model(theirs, device='meta').state_dict()
    model = timm.create_model(ours, device='meta')
    message = rf'^the checkpoint is of another depth: [^\n]*{message}\.$'  # and nothing else
    with pytest.raises(ValueError, match=message):
        checkpoint_filter_fn(state_dict, model)
    with pytest.raises(RuntimeError, match=message):
        model.load_state_dict(state_dict, strict=strict)
    task = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)
    with pytest.raises(RuntimeError, match=message):
        task.load_checkpoint_state(state_dict)  # --resume
    assert not caplog.text


@pytest.mark.filterwarnings(NO_DATA)
@pytest.mark.parametrize('theirs, ours', [
    ('cifar_resnet32', 'cifar_resnet20'), ('resnet34', 'slim_resnet18'), ('resnet34', 'slim_resnet50')])
def test_dense_models_of_this_package_say_first_that_the_depth_is_another(theirs, ours):
    with pytest.raises(RuntimeError, match='^the checkpoint is of another depth'):
        timm.create_model(ours, device='meta').load_state_dict(timm.create_model(theirs, device='meta').state_dict())


def test_another_depth_by_checkpoint_path(tmp_path):
    torch.save(timm.create_model('resnet34').state_dict(), tmp_path / 'dense.pth')
    with pytest.raises(RuntimeError, match='another depth.*3-4-6-3.*2-2-2-2'):
        timm.create_model('gated_resnet18', checkpoint_path=str(tmp_path / 'dense.pth'))
    with pytest.raises(ValueError, match='another depth.*3-4-6-3.*2-2-2-2'):
        timm.create_model(
            'gated_resnet18', pretrained=True, pretrained_cfg_overlay=dict(file=str(tmp_path / 'dense.pth')))


def test_a_dense_model_of_this_package_refuses_another_depth():
    with pytest.raises(ValueError, match='another depth.*5-5-5.*3-3-3'):
        checkpoint_filter_fn(
            timm.create_model('cifar_resnet32').state_dict(), timm.create_model('cifar_resnet20'))


@pytest.mark.filterwarnings(NO_DATA)
@pytest.mark.parametrize('theirs, ours, message', [
    (('cifar_resnet20', dict(inner_width=10)), 'gated_resnet20',
     r'other shapes: layer1.0.conv1.weight \(160, 16, 3, 3\) instead of \(16, 16, 3, 3\)'),
    (('gated_resnet20_w10', {}), 'gated_resnet20_w20', r'\(160, 16, 3, 3\) instead of \(320, 16, 3, 3\)'),
    (('wide_resnet50_2', {}), 'gated_resnet50', r'other shapes: layer1.0.conv1.weight'),
])
def test_another_width_is_an_error(theirs, ours, message):
    name, kwargs = theirs
    state_dict = timm.create_model(name, device='meta', **kwargs).state_dict()
    model = timm.create_model(ours, device='meta')
    with pytest.raises(ValueError, match=f'does not fit this {type(model).__name__}.*{message}'):
        checkpoint_filter_fn(state_dict, model)
    with pytest.raises(RuntimeError, match=r'size mismatch|Missing key'):
        model.load_state_dict(state_dict)


@pytest.mark.parametrize('change, message', [
    (lambda sd: sd.pop('layer2.0.bn1.weight'), 'missing: layer2.0.bn1.weight'),
    (lambda sd: sd.update(extra=torch.zeros(1)), 'unexpected: extra'),
])
def test_missing_and_unexpected_keys_are_named(change, message):
    state_dict = dict(timm.create_model('cifar_resnet20').state_dict())
    change(state_dict)
    with pytest.raises(ValueError, match=message):
        checkpoint_filter_fn(state_dict, timm.create_model('gated_resnet20'))


def test_a_gate_of_another_width_is_an_error():
    model = create('gated_resnet20')
    state_dict = create('gated_resnet20', gate_hidden=8).state_dict()
    with pytest.raises(RuntimeError, match='size mismatch for layer1.0.gate1.fc1.weight'):
        model.load_state_dict(checkpoint_filter_fn(state_dict, model))


@pytest.mark.parametrize('empty', [{}, {'state_dict': {}}])
def test_an_empty_checkpoint_is_an_error(empty):
    with pytest.raises(ValueError, match='missing: '):
        checkpoint_filter_fn(empty, timm.create_model('gated_resnet20', device='meta'))
