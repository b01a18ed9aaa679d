"""A training with the calls of timm's train.py. Data and noise are seeded by epoch and step"""
from pathlib import Path
from typing import Any, Callable, Dict, Optional

import timm
import torch
import torch.nn as nn
from timm.optim import create_optimizer_v2
from timm.scheduler import create_scheduler_v2
from timm.task import ClassificationTask, load_task_ema_checkpoint, resume_task_checkpoint
from timm.utils import CheckpointSaver, NativeScaler

from timm_gated import gates, objectives

STEPS = 4  # per epoch
ACCUMULATED = 2  # steps per update
RECOVERY_INTERVAL = 3  # so that both kinds of checkpoints alternate


def batch(seed: int):
    torch.manual_seed(seed)  # also seeds the noise of the gates
    return torch.randn(4, 3, 8, 8), torch.randint(10, (4,))


def progress(task: Any, result: Dict[str, Any]) -> Dict[str, Any]:
    """All scheduled values."""
    models = task.get_trainable_module(), task.get_trainable_module(ema=True)
    return dict(
        gate_epoch=task.gate_epoch,
        weights={key: value for key, value in result.items() if isinstance(value, float)},
        prior_shares=[objective.prior.share for objective in objectives(models[0]) if hasattr(objective, 'prior')],
        gates=[[getattr(gate, name).item() for _, gate in gates(model) for name in ('noise', 'num_open')
                if hasattr(gate, name)] for model in models])


def train(report: Callable, name: str, model_args: Dict[str, Any], folder: Path, resume: Optional[Path], epochs: int):
    """The calls of train.py: scaled and accumulated gradients, EMA, checkpoints per epoch, recovery checkpoints."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task: Any = ClassificationTask(
        timm.create_model(name, **model_args), nn.CrossEntropyLoss(), verbose=False)
    optimizer = create_optimizer_v2(task.get_trainable_module(), opt='sgd', lr=0.05, momentum=0.9)
    scaler = NativeScaler('cpu')
    start_epoch = 0
    if resume is not None:
        start_epoch = resume_task_checkpoint(task, str(resume), optimizer=optimizer, loss_scaler=scaler)
    task.setup_ema(decay=0.9, use_warmup=True)
    if resume is not None:
        load_task_ema_checkpoint(task, str(resume))
    saver = CheckpointSaver(
        task.get_trainable_module(), optimizer, task=task, amp_scaler=scaler, checkpoint_dir=str(folder),
        recovery_dir=str(folder), decreasing=True)
    if resume is not None:
        saver.load_state_dict_from_checkpoint(str(resume))
    scheduler, _ = create_scheduler_v2(
        optimizer, sched='cosine', num_epochs=epochs, updates_per_epoch=STEPS // ACCUMULATED)
    if start_epoch > 0:
        scheduler.step(start_epoch)

    for epoch in range(start_epoch, epochs):
        task.get_trainable_module().train()
        for step in range(STEPS):
            result = task(*batch(epoch * STEPS + step))
            updates = (step + 1) % ACCUMULATED == 0
            scaler(result['loss'] / ACCUMULATED, optimizer, need_update=updates)
            num_updates = (epoch * STEPS + step + 1) // ACCUMULATED
            if updates:
                optimizer.zero_grad()
                task.update_ema(step=num_updates)
            report(dict(
                epoch=epoch, step=step, loss=result['loss'].item(), lr=optimizer.param_groups[0]['lr'],
                **progress(task, result)))
            if (step + 1) % RECOVERY_INTERVAL == 0:
                saver.save_recovery(epoch, batch_idx=step)
            scheduler.step_update(num_updates=num_updates)
        metric = 0.
        for model in (task.get_eval_model(), task.get_eval_model(ema=True)):
            model.eval()
            with torch.no_grad():
                metric = model(batch(0)[0]).square().mean().item()
        saver.save_checkpoint(epoch, metric=metric)
        scheduler.step(epoch + 1, metric)
