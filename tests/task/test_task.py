"""Gated models in timm's training: tasks, optimizer, checkpoint saver, resume"""
import copy
import io
import logging
import pickle
import subprocess
import sys

import pytest
import timm
import torch
import torch.nn as nn
from timm.optim import create_optimizer_v2
from timm.task import (
    ClassificationTask,
    FeatureDistillationTask,
    LogitDistillationTask,
    load_task_ema_checkpoint,
    resume_task_checkpoint,
)
from timm.utils import CheckpointSaver, NativeScaler

import timm_gated
from timm_gated import ObjectiveTask, batch_shaping_loss, gates, l0_loss

SCHEDULE = dict(lam=0.75, lam_epochs=(0, 2), gamma=0.1, gamma_epochs=(1, 3))
# Weights of this schedule in epochs 0, 1, 2, 3.
EXPECTED = [(0.75, 0.), (0.375, 0.), (0., 0.05), (0., 0.1)]


def make_model(**kwargs) -> nn.Module:
    return timm.create_model('gated_resnet20', **{'layers': (1, 1, 1), 'channels': (8, 8, 8), **SCHEDULE, **kwargs})


def make_task(model: nn.Module) -> ClassificationTask:
    return ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)


def batch(size: int = 4):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, 3, 16, 16, generator=generator), torch.arange(size) % 10


def train_epochs(task, num_epochs: int, steps: int = 2, validate: bool = True):
    """The calls of timm's train.py. Returns lambda and gamma of every step."""
    seen = []
    for _ in range(num_epochs):
        task.get_trainable_module().train()
        for _ in range(steps):
            result = task(*batch())
            seen.append((result['lam'], result['gamma']))
        if validate:
            task.get_eval_model().eval()
            task.get_eval_model()(batch()[0])
    return seen


def test_loss_is_the_task_loss_plus_weighted_terms():
    model = make_model(lam=0.5, lam_epochs='fixed', gamma=0.2, gamma_epochs='fixed')
    result = make_task(model)(*batch())
    logits = torch.cat([gate.logits for _, gate in gates(model)], 1)
    shaping, l0 = batch_shaping_loss(logits.sigmoid(), reduction='sum'), l0_loss(logits, 'mean')
    torch.testing.assert_close(result['batch_shaping_loss'], shaping)
    torch.testing.assert_close(result['l0_loss'], l0)
    torch.testing.assert_close(result['task_loss'], nn.functional.cross_entropy(result['output'], batch()[1]))
    torch.testing.assert_close(result['loss'], result['task_loss'] + 0.5 * shaping + 0.2 * l0)
    decisions = torch.cat([gate.decision for _, gate in gates(model)], 1)
    torch.testing.assert_close(result['gate_density'], decisions.mean())
    torch.testing.assert_close(result['gate_density_eval'], (logits > 0).float().mean())


def test_gate_losses_reach_the_gates():
    model = make_model(lam=0., gamma=1., gamma_epochs='fixed')
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for _, gate in gates(model):
        gate.fc2.bias.requires_grad_(True)
    result = make_task(model)(*batch())
    (result['gamma'] * result['l0_loss']).backward()
    for _, gate in gates(model):
        assert (gate.fc2.bias.grad > 0).all()  # gradient descent closes gates


def test_script_that_imported_the_task_before_the_plugin():
    script = (
        'from timm.task import ClassificationTask\n'  # as at the top of train.py
        'from timm.models import create_model\n'
        'import importlib; importlib.import_module("timm_gated")\n'  # as by --device-modules
        'import torch\n'
        'model = create_model("gated_resnet20")\n'
        'task = ClassificationTask(model, torch.nn.CrossEntropyLoss())\n'
        'result = task(torch.randn(2, 3, 32, 32), torch.tensor([0, 1]))\n'
        'assert "batch_shaping_loss" in result, list(result)\n')
    subprocess.run([sys.executable, '-c', script], check=True, timeout=120)


