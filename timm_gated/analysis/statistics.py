"""Gate statistics over a data set: always on, conditional, always off

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)

A gate is always on (off) if it is on (off) for more than 99 % of the inputs, and conditional otherwise.
"""
from typing import Any, Callable, Dict, NamedTuple, Optional, Union

import numpy as np
import torch
import torch.nn as nn

from ..layers import gates

__all__ = ['GateCounts', 'GateStatistics', 'check_threshold', 'gate_kinds']


def check_threshold(threshold: float) -> float:
    """Return the threshold above which a gate counts as always on or off. Raise a ValueError if it is out of range."""
    if not 0.5 < threshold <= 1:
        raise ValueError(f'threshold must be in (0.5, 1], got {threshold}.')
    return threshold


class GateCounts(NamedTuple):
    """Number of gates of each kind."""
    always_on: int
    conditional: int
    always_off: int

    @classmethod
    def of(cls, kinds: Union[torch.Tensor, np.ndarray]) -> 'GateCounts':
        """Count the kinds of gates, as returned by `gate_kinds`."""
        return cls(*(int((kinds == kind).sum()) for kind in range(len(cls._fields))))


def gate_kinds(open_share: torch.Tensor, threshold: float = 0.99) -> torch.Tensor:
    """Kind of each gate as an index into `GateCounts`: 0 always on, 1 conditional, 2 always off.

    Args:
        open_share: Share of inputs for which each gate was open.
        threshold: Share of inputs above which a gate counts as always on or off; with 1, all inputs are required.
    """
    check_threshold(threshold)
    always_on = (open_share > threshold) | (open_share == 1)
    always_off = (1 - open_share > threshold) | (open_share == 0)
    return 1 - always_on.long() + always_off.long()


class GateStatistics:
    """Counts the inputs for which each gate is open. Memory does not grow with the data set.

    Args:
        num_classes: Number of classes to also count by; 0 for none.

    Attributes:
        num_samples: Number of inputs seen.
        samples_by_class: Number of inputs seen per class, [num_classes].

    Examples:
        >>> statistics = GateStatistics()
        >>> for images, _ in loader:
        >>>     model(images)
        >>>     statistics.update(model)
        >>> statistics.counts()
    """

    def __init__(self, num_classes: int = 0) -> None:
        self.num_samples = 0
        self.samples_by_class = torch.zeros(num_classes, dtype=torch.int64)
        self._open: Dict[str, torch.Tensor] = {}
        self._open_by_class: Dict[str, torch.Tensor] = {}

    def update(
            self, model: nn.Module, members: Optional[torch.Tensor] = None, num_samples: Optional[int] = None) -> None:
        """Add the decisions of the last forward pass.

        Args:
            model: Model with gates.
            members: Class membership of each input, boolean [N, num_classes]; required if `num_classes` is not 0. A
                label map may belong to any number of classes.
            num_samples: Number of inputs to count, from the start of the batch. Use it to skip the inputs that a
                distributed sampler repeats at the end.
        """
        num_classes = self.samples_by_class.numel()
        if members is None and num_classes:
            raise ValueError(f'members is required with num_classes={num_classes}, got None.')
        if members is not None and members.shape[1:] != (num_classes,):
            raise ValueError(
                f'members must have the shape [N, {num_classes}], got {list(members.shape)}.')
        members = None if members is None else members[:num_samples]
        counted = 0
        for name, gate in gates(model):
            decision = gate.decision
            if decision is None:
                raise RuntimeError(f"gate '{name}' has no decision yet: run the model before `update`.")
            decision = decision[:num_samples]
            counted = decision.shape[0]
            self._open[name] = self._open.get(name, 0) + decision.long().sum(0)
            if members is not None:  # integers, exact in float32 for batches below 2 ** 24
                by_class = (members.T.to(decision) @ decision).long()
                self._open_by_class[name] = self._open_by_class.get(name, 0) + by_class
        self.num_samples += counted
        if members is not None:
            self.samples_by_class += members.sum(0).cpu()

    def reduce(self, all_reduce: Callable[[torch.Tensor], Any]) -> None:
        """Sum the counts of all processes. Each process must have called `update` at least once.

        Args:
            all_reduce: Function that sums a tensor over processes in place, such as `torch.distributed.all_reduce`.
        """
        num_samples = torch.tensor(self.num_samples)
        counts = (num_samples, self.samples_by_class, *self._open.values(), *self._open_by_class.values())
        # One tensor on the device of the gates: a backend may require its own device.
        total = torch.cat([count.flatten().to(counts[-1].device) for count in counts])
        all_reduce(total)
        for count, summed in zip(counts, total.split([count.numel() for count in counts]), strict=True):
            count.copy_(summed.view_as(count))
        self.num_samples = int(num_samples)

    def open_share(self) -> Dict[str, torch.Tensor]:
        """Share of inputs for which each gate was open, [num_gates], by gate module."""
        if not self._open:
            raise RuntimeError('no decisions counted yet: call `update` after a forward pass of a model with gates.')
        return {name: count.double() / self.num_samples for name, count in self._open.items()}

    def open_share_by_class(self) -> Dict[str, torch.Tensor]:
        """`open_share` within each class, [num_classes, num_gates]; NaN for a class that does not occur."""
        if not self._open_by_class:
            raise RuntimeError('no decisions counted by class yet: call `update` with `members`.')
        return {
            name: count.double() / self.samples_by_class.to(count.device)[:, None]
            for name, count in self._open_by_class.items()}

    def _shares(self, within: str) -> torch.Tensor:
        return torch.cat([share for name, share in self.open_share().items() if within in name])

    def density(self, within: str = '') -> float:
        """Mean share of open gates.

        Args:
            within: Part of the names of the gate modules to include, such as the name of a stage.
        """
        return self._shares(within).mean().item()

    def counts(self, threshold: float = 0.99, within: str = '') -> GateCounts:
        """Number of gates of each kind.

        Args:
            threshold: Share of inputs above which a gate counts as always on or off.
            within: Part of the names of the gate modules to include, such as the name of a stage.
        """
        return GateCounts.of(gate_kinds(self._shares(within), threshold))
