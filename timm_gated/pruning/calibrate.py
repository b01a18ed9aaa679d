"""A dial after training: the average MACs of a gated network, set by the thresholds of its gates

A gate is open where its logit is above a threshold, which is zero after training. `calibrate` shifts the thresholds so
that the average MACs over some images meet a share of the dense network's MACs. One checkpoint then serves many
budgets, without training.

A shift is added to the bias that ends the logits (see `logit_biases`). The result therefore has the same modules and
keys as the original, and everything that reads weights works on it: `accelerate`, exports, `save_pretrained`.

All thresholds move with one number, the dial. They are equal, or each has the logarithm of what its filter costs as an
offset: then a filter is kept if its odds of being open, exp(logit), divided by its MACs exceed a bound. MACs do not
follow from the logits of one pass, since gates read features that other gates change. Therefore the dial is solved from
the logits of a pass and the network is run again, until the measured share is the target.
"""
import copy
import math
from dataclasses import dataclass
from statistics import mean
from typing import Any, Callable, Dict, Iterable, List, Mapping, Tuple

import torch
import torch.nn as nn

from ..analysis import check_gated
from ..layers import MacCounter, MacFormula, Macs, gates, logit_biases
from ..utils import check_number, unwrap
from .prune import check_repeatable

__all__ = ['Calibrated', 'calibrate', 'calibrate_with']

RULES = ('global', 'cost')
MAX_PASSES = 16

RunBatch = Callable[[nn.Module, Any], Any]


@dataclass
class Calibrated:
    """Calibrated network and its figures. `print` shows them.

    Attributes:
        model: Calibrated network, in evaluation mode.
        target: Share of the dense network's MACs that was asked for.
        share: Share that the network uses on the images.
        before: Share that the original uses on the images.
        possible: Share with all gates closed, and with all gates open.
        dense_macs: MACs per image of the dense network.
        thresholds: Logit of the original network above which each gate opens, [num_gates], by name of the gate module.
        num_samples: Number of images.
        num_passes: Number of passes over the images.
    """
    model: nn.Module
    target: float
    share: float
    before: float
    possible: Tuple[float, float]
    dense_macs: float
    thresholds: Dict[str, torch.Tensor]
    num_samples: int
    num_passes: int

    def __str__(self) -> str:
        def macs(share: float) -> str:
            return f'{share * self.dense_macs / 1e6:.2f} M'

        lowest, highest = (torch.stack([f(t) for t in self.thresholds.values()]) for f in (torch.min, torch.max))
        return '\n'.join((
            f'{"":<16}{"before":>14}{"after":>14}{"target":>14}',
            f'{"average MACs":<16}{macs(self.before):>14}{macs(self.share):>14}{macs(self.target):>14}',
            f'{"share of dense":<16}{self.before:>14.1%}{self.share:>14.1%}{self.target:>14.1%}',
            f'possible shares: {self.possible[0]:.1%} to {self.possible[1]:.1%}; thresholds of the gates: '
            f'{lowest.min():+.2f} to {highest.max():+.2f}; images: {self.num_samples}, passes: {self.num_passes}'))


def calibrate(
        model: nn.Module,
        loader: Iterable[Any],
        share: float = 0.6,
        by: str = 'cost',
        tolerance: float = 0.002,
) -> Calibrated:
    """Shift the thresholds of a network's gates so that its average MACs are a share of the dense network's.

    The result is a copy, as of `prune_static`: the model itself is not changed, so that it can be calibrated for
    several budgets. Gates that are forced while this function runs are not forced in the copy.

    Gates with a threshold can be calibrated: those of batch shaping, L0, DGNet, ConvNet-AIG, GaterNet and SkipNet. FBS
    keeps a fixed share of the filters instead; set its `density`. A network whose share is within the tolerance keeps
    its thresholds. Calibrate the original rather than a calibrated network: 'cost' would count twice. For a pruned
    network, the share refers to the MACs of the pruned one, as `budget` does. In distributed training, calibrate in one
    process: each would find thresholds for its own images.

    Training images are a good choice; a few thousand suffice. About four passes are made, at most 16. The logits of a
    pass are kept in memory, 4 bytes per gate and image.

    Args:
        model: Gated network.
        loader: Batches of images or of (images, labels).
        share: Average MACs, gates included, as a share of the dense network's. It may be above or below the share that
            the model uses now.
        by: 'cost' adds the logarithm of the MACs that a decision switches to its threshold, so that cheap filters stay
            open longer. 'global' shifts all thresholds equally, which keeps the order of the trained decisions.
        tolerance: Largest difference between `share` and the measured share. If decisions jump over it, as with few
            images, the nearest share found is returned.

    Examples:
        >>> calibrated = calibrate(model, loader, share=0.5)
        >>> print(calibrated)
        >>> save_pretrained(calibrated.model, 'half')
    """
    def run(network: nn.Module, batch: Any) -> None:
        images = batch[0] if isinstance(batch, (list, tuple)) else batch
        if not isinstance(images, torch.Tensor):
            raise ValueError(f'batches must be images or (images, labels), got a {type(batch).__name__}.')
        network(images.to(next(network.parameters()).device))

    return calibrate_with(model, run, loader, share, by, tolerance)


