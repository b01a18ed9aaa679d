"""Changes to timm, mmengine and torch by importing our packages and by building the first gated model"""
import copy
import json
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Callable, Dict, List

import mmseg_plugin  # noqa: F401  (must come before mmseg)

# isort: split
import mmengine
import pytest
import timm
import torch
import torch.nn as nn
from mmengine.runner import CheckpointLoader
from mmseg.registry import HOOKS, MODELS
from mmseg_small import TINY as TINY_SEGMENTOR
from paths import HELPERS
from timm.models import load_checkpoint
from timm.task import ClassificationTask, TrainingTask
from timm.utils import CheckpointSaver

from mmseg_plugin.checkpoints import extend_checkpoint_loader
from mmseg_plugin.compat import history_allowed
from timm_gated import GateLosses, extend_timm_tasks, gates, protect_timm_checkpoints, shape_features
from timm_gated.utils import installation

TINY: Dict[str, Any] = dict(layers=(1, 1, 1), channels=(4, 4, 4))


def make_gated() -> nn.Module:
    return timm.create_model('gated_resnet20', **TINY)


def make_plain() -> nn.Module:
    return timm.create_model('cifar_resnet20', **TINY)


def test_imports_change_nothing():
    worker = HELPERS / 'imports_worker.py'
    done = subprocess.run([sys.executable, str(worker)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == []


# When extensions are installed

RESNET: Dict[str, Any] = dict(depth=18, base_channels=8, stem_channels=8)


def dense_segmentor(kind: str) -> nn.Module:
    head = dict(TINY_SEGMENTOR['decode_head'], in_channels=64, channels=64, in_index=3)
    return MODELS.build(dict(type=kind, backbone=dict(type='ResNetV1c', **RESNET), decode_head=head))


def build(registry: Any, kind: str, **options: Any) -> Callable[[], Any]:
    return lambda: registry.build(dict(type=kind, **options))


@pytest.fixture
def installed(monkeypatch) -> List[bool]:
    """List that gets an entry at the first gate or objective."""
    calls: List[bool] = []
    monkeypatch.setattr(installation, '_pending', [lambda: calls.append(True)])
    return calls


@pytest.mark.parametrize('make', [
    make_gated,
    lambda: timm.create_model('gated_resnet20', features_only=True, **TINY),
    GateLosses,
    lambda: shape_features(make_plain(), {'layer1': 'normal'}),
    build(MODELS, 'GatedResNet', **RESNET),
    build(MODELS, 'SlimResNet', **RESNET),
    build(MODELS, 'TimmGatedBackbone', model_name='cifar_resnet20'),
    lambda: dense_segmentor('GatedEncoderDecoder'),
    build(HOOKS, 'GateStatisticsHook'),
    build(HOOKS, 'GateLossScheduleHook', loss_name='loss_l0', schedule='linear_warmup', begin=0, end=1),
], ids=['model', 'features', 'objective', 'shaping', 'backbone', 'slim', 'timm', 'segmentor', 'hook', 'schedule'])
def test_first_gated_object_installs(make, installed):
    make()
    assert installed == [True]
    make()
    assert installed == [True]


@pytest.mark.parametrize('make', [make_gated, GateLosses, lambda: gates(make_gated())[0][1]])
@pytest.mark.parametrize('again', [lambda thing: pickle.loads(pickle.dumps(thing)), copy.deepcopy])
def test_first_copy_installs(make, again, monkeypatch):
    thing, calls = make(), []
    monkeypatch.setattr(installation, '_pending', [lambda: calls.append(True)])
    again(thing)
    assert calls == [True]


@pytest.mark.parametrize('make', [
    make_plain, lambda: pickle.loads(pickle.dumps(make_plain())), lambda: dense_segmentor('EncoderDecoder'),
    lambda: timm.create_model('resnet18', device='meta'),
    lambda: ClassificationTask(make_plain(), nn.CrossEntropyLoss(), verbose=False)])
def test_dense_objects_install_nothing(make, installed):
    make()
    assert not installed


# Dense models keep the behaviour of timm


def test_errors_keep_their_types(tmp_path):
    """Also for a truncated file and a dense model."""
    make_gated()
    path, plain = tmp_path / 'weights.pth', make_plain()
    torch.save(plain.state_dict(), path)
    content = path.read_bytes()
    for size in (0, 3, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(Exception) as expected:
            timm.models._helpers.load_state_dict.__wrapped__(str(path))
        with pytest.raises(expected.type) as error:
            load_checkpoint(plain, str(path))
        assert str(error.value) == str(expected.value)
        assert len(error.value.__notes__) == 1 and f'{path} is truncated' in error.value.__notes__[0]
    for other, content in (('missing.pth', None), ('text.pth', b'no checkpoint')):
        if content:
            (tmp_path / other).write_bytes(content)
        with pytest.raises(Exception) as expected:
            timm.models._helpers.load_state_dict.__wrapped__(str(tmp_path / other))
        with pytest.raises(expected.type) as error:
            load_checkpoint(plain, str(tmp_path / other))
        assert str(error.value) == str(expected.value) and not hasattr(error.value, '__notes__')


@pytest.mark.parametrize('name', ['cut.**', 'cut.['])
def test_errors_keep_their_types_whatever_the_name(name, tmp_path):
    """The note is not worth another error."""
    extend_checkpoint_loader()
    make_gated()
    path = tmp_path / name
    path.write_bytes(b'PK\x03\x04')
    with pytest.raises(Exception) as expected:
        torch.load(path)
    for load in (timm.models.load_state_dict, CheckpointLoader.load_checkpoint):
        with pytest.raises(expected.type):
            load(str(path))
    path.unlink()
    for load in (timm.models.load_state_dict, CheckpointLoader.load_checkpoint):
        with pytest.raises(FileNotFoundError):
            load(str(path))


def test_savers_that_are_made_otherwise(tmp_path):
    """Without a task, which older ones do not have."""
    make_gated()
    saver = CheckpointSaver(make_plain(), None, checkpoint_dir=str(tmp_path))
    del saver.task
    (tmp_path / 'new').touch()
    saver._replace(str(tmp_path / 'new'), str(tmp_path / 'last'))
    assert (tmp_path / 'last').is_file()


def test_wrong_arguments_raise_type_errors():
    make_gated()
    for args in (dict(), dict(checkpoint='x'), dict(use_ema=False)):
        with pytest.raises(TypeError, match=r'load_state_dict\(\)'):
            timm.models.load_state_dict(**args)


def save_twice(model: nn.Module, folder: Path, monkeypatch: Any, by_task: bool = False) -> List[bool]:
    """Whether the last checkpoint still existed when the next one replaced it."""
    task = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False) if by_task else None
    saver = CheckpointSaver(
        None if by_task else model, torch.optim.SGD(model.parameters()), task=task, checkpoint_dir=str(folder))
    saver.save_checkpoint(0)
    there, replace = [], os.replace

    def watched(source: Any, target: Any) -> None:
        there.append(Path(target).exists())
        replace(source, target)
    monkeypatch.setattr(os, 'replace', watched)
    saver.save_checkpoint(1)
    assert saver.can_hardlink and torch.load(folder / 'last.pth.tar')['epoch'] == 1
    return there


@pytest.mark.parametrize('by_task', [False, True])
def test_checkpoints_of_gated_models_are_replaced_atomically(by_task, tmp_path, monkeypatch):
    assert save_twice(make_gated(), tmp_path, monkeypatch, by_task) == [True]


@pytest.mark.parametrize('by_task', [False, True])
def test_checkpoints_of_dense_models_are_replaced_by_timm(by_task, tmp_path, monkeypatch):
    make_gated()
    assert save_twice(make_plain(), tmp_path, monkeypatch, by_task) == [False]


def test_checkpoints_with_shaped_features_are_replaced_atomically(tmp_path, monkeypatch):
    model = make_plain()
    shape_features(model, {'layer1': 'normal'})
    assert save_twice(model, tmp_path, monkeypatch) == [True]


def test_tasks_of_dense_models_are_timms():
    make_gated()
    task = ClassificationTask(make_plain(), nn.CrossEntropyLoss(), verbose=False)
    assert type(task) is ClassificationTask
    assert type(pickle.loads(pickle.dumps(task))) is ClassificationTask


# Extensions call the functions that they replace, even if those were replaced before


def test_replaced_timm_functions_are_called(monkeypatch, tmp_path):
    calls = []

    def note(name: str) -> Callable:
        return lambda *args, **kwargs: calls.append((name, args[-1]))
    monkeypatch.setattr(CheckpointSaver, '_replace', note('replace'))
    monkeypatch.setattr('timm.task._helpers._load_train_checkpoint', note('resume'))
    for module in ('timm.models', 'timm.models._helpers', 'timm.models._builder', 'timm.models._hub'):
        monkeypatch.setattr(f'{module}.load_state_dict', note(module))
    protect_timm_checkpoints.__wrapped__()
    (tmp_path / 'new').touch()
    for model in (make_gated(), make_plain()):
        CheckpointSaver(model, None)._replace(str(tmp_path / 'new'), 'last')
    timm.task._helpers._load_train_checkpoint('path')
    timm.models._builder.load_state_dict('path')
    assert calls == [('replace', 'last'), ('replace', 'last'), ('resume', 'path'), ('timm.models._builder', 'path')]


@pytest.mark.parametrize('make', [make_gated, make_plain])
def test_replaced_task_constructor_is_called(make, monkeypatch):
    made = []

    def new(cls, *args, **kwargs):
        made.append((cls, args))
        return object.__new__(cls)
    monkeypatch.setattr(TrainingTask, '__new__', staticmethod(new))
    extend_timm_tasks.__wrapped__()
    model, criterion = make(), nn.CrossEntropyLoss()
    task = ClassificationTask(model, criterion, verbose=False)
    assert made == [(type(task), (model, criterion))] and task.criterion is criterion


def test_replaced_mmengine_loader_is_called(monkeypatch):
    def load(cls, filename, map_location=None, logger='current'):
        return cls, filename, map_location
    monkeypatch.setattr(CheckpointLoader, 'load_checkpoint', classmethod(load))
    extend_checkpoint_loader.__wrapped__()
    assert CheckpointLoader.load_checkpoint('path', map_location='cpu') == (CheckpointLoader, 'path', 'cpu')


# Classes that torch considers safe to load


class Malicious:
    def __reduce__(self):
        return getattr, (mmengine.logging.HistoryBuffer, '__init__')


@pytest.fixture
def history(tmp_path) -> Path:
    torch.save({'x': mmengine.logging.HistoryBuffer([1.], [1])}, tmp_path / 'good.pth')
    return tmp_path / 'good.pth'


def test_mmengine_loads_its_history_only(history, tmp_path):
    make_gated()
    before = set(torch.serialization.get_safe_globals())
    assert CheckpointLoader.load_checkpoint(str(history))['x'].mean() == 1
    torch.save({'x': Malicious()}, tmp_path / 'bad.pth')
    with pytest.raises(pickle.UnpicklingError, match="refused to load: .*'__init__'"):  # as torch
        CheckpointLoader.load_checkpoint(str(tmp_path / 'bad.pth'))
    assert set(torch.serialization.get_safe_globals()) == before
    with pytest.raises(pickle.UnpicklingError, match='Unsupported global'):
        torch.load(history)


def test_safe_globals_of_the_user_are_kept(history):
    with torch.serialization.safe_globals([mmengine.logging.HistoryBuffer]):
        for _ in range(2):
            with history_allowed(), history_allowed():
                assert torch.load(history)['x'].mean() == 1
        assert mmengine.logging.HistoryBuffer in torch.serialization.get_safe_globals()
    assert mmengine.logging.HistoryBuffer not in torch.serialization.get_safe_globals()


def test_threads_load_the_history_in_parallel(history):
    make_gated()
    with ThreadPoolExecutor(4) as threads:
        loaded = list(threads.map(CheckpointLoader.load_checkpoint, [str(history)] * 40))
    assert all(checkpoint['x'].mean() == 1 for checkpoint in loaded)
    assert mmengine.logging.HistoryBuffer not in torch.serialization.get_safe_globals()
