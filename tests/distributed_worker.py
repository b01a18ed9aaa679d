"""One of the processes of test_distributed.py, started by torchrun"""
import sys
from pathlib import Path

import timm
import torch
import torch.distributed as dist
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask

import timm_gated  # noqa: F401

MODELS = {
    'gated_resnet20': dict(
        lam_epochs=(0, 2), gamma=0.1, gamma_epochs=(1, 3),
        prior={'type': 'beta', 'learnable': True}),  # whose parameters DDP waits for, also where lambda is zero
    'fbs_resnet20': dict(density=0.5, density_epochs=(0, 2)),  # a buffer that follows a schedule
    'gaternet_resnet20': dict(),  # a network beside the network
    'skipnet_resnet38': dict(stage='hybrid', layers=(2, 2, 2)),  # gates that share a layer, and sampled decisions
}
EXPECTED = {
    'gated_resnet20': [dict(lam=0.75, gamma=0.), dict(lam=0.375, gamma=0.), dict(lam=0., gamma=0.05)],
    'fbs_resnet20': [dict(gate_density=1.), dict(gate_density=0.75), dict(gate_density=0.5)],
    'gaternet_resnet20': [dict(sparsity_weight=0.1)] * 3,
    'skipnet_resnet38': [dict(rl_weight=1.)] * 3,
}


def train(name: str, rank: int) -> bool:
    """Whether both processes end with the same parameters."""
    torch.manual_seed(0)
    model = timm.create_model(name, **MODELS[name])
    before = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
    task = ClassificationTask(model, torch.nn.CrossEntropyLoss(), verbose=rank == 0)
    optimizer = create_optimizer_v2(task.get_trainable_module(), opt='sgd', lr=0.1, weight_decay=1e-4)
    task.prepare_distributed(device_ids=None)

    torch.manual_seed(1 + rank)  # other data and other noise in each process
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


def main(output: Path) -> None:
    dist.init_process_group('gloo')
    rank = dist.get_rank()
    torch.set_num_threads(1)
    different = [name for name in MODELS if not train(name, rank)]
    (output / f'rank{rank}').write_text(f'different: {different}' if different else 'equal')
    dist.destroy_process_group()


if __name__ == '__main__':
    main(Path(sys.argv[1]))
