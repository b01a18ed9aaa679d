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


def checksum(model: torch.nn.Module) -> float:
    return sum(parameter.double().abs().sum().item() for parameter in model.parameters())


def main(config: str, output: Path) -> None:
    dist.init_process_group('gloo')
    torch.set_num_threads(1)
    cfg = Config.fromfile(config)
    cfg.launcher = 'pytorch'
    cfg.work_dir = str(output / 'work')
    cfg.train_cfg.max_iters = 2
    cfg.model_wrapper_cfg = dict(type='MMDistributedDataParallel', device_ids=None, broadcast_buffers=False)
    runner = Runner.from_cfg(cfg)
    before = checksum(runner.model)
    runner.train()
    # Statistics of BN are each process's own: share those of the first before a common validation.
    for buffer in runner.model.buffers():
        dist.broadcast(buffer, 0)
    metrics = {name: float(value) for name, value in runner.val_loop.run().items()}
    result = dict(metrics=metrics, initial_checksum=before, checksum=checksum(runner.model))
    (output / f'rank{os.environ["RANK"]}.json').write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == '__main__':
    main(sys.argv[1], Path(sys.argv[2]))