def test_models_without_gates_get_the_untouched_task():
    task = make_task(timm.create_model('cifar_resnet20'))
    assert type(task) is ClassificationTask
    assert set(task(*batch())) == {'loss', 'output'}
    assert task.get_task_state() == {}


def test_isinstance_and_name_of_the_task_stay():
    task = make_task(make_model())
    assert isinstance(task, (ClassificationTask, ObjectiveTask)) and type(task).__name__ == 'ClassificationTask'


def saved_and_loaded(task):
    file = io.BytesIO()
    torch.save(task, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize('again', [
    lambda task: pickle.loads(pickle.dumps(task)), lambda task: pickle.loads(pickle.dumps(task, protocol=0)),
    saved_and_loaded, copy.deepcopy], ids=['pickle', 'protocol0', 'save', 'deepcopy'])
def test_a_copy_of_a_task_goes_on_like_the_task(again):
    task = make_task(make_model())
    train_epochs(task, 2)
    other = again(task)
    assert type(other) is type(task) and other.get_trainable_module() is not task.get_trainable_module()
    assert train_epochs(task, 1) == train_epochs(other, 1) == [EXPECTED[2]] * 2
    assert task.gate_epoch == other.gate_epoch == 2


@pytest.mark.parametrize('task_cls', [LogitDistillationTask, FeatureDistillationTask])
def test_other_tasks_are_pickled_too(task_cls):
    teacher = timm.create_model('cifar_resnet20', channels=(8, 8, 8))
    task = task_cls(make_model(), teacher, criterion=nn.CrossEntropyLoss(), verbose=False)
    assert 'lam' in pickle.loads(pickle.dumps(task))(*batch())


class OwnPickle(ClassificationTask):
    def __reduce__(self):
        return make_own, (self.get_trainable_module(),)


def make_own(model):
    return OwnPickle(model, nn.CrossEntropyLoss(), verbose=False)


def test_a_task_with_its_own_way_to_be_pickled():
    task = make_own(make_model())
    assert 'lam' in pickle.loads(pickle.dumps(task))(*batch()) and 'lam' in copy.deepcopy(task)(*batch())


def test_pickles_are_opened_in_another_process(tmp_path):
    (tmp_path / 'task').write_bytes(pickle.dumps(make_task(make_model())))
    (tmp_path / 'model').write_bytes(pickle.dumps(make_model()))
    script = (
        'import pickle, torch\n'
        'from timm.task import ClassificationTask\n'
        'model = pickle.load(open("model", "rb"))\n'
        'for task in (ClassificationTask(model, torch.nn.CrossEntropyLoss()), pickle.load(open("task", "rb"))):\n'
        '    result = task(torch.randn(2, 3, 16, 16), torch.tensor([0, 1]))\n'
        '    assert "batch_shaping_loss" in result, list(result)\n')
    subprocess.run([sys.executable, '-c', script], check=True, timeout=120, cwd=tmp_path)


@pytest.mark.parametrize('validate', [True, False])
def test_schedule_steps_once_an_epoch(validate):
    seen = train_epochs(make_task(make_model()), 4, validate=validate)
    assert seen == [value for value in EXPECTED for _ in range(2)]


def test_repeated_train_calls_before_a_step_are_one_epoch():
    task = make_task(make_model())
    task.get_trainable_module().train()
    task.get_trainable_module().train()
    task(*batch())
    assert task.gate_epoch == 0


def test_epoch_can_be_set():
    task = make_task(make_model())
    task.get_trainable_module().train()
    task.set_epoch(2)
    result = task(*batch())
    assert task.gate_epoch == 2 and (result['lam'], result['gamma']) == EXPECTED[2]


def test_a_pass_in_evaluation_mode_begins_no_epoch():
    task = make_task(make_model())
    task.get_trainable_module().eval()
    with torch.no_grad():
        task(*batch())
    task.get_trainable_module().train()
    task(*batch())
    assert task.gate_epoch == 0


def test_resume_continues_step_by_step(tmp_path):
    uninterrupted = train_epochs(make_task(make_model()), 4)

    task = make_task(make_model())
    optimizer = create_optimizer_v2(task.get_trainable_module(), opt='sgd', lr=0.1)
    task.setup_ema(decay=0.9)
    first = train_epochs(task, 2)
    saver = CheckpointSaver(
        task.get_trainable_module(), optimizer, task=task, checkpoint_dir=str(tmp_path), recovery_dir=str(tmp_path))
    saver.save_checkpoint(1, metric=1.)

    task = make_task(make_model())
    optimizer = create_optimizer_v2(task.get_trainable_module(), opt='sgd', lr=0.1)
    assert resume_task_checkpoint(task, str(tmp_path / 'last.pth.tar'), optimizer=optimizer) == 2
    task.setup_ema(decay=0.9)
    load_task_ema_checkpoint(task, str(tmp_path / 'last.pth.tar'))
    assert first + train_epochs(task, 2) == uninterrupted


def noises(model: nn.Module):
    return {gate.noise.item() for _, gate in gates(model)}


def test_noise_is_annealed_and_resumed():
    task = make_task(make_model(noise_epochs=(0, 2)))
    seen = []
    for _ in range(3):
        train_epochs(task, 1)
        seen.append(noises(task.get_trainable_module()))
    assert seen == [{1.}, {0.5}, {0.}]

    task = make_task(make_model(noise_epochs=(0, 2)))
    task.load_task_state({'gate_epoch': 0})
    train_epochs(task, 1)
    assert noises(task.get_trainable_module()) == {0.5}


def test_noise_is_the_paper_s_by_default():
    task = make_task(make_model())
    train_epochs(task, 3)
    assert noises(task.get_trainable_module()) == {1.}


def test_fine_tuning_from_a_trained_model_starts_its_schedule_anew(tmp_path):
    task = make_task(make_model())
    train_epochs(task, 3)
    torch.save(task.get_trainable_module().state_dict(), tmp_path / 'trained.pth')
    task = make_task(make_model(checkpoint_path=str(tmp_path / 'trained.pth')))
    assert train_epochs(task, 1, steps=1) == [EXPECTED[0]]


def test_resume_from_a_run_without_gates_warns(caplog):
    task = make_task(make_model())
    with caplog.at_level(logging.WARNING):
        task.load_task_state(None)
    assert 'schedules begin at epoch 0' in caplog.text


def test_parts_are_logged(caplog):
    task = ClassificationTask(make_model(log_interval=2), nn.CrossEntropyLoss(), verbose=True)
    with caplog.at_level(logging.INFO, logger='timm_gated.task'):
        train_epochs(task, 2, steps=4)
        task.get_task_state()
    lines = [record.message for record in caplog.records if record.name.startswith('timm_gated.task')]
    assert [line[:15] for line in lines] == [
        f'Gates: {epoch} {what}' for epoch in (0, 1) for what in ('[   0]', '[   2]', '[   3]', 'valida')]
    for part in (
            'task_loss', 'batch_shaping_loss', 'l0_loss', 'lam: 0.75', 'gamma: 0.0', 'gate_density: ',
            'gate_density_eval: '):
        assert part in lines[0]


def test_gradient_accumulation_averages_the_whole_loss():
    torch.manual_seed(0)
    model = make_model(lam_epochs='fixed').train()
    task = make_task(model)
    halves = [(batch(8)[0][i::2], batch(8)[1][i::2]) for i in (0, 1)]
    torch.manual_seed(1)
    for half in halves:
        loss = task(*half)['loss']
        loss /= 2  # in place, as train.py does
        loss.backward()
    accumulated = model.layer1[0].gate1.fc2.bias.grad.clone()
    model.zero_grad()
    torch.manual_seed(1)
    sum(task(*half)['loss'] for half in halves).mul(0.5).backward()
    torch.testing.assert_close(model.layer1[0].gate1.fc2.bias.grad, accumulated)
    assert task.gate_epoch == 0


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model = make_model()
    task = make_task(model)
    with torch.autocast('cpu', dtype=dtype):
        result = task(*batch())
    assert result['batch_shaping_loss'].dtype == torch.float32 and result['loss'].dtype == torch.float32
    result['loss'].backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_grad_scaler():
    model = make_model()
    task = make_task(model)
    optimizer = create_optimizer_v2(model, opt='sgd', lr=0.1)
    scaler = NativeScaler(device='cpu')
    before = model.layer1[0].gate1.fc2.bias.detach().clone()
    for _ in range(4):  # the first steps may be skipped, until the scale fits
        with torch.autocast('cpu', dtype=torch.float16):
            loss = task(*batch())['loss']
        optimizer.zero_grad()
        scaler(loss, optimizer, parameters=model.parameters())
    assert not torch.equal(before, model.layer1[0].gate1.fc2.bias)
    assert all(p.isfinite().all() for p in model.parameters())


def test_compiled_task_has_the_same_losses():
    model = make_model()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    with timm_gated.force_gates(model, 'open'):  # no noise, so that the two runs can be compared
        eager = make_task(model.train())(*batch())
    model.load_state_dict(state)
    task = make_task(model)
    task.compile(backend='aot_eager')
    with timm_gated.force_gates(model, 'open'):
        compiled = task(*batch())
    for key in ('loss', 'task_loss', 'batch_shaping_loss', 'l0_loss'):
        torch.testing.assert_close(compiled[key], eager[key])
    compiled['loss'].backward()
    assert all(gate.fc1.weight.grad.abs().sum() > 0 for _, gate in gates(model))
    assert train_epochs(task, 2, steps=1) == EXPECTED[1:3]


@pytest.mark.parametrize('task_cls', [LogitDistillationTask, FeatureDistillationTask])
def test_distillation(task_cls, tmp_path):
    student, teacher = make_model(), timm.create_model('cifar_resnet20')
    task = task_cls(student, teacher, criterion=nn.CrossEntropyLoss(), verbose=False)
    result = task(*batch())
    expected = result['task_loss'] + result['kd_loss'] + 0.75 * result['batch_shaping_loss']
    torch.testing.assert_close(result['loss'], expected)
    train_epochs(task, 2)

    state = task.get_checkpoint_state()
    resumed = task_cls(make_model(), teacher, criterion=nn.CrossEntropyLoss(), verbose=False)
    resumed.load_checkpoint_state(state['state_dict'], state['task_state'])
    assert resumed.gate_epoch == task.gate_epoch
    if task_cls is FeatureDistillationTask:  # a projection from 8 to 64 channels must be restored too
        torch.testing.assert_close(
            resumed.get_trainable_module().projection.weight, task.get_trainable_module().projection.weight)


def test_gated_teacher_does_not_train_its_gates():
    task = LogitDistillationTask(
        timm.create_model('cifar_resnet20'), make_model().eval(), criterion=nn.CrossEntropyLoss(), verbose=False)
    assert set(task(*batch())) == {'loss', 'output', 'task_loss', 'kd_loss'}


def test_learning_prior_is_trained_and_saved():
    prior = timm_gated.Beta(0.6, 0.4, learnable=True)
    model = make_model(prior=prior, lam=1.)
    task = make_task(model)
    optimizer = create_optimizer_v2(model, opt='sgd', lr=0.1, weight_decay=0.1, filter_bias_and_bn=False)
    before = prior.state_dict()
    before = {k: v.clone() for k, v in before.items()}
    task(*batch())['loss'].backward()
    optimizer.step()
    assert before and all(not torch.equal(before[k], v) for k, v in prior.state_dict().items())
    assert any(key.startswith('gate_losses.prior') for key in model.state_dict())
    decayed = {id(p) for group in optimizer.param_groups if group['weight_decay'] for p in group['params']}
    assert not decayed & {id(p) for p in prior.parameters()}


def test_losses_without_a_gradient_are_refused():
    model = make_model()
    with torch.no_grad():
        model(batch()[0])
    with pytest.raises(RuntimeError, match='use_reentrant=False'):
        model.gate_losses.terms(model, 0)
