"""Gate losses in timm's training tasks

timm computes its training loss in a task (`timm.task`). A task created for a model with objectives
(`timm_gated.loss.objective`) becomes a subclass of itself that adds the terms of the objectives to `result['loss']`.
Gradient accumulation, the fp16 scaler, EMA, distillation and `--torchcompile` therefore all see one loss. Models
without objectives get timm's own task, unchanged.

timm's training script imports its task classes before it imports plugins, so the classes themselves cannot be replaced.
Instead, creating the first objective replaces `TrainingTask.__new__`.

Schedules step once per epoch, like timm's learning rate. timm does not pass the epoch to its tasks, so a new epoch
begins at the first training step after a call of `train()`, which training loops make once per epoch. A loop that calls
`train()` at other times must call `set_epoch`, which stops the counting. The epoch is part of the task state:
checkpoints store it and `--resume` continues from it.

The MACs of a validation are reported beside its accuracy, see `timm_gated.task.evaluator`.
"""
import copyreg
import functools
import logging
import weakref
from typing import Any, Dict, List, Optional, Tuple, Type

import torch
import torch.nn as nn
from timm.task import TrainingTask

from ..layers import gates
from ..loss import Scheduled, Step, find_objectives, objectives
from ..utils import full_precision, on_first_use
from .evaluator import EvaluationMonitor

__all__ = ['ObjectiveTask', 'extend_timm_tasks']

_logger = logging.getLogger(__name__)

_STATE_KEY = 'gate_epoch'


class ObjectiveTask(TrainingTask):
    """Mixin for timm's tasks that adds the terms of the model's objectives to the loss.

    Attributes:
        gate_epoch: The current epoch; -1 before the first step.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.gate_epoch = -1
        self._counts_epochs = True
        self._warned = False
        self._steps: List[int] = []  # number of steps in each counted epoch
        self._progress = _Progress()
        self._log = _RunningLog()
        self._monitor = EvaluationMonitor()
        if self.verbose:
            for objective in objectives(self._trained()):
                _logger.info(f'{type(self).__name__}: {type(objective).__name__}({objective.extra_repr()})')
                for scheduled in objective.schedule():
                    _logger.info(f'{type(self).__name__}: {scheduled}')
                    self._progress.scheduled.append(scheduled)
            weakref.finalize(self, self._progress.warn_of_inactive)

    def set_epoch(self, epoch: int) -> None:
        """Set the current epoch. From the first call on, the task no longer counts epochs.

        Loops that call `train()` more than once per epoch must call this at the start of every epoch.

        Args:
            epoch: Index of the epoch, from 0.
        """
        self._counts_epochs = False
        self._begin_epoch(epoch)

    def _next_epoch(self) -> None:
        """Begin the next epoch, after a call of `train()`."""
        self._begin_epoch(self.gate_epoch + 1)
        for objective in objectives(self._trained()):
            objective.epoch_begins = False
        if not self._warned and _look_wrong(self._steps):
            self._warned = True
            _logger.warning(
                f'The last two epochs of the gate losses had {self._steps[-2]} and {self._steps[-1]} steps. A new '
                f'epoch is counted after each call of train(). If your loop calls train() at other times too, call '
                f'task.set_epoch(epoch) at the start of every epoch.')
        self._steps.append(0)

    def create_evaluator(self, **kwargs) -> Any:
        """timm's evaluator; for gated models, with the metrics `macs_share` and `gate_density`."""
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
        self._log.flush()
        for name, means in self._monitor.take_means().items():
            if self.verbose:
                _logger.info(f'Gates: {self.gate_epoch} validation{name}  {_listed(means)}')

    def _begin_epoch(self, epoch: int) -> None:
        self._log_evaluations()
        self.gate_epoch = epoch
        average = self.get_trainable_module(ema=True)
        for objective in objectives(self._trained()):
            objective.begin_epoch(self._trained(), epoch)
            if average is not None:
                objective.begin_epoch(average, epoch)

    def _trained(self) -> nn.Module:
        model = self.get_trainable_module()
        assert model is not None
        return model

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> Dict[str, Any]:
        """timm's forward, with the terms, weights and statistics of the objectives added to the result by name.

        `loss` includes the weighted terms, `task_loss` does not.
        """
        model = self._trained()
        last_pass, active = find_objectives(model)  # the only walk over the modules in a step
        if not active:
            return super().forward(input, target)
        if model.training:
            if self._counts_epochs and (not self._steps or any(objective.epoch_begins for objective, _ in active)):
                self._next_epoch()
                last_pass, active = find_objectives(model)  # `begin_epoch` may change the model
            if self._counts_epochs:
                self._steps[-1] += 1
            self._progress.epoch = self.gate_epoch
            if last_pass.gates:
                self._watch_evaluations()
        result: Dict[str, Any] = super().forward(input, target)
        loss, step = result['loss'], Step(input, result['output'], target)
        result.setdefault('task_loss', loss)
        with full_precision(loss):  # sorted sigmoids and their CDFs need float32
            for objective, parent_pass in active:
                for name, term in objective.terms(parent_pass, self.gate_epoch, step).items():
                    loss = loss + term.weight * term.value
                    result.update({name: term.value, term.weight_name: term.weight})
                result.update(objective.stats(parent_pass))
                if model.training:
                    objective.observe(parent_pass, self.gate_epoch)
            gather = model.training and any(objective.gather_gates for objective, _ in active)
            result.update(last_pass.density(gather))
        added = {k: v for k, v in result.items() if k not in ('loss', 'output')}
        result['loss'] = loss
        if self.verbose:
            self._log.update(self.gate_epoch, added, min(objective.log_interval for objective, _ in active))
        return result

    def get_task_state(self, module: Optional[nn.Module] = None, ema: bool = False) -> Dict[str, Any]:
        self._log_evaluations()
        for objective in objectives(self._trained()):
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
                'The checkpoint has no epoch of the gate losses (it was not written by a gated run); their schedules '
                'begin at epoch 0.')


