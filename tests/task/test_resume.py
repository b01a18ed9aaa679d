"""Killed and resumed trainings with timm's task and checkpoint saver; truncated checkpoints"""
import copy
import os
import pickle
import random
import re
import tarfile
from pathlib import Path
from typing import Any, Dict, List, Optional

import pytest
import timm
import torch
import torch.nn as nn
from effort import TIMES
from killing import Kill, Life, assert_equal, live, random_kills, was_killed
from safetensors import SafetensorError
from safetensors.torch import save_file
from timm.models import load_checkpoint
from timm.task import ClassificationTask, resume_task_checkpoint
from timm.utils import CheckpointSaver
from timm_resume_worker import RECOVERY_INTERVAL, STEPS, train

from timm_gated.loss.snapshots import load_snapshots
from timm_gated.task.checkpoint_saver import protect_timm_checkpoints
from timm_gated.utils.checkpoints import complete_checkpoints, is_truncated

KILLS = 10 * TIMES
EPOCHS = 2 + KILLS  # more than a training completes before it is killed
TINY: Dict[str, Any] = dict(layers=(1, 1, 1), channels=(4, 4, 4))
RUNS: Dict[str, Dict[str, Any]] = {  # everything with a schedule, a state or noise
    'gated_resnet20': dict(
        lam_epochs=(0, 20), gamma=0.1, gamma_epochs=(2, 22), noise_epochs=(1, 21), prior_epochs=(3, 19), budget=0.5,
        prior={'type': 'beta', 'learnable': True}, prior_end={'type': 'beta', 'a': 0.3, 'b': 0.6}, snapshot_gates=4),
    'fbs_resnet20': dict(density=0.25, density_epochs=(0, 6)),
    'skipnet_resnet38': dict(stage='hybrid'),
    'convnet_aig_resnet20': dict(budget=0.7),
    'gaternet_resnet20': dict(),
    'batch_shaped': dict(
        network='cifar_resnet20', features={'layer2': {'type': 'beta', 'learnable': True}}, weight=0.5, epochs=(1, 6)),
}


class Training:
    """A training in a folder that is killed and resumed, and its reports."""

    def __init__(self, name: str, folder: Path, epochs: int) -> None:
        self.name, self.folder, self.epochs = name, folder, epochs
        folder.mkdir()
        self.model_args = {**TINY, **RUNS[name]}
        if 'snapshot_gates' in self.model_args:
            self.model_args['snapshot_dir'] = str(folder / 'gates')
        self.reports: List[Dict[str, Any]] = []

    def run(self, resume: Optional[Path] = None, kill: Optional[Kill] = None) -> Life:
        life = live(train, self.name, self.model_args, self.folder, resume, self.epochs, kill=kill)
        self.reports += life.reports
        return life

    def last(self) -> Optional[Path]:
        path = self.folder / 'last.pth.tar'
        return path if path.exists() else None

    def newest(self) -> Optional[Path]:
        found = complete_checkpoints(self.folder, '.pth.tar')
        return found[0] if found else None

    def result(self) -> Dict[str, Any]:
        """The last checkpoint, without timm's list of other files: a kill may have left fewer of them."""
        checkpoint = torch.load(self.folder / 'last.pth.tar', weights_only=True)
        return {key: value for key, value in checkpoint.items() if key != 'saver'}


def by_step(reports: List[Dict[str, Any]]) -> Dict[Any, Dict[str, Any]]:
    return {(report['epoch'], report['step']): report for report in reports}


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory) -> Training:
    training = Training('gated_resnet20', tmp_path_factory.mktemp('complete') / 'run', epochs=EPOCHS)
    assert training.run().exitcode == 0
    return training


def test_killed(uninterrupted, tmp_path):
    training = Training('gated_resnet20', tmp_path / 'run', epochs=EPOCHS)
    truncated = []
    for kill in random_kills(seed=0, number=KILLS, max_steps=2 * STEPS - 1, max_delay=0.1, sizes=range(30000)):
        assert was_killed(training.run(training.last(), kill))
        if kill.size is not None:
            truncated += [path.name for path in training.folder.glob('*.pth.tar') if is_truncated(path)]
    assert {'tmp.pth.tar', 'recovery_tmp.pth.tar'} <= set(truncated)
    assert training.run(training.last()).exitcode == 0

    complete = by_step(uninterrupted.reports)
    assert len(complete) == EPOCHS * STEPS and len(training.reports) > len(complete)
    for report in training.reports:
        assert report == complete[report['epoch'], report['step']]
    assert_equal(training.result(), uninterrupted.result())
    mine, other = (load_snapshots(run.folder / 'gates') for run in (training, uninterrupted))
    assert (mine.counts == other.counts).all() and mine.epochs.tolist() == list(range(EPOCHS))


@pytest.mark.parametrize('name', sorted(set(RUNS) - {'gated_resnet20'}))
def test_other_methods(name, tmp_path):
    complete, training = (Training(name, tmp_path / folder, epochs=8) for folder in ('complete', 'killed'))
    assert complete.run().exitcode == 0
    for kill in random_kills(seed=1, number=4, max_steps=2 * STEPS - 1, max_delay=0.1, sizes=range(30000)):
        assert was_killed(training.run(training.last(), kill))
    assert training.run(training.last()).exitcode == 0
    expected = by_step(complete.reports)
    assert [report for report in training.reports if report != expected[report['epoch'], report['step']]] == []
    assert_equal(training.result(), complete.result())


