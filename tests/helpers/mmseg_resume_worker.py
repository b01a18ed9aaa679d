"""Runs mmseg's train.py with data and noise that are seeded per iteration"""
import runpy
import sys
import traceback
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, Callable, Optional

import torch
from forked import leave_configs_as_they_are
from mmengine.hooks import Hook
from mmseg.registry import HOOKS
from mmseg_small import SCRIPTS

import mmseg_plugin  # noqa: F401

SCRIPT = SCRIPTS / 'train.py'
_report: Optional[Callable] = None


@HOOKS.register_module()
class ReportHook(Hook):
    """Seed each iteration, and report its loss and scheduled values."""

    priority = 'VERY_HIGH'  # report before checkpoints are written

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        torch.manual_seed(runner.iter)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        assert _report is not None
        _report(dict(
            iter=runner.iter, epoch=runner.epoch, loss=outputs['loss'].item(),
            lr=runner.optim_wrapper.get_lr()['lr'][0],
            weights={loss.loss_name: loss.loss_weight for loss in runner.model.gate_losses}))

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        assert _report is not None
        _report(dict(iter=runner.iter, metrics=metrics))


def train(report: Callable, config: Path, work_dir: Path, *options: str) -> None:
    global _report
    _report = report
    torch.set_num_threads(1)
    leave_configs_as_they_are()
    sys.argv = [str(SCRIPT), str(config), '--work-dir', str(work_dir), *options]
    with open(work_dir.with_suffix('.log'), 'w') as log, redirect_stdout(log), redirect_stderr(log):
        try:
            runpy.run_path(str(SCRIPT), run_name='__main__')
        except Exception:
            traceback.print_exc()
            raise SystemExit(1) from None
