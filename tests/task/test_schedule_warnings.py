"""Schedules and the length of a training: scaled to it, logged at its start, and warnings at its end"""
import gc
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
import torch.nn as nn
from timm.task import ClassificationTask

import timm_gated  # noqa: F401  (registers the models)

TINY = dict(layers=(1, 1, 1), channels=(4, 4, 4))


def make_task(**kwargs) -> ClassificationTask:
    return ClassificationTask(timm.create_model('gated_resnet20', **TINY, **kwargs), nn.CrossEntropyLoss())


def train(task: ClassificationTask, *epochs: int) -> None:
    """Train epochs with the given numbers of steps."""
    for steps in epochs:
        task.get_trainable_module().train()
        for _ in range(steps):
            task(torch.randn(2, 3, 8, 8), torch.arange(2))


def messages(caplog, level: int) -> list:
    return [record.getMessage() for record in caplog.records if record.levelno == level and 'timm_gated' in record.name]


@pytest.mark.parametrize('name, option, schedule', [
    ('gated_resnet20', 50, [(0, 10), (10, 30)]), ('gated_resnet32', 1000, [(0, 200), (200, 600)]),
    ('gated_resnet18', 15, [(0, 2), (3, 6)]), ('gated_resnet20', None, [(0, 100), (100, 300)])])
def test_schedules_scale_with_the_training(name, option, schedule):
    losses = timm.create_model(name, schedule_epochs=option).gate_losses
    assert [losses.lam_epochs, losses.gamma_epochs] == schedule


def test_what_is_given_is_not_scaled():
    options = dict(schedule_epochs=50, gamma_epochs=(1, 2), lam_epochs='fixed')
    losses = timm.create_model('gated_resnet20', **options).gate_losses
    assert losses.gamma_epochs == (1, 2) and losses.lam_epochs == 'fixed'
    assert timm.create_model('fbs_resnet20', schedule_epochs=50).gate_losses.density_epochs == (0, 10)


@pytest.mark.parametrize('name, value, message', [
    ('convnet_aig_resnet20', 50, 'convnet_aig_resnet20 has none; got 50'),
    ('gated_resnet20', 0, 'schedule_epochs .* got 0'),
    ('gated_resnet20', 'all', "schedule_epochs .* got 'all'")])
def test_bad_lengths(name, value, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model(name, schedule_epochs=value)


@pytest.mark.parametrize('name', ['gated_resnet20', 'gated_resnet18'])
def test_two_lengths(name):
    with pytest.raises(ValueError, match='from_dense is the length of the training already.*got 8 and 50'):
        timm.create_model(name, from_dense=8, schedule_epochs=50)


def test_the_log_says_when_losses_begin_and_end(caplog):
    caplog.set_level(logging.INFO)
    make_task(schedule_epochs=50, lam_epochs='fixed')
    text = '\n'.join(messages(caplog, logging.INFO))
    assert 'batch_shaping_loss: lam 0.75 throughout' in text
    assert 'l0_loss: gamma 0 to 0.05 over epochs 10 to 30' in text


def test_the_log_tells_of_every_schedule(caplog):
    caplog.set_level(logging.INFO)
    make_task(from_dense=8, prior_end=dict(type='beta', a=0.2, b=0.8), prior_epochs=(1, 3))
    text = '\n'.join(messages(caplog, logging.INFO))
    for line in ('lam 0.003 to 0 over epochs 0 to 4', 'prior_end: share 0 to 1 over epochs 1 to 3',
                 'gates: noise 1 to 0 over epochs 0 to 5'):
        assert line in text


@pytest.mark.parametrize('epochs, warned', [(2, True), (3, True), (4, False)])
def test_a_loss_that_never_began(epochs, warned, caplog):
    task = make_task(gamma_epochs=(2, 4))
    train(task, *(epochs * [2]))
    assert not messages(caplog, logging.WARNING)
    del task
    gc.collect()
    found = messages(caplog, logging.WARNING)
    assert bool(found) == warned
    if warned:
        assert 'l0_loss was never active' in found[0] and f'schedule_epochs={epochs}' in found[0]


def test_a_prior_that_never_came(caplog):
    train(make_task(gamma=0., prior_end='uniform', prior_epochs=(1, 3)), 2, 2)
    gc.collect()
    warning, = messages(caplog, logging.WARNING)
    assert 'prior_end was never active: the last epoch was 1, but prior_end: share 0 to 1 over epochs 1 to 3' in warning


def test_a_schedule_of_no_length(caplog):
    """It is a step: the loss is active from that epoch on."""
    train(make_task(gamma_epochs=(1, 1)), 2, 2)
    gc.collect()
    assert not messages(caplog, logging.WARNING)


@pytest.mark.parametrize('epochs, warned', [(1, True), (3, True), (4, False)])
def test_a_density_that_was_not_reached(epochs, warned, caplog):
    """A network of saliencies is evaluated at its last density, even if the training ended earlier."""
    model = timm.create_model('fbs_resnet20', density_epochs=(0, 3), **TINY)
    train(ClassificationTask(model, nn.CrossEntropyLoss()), *(epochs * [2]))
    gc.collect()
    found = messages(caplog, logging.WARNING)
    assert bool(found) == warned
    if warned:
        assert 'density 0.6, which the network is evaluated with, was never reached' in found[0]
        assert f'schedule_epochs={epochs}' in found[0]


def test_none_is_expected_of_a_loss_of_no_weight(caplog):
    train(make_task(gamma=0.), 2)
    gc.collect()
    assert not messages(caplog, logging.WARNING)


def test_the_end_of_the_process():
    script = (
        'import logging, test_schedule_warnings as t\n'
        'logging.basicConfig()\n'
        'task = t.make_task()\n'
        't.train(task, 1)\n')
    done = subprocess.run(
        [sys.executable, '-c', script], cwd=Path(__file__).parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and 'l0_loss was never active: the last epoch was 0' in done.stderr, done.stderr


@pytest.mark.parametrize('epochs', [(1, 1, 1, 1), (6, 2, 6, 2), (2, 6, 6, 6), (8, 8, 4), (8, 12, 8)])
def test_epochs_that_look_wrong(epochs, caplog):
    task = make_task(gamma_epochs='fixed')
    train(task, *epochs, 1)
    found = messages(caplog, logging.WARNING)
    assert len(found) == 1 and 'call task.set_epoch(epoch)' in found[0]


@pytest.mark.parametrize('epochs', [(3, 3, 3), (5, 4, 5), (4,), (1, 2, 2), (10, 12, 10)])
def test_epochs_that_do_not(epochs, caplog):
    train(make_task(gamma_epochs='fixed'), *epochs)
    assert not messages(caplog, logging.WARNING)


def test_set_epoch_ends_the_counting(caplog):
    task = make_task(lam_epochs=(0, 4), gamma_epochs='fixed')
    seen = []
    for epoch in range(3):
        task.set_epoch(epoch)
        for _ in range(4):
            task.get_trainable_module().train()  # in every iteration
            seen.append(task(torch.randn(2, 3, 8, 8), torch.arange(2))['lam'])
            task.get_trainable_module().eval()
    assert seen == [0.75] * 4 + [0.5625] * 4 + [0.375] * 4 and task.gate_epoch == 2
    assert not messages(caplog, logging.WARNING)
