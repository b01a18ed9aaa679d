"""One of the processes of test_distributed.py, started by torchrun"""
import sys
from pathlib import Path

import timm
import torch
import torch.distributed as dist
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask

import timm_gated  # noqa: F401


def create(method: str) -> torch.nn.Module:
    if method == 'skipnet':
        return timm.create_model('skipnet_resnet38', stage='hybrid', layers=(2, 2, 2))
    return timm.create_model(
        'gated_resnet20', lam_epochs=(0, 2), gamma=0.1, gamma_epochs=(1, 3),
        prior={'type': 'beta', 'learnable': True})  # whose parameters DDP waits for, also where lambda is zero


def main(method: str, output: Path) -> None:
    dist.init_process_group('gloo')
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = create(method)
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
        assert method != 'gated' or (result['lam'], result['gamma']) == [(0.75, 0.), (0.375, 0.), (0., 0.05)][epoch]

    mine = torch.cat([p.detach().flatten() for p in model.parameters()])
    both = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(both, mine)
    assert not torch.equal(before, mine)
    (output / f'rank{rank}').write_text('equal' if torch.equal(*both) else 'different')
    dist.destroy_process_group()


if __name__ == '__main__':
    main(sys.argv[1], Path(sys.argv[2]))
