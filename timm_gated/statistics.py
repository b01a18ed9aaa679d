"""How gates behave over a data set: always on, conditional, always off

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)

A gate is always on (off) when it is on (off) for more than 99 % of the inputs, and conditional otherwise.
"""
from typing import Any, Callable, Dict, NamedTuple

import torch
import torch.nn as nn

from .gate import gates

__all__ = ['GateCounts', 'GateStatistics', 'check_threshold']


def check_threshold(threshold: float) -> float:
    """Validate the share of inputs above which a gate counts as always on or always off, and return it."""
    if not 0.5 <= threshold < 1:
        raise ValueError(f'threshold must be in [0.5, 1), got {threshold}.')
    return threshold


class GateCounts(NamedTuple):
    """Number of gates by what they do over a data set."""
    always_on: int
    conditional: int
    always_off: int


class GateStatistics:
    """Counts, gate by gate, for how many inputs it was open. Memory does not grow with the data set.

    Example:
        >>> statistics = GateStatistics()
        >>> for images, _ in loader:
        >>>     model(images)
        >>>     statistics.update(model)
        >>> statistics.counts()
    """

    def __init__(self) -> None:
        self.num_samples = 0
        self._open: Dict[str, torch.Tensor] = {}

    def update(self, model: nn.Module) -> None:
        """Take in the decisions of the model's last forward pass."""
        num_samples = 0
        for name, gate in gates(model):
            if gate.decision is None:
                raise RuntimeError(f"gate '{name}' has seen no input: run the model before its statistics.")
            num_samples = gate.decision.shape[0]
            self._open[name] = self._open.get(name, 0) + gate.decision.long().sum(0)
        self.num_samples += num_samples

    def reduce(self, all_reduce: Callable[[torch.Tensor], Any]) -> None:
        """Add up the counts of all processes.

        Args:
            all_reduce: Sums a tensor over the processes, in place.
        """
        num_samples = torch.tensor(self.num_samples)
        for count in (num_samples, *self._open.values()):
            all_reduce(count)
        self.num_samples = int(num_samples)

    def open_share(self) -> Dict[str, torch.Tensor]:
        """For each gate module, the share of inputs for which each of its gates was open, [num_gates]."""
        if not self._open:
            raise RuntimeError('no decisions counted yet: call update with a model that has gates, after its forward.')
        return {name: count.double() / self.num_samples for name, count in self._open.items()}

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
        share = self._shares(within)
        check_threshold(threshold)
        on, off = int((share > threshold).sum()), int((1 - share > threshold).sum())
        return GateCounts(on, share.numel() - on - off, off)
