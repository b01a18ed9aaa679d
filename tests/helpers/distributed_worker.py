"""Worker process of test_distributed.py, started as by torchrun"""
import copy
import sys
from pathlib import Path
from typing import Any, Dict, Tuple

import timm
import torch
import torch.distributed as dist
from nets import shuffle
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask
from torch.nn.modules.batchnorm import _BatchNorm

from timm_gated import GateStatistics, count_macs, gates, objectives
from timm_gated.layers.gate import set_gate_noise
from timm_gated.models.gaternet import HashingGate
from timm_gated.models.skipnet import SkipGate
from timm_gated.utils.distributed import gather_batch

MODELS = {
    'gated_resnet20': dict(
        lam_epochs=(0, 2), gamma=0.1, gamma_epochs=(1, 3),
        prior={'type': 'beta', 'learnable': True}),  # DDP waits for its parameters even if lambda is zero
    'fbs_resnet20': dict(density=0.5, density_epochs=(0, 2)),  # a buffer that follows a schedule
    'gaternet_resnet20': dict(),  # a separate gating network
    'skipnet_resnet38': dict(stage='hybrid', layers=(2, 2, 2)),  # gates that share a layer, and sampled decisions
}
EXPECTED = {
    'gated_resnet20': [dict(lam=0.75, gamma=0.), dict(lam=0.375, gamma=0.), dict(lam=0., gamma=0.05)],
    'fbs_resnet20': [dict(gate_density=1.), dict(gate_density=0.75), dict(gate_density=0.5)],
    'gaternet_resnet20': [dict(sparsity_weight=0.1)] * 3,
    'skipnet_resnet38': [dict(rl_weight=1.)] * 3,
}


def train(name: str, rank: int) -> bool:
    """Check that both processes end with the same parameters."""
    torch.manual_seed(0)
    model = timm.create_model(name, **MODELS[name])
    before = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
    task = ClassificationTask(model, torch.nn.CrossEntropyLoss(), verbose=rank == 0)
    optimizer = create_optimizer_v2(task.get_trainable_module(), opt='sgd', lr=0.1, weight_decay=1e-4)
    task.prepare_distributed(device_ids=None)

    torch.manual_seed(1 + rank)  # different data and noise in each process
    for epoch in range(3):
        task.get_trainable_module().train()
        for step in range(2):
            images, labels = torch.randn(4, 3, 32, 32), torch.randint(10, (4,))
            if step == 0:  # gradient accumulation
                with task.no_sync():
                    task(images, labels)['loss'].backward()
            else:
                result = task(images, labels)
                result['loss'].backward()
                optimizer.step()
                optimizer.zero_grad()
        expected = EXPECTED[name][epoch]
        assert {key: float(result[key]) for key in expected} == expected

    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    assert not torch.equal(before, mine)
    return torch.equal(*both)


GATHERING = {
    'gated_resnet20': dict(prior={'type': 'beta', 'learnable': True}, gamma_epochs='fixed', budget=0.3),
    'convnet_aig_resnet20': dict(),
    'fbs_resnet20': dict(density=0.5),
    'gaternet_resnet20': dict(),
    'skipnet_resnet38': dict(stage='hybrid'),
}
DENSITIES = ['gate_density', 'gate_density_eval']
LOGGED = {
    'gated_resnet20': ['batch_shaping_loss', 'l0_loss', 'budget_loss', 'macs_share', *DENSITIES],
    'convnet_aig_resnet20': ['target_rate_loss', *DENSITIES],
    'fbs_resnet20': ['saliency_loss'],  # its density is constant
    'gaternet_resnet20': ['sparsity_loss', *DENSITIES],
    'skipnet_resnet38': ['reinforce_loss', *DENSITIES],
}
SMALL = dict(layers=(2, 2, 2), channels=(4, 4, 4), num_classes=4)


def images(size: int) -> torch.Tensor:
    """Images of colours so different that gates decide differently."""
    return torch.randn(size, 3, 16, 16) + 3 * torch.randn(size, 3, 1, 1)


def step(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, with_task: bool) -> Dict[str, Any]:
    """Forward and backward pass, through DDP if the model is wrapped. Every parameter is part of the graph."""
    task = ClassificationTask(model, torch.nn.CrossEntropyLoss(), verbose=False)
    if objectives(model)[0].gather_gates:
        task.prepare_distributed(device_ids=None)
    torch.manual_seed(0)
    result = task(x, y)
    (result['loss'] - (0 if with_task else 1) * result['task_loss']).backward()
    return result


def straight_through(logits: torch.Tensor) -> torch.Tensor:
    soft = torch.sigmoid(logits)
    return (logits > 0).to(soft.dtype) + (soft - soft.detach())


