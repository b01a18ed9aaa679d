"""Hooks: schedules of gate losses and statistics of gates

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)
"""
import re
from typing import Any, Dict

import torch.nn as nn
from mmengine.dist import all_reduce, get_dist_info
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.runner import IterBasedTrainLoop, Runner
from mmseg.registry import HOOKS

from timm_gated import GateStatistics, gates
from timm_gated.analysis import check_threshold
from timm_gated.layers import set_gate_noise
from timm_gated.loss import check_epochs, linear_anneal, linear_warmup
from timm_gated.utils import install

__all__ = ['GateLossScheduleHook', 'GateNoiseScheduleHook', 'GateStatisticsHook']

_SCHEDULES = {'linear_anneal': linear_anneal, 'linear_warmup': linear_warmup}


def _unwrap(model: nn.Module) -> Any:
    return model.module if is_model_wrapper(model) else model


@HOOKS.register_module()
class GateLossScheduleHook(Hook):
    """Schedule the weight of one gate loss. Without this hook the weight is constant.

    The weight depends only on the progress of the runner, so it is exact after resuming.

    Args:
        loss_name: Name of the gate loss.
        schedule: 'linear_anneal' (from the configured weight to zero) or 'linear_warmup' (from zero to it).
        begin: Iteration (or epoch) at which the change begins.
        end: Iteration (or epoch) at which the change ends.
        by_epoch: Whether `begin` and `end` are epochs, for an epoch-based training loop.
    """

    def __init__(self, loss_name: str, schedule: str, begin: float, end: float, by_epoch: bool = False) -> None:
        if schedule not in _SCHEDULES:
            raise ValueError(f'schedule must be one of {", ".join(_SCHEDULES)}, got {schedule!r}.')
        check_epochs((begin, end), 'begin and end')
        install()
        self.loss_name = loss_name
        self.schedule = _SCHEDULES[schedule]
        self.begin, self.end, self.by_epoch = begin, end, by_epoch
        self._loss: Any = None
        self._weight = 0.

    def before_train(self, runner: Runner) -> None:
        losses = {loss.loss_name: loss for loss in getattr(_unwrap(runner.model), 'gate_losses', ())}
        if self.loss_name not in losses:
            raise ValueError(
                f"the model has no gate loss '{self.loss_name}' to schedule; it has: {', '.join(losses) or 'none'}.")
        _check_unit(runner, self.by_epoch, f"'{self.loss_name}'")
        self._loss = losses[self.loss_name]
        self._weight = self._loss.loss_weight
        first, last = (self.schedule(progress, self._weight, self.begin, self.end) for progress in (0, float('inf')))
        unit, total = ('epochs', runner.max_epochs) if self.by_epoch else ('iterations', runner.max_iters)
        runner.logger.info(
            f'{self.loss_name}: loss_weight {first:g} to {last:g} over {unit} {self.begin:g} to {self.end:g} of '
            f'{total}')
        if not first and last and not self.schedule(total - 1, self._weight, self.begin, self.end):
            runner.logger.warning(
                f'{self.loss_name} will never be active: its schedule begins at {self.begin:g}, but the training ends '
                f'after {total} {unit}. Change begin and end of its GateLossScheduleHook.')

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        progress = runner.epoch if self.by_epoch else runner.iter
        self._loss.loss_weight = self.schedule(progress, self._weight, self.begin, self.end)


@HOOKS.register_module()
class GateNoiseScheduleHook(Hook):
    """Anneal the training noise of all gates linearly to zero, so that they decide as in evaluation from then on.

    Args:
        begin: Iteration (or epoch) at which the noise begins to fall.
        end: Iteration (or epoch) from which there is none.
        by_epoch: Whether `begin` and `end` are epochs, for an epoch-based training loop.
    """

    def __init__(self, begin: float, end: float, by_epoch: bool = False) -> None:
        check_epochs((begin, end), 'begin and end')
        install()
        self.begin, self.end, self.by_epoch = begin, end, by_epoch

    def before_train(self, runner: Runner) -> None:
        _check_unit(runner, self.by_epoch, 'the gate noise')

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        progress = runner.epoch if self.by_epoch else runner.iter
        set_gate_noise(_unwrap(runner.model), linear_anneal(progress, 1., self.begin, self.end))


def _check_unit(runner: Runner, by_epoch: bool, what: str) -> None:
    if by_epoch and isinstance(getattr(runner, 'train_loop', None), IterBasedTrainLoop):
        raise ValueError(
            f'the schedule of {what} has by_epoch=True, but the training loop is iteration-based: set by_epoch=False, '
            f'and begin and end in iterations.')


@HOOKS.register_module()
class GateStatisticsHook(Hook):
    """Log the behaviour of the gates after each validation and test.

    Logs the density and the shares of gates that are always on, conditional and always off, overall and per stage, to
    the logger and all visualisation backends. Distributed evaluation requires mmengine's DefaultSampler without
    shuffling, as in mmseg's configs.

    Args:
        threshold: Share of images above which a gate counts as always on or always off.
    """

    def __init__(self, threshold: float = 0.99) -> None:
        install()
        self.threshold = check_threshold(threshold)
        self._statistics = GateStatistics()

    def before_val_epoch(self, runner: Runner) -> None:
        if not gates(_unwrap(runner.model)):
            raise ValueError('GateStatisticsHook needs a model with gates, but the model has none.')
        self._statistics = GateStatistics()

    def after_val_iter(
            self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self._update(runner.model, runner.val_loop)

    def after_test_iter(
            self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self._update(runner.model, runner.test_loop)

    def _update(self, model: nn.Module, loop: Any) -> None:
        """Count the last batch without the images that the sampler repeats to give all processes the same number."""
        rank, num_processes = get_dist_info()
        own = len(range(rank, len(loop.dataloader.dataset), num_processes))
        self._statistics.update(_unwrap(model), num_samples=own - self._statistics.num_samples)

    def after_val_epoch(self, runner: Runner, metrics: Any = None) -> None:
        self._statistics.reduce(all_reduce)
        scalars = self.scalars()
        runner.visualizer.add_scalars(scalars, step=runner.iter)
        runner.logger.info('Gates: ' + '  '.join(f'{name}: {value:.4f}' for name, value in scalars.items()))

    before_test_epoch = before_val_epoch
    after_test_epoch = after_val_epoch

    def scalars(self) -> Dict[str, float]:
        """Density and shares of gates, overall (`gates/…`) and per stage (`gates/layer1/…`)."""
        found = (re.search(r'layer\d+\.', name) for name in self._statistics.open_share())
        scalars = {}
        for stage in ('', *sorted({match.group() for match in found if match})):
            counts = self._statistics.counts(self.threshold, within=stage)
            prefix = f'gates/{stage.replace(".", "/")}'
            scalars[f'{prefix}density'] = self._statistics.density(within=stage)
            scalars.update({f'{prefix}{name}': count / sum(counts) for name, count in counts._asdict().items()})
        return scalars