class _Progress:
    """Progress of a training, for warnings at its end."""

    def __init__(self) -> None:
        self.epoch = -1
        self.scheduled: List[Scheduled] = []

    def warn_of_inactive(self) -> None:
        """Warn about schedules that never started or never ended. Called when the task is deleted or at exit."""
        if self.epoch < 0:
            return
        remedy = (
            f'If this was the complete training, pass schedule_epochs={self.epoch + 1} to the model, which scales its '
            f'default schedule, or set other epochs.')
        for scheduled in self.scheduled:
            if scheduled.begins_after(self.epoch):
                _logger.warning(
                    f'{scheduled.what} was never active: the last epoch was {self.epoch}, but {scheduled}. {remedy}')
            elif scheduled.evaluated and scheduled.ends_after(self.epoch):
                _logger.warning(
                    f'{scheduled.what}: {scheduled.name} {scheduled.last:g}, which the network is evaluated with, was '
                    f'never reached: the last epoch was {self.epoch}, but {scheduled}. {remedy}')


def _look_wrong(steps: List[int]) -> bool:
    """Whether the last two epochs are unlikely to be complete: one step each, or of different lengths.

    An evaluation in the middle of an epoch cannot be detected this way.
    """
    *_, before, last = 0, 0, *steps
    return bool(before) and (before == last == 1 or max(before, last) > 1.25 * min(before, last) + 1)


class _RunningLog:
    """Means of the logged values, written every `interval` steps and at the end of an epoch."""

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
        if reduced[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]  # the task defines its own pickling
            return reduced
        return _empty_task, (task_cls,), *reduced[2:]  # pickle cannot find this class by its name

    attributes = {'__doc__': task_cls.__doc__, '__reduce_ex__': reduce_ex}
    return type(task_cls.__name__, (ObjectiveTask, task_cls), attributes)


def _empty_task(task_cls: Any) -> TrainingTask:
    """Empty task, for copying and unpickling."""
    cls = _with_objectives(task_cls)
    return cls.__new__(cls)


@on_first_use
def extend_timm_tasks() -> None:
    """Make timm's tasks use the objectives of their models. Creating the first objective calls this."""
    new = TrainingTask.__new__

    def new_task(cls, *args, **kwargs):
        given = (value for value in (*args, *kwargs.values()) if isinstance(value, nn.Module))
        if not issubclass(cls, ObjectiveTask) and any(objectives(module) for module in given):
            cls = _with_objectives(cls)
        return new(cls) if new is object.__new__ else new(cls, *args, **kwargs)

    TrainingTask.__new__ = staticmethod(new_task)  # type: ignore[method-assign]
