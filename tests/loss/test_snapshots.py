"""Distributions of single gates over a training, as recorded by the task"""
import copy

import numpy as np
import pytest
import timm
import torch
import torch.nn as nn
from timm.task import ClassificationTask

from timm_gated import gates
from timm_gated.loss.snapshots import GateSnapshots, histograms, load_snapshots


def make_task(folder, **kwargs) -> ClassificationTask:
    model = timm.create_model(
        'gated_resnet20', channels=(8, 8, 8), lam=0.5, lam_epochs=(0, 2), gamma=0.1, gamma_epochs=(1, 3),
        snapshot_dir=folder and str(folder), **kwargs)
    return ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)


def train_epoch(task: ClassificationTask, steps: int = 2) -> torch.Tensor:
    """The calls of timm's train.py; returns sigmoid(logit) of all gates and images."""
    model = task.get_trainable_module()
    model.train()
    seen = []
    for _ in range(steps):
        task(torch.randn(4, 3, 8, 8), torch.arange(4))
        seen.append(torch.cat([gate.logits for _, gate in gates(model)], 1).detach().sigmoid())
    return torch.cat(seen)


def test_histograms_by_hand():
    values = torch.tensor([[0., 1.], [0.24, 0.25], [0.5, 0.99], [0.75, 0.]])
    assert histograms(values, 4).tolist() == [[2, 0, 1, 1], [1, 1, 0, 2]]


def test_task_records_every_epoch(tmp_path):
    torch.manual_seed(0)
    task = make_task(tmp_path / 'run' / 'gates', snapshot_gates=5)
    first = train_epoch(task)
    assert not list(tmp_path.rglob('*.npz'))
    task.get_trainable_module().eval()
    assert [path.name for path in tmp_path.rglob('*.*')] == ['epoch_0000.npz']
    train_epoch(task)
    task.get_task_state()  # a checkpoint without a validation before it
    snapshots = load_snapshots(tmp_path / 'run' / 'gates')
    assert snapshots.epochs.tolist() == [0, 1]
    assert snapshots.names == [
        'layer1.0.gate1/0', 'layer1.2.gate1/2', 'layer2.1.gate1/4', 'layer3.0.gate1/5', 'layer3.2.gate1/7']
    assert snapshots.counts.shape == (2, 5, 50) and (snapshots.counts.sum(-1) == 8).all()
    expected = np.histogram(first[:, 18].numpy(), np.linspace(0, 1, 51))[0]  # layer1.2.gate1/2
    assert snapshots.counts[0, 1].tolist() == expected.tolist()
    assert snapshots.mean()[0, 1] == pytest.approx(first[:, 18].mean().item(), abs=0.01)
    assert {name: weight.tolist() for name, weight in snapshots.weights.items()} == {
        'lam': [0.5, 0.25], 'gamma': [0., 0.]}


def test_resume_continues_in_the_same_folder(tmp_path):
    task = make_task(tmp_path)
    train_epoch(task)
    state = task.get_checkpoint_state()
    train_epoch(task, steps=1)  # stopped in the second epoch, before it was written
    resumed = make_task(tmp_path)
    resumed.load_checkpoint_state(state['state_dict'], state['task_state'])
    for _ in range(2):
        train_epoch(resumed)
    resumed.get_trainable_module().eval()
    snapshots = load_snapshots(tmp_path)
    assert snapshots.epochs.tolist() == [0, 1, 2]
    assert (snapshots.counts.sum(-1) == 8).all()
    assert snapshots.counts.shape[1] == 64


def test_validation_within_an_epoch_loses_nothing(tmp_path):
    task = make_task(tmp_path)
    train_epoch(task)
    snapshots = task.get_trainable_module().gate_losses.snapshots
    snapshots.write()
    task(torch.randn(4, 3, 8, 8), torch.arange(4))
    snapshots.write()
    assert (load_snapshots(tmp_path).counts.sum(-1) == 12).all()


def test_off_by_default_and_silent_in_copies_and_evaluation(tmp_path):
    assert timm.create_model('gated_resnet20').gate_losses.snapshots is None
    task = make_task(tmp_path)
    train_epoch(task)
    ema = copy.deepcopy(task.get_trainable_module())
    ema.eval()
    assert not list(tmp_path.iterdir())
    task.get_trainable_module().eval()
    task(torch.randn(4, 3, 8, 8), torch.arange(4))  # a validation loss
    task.get_trainable_module().eval()
    assert (load_snapshots(tmp_path).counts.sum(-1) == 8).all()


def test_mistakes(tmp_path):
    with pytest.raises(ValueError, match='no gate snapshots .* snapshot_dir'):
        load_snapshots(tmp_path)
    with pytest.raises(ValueError, match="must be a path, got ''"):
        GateSnapshots('')
    with pytest.raises(ValueError, match='number of gates in snapshots .* got 0'):
        make_task(tmp_path, snapshot_gates=0)
    task = make_task(tmp_path)
    train_epoch(task)
    task.get_trainable_module().eval()
    other = make_task(tmp_path, snapshot_gates=3)
    other.set_epoch(7)
    train_epoch(other)
    other.get_trainable_module().eval()
    with pytest.raises(ValueError, match='epoch_0007.npz and epoch_0000.npz .* different gates'):
        load_snapshots(tmp_path)
    (tmp_path / 'file').write_text('')
    with pytest.raises(OSError):  # at the first step, not after the first epoch
        train_epoch(make_task(tmp_path / 'file' / 'gates'))


def test_a_failed_write_does_not_stop_a_training(tmp_path, caplog):
    task = make_task(tmp_path / 'gates')
    train_epoch(task)
    (tmp_path / 'gates').rmdir()
    task.get_trainable_module().eval()
    assert 'could not be written' in caplog.text
