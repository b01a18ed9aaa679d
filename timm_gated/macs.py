"""Multiply-accumulates, of the dense network and of each sample

The convention is the gating paper's; `count_macs` states it.

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)
"""
import math
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Dict, Iterator, List, Mapping, Optional, Set, Tuple

import torch
import torch.nn as nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd, _AvgPoolNd

from .gate import Gate, Gating, gates

__all__ = ['MacCounter', 'MacFormula', 'Macs', 'ModuleMacs', 'count_macs', 'evaluation_mode']

_COUNTED = (_ConvNd, nn.Linear, nn.RNNBase, nn.RNNCellBase)
_POOLING = (_AdaptiveAvgPoolNd, _AvgPoolNd)


@dataclass
class ModuleMacs:
    """MACs of one module.

    Attributes:
        dense: MACs of a sample in the plain network; 0 for gates and their pooling.
        per_sample: MACs of each sample, [N], int64.
    """
    dense: int
    per_sample: torch.Tensor


@dataclass
class Macs:
    """MACs of a batch.

    Attributes:
        dense: MACs of a sample in the plain network without gates.
        per_sample: MACs of each sample, gates included, [N], int64.
        by_module: Both, for every module that counts, by name.
    """
    dense: int
    per_sample: torch.Tensor
    by_module: Dict[str, ModuleMacs] = field(repr=False)

    @property
    def share(self) -> float:
        """Mean MACs of a sample, gates included, over those of the plain network."""
        return self.per_sample.double().mean().item() / self.dense


