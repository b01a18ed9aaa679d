"""Gather batches from all processes

Batch shaping compares the distribution of a gate over the batch with a prior, and a budget applies to the mean of the
batch: neither loss is the average of the losses of the processes. With gathered gates, value and gradient equal those
of one process with the complete batch.
"""
from typing import Any, Tuple

import torch
import torch.distributed as dist
import torch.nn.functional as F

__all__ = ['average_batches', 'gather_batch']


def gather_batch(x: torch.Tensor) -> torch.Tensor:
    """Rows of all processes, in the order of their ranks; `x` itself with a single process.

    All processes must compute the same loss from the result, and DDP must average the gradients. The backward pass
    multiplies the gradient of the local rows by the number of processes, so that the average is the gradient of the
    loss. Other inputs of the loss, such as the parameters of a prior, have the same gradient in every process.

    Processes may have different numbers of rows. All of them must call this function.

    Args:
        x: Values per sample of this process, [N, …].
    """
    return _GatherBatch.apply(x) if _is_distributed() else x


def average_batches(means: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Means over the samples of all processes; `means` itself with a single process.

    For logging: the result has no gradient. All processes must call this function.

    Args:
        means: Means over the samples of this process, any shape.
        batch_size: Number of samples of this process.
    """
    if not _is_distributed():
        return means
    sums = batch_size * torch.cat((means.detach().flatten(), means.new_ones(1)))
    dist.all_reduce(sums)
    return (sums[:-1] / sums[-1]).view_as(means)


def _is_distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class _GatherBatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        size = torch.tensor([x.shape[0]], device=x.device)
        sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
        dist.all_gather(sizes, size)
        counts = torch.cat(sizes).tolist()
        # all_gather needs equal shapes.
        padded = F.pad(x, (0, 0) * (x.ndim - 1) + (0, max(counts) - x.shape[0])).contiguous()
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        ctx.num_processes = len(counts)
        ctx.start, ctx.length = sum(counts[:dist.get_rank()]), x.shape[0]
        return torch.cat([part[:n] for part, n in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[torch.Tensor]:
        return (ctx.num_processes * grad.narrow(0, ctx.start, ctx.length),)
