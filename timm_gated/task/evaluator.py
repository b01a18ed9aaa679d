"""MACs and gate density of a validation, beside timm's own metrics

timm's tasks create the evaluator that a training script reports after each validation
(`TrainingTask.create_evaluator`, since timm 1.0.31). For gated models it has two more metrics, means over the
validation set: `macs_share`, the MACs per sample divided by those of the dense network, and `gate_density`, the share
of open gates. For scripts that do not create an evaluator, both are logged.

timm passes outputs and targets to an evaluator, but not the model. Therefore forward hooks observe the task's
evaluation models, the average (EMA) included, while the task exists and in its thread. Copies and pickles of a model
are not observed.
"""
from collections import OrderedDict
from threading import get_ident
from typing import Any, Dict, NamedTuple, Optional, Tuple, Union
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
import torch.nn as nn

from ..layers import MacFormulas, gates
from ..utils import unwrap

__all__ = ['EvaluationMonitor', 'GatedEvaluator', 'PassCosts']


class PassCosts(NamedTuple):
    """Share of the dense network's MACs and share of open gates, per sample of a forward pass, [N] each."""
    macs_share: torch.Tensor
    gate_density: torch.Tensor


class _Total:
    """Running means of costs. They stay on their device until they are read."""

    def __init__(self) -> None:
        self.num_samples = 0
        self.sums: Union[float, torch.Tensor] = 0.

    def add(self, costs: Optional[PassCosts], num_samples: int, num_outputs: int) -> None:
        """Add the first samples of a pass.

        Args:
            costs: Costs of the pass; None if it was not observed, which makes the means NaN.
            num_samples: Number of samples to count.
            num_outputs: Number of samples in the output of the pass.
        """
        self.num_samples += num_samples
        if costs is None:
            self.sums = self.sums + float('nan')
        elif num_samples:
            # Test-time augmentation averages the outputs of several views of a sample.
            views = torch.stack(costs).unflatten(1, (num_outputs, -1))
            self.sums = self.sums + views[:, :num_samples].mean(2).sum(1)

    def means(self, distributed: bool = False, device: Optional[torch.device] = None) -> Dict[str, float]:
        """Means over the samples, of all processes if distributed; 0 without samples."""
        sums = torch.as_tensor(self.sums, dtype=torch.float64, device=device).expand(len(PassCosts._fields))
        totals = torch.cat((sums, sums.new_tensor([self.num_samples])))
        if distributed:
            dist.all_reduce(totals)
        *values, count = totals.tolist()
        return {name: value / max(count, 1) for name, value in zip(PassCosts._fields, values, strict=True)}


class GatedEvaluator:
    """timm evaluator with the additional metrics `macs_share` and `gate_density`.

    Both are fractions, and NaN if a pass was not made by one of the task's evaluation models.

    Args:
        evaluator: The task's own evaluator.
        monitor: Monitor of the task's evaluation models.
        max_samples: Number of samples to count, excluding those that a sampler repeats at the end.
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
    """Observes the evaluation passes of a task's models. A copy observes nothing."""

    def __init__(self) -> None:
        self._watched: WeakSet = WeakSet()
        self._last: Optional[PassCosts] = None
        self._totals: Dict[str, _Total] = {}
        self._has_evaluator = False

    def __reduce__(self) -> Tuple[Any, ...]:
        return EvaluationMonitor, ()

    def watch(self, model: nn.Module, name: str = '') -> None:
        """Observe a model from now on. Further calls have no effect.

        Args:
            model: A gated model as validation calls it, such as a compiled model or an average.
            name: Name of the model in the log.
        """
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module  # scripts validate the inner model
        if model not in self._watched and gates(model):
            self._watched.add(model)
            model.register_forward_hook(_Watch(self, name), with_kwargs=True)

    def evaluator(self, evaluator: Any, max_samples: Optional[int]) -> GatedEvaluator:
        """Evaluator that reports the observed costs. From then on they are no longer logged."""
        self._has_evaluator = True
        return GatedEvaluator(evaluator, self, max_samples)

    def saw(self, costs: PassCosts, name: str) -> None:
        self._last = costs
        if not self._has_evaluator:
            num_samples = len(costs.macs_share)
            self._totals.setdefault(name, _Total()).add(costs, num_samples, num_samples)

    def take(self) -> Optional[PassCosts]:
        """Costs of the last pass since the previous call; None without a pass."""
        costs, self._last = self._last, None
        return costs

    def take_means(self) -> Dict[str, Dict[str, float]]:
        """Means and number of images since the previous call, by model name."""
        totals, self._totals = self._totals, {}
        return {name: {**total.means(), 'images': total.num_samples} for name, total in totals.items()}


class _Watch:
    """Forward hook that reports the costs of each evaluation pass to a monitor. Copies and pickles do nothing."""

    def __init__(self, monitor: EvaluationMonitor, name: str) -> None:
        self._monitor = ref(monitor)
        self._thread = get_ident()
        self._name = name
        self._formulas = MacFormulas()

    def __reduce__(self) -> Tuple[Any, ...]:
        return _get_ignore, ()

    def __call__(self, module: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any], output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        monitor = self._monitor()
        network = unwrap(module)
        if monitor is None or get_ident() != self._thread or network.training:
            return
        named_gates = gates(network)
        if not named_gates or named_gates[0][1].training:
            return
        images = (*args, *kwargs.values())[0]
        with torch.no_grad():
            masks: Dict[str, Any] = {name: gate.decision for name, gate in named_gates}
            if any(len(mask) != len(images) for mask in masks.values()):
                return  # another thread is running the model
            formula = self._formulas.find(network, tuple(images.shape[1:]), masks)
            density = torch.cat([mask.double() for mask in masks.values()], dim=1).mean(1)
            monitor.saw(PassCosts(formula.used(masks) / formula.dense, density), self._name)


def _ignore(module: nn.Module, args: Tuple[Any, ...], kwargs: Dict[str, Any], output: Any) -> None:
    """Hook of a copied model, which does nothing."""


def _get_ignore() -> Any:
    return _ignore
