"""Process of the distributed test in test_mmseg_scripts.py, started as torchrun does

mmengine's launcher requires a GPU, so the process group is created here.
"""
import json
import os
import sys
from pathlib import Path
from typing import Any, Dict, List, Tuple

import torch
import torch.distributed as dist
from mmengine.config import Config
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner
from mmseg.registry import MODELS
from mmseg_small import TINY, tiny_samples
from nets import shuffle
from torch.nn.modules.batchnorm import _BatchNorm

from mmseg_plugin import GateStatisticsHook
from timm_gated.layers.gate import set_gate_noise


def checksum(model: torch.nn.Module) -> float:
    return sum(parameter.double().abs().sum().item() for parameter in model.parameters())


def build(task_weight: float, **options: Any) -> torch.nn.Module:
    """A segmentor whose losses alone depend on the batch: norms in evaluation mode, gates without noise."""
    torch.manual_seed(0)
    head = dict(TINY['decode_head'], loss_decode=dict(type='CrossEntropyLoss', loss_weight=task_weight))
    shaping = dict(type='BatchShapingLoss', loss_weight=0.3, prior=dict(type='beta', learnable=True), **options)
    l0 = dict(type='L0Loss', loss_weight=0.2, **options)
    model = shuffle(MODELS.build(dict(TINY, decode_head=head, gate_losses=[shaping, l0])).double()).train()
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()
    set_gate_noise(model, 0.)
    return model


def train_step(model: torch.nn.Module, samples: List[Dict[str, Any]]) -> Dict[str, torch.Tensor]:
    data = dict(
        inputs=torch.stack([sample['inputs'] for sample in samples]).double(),
        data_samples=[sample['data_samples'] for sample in samples])
    return model.train_step(data, OptimWrapper(torch.optim.SGD(model.parameters(), lr=1.)))


def check_gathering(sizes: Tuple[int, int]) -> None:
    """A step of two processes equals one step on the images of both: logged values and updated parameters.

    The task loss has weight 0 if the batch sizes differ, as its mean over processes is then not that over images.
    """
    task_weight = float(sizes[0] == sizes[1])
    one, two, own = build(task_weight), build(task_weight, gather_gates=True), build(task_weight)
    samples = tiny_samples(sum(sizes))
    mine = samples[:sizes[0]] if dist.get_rank() == 0 else samples[sizes[0]:]
    before = {name: parameter.detach().clone() for name, parameter in one.named_parameters()}
    expected = train_step(one, samples)
    found = train_step(MMDistributedDataParallel(two, device_ids=None), mine)
    by_itself = train_step(own, mine)
    for key in ('loss_batch_shaping', 'loss_l0', 'gate_density', 'gate_density_eval'):
        torch.testing.assert_close(found[key], expected[key])
        assert not torch.allclose(by_itself[key], expected[key], rtol=1e-3), key  # the test would be vacuous
    for (name, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(q, p, rtol=1e-7, atol=1e-10, msg=lambda m, n=name: f'{n}: {m}')
        assert 'gate' not in name or not torch.equal(p, before[name]), name


def main(config: str, output: Path) -> None:
    dist.init_process_group('gloo')
    torch.set_num_threads(1)
    for sizes in ((3, 3), (4, 1), (2, 3)):
        check_gathering(sizes)
    cfg = Config.fromfile(config)
    cfg.launcher = 'pytorch'
    cfg.work_dir = str(output / 'work')
    cfg.train_cfg.max_iters = 2
    cfg.model_wrapper_cfg = dict(type='MMDistributedDataParallel', device_ids=None, broadcast_buffers=False)
    runner = Runner.from_cfg(cfg)
    shuffle(runner.model)  # freshly initialised gates would all be open
    before = checksum(runner.model)
    runner.train()
    # Statistics of batch norms differ between processes: broadcast those of the first before validation.
    for buffer in runner.model.buffers():
        dist.broadcast(buffer, 0)
    metrics = {name: float(value) for name, value in runner.val_loop.run().items()}
    gates = next(hook for hook in runner.hooks if isinstance(hook, GateStatisticsHook)).scalars()
    result = dict(metrics=metrics, gates=gates, initial_checksum=before, checksum=checksum(runner.model))
    (output / f'rank{os.environ["RANK"]}.json').write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == '__main__':
    main(sys.argv[1], Path(sys.argv[2]))
