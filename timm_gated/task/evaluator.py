"""What a validation costs: MACs and gate density beside timm's own metrics

timm's tasks make what a training script reports after each validation (`TrainingTask.create_evaluator`, since timm
1.0.31). For a gated model the report has two figures more, means over the validation set: `macs_share`, the MACs of a
sample over those of the plain network, and `gate_density`, the share of open gates. Scripts that do not ask for an
evaluator get the same two figures as a line of the log.

An evaluator is given outputs and targets, not the model. So the task's evaluation models, the average (EMA) too, are
watched by forward hooks, as long as the task exists and in the thread that it runs in. Copies and pickles of a model
are not watched.
"""
from collections import OrderedDict
from threading import get_ident
from typing import Any, Dict, NamedTuple, Optional, Tuple, Union
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
import torch.nn as nn

from ..layers import MacFormula, gates, mac_formula
from ..utils import unwrap

__all__ = ['EvaluationMonitor', 'GatedEvaluator', 'PassCosts']


class PassCosts(NamedTuple):
    """What each sample of a forward pass cost: share of the plain network's MACs, and share of open gates, [N] each."""
    macs_share: torch.Tensor
    gate_density: torch.Tensor


class _Total:
    """Running means of costs, on their device: no value is waited for before the means are read."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.sums: Union[float, torch.Tensor] = 0.

    def add(self, costs: Optional[PassCosts], num_samples: int, num_outputs: int) -> None:
        """Add the first samples of a pass.

        Args:
            costs: Costs of the pass; None if it was not watched, which makes the means NaN.
            num_samples: Number of samples to count, the first ones.
            num_outputs: Number of samples that the outputs of the pass stand for.
        """
        self.num_samples += num_samples
        if costs is None:
            self.sums = self.sums + float('nan')
        elif num_samples:
            # Test-time augmentation averages the outputs of several views of a sample.
            views = torch.stack(costs).unflatten(1, (num_outputs, -1))
            self.sums = self.sums + views[:, :num_samples].mean(2).sum(1)

    def means(self, distributed: bool = False, device: Optional[torch.device] = None) -> Dict[str, float]:
        """Means over the samples, of all processes if distributed; 0 if there were none."""
        sums = torch.as_tensor(self.sums, dtype=torch.float64, device=device).expand(len(PassCosts._fields))
        totals = torch.cat((sums, sums.new_tensor([self.num_samples])))
        if distributed:
            dist.all_reduce(totals)
        *values, count = totals.tolist()
        return {name: value / max(count, 1) for name, value in zip(PassCosts._fields, values, strict=True)}


class GatedEvaluator:
    """An evaluator of timm's that reports `macs_share` and `gate_density` as well.

    Both are fractions, and NaN if a pass was not one of the task's evaluation models.

    Args:
        evaluator: The task's own evaluator, which everything else comes from.
        monitor: Watches the task's evaluation models.
        max_samples: Number of samples to count, without those that a sampler repeats at the end.
    """

    def __init__(self, evaluator: Any, monitor: 'EvaluationMonitor', max_samples: Optional[int] = None) -> None:
        self.evaluator = evaluator
        self.metric_names = (*evaluator.metric_names, *PassCosts._fields)
        self.max_samples = max_samples
        self._monitor = monitor
        self._total = _Total()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.evaluator, name)

    def reset(self) -> None:
        self.evaluator.reset()
        self._total = _Total()

    @torch.no_grad()
    def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
        self.evaluator.update(output, target)
        count = num_outputs = len(output)
        if self.max_samples is not None:
            count = max(0, min(count, self.max_samples - self._total.num_samples))
        self._total.add(self._monitor.take(), count, num_outputs)

    def summary(self) -> Dict[str, float]:
        """Metrics of this process so far."""
        return OrderedDict(self.evaluator.summary(), **self._total.means())

    def compute(self, distributed: bool = False) -> Dict[str, float]:
        """Metrics of the validation, over all processes if distributed."""
        metrics = self.evaluator.compute(distributed=distributed)
        return OrderedDict(metrics, **self._total.means(distributed, self.evaluator.device))


class EvaluationMonitor:
    """Watches the evaluation passes of a task's models. A copy watches nothing."""

    def __init__(self) -> None:
        self._watched: WeakSet = WeakSet()
        self._last: Optional[PassCosts] = None
        self._totals: Dict[str, _Total] = {}
        self._has_evaluator = False

    def __reduce__(self) -> Tuple[Any, ...]:
        return EvaluationMonitor, ()

    def watch(self, model: nn.Module, name: str = '') -> None:
        """Watch a model from now on, once.

        Args:
            model: A gated model, as validation calls it: compiled, or as an average.
            name: What the log calls it.
        """
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module  # which is what scripts validate
        if model not in self._watched and gates(model):
            self._watched.add(model)
            model.register_forward_hook(_Watch(self, name), with_kwargs=True)

    def evaluator(self, evaluator: Any, max_samples: Optional[int]) -> GatedEvaluator:
        """An evaluator that reports what is seen here. The log is then left to the script that asked for it."""
        self._has_evaluator = True
        return GatedEvaluator(evaluator, self, max_samples)

    def saw(self, costs: PassCosts, name: str) -> None:
        self._last = costs
        if not self._has_evaluator:
            num_samples = len(costs.macs_share)
            self._totals.setdefault(name, _Total()).add(costs, num_samples, num_samples)

    def take(self) -> Optional[PassCosts]:
        """Costs of the pass since the last call, if there was one."""
        costs, self._last = self._last, None
        return costs

    def take_means(self) -> Dict[str, Dict[str, float]]:
        """Means over what was seen since the last call, and the number of images, by the names of the models."""
        totals, self._totals = self._totals, {}
        return {name: {**total.means(), 'images': total.num_samples} for name, total in totals.items()}


class _Watch:
    """Forward hook that tells a monitor what each evaluation pass cost. Copies and pickles of it do nothing."""

    def __init__(self, monitor: EvaluationMonitor, name: str) -> None:
        self._monitor = ref(monitor)
        self._thread = get_ident()
        self._name = name
        self._formulas: Dict[Any, MacFormula] = {}

    def __reduce__(self) -> Tuple[Any, ...]:
        return _get_ignore, ()

    def __call__(self, module: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        monitor = self._monitor()
        if monitor is None or get_ident() != self._thread:
            return
        named_gates = gates(module)
        if not named_gates or named_gates[0][1].training:
            return
        images = (*args, *kwargs.values())[0]
        with torch.no_grad():
            masks: Dict[str, Any] = {name: gate.decision for name, gate in named_gates}
            if any(len(mask) != len(images) for mask in masks.values()):
                return  # another thread runs the model at this very time
            input_size = tuple(images.shape[1:])
            key = input_size, tuple(mask.shape[1] for mask in masks.values())  # (gates may be pruned)
            if key not in self._formulas:
                self._formulas[key] = mac_formula(unwrap(module), input_size)
            formula = self._formulas[key]
            density = torch.cat([mask.double() for mask in masks.values()], dim=1).mean(1)
            monitor.saw(PassCosts(formula.used(masks) / formula.dense, density), self._name)


def _ignore(module: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any], output: Any) -> None:
    """What a watched model's copy has in place of the watch."""


def _get_ignore() -> Any:
    return _ignore
