"""How gates behave over a data set: always on, conditional, always off

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)

A gate is always on (off) when it is on (off) for more than 99 % of the inputs, and conditional otherwise.
"""
from typing import Any, Callable, Dict, NamedTuple, Optional

import torch
import torch.nn as nn

from ..layers import gates

__all__ = ['GateCounts', 'GateStatistics', 'check_threshold', 'gate_kinds']


def check_threshold(threshold: float) -> float:
    """Validate the share of inputs above which a gate counts as always on or always off, and return it."""
    if not 0.5 < threshold <= 1:
        raise ValueError(f'threshold must be in (0.5, 1], got {threshold}.')
    return threshold


class GateCounts(NamedTuple):
    """Number of gates by what they do over a data set."""
    always_on: int
    conditional: int
    always_off: int


def gate_kinds(open_share: torch.Tensor, threshold: float = 0.99) -> torch.Tensor:
    """What each gate does, as an index into `GateCounts`: 0 always on, 1 conditional, 2 always off.

    Args:
        open_share: Share of the inputs for which each gate was open.
        threshold: Share of inputs above which a gate counts as always on or always off; 1 is without exception.
    """
    check_threshold(threshold)
    always_on = (open_share > threshold) | (open_share == 1)
    always_off = (1 - open_share > threshold) | (open_share == 0)
    return 1 - always_on.long() + always_off.long()


class GateStatistics:
    """Counts, gate by gate, for how many inputs it was open. Memory does not grow with the data set.

    Args:
        num_classes: Count by class as well, for so many classes.

    Attributes:
        num_samples: Inputs seen.
        samples_by_class: Inputs seen of each class, [num_classes].

    Example:
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
        """Take in the decisions of the model's last forward pass.

        Args:
            model: A model with gates.
            members: Which classes each input belongs to, [N, num_classes] of booleans: one for a labelled image,
                any number for an image with a label map. Needed if there are classes.
            num_samples: Count only so many inputs, the first ones. Samplers of several processes repeat images, at the
                end, so that all processes have the same number: those must not count twice.
        """
        num_classes = self.samples_by_class.numel()
        if members is None and num_classes:
            raise ValueError(f'statistics of {num_classes} classes need the classes of each input, got none.')
        if members is not None and members.shape[1:] != (num_classes,):
            raise ValueError(
                f'the classes of inputs must be [N, {num_classes}], one column a class, got {list(members.shape)}.')
        members = None if members is None else members[:num_samples]
        counted = 0
        for name, gate in gates(model):
            decision = gate.decision
            if decision is None:
                raise RuntimeError(f"gate '{name}' has seen no input: run the model before its statistics.")
            decision = decision[:num_samples]
            counted = decision.shape[0]
            self._open[name] = self._open.get(name, 0) + decision.long().sum(0)
            if members is not None:  # whole numbers, exact in float32 for any batch of less than 2 ** 24 inputs
                by_class = (members.T.to(decision) @ decision).long()
                self._open_by_class[name] = self._open_by_class.get(name, 0) + by_class
        self.num_samples += counted
        if members is not None:
            self.samples_by_class += members.sum(0).cpu()

    def reduce(self, all_reduce: Callable[[torch.Tensor], Any]) -> None:
        """Add up the counts of all processes, each of which must have updated its own at least once.

        Args:
            all_reduce: Sums a tensor over the processes, in place: `torch.distributed.all_reduce`, for one.
        """
        num_samples = torch.tensor(self.num_samples)
        counts = (num_samples, self.samples_by_class, *self._open.values(), *self._open_by_class.values())
        # One tensor, where the gates are: a backend may want all tensors on its device.
        total = torch.cat([count.flatten().to(counts[-1].device) for count in counts])
        all_reduce(total)
        for count, summed in zip(counts, total.split([count.numel() for count in counts]), strict=True):
            count.copy_(summed.view_as(count))
        self.num_samples = int(num_samples)

    def open_share(self) -> Dict[str, torch.Tensor]:
        """For each gate module, the share of inputs for which each of its gates was open, [num_gates]."""
        if not self._open:
            raise RuntimeError('no decisions counted yet: call update with a model that has gates, after its forward.')
        return {name: count.double() / self.num_samples for name, count in self._open.items()}

    def open_share_by_class(self) -> Dict[str, torch.Tensor]:
        """The same within each class, [num_classes, num_gates]; NaN in the row of a class that never occurred."""
        if not self._open_by_class:
            raise RuntimeError('no decisions counted by class yet: give update the classes of each input.')
        return {
            name: count.double() / self.samples_by_class.to(count.device)[:, None]
            for name, count in self._open_by_class.items()}

    def _shares(self, within: str) -> torch.Tensor:
        return torch.cat([share for name, share in self.open_share().items() if within in name])

    def density(self, within: str = '') -> float:
        """Mean share of open gates.

        Args:
            within: Take only gate modules with this in their name, such as a stage's.
        """
        return self._shares(within).mean().item()

    def counts(self, threshold: float = 0.99, within: str = '') -> GateCounts:
        """Gates by what they do.

        Args:
            threshold: Share of inputs above which a gate counts as always on or always off.
            within: Take only gate modules with this in their name, such as a stage's.
        """
        kinds = gate_kinds(self._shares(within), threshold)
        return GateCounts(*torch.bincount(kinds, minlength=len(GateCounts._fields)).tolist())
