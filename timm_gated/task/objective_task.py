"""Gate losses in timm's training tasks

timm computes its training loss in a task (`timm.task`). A task that is given a model with objectives
(`timm_gated.loss.objective`) is made as a subclass of itself that adds the objectives' terms to `result['loss']`.
Gradient accumulation, the fp16 scaler, EMA, distillation and `--torchcompile` thus all see one loss, and models without
objectives get timm's own task, untouched.

The stock training script imports its task classes before it imports plugins, so the classes themselves cannot be
replaced; `TrainingTask.__new__`, which timm leaves to Python, is looked up when a task is made. It is replaced when the
first objective is made.

Progress: schedules step once per epoch, like timm's learning rate. A task is not told the epoch; it begins a new one
at the first training step after the model's `train()`, which training loops call at the start of every epoch. A loop
that calls it at other times has to call `set_epoch`, which ends the counting. The epoch is part of the task's state, so
checkpoints carry it and `--resume` continues it.

What a validation costs is reported beside its accuracy, see `timm_gated.task.evaluator`.
"""
import copyreg
import functools
import logging
import weakref
from typing import Any, Dict, List, Optional, Tuple, Type

import torch
import torch.nn as nn
from timm.task import TrainingTask

from ..layers import gate_density, gates
from ..loss import Objective, Scheduled, Step, objectives
from ..utils import full_precision, on_first_use
from .evaluator import EvaluationMonitor

__all__ = ['ObjectiveTask', 'extend_timm_tasks']

_logger = logging.getLogger(__name__)

_STATE_KEY = 'gate_epoch'


class ObjectiveTask(TrainingTask):
    """Mixin over a timm task: its loss, plus the terms of the model's objectives.

    `gate_epoch` is the current epoch, -1 before the first step.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.gate_epoch = -1
        self._counts_epochs = True
        self._warned = False
        self._steps: List[int] = []  # in each epoch that was counted
        self._progress = _Progress()
        self._log = _RunningLog()
        self._monitor = EvaluationMonitor()
        if self.verbose:
            for objective in self._objectives():
                _logger.info(f'{type(self).__name__}: {type(objective).__name__}({objective.extra_repr()})')
                for scheduled in objective.schedule():
                    _logger.info(f'{type(self).__name__}: {scheduled}')
                    self._progress.scheduled.append(scheduled)
            weakref.finalize(self, self._progress.warn_of_inactive)

    def set_epoch(self, epoch: int) -> None:
        """Set the current epoch. From the first call on, the task does not count epochs by itself.

        Call it at the start of every epoch in a loop that calls `train()` at other times too.

        Args:
            epoch: Number of the epoch, from 0.
        """
        self._counts_epochs = False
        self._begin_epoch(epoch)

    def _next_epoch(self) -> None:
        """Begin the next epoch, because the model was put into training mode."""
        self._begin_epoch(self.gate_epoch + 1)
        for objective in self._objectives():
            objective.epoch_begins = False
        if not self._warned and _look_wrong(self._steps):
            self._warned = True
            _logger.warning(
                f'The last two epochs of the gate losses had {self._steps[-2]} and {self._steps[-1]} steps. A new '
                f'epoch is counted after each call of train(). If your loop calls train() at other times too, call '
                f'task.set_epoch(epoch) at the start of every epoch.')
        self._steps.append(0)

    def create_evaluator(self, **kwargs) -> Any:
        """As the task's own, with `macs_share` and `gate_density` of the evaluated model among the metrics."""
        evaluator = super().create_evaluator(**kwargs)
        model = self.get_eval_model()
        if model is None or not gates(model):
            return evaluator
        self._watch_evaluations()
        return self._monitor.evaluator(evaluator, kwargs.get('max_samples'))

    def _watch_evaluations(self) -> None:
        for name, model in (('', self.get_eval_model()), (' (EMA)', self.get_eval_model(ema=True))):
            if model is not None:
                self._monitor.watch(model, name)

    def _log_evaluations(self) -> None:
        self._log.flush()  # of the epoch before
        for name, means in self._monitor.take_means().items():
            if self.verbose:
                _logger.info(f'Gates: {self.gate_epoch} validation{name}  {_listed(means)}')

    def _begin_epoch(self, epoch: int) -> None:
        self._log_evaluations()
        self.gate_epoch = epoch
        for model in (self.get_trainable_module(), self.get_trainable_module(ema=True)):
            if model is not None:
                for objective in self._objectives():
                    objective.begin_epoch(model, epoch)

    def _objectives(self) -> List[Objective]:
        model = self.get_trainable_module()
        assert model is not None
        return objectives(model)

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> Dict[str, Any]:
        """As the task's own, with the objectives' terms, their weights and statistics added to the result by name.

        `loss` includes the weighted terms, `task_loss` does not.
        """
        model = self.get_trainable_module()
        assert model is not None
        active = self._objectives()
        if not active:
            return super().forward(input, target)
        if model.training:
            if self._counts_epochs and (not self._steps or any(objective.epoch_begins for objective in active)):
                self._next_epoch()
            if self._counts_epochs:
                self._steps[-1] += 1
            self._progress.epoch = self.gate_epoch
            self._watch_evaluations()
        result: Dict[str, Any] = super().forward(input, target)
        loss, step = result['loss'], Step(input, result['output'], target)
        result.setdefault('task_loss', loss)
        # Outside autocast: sorted sigmoids and their CDFs need all of float32.
        with full_precision(loss):
            for objective in active:
                for name, term in objective.terms(model, self.gate_epoch, step).items():
                    loss = loss + term.weight * term.value
                    result.update({name: term.value, term.weight_name: term.weight})
                result.update(objective.stats(model))
                if model.training:
                    objective.observe(model, self.gate_epoch)
            gather = model.training and any(objective.gather_gates for objective in active)
            result.update(gate_density(model, gather))
        added = {k: v for k, v in result.items() if k not in ('loss', 'output')}
        result['loss'] = loss
        if self.verbose:
            self._log.update(self.gate_epoch, added, min(objective.log_interval for objective in active))
        return result

    def get_task_state(self, module: Optional[nn.Module] = None, ema: bool = False) -> Dict[str, Any]:
        self._log_evaluations()  # a checkpoint is written at the end of an epoch
        for objective in self._objectives():
            objective.flush()
        state = super().get_task_state(module=module, ema=ema)
        return state if ema else {**state, _STATE_KEY: self.gate_epoch}

    def load_task_state(
            self,
            state: Optional[Dict[str, Any]],
            strict: bool = True,
            module: Optional[nn.Module] = None,
            ema: bool = False,
    ) -> None:
        super().load_task_state(state, strict=strict, module=module, ema=ema)
        if ema:
            return
        if state and _STATE_KEY in state:
            self._begin_epoch(int(state[_STATE_KEY]))
        else:
            _logger.warning(
                'The checkpoint does not say how far the gate losses had come (it was not written by a gated run); '
                'their schedules begin at epoch 0.')


