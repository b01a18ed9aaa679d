"""One of the processes of test_mmseg_scripts.py, started by torchrun

mmengine's launcher wants a GPU, so the process group is made here.
"""
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from mmengine.config import Config
from mmengine.runner import Runner
from mmseg.registry import MODELS
from nets import shuffle

from mmseg_plugin import GateStatisticsHook
from timm_gated import ChannelGate


def checksum(model: torch.nn.Module) -> float:
    return sum(parameter.double().abs().sum().item() for parameter in model.parameters())


def check_gathering(loss_type: str) -> None:
    """Value and gradient of two processes, with three images and two, are those of one with all five."""
    torch.manual_seed(0)
    gate = ChannelGate(5, 7).double().eval()
    x = torch.randn(5, 5, dtype=torch.float64)
    found = []
    for batch, options in ((x.split((3, 2))[dist.get_rank()], dict(gather_gates=True)), (x, dict())):
        gate(batch)
        loss = MODELS.build(dict(type=loss_type, loss_weight=0.3, **options))(gate)
        found.append([loss, *torch.autograd.grad(loss, list(gate.parameters()))])
    for gathered, expected in zip(*found, strict=True):
        dist.all_reduce(gathered.detach())  # as DDP does
        torch.testing.assert_close(gathered / 2, expected)


def main(config: str, output: Path) -> None:
    dist.init_process_group('gloo')
    torch.set_num_threads(1)
    for loss_type in ('BatchShapingLoss', 'L0Loss'):
        check_gathering(loss_type)
    cfg = Config.fromfile(config)
    cfg.launcher = 'pytorch'
    cfg.work_dir = str(output / 'work')
    cfg.train_cfg.max_iters = 2
    cfg.model_wrapper_cfg = dict(type='MMDistributedDataParallel', device_ids=None, broadcast_buffers=False)
    runner = Runner.from_cfg(cfg)
    shuffle(runner.model)  # fresh gates would all stay open
    before = checksum(runner.model)
    runner.train()
    # Statistics of BN are each process's own: share those of the first before a common validation.
    for buffer in runner.model.buffers():
        dist.broadcast(buffer, 0)
    metrics = {name: float(value) for name, value in runner.val_loop.run().items()}
    gates = next(hook for hook in runner.hooks if isinstance(hook, GateStatisticsHook)).scalars()
    result = dict(metrics=metrics, gates=gates, initial_checksum=before, checksum=checksum(runner.model))
    (output / f'rank{os.environ["RANK"]}.json').write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == '__main__':
    main(sys.argv[1], Path(sys.argv[2]))