def calibrate_with(
        model: nn.Module,
        run: RunBatch,
        loader: Iterable[Any],
        share: float = 0.6,
        by: str = 'cost',
        tolerance: float = 0.002,
) -> Calibrated:
    """Calibrate any network with gates on any data. Used by `calibrate`.

    Args:
        model: Network to calibrate.
        run: Function that runs a network on a batch.
        loader: Batches of any kind.
        share: Average MACs as a share of the dense network's.
        by: How the thresholds are shifted, see `calibrate`.
        tolerance: Largest difference between `share` and the measured share.
    """
    model = check_gated(unwrap(model))
    check_number(share, 'share', above=0)
    check_number(tolerance, 'tolerance', above=0)
    if by not in RULES:
        raise ValueError(f'by must be one of {", ".join(RULES)}, got {by!r}.')
    check_repeatable(loader)
    dial = _Dial(model, run, loader)
    first = measured = dial.measure()
    possible = first.possible()
    if not possible[0] - tolerance <= share <= possible[1] + tolerance:
        raise ValueError(
            f'share must be from {possible[0]:.3f} (all gates closed) to {possible[1]:.3f} (all gates open) for this '
            f'network, got {share}.')
    passes = 1
    tried: Dict[float, float] = {}
    if by == 'cost' and abs(first.share - share) > tolerance:
        dial.offset(first.costs())
    else:
        tried[dial.value] = first.share
    while abs(measured.share - share) > tolerance and passes < MAX_PASSES:
        value = measured.solve(share, dial.offsets)
        if value in tried:  # the nearest that the decisions allow
            break
        dial.turn(_next(dial.value, value, tried, share))
        measured = dial.measure()
        passes += 1
        tried[dial.value] = measured.share
    dial.turn(min(tried, key=lambda value: abs(tried[value] - share)))
    return Calibrated(
        model=dial.network,
        target=share,
        share=tried[dial.value],
        before=first.share,
        possible=possible,
        dense_macs=first.dense / first.num_samples,
        thresholds=dial.thresholds(),
        num_samples=first.num_samples,
        num_passes=passes,
    )


def _next(value: float, solved: float, tried: Mapping[float, float], share: float) -> float:
    """Value of the dial for the next pass.

    The solution from the logits of the last pass is right if later gates do not react. As long as the target is not
    enclosed, steps grow from the fourth pass on. Once it is, the measured interval is divided.

    Args:
        value: Value of the last pass.
        solved: Value that the logits of the last pass lead to.
        tried: Measured shares by value.
        share: Target share.
    """
    low = max((known for known, measured in tried.items() if measured > share), default=-math.inf)
    high = min((known for known, measured in tried.items() if measured <= share), default=math.inf)
    if math.isinf(high - low):
        solved = value + max(1, len(tried) - 2) * (solved - value)
        return solved if low < solved < high else low + 1 if math.isinf(high) else high - 1
    if low < solved < high and len(tried) < 4:
        return solved
    part = (tried[low] - share) / (tried[low] - tried[high]) if len(tried) % 2 else 0.5
    return low + part * (high - low)