class _Progress:
    """How far a training has come, for a warning at its end."""

    def __init__(self) -> None:
        self.epoch = -1
        self.scheduled: List[Scheduled] = []

    def warn_of_inactive(self) -> None:
        """Warn of what never began, or was not reached. Called when the task goes, or the process ends."""
        if self.epoch < 0:
            return
        remedy = (
            f'If this was the whole training, pass schedule_epochs={self.epoch + 1} to the model, which scales its '
            f'default schedule, or give the schedule other epochs.')
        for scheduled in self.scheduled:
            if scheduled.begins_after(self.epoch):
                _logger.warning(
                    f'{scheduled.what} was never active: the last epoch was {self.epoch}, but {scheduled}. {remedy}')
            elif scheduled.evaluated and scheduled.ends_after(self.epoch):
                _logger.warning(
                    f'{scheduled.what}: {scheduled.name} {scheduled.last:g}, which the network is evaluated with, was '
                    f'never reached: the last epoch was {self.epoch}, but {scheduled}. {remedy}')


def _look_wrong(steps: List[int]) -> bool:
    """Whether the last two epochs can hardly both be whole: one step each, or of different length.

    Whole epochs differ by little, if at all. An evaluation in the middle of an epoch cannot be told by the lengths.
    """
    *_, before, last = 0, 0, *steps
    return bool(before) and (before == last == 1 or max(before, last) > 1.25 * min(before, last) + 1)


class _RunningLog:
    """Means of the parts of the loss, logged every so many steps and at the end of an epoch."""

    def __init__(self) -> None:
        self.epoch = self.step = -1
        self.history: List[Dict[str, Any]] = []

    def update(self, epoch: int, values: Dict[str, Any], interval: int) -> None:
        if epoch != self.epoch:
            self.flush()
            self.epoch, self.step = epoch, -1
        self.step += 1
        self.history.append({k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in values.items()})
        if self.step % interval == 0:
            self.flush()

    def flush(self) -> None:
        if not self.history:
            return
        means = {k: sum(float(entry[k]) for entry in self.history) / len(self.history) for k in self.history[0]}
        self.history = []
        _logger.info(f'Gates: {self.epoch} [{self.step:>4d}]  {_listed(means)}')


def _listed(values: Dict[str, float]) -> str:
    return '  '.join(f'{k}: {v}' if isinstance(v, int) else f'{k}: {v:#.4g}' for k, v in values.items())


@functools.cache
def _with_objectives(task_cls: Type[TrainingTask]) -> Type[TrainingTask]:

    def reduce_ex(self: TrainingTask, protocol: Any) -> Tuple[Any, ...]:
        reduced: Any = task_cls.__reduce_ex__(self, max(protocol, 2))
        if reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]  # a way of the task's own
            return reduced
        return _empty_task, (task_cls,), *reduced[2:]  # because under its name pickle would not find this class

    attributes = {'__doc__': task_cls.__doc__, '__reduce_ex__': reduce_ex}
    return type(task_cls.__name__, (ObjectiveTask, task_cls), attributes)


def _empty_task(task_cls: Any) -> TrainingTask:
    """What a copy or a pickle of a task begins with."""
    cls = _with_objectives(task_cls)
    return cls.__new__(cls)


@on_first_use
def extend_timm_tasks() -> None:
    """Make timm's tasks take in the objectives of the models they are given. The first objective does it."""
    new = TrainingTask.__new__

    def new_task(cls, *args, **kwargs):
        given = (value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module))
        if not issubclass(cls, ObjectiveTask) and any(objectives(module) for module in given):
            cls = _with_objectives(cls)
        return new(cls) if new is object.__new__ else new(cls, *args, **kwargs)

    TrainingTask.__new__ = staticmethod(new_task)  # type: ignore[method-assign]
