"""MACs and gate density of a validation, in timm's evaluators and in the log"""
import copy
import gc
import logging
import pickle
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
import torch.nn as nn
from nets import ONE_EACH, TINY, is_imagenet, shuffle
from timm.task import ClassificationTask, FeatureDistillationTask, LogitDistillationTask, MultiLabelClassificationTask

from timm_gated import count_macs, gates

CLASSES = 7


def images(size: int, seed: int = 0, pixels: int = 32) -> torch.Tensor:
    """Images of colours so different that gates decide differently."""
    generator = torch.Generator().manual_seed(seed)
    colours = 3 * torch.randn(size, 3, 1, 1, generator=generator)
    return torch.randn(size, 3, pixels, pixels, generator=generator) + colours


def make_model(name: str = 'gated_resnet20', seed: int = 0, **kwargs) -> nn.Module:
    torch.manual_seed(seed)
    return shuffle(timm.create_model(name, num_classes=CLASSES, **{**TINY[name], **kwargs}), seed)


def make_task(model: nn.Module, **kwargs) -> ClassificationTask:
    return ClassificationTask(model, **{'verbose': False, **kwargs})


def labels(size: int) -> torch.Tensor:
    return torch.arange(size) % CLASSES


def validate(task: ClassificationTask, batches, ema: bool = False, **kwargs):
    """The calls of a validation script."""
    evaluator = task.create_evaluator(**kwargs)
    model = task.get_eval_model(ema=ema)
    model.eval()
    with torch.inference_mode():
        for batch in batches:
            evaluator.update(model(batch), labels(len(batch)))
            assert set(evaluator.summary()) == set(evaluator.metric_names)
    return evaluator.compute()


def expected(model: nn.Module, *batches: torch.Tensor):
    """Mean share of MACs and of open gates, counted batch by batch."""
    shares, densities = [], []
    for batch in batches:
        macs = count_macs(model, batch)
        shares.append(macs.per_sample.double() / macs.dense)
        densities.append(torch.cat([gate.decision for _, gate in gates(model)], 1).double().mean(1))
    return torch.cat(shares).mean().item(), torch.cat(densities).mean().item()


def reported(metrics):
    return metrics['macs_share'], metrics['gate_density']


@pytest.mark.parametrize('name', ONE_EACH)
def test_figures_are_those_of_count_macs(name):
    model = make_model(name)
    pixels = 64 if is_imagenet(name) else 32
    batches = [images(6, 0, pixels), images(3, 1, pixels), images(2, 2, pixels + 16)]
    metrics = validate(make_task(model), batches)
    assert list(metrics) == ['loss', 'top1', 'top5', 'macs_share', 'gate_density']
    assert reported(metrics) == pytest.approx(expected(model, *batches))
    assert metrics['macs_share'] > 0 and 0 < metrics['gate_density'] < 1


def test_repeated_images_of_a_sampler_do_not_count():
    model = make_model()
    batches = [images(4), images(4, 1)]
    metrics = validate(make_task(model), batches, max_samples=6)
    assert reported(metrics) == pytest.approx(expected(model, batches[0], batches[1][:2]))
    plain = ClassificationTask(timm.create_model('cifar_resnet20', num_classes=CLASSES), verbose=False)
    assert list(validate(plain, batches)) == ['loss', 'top1', 'top5']


def test_average_of_the_model():
    task = make_task(make_model())
    task.setup_ema(decay=0.5)
    average = task.get_trainable_module(ema=True).module
    average.load_state_dict(make_model(seed=1).state_dict())
    batches = [images(5), images(4, 1)]
    plain = reported(validate(task, batches))
    assert plain == pytest.approx(expected(task.get_trainable_module(), *batches))
    of_average = reported(validate(task, batches, ema=True))
    assert of_average == pytest.approx(expected(average, *batches)) and of_average != plain
    assert reported(validate(task, batches)) == plain


def test_compiled_model():
    model = make_model()
    task = make_task(model)
    task(images(4), labels(4))
    task.compile(backend='eager')
    metrics = validate(task, [images(4), images(4, 1)])
    assert reported(metrics) == pytest.approx(expected(model, images(4), images(4, 1)))


def test_views_of_an_image():
    """Test-time augmentation: one output for several rows of the batch."""
    model = make_model().eval()
    evaluator = make_task(model).create_evaluator(max_samples=3)
    with torch.inference_mode():
        output = model(images(8)).unfold(0, 2, 2).mean(2)
        evaluator.update(output, labels(4))
    assert reported(evaluator.compute()) == pytest.approx(expected(model, images(8)[:6]))


def test_outputs_of_another_model_have_no_figures():
    task, other = make_task(make_model()), make_model(seed=1).eval()
    evaluator = task.create_evaluator()
    evaluator.update(other(images(4)), labels(4))
    assert all(value != value for value in reported(evaluator.compute())) and evaluator.compute()['loss'] > 0
    evaluator.reset()
    evaluator.update(task.get_eval_model().eval()(images(4)), labels(4))
    assert reported(evaluator.compute()) == pytest.approx(expected(task.get_eval_model(), images(4)))


def test_what_is_timms_stays_timms():
    task = make_task(make_model())
    evaluator, own = task.create_evaluator(), ClassificationTask.create_evaluator(task)
    assert evaluator.default_metric == own.default_metric == 'top1'
    assert evaluator.metric_names[:len(own.metric_names)] == own.metric_names