class _Dial:
    """A copy of a network whose thresholds move with one number.

    Args:
        model: Network to copy.
        run: Function that runs a network on a batch.
        loader: Batches.

    Attributes:
        network: The copy, in evaluation mode.
        offsets: Difference between threshold and dial, by name of the gate module.
        value: Value of the dial, 0 at first.
    """

    def __init__(self, model: nn.Module, run: RunBatch, loader: Iterable[Any]) -> None:
        self.network = copy.deepcopy(model)
        self.network.eval()  # not chained: eval() of mmseg's backbones returns None
        self._run = run
        self._loader = loader
        self._biases = logit_biases(self.network)
        for name, gate in gates(self.network):
            if name not in self._biases:
                raise ValueError(
                    f"gate '{name}' is a {type(gate).__name__}, which has no threshold of its own here, so the network "
                    f'cannot be calibrated. The MACs of FBS follow from its option density.')
        self._originals = {name: bias.clone() for name, bias in self._biases.items()}
        self.offsets = dict.fromkeys(self._biases, 0.)
        self.value = 0.

    def offset(self, costs: Mapping[str, float]) -> None:
        """Make the offsets the logarithm of the cost, with a mean of zero. Gates that share a bias have their mean.

        Args:
            costs: MACs per decision, by name of the gate module. Gates without a cost did not run.
        """
        logs = {name: math.log(cost) for name, cost in costs.items()}
        sharing: Dict[int, List[float]] = {}
        for name, log in logs.items():
            sharing.setdefault(self._biases[name].data_ptr(), []).append(log)
        for name in logs:
            self.offsets[name] = mean(sharing[self._biases[name].data_ptr()]) - mean(logs.values())

    def turn(self, value: float) -> None:
        """Set the dial. A higher value closes more gates."""
        self.value = value
        for name, bias in self._biases.items():
            bias.copy_(self._originals[name] - value - self.offsets[name])

    def thresholds(self) -> Dict[str, torch.Tensor]:
        """Logits of the original network above which gates open, [num_gates], by name of the gate module."""
        return {name: self._originals[name] - bias for name, bias in self._biases.items()}

    @torch.no_grad()
    def measure(self) -> '_Measured':
        """Run the network on all batches."""
        measured = _Measured()
        counter = MacCounter(self.network)
        thresholds = self.thresholds()
        for batch in self._loader:
            with counter:
                self._run(self.network, batch)
            macs, formula = counter.macs(), counter.formula()
            if not len(macs.per_sample):
                continue
            ran = {name for _, ungated in formula.switched.values() for name in ungated}
            logits: Dict[str, torch.Tensor] = {}
            for name, gate in gates(self.network):
                if name not in ran:
                    continue
                assert gate.logits is not None
                logits[name] = gate.logits + thresholds[name]
                if not logits[name].isfinite().all():
                    raise ValueError(
                        f"a logit of gate '{name}' is not finite: the weights or the input hold NaN or infinity. Check "
                        f'that training was stable and that the input is normalised as in training.')
            measured.add(macs, formula, logits)
        if not measured.num_samples:
            raise ValueError('the data set is empty. Check its path and split.')
        return measured


class _Measured:
    """MACs of a pass over the images, and the logits, on the scale of the original network."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.dense = self._used = 0.
        self._batches: List[Tuple[int, MacFormula, Dict[str, torch.Tensor]]] = []

    def add(self, macs: Macs, formula: MacFormula, logits: Dict[str, torch.Tensor]) -> None:
        count = len(macs.per_sample)
        self.num_samples += count
        self.dense += count * macs.dense
        self._used += macs.per_sample.double().sum().item()
        self._batches.append((count, formula, logits))

    @property
    def share(self) -> float:
        """Measured share of the dense network's MACs."""
        return self._used / self.dense

    def possible(self) -> Tuple[float, float]:
        """Share with all gates closed, and with all gates open."""
        closed, opened = (
            sum(count * float(formula.used({
                name: value * torch.ones(1, part.shape[1]) for name, part in logits.items()}))
                for count, formula, logits in self._batches) / self.dense
            for value in (0, 1))
        return closed, opened

    def costs(self) -> Dict[str, float]:
        """MACs of the convolutions that a decision switches, by name of the gate module, with all gates open."""
        _, formula, logits = self._batches[0]
        costs = dict.fromkeys(logits, 0.)
        for macs, ungated in formula.switched.values():
            for name, always in ungated.items():
                costs[name] += macs / (logits[name].shape[1] + always)
        return costs

    def solve(self, share: float, offsets: Mapping[str, float]) -> float:
        """Value of the dial at which the recorded logits use a share, halfway between the nearest decisions.

        Args:
            share: Target share.
            offsets: Difference between threshold and dial, by name of the gate module.
        """
        critical = [{name: part - offsets[name] for name, part in logits.items()} for _, _, logits in self._batches]
        steps = torch.cat([part.flatten() for parts in critical for part in parts.values()]).unique()

        def value(index: int) -> float:
            """Value of the dial above this number of steps."""
            if index in (0, len(steps)):
                return float(steps[0]) - 1 if index == 0 else float(steps[-1]) + 1
            return (float(steps[index - 1]) + float(steps[index])) / 2

        def excess(index: int) -> float:
            used = sum(
                float(formula.used({name: part > value(index) for name, part in parts.items()}).sum())
                for (_, formula, _), parts in zip(self._batches, critical, strict=True))
            return used / self.dense - share

        low, high = 0, len(steps)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if excess(middle) > 0 else (low, middle)
        return value(min(max(low - 1, 0), low, key=lambda index: abs(excess(index))))