def test_recovery_checkpoints(uninterrupted, tmp_path):
    """timm continues with the next epoch, so the parameters differ, but all schedules are the same."""
    training = Training('gated_resnet20', tmp_path / 'run', epochs=EPOCHS)
    within_first_checkpoint = Kill(STEPS, size=0)
    assert was_killed(training.run(kill=within_first_checkpoint))
    assert training.newest() == training.folder / f'recovery-0-{RECOVERY_INTERVAL - 1}.pth.tar'
    for kill in random_kills(seed=2, number=9, max_steps=2 * STEPS - 1, max_delay=0.1, sizes=range(30000)):
        assert was_killed(training.run(training.newest(), kill))
    assert training.run(training.newest()).exitcode == 0
    complete = by_step(uninterrupted.reports)
    for report in training.reports:
        assert {**report, 'loss': None} == {**complete[report['epoch'], report['step']], 'loss': None}
    assert training.result()['task_state'] == uninterrupted.result()['task_state'] == {'gate_epoch': EPOCHS - 1}


def test_the_last_checkpoint_stays_until_the_next_is_there(tmp_path, monkeypatch):
    model = timm.create_model('gated_resnet20', **TINY)
    saver = CheckpointSaver(model, torch.optim.SGD(model.parameters()), checkpoint_dir=str(tmp_path))
    saver.save_checkpoint(0, metric=1.)
    monkeypatch.setattr(os, 'replace', raise_interrupt)  # interrupted just before the replacement
    with pytest.raises(KeyboardInterrupt):
        saver.save_checkpoint(1, metric=1.)
    assert torch.load(tmp_path / 'last.pth.tar', weights_only=True)['epoch'] == 0


def raise_interrupt(*args: Any) -> None:
    raise KeyboardInterrupt


# Truncated checkpoints


def cuts(content: bytes) -> List[int]:
    """Lengths to truncate a file to: near its start and its end, which formats check, and anywhere."""
    size = len(content)
    return [*range(30), *random.Random(0).sample(range(30, size - 70), 100), *range(size - 70, size)]


def test_cut_training_checkpoint(uninterrupted, tmp_path):
    content = (uninterrupted.folder / 'last.pth.tar').read_bytes()
    last = tmp_path / 'last.pth.tar'
    task = ClassificationTask(timm.create_model('gated_resnet20', **TINY), nn.CrossEntropyLoss(), verbose=False)
    before = copy.deepcopy(task.state_dict())
    for size in cuts(content):
        last.write_bytes(content[:size])
        with pytest.raises(Exception, match=rf'{re.escape(str(last))} is truncated.*no complete checkpoint'):
            resume_task_checkpoint(task, str(last))
        with pytest.raises(Exception, match='last.pth.tar is truncated'):  # --initial-checkpoint, --checkpoint
            load_checkpoint(task.get_trainable_module(), str(last))
    assert_equal(task.state_dict(), before)
    assert task.gate_epoch == -1

    for index, name in enumerate(['checkpoint-2.pth.tar', 'checkpoint-3.pth.tar', 'recovery-4-1.pth.tar']):
        (tmp_path / name).write_bytes(content if 'checkpoint' in name else content[:-1])
        os.utime(tmp_path / name, (index, index))
    with pytest.raises(Exception, match=r'newest first: checkpoint-3.pth.tar, checkpoint-2.pth.tar\. Use one of'):
        resume_task_checkpoint(task, str(last))


def test_cut_safetensors(tmp_path):
    path = tmp_path / 'weights.safetensors'
    save_file(timm.create_model('gated_resnet20', **TINY).state_dict(), path)
    content = path.read_bytes()
    model = timm.create_model('gated_resnet20', **TINY, checkpoint_path=str(path))
    for size in cuts(content):
        path.write_bytes(content[:size])
        with pytest.raises(SafetensorError, match='weights.safetensors is truncated'):
            load_checkpoint(model, str(path))


@pytest.mark.parametrize('zipped', [True, False], ids=['new', 'old'])
def test_whole_files_have_their_own_errors(tmp_path, zipped):
    path = tmp_path / 'last.pth.tar'
    task = ClassificationTask(timm.create_model('cifar_resnet20'), nn.CrossEntropyLoss(), verbose=False)
    torch.save({'state_dict': Path('.')}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(pickle.UnpicklingError, match='Unsupported global'):
        resume_task_checkpoint(task, str(path))
    torch.save({'state_dict': {}}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(RuntimeError, match='Missing key'):
        resume_task_checkpoint(task, str(path))


def test_only_complete_checkpoints_are_recommended(tmp_path):
    (tmp_path / 'truncated.pth.tar').write_bytes(b'PK')
    with tarfile.open(tmp_path / 'images.tar', 'w') as tar:
        tar.add(__file__)
    torch.save({}, tmp_path / '.being_written.partial.tar')
    torch.save({}, tmp_path / 'complete.pth.tar')
    (tmp_path / 'link.pth.tar').symlink_to('nowhere')
    assert complete_checkpoints(tmp_path, '.tar') == [tmp_path / 'complete.pth.tar']


def test_loading_by_timm_is_explained_everywhere(tmp_path):
    path = tmp_path / 'weights.pth'
    path.write_bytes(b'PK')
    timm.create_model('gated_resnet20', **TINY)
    for module in (timm.models, timm.models._helpers, timm.models._builder, timm.models._hub):
        with pytest.raises(RuntimeError, match='weights.pth is truncated') as error:
            module.load_state_dict(checkpoint_path=str(path))
        assert len(error.value.__notes__) == 1


def test_names_of_timm_that_are_gone_are_left_alone(monkeypatch):
    for name in ('timm.task._helpers._load_train_checkpoint', 'timm.utils.CheckpointSaver._replace'):
        monkeypatch.delattr(name)
    for name in ('', '._helpers', '._builder', '._hub'):
        monkeypatch.delattr(f'timm.models{name}.load_state_dict')
    protect_timm_checkpoints.__wrapped__()
    assert not hasattr(CheckpointSaver, '_replace')