@dataclass
class MacFormula:
    """What an image costs as a function of its gates, for images of one size.

    Attributes:
        dense: MACs of a sample in the plain network without gates.
        fixed: MACs that every sample uses: stem, shortcuts, head, and the gates themselves.
        switched: Of every convolution that gates switch, by name: its MACs with all of them open, and the names of the
            gates, each with how many channels beside its own are always open.
    """
    dense: int
    fixed: int
    switched: Dict[str, Tuple[int, Dict[str, int]]]

    def used(self, masks: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """MACs of each sample, [N], float64. A convolution uses its open inputs times its open outputs.

        Args:
            masks: Of every gate, by name, [N, num_gates]; gradients go through them.
        """
        total: Any = self.fixed
        for macs, ungated in self.switched.values():
            used: Any = macs
            for name, always in ungated.items():
                used = used / (masks[name].shape[1] + always) * (masks[name].double().sum(1) + always)
            total = total + used
        return total


class MacCounter:
    """Counts MACs while the context lasts, over all forward passes of one batch.

    Args:
        model: A gated model, or any other model of convolutions and linear layers.

    Example:
        >>> with MacCounter(model) as counter:
        >>>     output = model(images)
        >>> counter.macs()
    """

    def __init__(self, model: nn.Module) -> None:
        self._full: Dict[str, int] = {}  # MACs of a sample with everything open
        self._used: Dict[str, torch.Tensor] = {}  # and what is left of them, of convolutions that gates switch
        self._batch: Optional[Tuple[int, torch.device]] = None  # number of samples, and where they are
        self._switches: Dict[str, List[Gate]] = {}  # gates over the inputs and the outputs of convolutions
        self._overhead: Set[str] = set()  # what the plain network does not have
        self._modules: Dict[str, Any] = {}  # what counts
        for name, module in model.named_modules():
            prefix = f'{name}.' if name else ''
            if isinstance(module, Gating):
                self._overhead.update(
                    inner_name for inner_name, inner in module.named_modules(prefix=name)
                    if isinstance(inner, _COUNTED + _POOLING))
            for conv, pair in getattr(module, 'gated_convs', {}).items():
                switching = [gate for gate in pair if gate is not None]
                if switching:
                    self._switches[prefix + conv] = switching
            if name in self._overhead or isinstance(module, _COUNTED):
                self._modules[name] = module
        known = {id(gate) for switching in self._switches.values() for gate in switching}
        self._gate_names = {id(gate): name for name, gate in gates(model)}
        for name, gate in gates(model):
            if name and id(gate) not in known:  # (a gate by itself switches nothing)
                raise ValueError(
                    f"cannot tell what gate '{name}' switches: its block is not in this model (a traced copy, maybe). "
                    f'Count the model that it was made from.')
        self._num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self._handles: List[Any] = []

    def __enter__(self) -> 'MacCounter':
        self._full, self._used, self._batch = {}, {}, None
        self._handles = [
            module.register_forward_hook(partial(self._record, name)) for name, module in self._modules.items()]
        return self

    def __exit__(self, *args: Any) -> None:
        for handle in self._handles:
            handle.remove()

    def _record(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        # A hook for every module of every batch: what does not depend on the sample stays out of tensors.
        full = _full_macs(module, args[0], output)
        self._batch = args[0].shape[_batch_dim(module)], args[0].device
        self._full[name] = self._full.get(name, 0) + full  # a second pass adds up, such as that of another crop
        if name in self._switches:
            used: Any = full
            for gate in self._switches[name]:
                assert gate.mask is not None, f'{name} runs before a gate that switches it'
                num_open = gate.mask.count_nonzero(dim=1) + gate.num_ungated
                used = used // (gate.num_gates + gate.num_ungated) * num_open
            self._used[name] = self._used.get(name, 0) + used

    def macs(self) -> Macs:
        """What was counted since the context was entered."""
        num_samples, device = self._counted()
        by_module = {
            name: ModuleMacs(
                dense=0 if name in self._overhead else full,
                per_sample=self._used[name] if name in self._used else torch.full(
                    (num_samples,), full, dtype=torch.int64, device=device),
            )
            for name, full in self._full.items()}
        return Macs(
            dense=sum(macs.dense for macs in by_module.values()),
            per_sample=torch.stack([macs.per_sample for macs in by_module.values()]).sum(0),
            by_module=by_module,
        )

    def formula(self) -> MacFormula:
        """What was counted since the context was entered, as a function of the gates."""
        self._counted()
        return MacFormula(
            dense=sum(macs for name, macs in self._full.items() if name not in self._overhead),
            fixed=sum(macs for name, macs in self._full.items() if name not in self._switches),
            switched={
                name: (self._full[name], {self._gate_names[id(gate)]: gate.num_ungated for gate in switching})
                for name, switching in self._switches.items() if name in self._full},
        )

    def parameters(self) -> torch.Tensor:
        """Parameters that each sample used, [N]: all but the weights of filters, and of their inputs, that were off.

        Norms, biases and gates count in full.
        """
        num_samples, device = self._counted()
        used = torch.full((num_samples,), float(self._num_parameters), dtype=torch.float64, device=device)
        for name, open_macs in self._used.items():
            weight = self._modules[name].weight
            used -= weight.numel() * (1 - open_macs.double() / self._full[name])
        return used

    def _counted(self) -> Tuple[int, torch.device]:
        if self._batch is None:
            raise RuntimeError('no MACs counted yet: run the model while the context lasts.')
        return self._batch


@torch.no_grad()
def count_macs(model: nn.Module, x: torch.Tensor) -> Macs:
    """Count the MACs of a forward pass in evaluation mode; the model's mode is restored afterwards.

    Counted are convolutions, linear layers and the matrix products of recurrent ones, one MAC a multiplication; not
    counted are normalisation, activation, pooling, residual additions and biases. For a plain ResNet the total agrees
    with fvcore's convolution + linear.

    `dense` is the plain network without its gates. `per_sample` is what an image costs: a convolution counts its open
    inputs times its open outputs, and nothing in a block that is skipped; shortcuts, stem and head count in full; and
    so does the overhead of the gates, which is all that counts within `Gating` modules, and the additions of average
    pooling there, one a value.

    Args:
        model: A gated model, or any other model of convolutions and linear layers.
        x: A batch of images.

    Example:
        >>> macs = count_macs(model, images)
        >>> macs.dense, macs.per_sample.float().mean(), macs.share
    """
    with evaluation_mode(model), MacCounter(model) as counter:
        model(x)
    return counter.macs()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Context in which a model is in evaluation mode; afterwards each of its modules is in the mode it was in."""
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, training in modes.items():
            module.training = training


def _batch_dim(module: nn.Module) -> int:
    """Dimension of the samples in the input of a module."""
    return 1 if isinstance(module, nn.RNNBase) and not module.batch_first else 0


def _full_macs(module: nn.Module, x: torch.Tensor, output: Any) -> int:
    """MACs of a sample with all channels open."""
    if isinstance(module, nn.Linear):
        return output[0].numel() * module.in_features
    if isinstance(module, _ConvTransposeNd):
        return x[0].numel() * math.prod(module.weight.shape[1:])
    if isinstance(module, _ConvNd):
        return output[0].numel() * math.prod(module.weight.shape[1:])
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        steps = x.shape[1 - _batch_dim(module)] if isinstance(module, nn.RNNBase) else 1
        return steps * sum(weight.numel() for name, weight in module.named_parameters() if name.startswith('weight'))
    return x[0].numel()  # the additions of a pooling
