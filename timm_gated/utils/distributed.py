"""One batch out of those of all processes

Batch shaping compares gates with their prior over a batch, and a budget is one of a batch's mean: neither is the
average of what processes find for their own parts of it. Gathered, the gates of all processes make the loss of one
process with the whole batch, in value and in gradient.
"""
from typing import Any, Tuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

__all__ = ['average_batches', 'gather_batch']


def gather_batch(x: torch.Tensor) -> torch.Tensor:
    """The rows of all processes, in the order of their ranks; x itself if there is one process.

    Made for losses that all processes compute alike and whose gradients DDP averages. Each process passes on the
    gradient of its own rows, times the number of processes: the average is then the gradient of the one loss. What does
    not come from here, such as the parameters of a prior, has that gradient in every process already.

    Processes may have different numbers of rows. As in DDP, all of them must take part.

    Args:
        x: What the samples of this process have, [N, …].
    """
    return _GatherBatch.apply(x) if _are_several() else x


def average_batches(means: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Means over the samples of all processes; those of this process's samples if there is one process.

    One small collective, for what is logged: no gradient goes through it. All processes must take part.

    Args:
        means: Over the samples of this process, any shape.
        batch_size: Number of these samples.
    """
    if not _are_several():
        return means
    sums = batch_size * torch.cat((means.detach().flatten(), means.new_ones(1)))
    dist.all_reduce(sums)
    return (sums[:-1] / sums[-1]).view_as(means)


def _are_several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class _GatherBatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        size = torch.tensor([x.shape[0]], device=x.device)
        sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
        dist.all_gather(sizes, size)
        counts = torch.cat(sizes).tolist()
        # Collectives want equal shapes.
        padded = F.pad(x, (0, 0) * (x.ndim - 1) + (0, max(counts) - x.shape[0])).contiguous()
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        ctx.num_processes = len(counts)
        ctx.start, ctx.length = sum(counts[:dist.get_rank()]), x.shape[0]
        return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[torch.Tensor]:
        return (ctx.num_processes * grad.narrow(0, ctx.start, ctx.length),)