def check_gathering(name: str, sizes: Tuple[int, int], rank: int) -> None:
    """Values and gradients of two processes equal those of one process with both batches.

    Only the losses may depend on the batch: norms use their running statistics, and gates decide without noise. The
    mean of two task losses is that of both batches only if these have the same size.
    """
    torch.manual_seed(5)  # with this seed, no part of a batch resembles the complete batch
    one = shuffle(timm.create_model(name, **SMALL, **GATHERING[name]).double(), seed=3).train()
    for module in one.modules():
        if isinstance(module, _BatchNorm):
            module.eval()
    set_gate_noise(one, 0.)
    for _, gate in gates(one):
        if isinstance(gate, (HashingGate, SkipGate)):
            gate.sample = straight_through
    own, both = copy.deepcopy(one), timm.create_model(name, gather_gates=True, **SMALL, **GATHERING[name])
    two = copy.deepcopy(one)
    for objective, option in zip(objectives(two), objectives(both), strict=True):
        objective.gather_gates = option.gather_gates  # set by the model option

    x, y = images(sum(sizes)).double(), torch.arange(sum(sizes)) % 4
    mine, labels = x.split(sizes)[rank], y.split(sizes)[rank]
    with_task = sizes[0] == sizes[1]
    expected, result = step(one, x, y, with_task), step(two, mine, labels, with_task)
    by_itself = step(own, mine, labels, with_task)
    for key in LOGGED[name]:
        torch.testing.assert_close(result[key], expected[key])
        assert not torch.allclose(by_itself[key], expected[key], rtol=1e-3), key  # gathering matters
    for (parameter, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-7, atol=1e-10, msg=lambda m, n=parameter: f'{n}: {m}')
    assert all(p.grad.any() for n, p in two.named_parameters() if 'gate' in n)

    # A process that evaluates alone does not wait for the others.
    if rank == 0:
        two.eval()
        step_in_evaluation = ClassificationTask(two, torch.nn.CrossEntropyLoss(), verbose=False)(mine, labels)
        assert all(key in step_in_evaluation for key in LOGGED[name])


def check_gathering_in_half_precision(dtype: torch.dtype, rank: int) -> None:
    """Rows and gradients are exchanged exactly, and a step under autocast has the same losses in both processes."""
    torch.manual_seed(0)
    rows, weights = torch.randn(2, 5, 3).to(dtype)
    mine = rows.split((3, 2))[rank].clone().requires_grad_()
    gathered = gather_batch(mine)
    assert gathered.dtype == dtype and torch.equal(gathered, rows)
    (gathered * weights).sum().backward()
    assert torch.equal(mine.grad, 2 * weights.split((3, 2))[rank])

    model = shuffle(timm.create_model('gated_resnet20', gather_gates=True, **SMALL, **GATHERING['gated_resnet20']))
    with torch.autocast('cpu', dtype=dtype):
        result = step(model, images(5).split((3, 2))[rank], torch.arange(5).split((3, 2))[rank] % 4, with_task=True)
    mine = torch.stack([result[key].detach().double() for key in LOGGED['gated_resnet20']])
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    assert torch.equal(*both) and mine.isfinite().all()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def check_statistics(rank: int) -> None:
    """Seven images on two processes in batches of three: the last batches are uneven, and one image is repeated."""
    torch.manual_seed(0)
    model = shuffle(timm.create_model('gated_resnet20', **SMALL)).eval()
    x, members = images(7), torch.eye(4).bool()[torch.arange(7) % 3]
    together, parts = GateStatistics(num_classes=4), GateStatistics(num_classes=4)
    macs = count_macs(model, x)
    together.update(model, members)

    mine = [*range(7), 0][rank::2]  # as by timm's and mmengine's samplers
    own, used = len(range(rank, 7, 2)), 0
    for batch in torch.tensor(mine).split(3):
        counted = own - parts.num_samples
        used += count_macs(model, x[batch]).per_sample[:counted].sum()
        parts.update(model, members[batch], num_samples=counted)
    parts.reduce(dist.all_reduce)
    dist.all_reduce(used)

    assert parts.num_samples == together.num_samples == 7 and 0 < together.density() < 1
    assert torch.equal(parts.samples_by_class, together.samples_by_class)
    for shares, expected in (
            (parts.open_share(), together.open_share()), (parts.open_share_by_class(), together.open_share_by_class())):
        assert all(torch.equal(shares[name].nan_to_num(2), share.nan_to_num(2)) for name, share in expected.items())
    assert parts.counts() == together.counts() and used == macs.per_sample.sum()

    task = ClassificationTask(model, verbose=False)
    evaluator = task.create_evaluator(max_samples=own)
    for batch in torch.tensor(mine).split(3):
        evaluator.update(model(x[batch]), batch % 3)
    metrics = evaluator.compute(distributed=True)
    torch.testing.assert_close(metrics['macs_share'], macs.share)
    torch.testing.assert_close(metrics['gate_density'], together.density())


def main(output: Path) -> None:
    dist.init_process_group('gloo')
    rank = dist.get_rank()
    torch.set_num_threads(1)
    for name in GATHERING:
        for sizes in ((3, 3), (4, 1), (2, 3)):
            check_gathering(name, sizes, rank)
    for dtype in (torch.bfloat16, torch.float16):
        check_gathering_in_half_precision(dtype, rank)
    check_statistics(rank)
    different = [name for name in MODELS if not train(name, rank)]
    (output / f'rank{rank}').write_text(f'different: {different}' if different else 'equal')
    dist.destroy_process_group()


if __name__ == '__main__':
    main(Path(sys.argv[1]))
