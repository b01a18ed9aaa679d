"""Schedules of the gate losses, as pure functions of the epoch

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)

Batch shaping starts at full weight and is annealed linearly to zero; the L0 loss starts later and ramps up linearly.
"""
from typing import Any, Dict, Mapping, NamedTuple, Sequence, Tuple, Union

from ..utils import check_number

__all__ = ['Epochs', 'Scheduled', 'check_epochs', 'linear_anneal', 'linear_warmup', 'scale_epochs']

Epochs = Union[str, Tuple[float, float]]  # 'fixed', or (start, end)


class Scheduled(NamedTuple):
    """A scheduled value of a training, as shown in the log.

    Attributes:
        what: Name of the loss or other quantity.
        name: Name of the value.
        first: Value before the schedule starts.
        last: Value after the schedule has ended, or the fixed value.
        epochs: Start and end of the schedule, or 'fixed'.
        evaluated: Whether a trained network is always evaluated with the last value.
    """
    what: str
    name: str
    first: float
    last: float
    epochs: Epochs
    evaluated: bool = False

    def __str__(self) -> str:
        if isinstance(self.epochs, str):
            return f'{self.what}: {self.name} {self.last:g} throughout'
        start, end = self.epochs
        return f'{self.what}: {self.name} {self.first:g} to {self.last:g} over epochs {start:g} to {end:g}'

    def begins_after(self, epoch: float) -> bool:
        """Whether a value that starts at zero is still zero in this epoch."""
        return self.first == 0 != self.last and self._done(epoch) == 0

    def ends_after(self, epoch: float) -> bool:
        """Whether the value has not reached its last value in this epoch."""
        return self.first != self.last and self._done(epoch) < 1

    def _done(self, epoch: float) -> float:
        return 1. if isinstance(self.epochs, str) else _fraction(epoch, *self.epochs)


def scale_epochs(options: Mapping[str, Any], factor: float) -> Dict[str, Any]:
    """Scale all schedules in a dict of options: the pairs whose names end in `_epochs`.

    Args:
        options: Options of an objective.
        factor: New length of the training divided by the old length.
    """
    return {
        name: tuple(epoch * factor for epoch in value) if name.endswith('_epochs') and value != 'fixed' else value
        for name, value in options.items()}


def check_epochs(epochs: Any, name: str = 'epochs') -> Epochs:
    """Validate the epochs of a schedule: 'fixed', or a pair (start, end) as a tuple or list."""
    if epochs == 'fixed':
        return 'fixed'
    if isinstance(epochs, str) or not isinstance(epochs, Sequence) or len(epochs) != 2:
        raise ValueError(f"{name} must be 'fixed' or a pair (start, end), got {epochs!r}.")
    start, end = check_number(epochs[0], f'start of {name}'), check_number(epochs[1], f'end of {name}')
    if not 0 <= start <= end:
        raise ValueError(f'{name} must satisfy 0 <= start <= end, got start {start} and end {end}.')
    return start, end


def _fraction(epoch: float, start: float, end: float) -> float:
    """Completed fraction of a schedule. If start and end are equal, the schedule is a step."""
    if epoch >= end:
        return 1.
    if epoch <= start:
        return 0.
    return (epoch - start) / (end - start)


def linear_anneal(epoch: float, value: float, start: float, end: float) -> float:
    """`value` until `start`, then linearly down to zero at `end`."""
    check_epochs((start, end))
    return value * (1. - _fraction(epoch, start, end))


def linear_warmup(epoch: float, value: float, start: float, end: float) -> float:
    """Zero until `start`, then linearly up to `value` at `end`."""
    check_epochs((start, end))
    return value * _fraction(epoch, start, end)