@pytest.mark.parametrize('task_cls', [LogitDistillationTask, FeatureDistillationTask])
def test_distillation(task_cls):
    model = make_model()
    teacher = timm.create_model('cifar_resnet20', num_classes=CLASSES)
    task = task_cls(model, teacher, criterion=nn.CrossEntropyLoss(), verbose=False)
    task.get_trainable_module().train()
    result = task(images(4), labels(4))
    assert {'batch_shaping_loss', 'l0_loss'} <= set(result)
    metrics = validate(task, [images(4)])
    assert reported(metrics) == pytest.approx(expected(model, images(4)))


def test_multi_label_training():
    model = make_model(gamma=0.5, gamma_epochs='fixed')
    task = MultiLabelClassificationTask(model, verbose=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    target = torch.eye(CLASSES)[labels(4)]
    before = gates(model)[0][1].fc2.weight.clone()
    task.get_trainable_module().train()
    result = task(images(4), target)
    bce = nn.functional.binary_cross_entropy_with_logits(result['output'], target)
    torch.testing.assert_close(
        result['loss'] - result['lam'] * result['batch_shaping_loss'] - 0.5 * result['l0_loss'],
        task.criterion(result['output'], target))
    result['loss'].backward()
    optimizer.step()
    assert not torch.equal(before, gates(model)[0][1].fc2.weight) and bce > 0

    evaluator = task.create_evaluator()
    with torch.inference_mode():
        evaluator.update(task.get_eval_model().eval()(images(4)), target)
    metrics = evaluator.compute()
    assert {'map', 'macs_share', 'gate_density'} <= set(metrics)
    assert reported(metrics) == pytest.approx(expected(model, images(4)))


# Scripts without an evaluator


def validation_lines(caplog):
    return [record.getMessage() for record in caplog.records if 'validation' in record.getMessage()]


def test_log_of_a_script_without_evaluators(caplog):
    """The calls of timm's train.py before 1.0.31."""
    caplog.set_level(logging.INFO)
    task = make_task(make_model(), verbose=True)
    eval_model = task.get_eval_model()
    task.setup_ema(decay=0.5)
    lines = []
    for _ in range(2):
        task.get_trainable_module().train()
        task(images(4), labels(4))
        task.update_ema()
        for model in (eval_model, task.get_eval_model(ema=True)):
            model.eval()
            with torch.inference_mode():
                model(images(5)), model(images(3, 1))
        figures = [expected(model, images(5), images(3, 1)) for model in (
            copy.deepcopy(eval_model), copy.deepcopy(task.get_trainable_module(ema=True).module))]
        lines += [
            f'Gates: {task.gate_epoch} validation{name}  macs_share: {share:#.4g}  gate_density: {density:#.4g}  '
            f'images: 8'
            for name, (share, density) in zip(('', ' (EMA)'), figures, strict=True)]
        task.get_task_state()
    assert validation_lines(caplog) == lines
    task.get_trainable_module().train()
    task(images(4), labels(4))
    assert len(validation_lines(caplog)) == 4


def test_an_evaluator_takes_the_place_of_the_log(caplog):
    caplog.set_level(logging.INFO)
    task = make_task(make_model(), verbose=True)
    task(images(4), labels(4))
    validate(task, [images(4)])
    task.get_task_state()
    assert not validation_lines(caplog)


def test_copies_are_not_watched(caplog):
    caplog.set_level(logging.INFO)
    model = make_model()
    task = make_task(model, verbose=True)
    task(images(4), labels(4))
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        other.eval()(images(4))
    task.get_task_state()
    assert not validation_lines(caplog)
    model.eval()(images(4))
    task.get_task_state()
    assert len(validation_lines(caplog)) == 1


@pytest.mark.parametrize('training_is_over', [False, True])
def test_a_trained_model_serves_several_threads(training_is_over):
    """In lockstep, so that the gates of one pass hold decisions for different batches."""
    model = make_model()
    task = make_task(model)
    task.create_evaluator()
    if training_is_over:
        del task
        gc.collect()
    model.eval()
    batches = [images(size, seed=size) for size in (2, 3)]
    with torch.inference_mode():
        outputs = [model(batch) for batch in batches]
    barrier = threading.Barrier(2, timeout=20)

    def wait(*args):
        barrier.wait()

    for _, gate in gates(model):
        gate.register_forward_hook(wait)

    def run(batch):
        with torch.inference_mode():
            return model(batch)

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(run, batches[1])
        results = run(batches[0]), other.result()
    assert all(torch.allclose(*pair, atol=1e-4) for pair in zip(results, outputs, strict=True))


def test_passes_of_other_threads_do_not_count():
    model = make_model()
    task = make_task(model)
    evaluator = task.create_evaluator()
    model.eval()
    with torch.no_grad():
        output = model(images(4))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(model, images(3)).result()
    evaluator.update(output, labels(4))
    assert reported(evaluator.compute()) == pytest.approx(expected(model, images(4)))


def test_a_model_is_watched_no_longer_than_it_is_trained():
    model = make_model()
    task = make_task(model)
    task.create_evaluator()
    monitor = weakref.ref(task._monitor)
    del task
    gc.collect()
    assert monitor() is None


def test_images_by_keyword():
    task = make_task(make_model())
    evaluator, model = task.create_evaluator(), task.get_eval_model()
    model.eval()
    with torch.inference_mode():
        evaluator.update(model(x=images(4)), labels(4))
    assert reported(evaluator.compute()) == pytest.approx(expected(model, images(4)))
