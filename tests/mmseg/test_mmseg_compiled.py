"""mmengine's `compile`: same losses as eager training, and no recompilation when the weights of gate losses change"""
import copy
from typing import Any, Dict, List

import mmseg_plugin  # noqa: F401  (must precede imports of mmseg)

# isort: split
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.hooks import Hook
from mmengine.runner import Runner
from mmseg.registry import MODELS
from mmseg_small import LOSSES, TINY, tiny_samples
from torch.utils.data import DataLoader

from timm_gated import ChannelGate

STEPS = 6
SCHEDULES = [
    dict(type='GateLossScheduleHook', loss_name='loss_batch_shaping', schedule='linear_anneal', begin=0, end=STEPS),
    dict(type='GateLossScheduleHook', loss_name='loss_l0', schedule='linear_warmup', begin=0, end=STEPS)]


class Watch(Hook):
    """Record the log of each iteration, and allow compilation in the first two only."""

    def __init__(self) -> None:
        self.logged: List[Dict[str, float]] = []

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        torch.manual_seed(runner.iter)
        torch._dynamo.config.error_on_recompile = runner.iter > 1

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.logged.append({name: float(value) for name, value in outputs.items()})


def train(model: nn.Module, folder: str, **cfg: Any) -> List[Dict[str, float]]:
    """Train with mmengine's runner and return its log."""
    watch = Watch()
    samples = tiny_samples(2 * STEPS)  # one epoch: mmengine sleeps for two seconds after each
    runner = Runner(
        model, folder, DataLoader(samples, batch_size=2, collate_fn=pseudo_collate),
        train_cfg=dict(by_epoch=False, max_iters=STEPS), optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.05)),
        custom_hooks=[*SCHEDULES, watch], default_scope='mmseg', experiment_name=str(cfg), cfg=cfg)
    torch.manual_seed(0)
    with torch._dynamo.config.patch(error_on_recompile=False):  # restores what the hook changes
        runner.train()
    return watch.logged


def test_weights_of_gate_losses_change_in_compiled_training(tmp_path):
    torch._dynamo.reset()
    preprocessor = dict(type='mmseg.SegDataPreProcessor', size=(16, 16))
    teacher = Config(dict(model=dict(TINY, data_preprocessor=preprocessor)))
    torch.save(MODELS.build(teacher.model).state_dict(), tmp_path / 'teacher.pth')
    distillation = dict(
        type='DistillationLoss', teacher_config=teacher, teacher_ckpt=str(tmp_path / 'teacher.pth'))
    model = MODELS.build(dict(
        TINY, data_preprocessor=preprocessor, gate_losses=[*LOSSES, dict(type='MACBudgetLoss'), distillation]))
    compiled = copy.deepcopy(model)
    expected, found = train(model, str(tmp_path)), train(compiled, str(tmp_path), compile=dict(backend='eager'))
    assert len({entry['weight_batch_shaping'] for entry in expected}) == STEPS
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # float32, after a few steps
    for (key, a), b in zip(compiled.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, msg=lambda message, key=key: f'{key}: {message}')


def test_gate_losses_compile_to_one_graph():
    torch._dynamo.reset()
    torch.manual_seed(0)
    gate = ChannelGate(5, 7).eval()
    losses = [MODELS.build(cfg) for cfg in TINY['gate_losses']]

    def total(x: torch.Tensor) -> torch.Tensor:
        gate(x)
        return torch.stack([loss(gate) for loss in losses])

    compiled = torch.compile(total, backend='aot_eager', fullgraph=True)
    for step in range(1, STEPS):
        for loss in losses:
            loss.loss_weight = 0.1 * step
        x = torch.randn(8, 5)
        with torch._dynamo.config.patch(error_on_recompile=step > 2):
            found = compiled(x)
        expected = total(x)
        torch.testing.assert_close(found, expected)
        grads = [torch.autograd.grad(values.sum(), list(gate.parameters())) for values in (found, expected)]
        torch.testing.assert_close(*grads)
