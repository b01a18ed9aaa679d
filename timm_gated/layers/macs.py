"""Multiply-accumulates (MACs) of the dense network and of each sample

The convention is the paper's; `count_macs` states it.

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)

The counter is a `TorchFunctionMode`: it sees all calls of its own thread, functional ones included. It sets no hooks,
since another thread may run the same modules, and finds the calling module in the stack of Python frames.
"""
import copy
import itertools
import sys
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Dict, List, Mapping, Optional, Set, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

from ..utils import evaluation_mode, unwrap
from .gate import Gate, Gating, report_decision
from .gate_state import gates
from .mac_rules import MAC_RULES, PARTLY_COUNTED, POOLING, num_mapped, open_pairs, operator_name

__all__ = [
    'count_macs', 'mac_formula', 'MacCounter', 'MacFormula', 'MacFormulas', 'Macs', 'ModuleMacs', 'run_and_report',
    'run_apart',
]

_CALL = nn.Module._call_impl.__code__  # code of `module(...)`
_WITHOUT_PRODUCTS = nn.Embedding, nn.EmbeddingBag, nn.LayerNorm


@dataclass
class ModuleMacs:
    """MACs of one module.

    Attributes:
        dense: MACs per sample in the dense network; 0 for gates and their pooling.
        per_sample: MACs of each sample, [N], int64.
    """
    dense: int
    per_sample: torch.Tensor


@dataclass
class Macs:
    """MACs of a batch.

    Attributes:
        dense: MACs per sample in the dense network, without gates.
        per_sample: MACs of each sample, gates included, [N], int64.
        by_module: MACs of every counted module, by name. An accelerated network is one module.
        uncounted: Names of modules with matrix products outside the count, by operator; and names of layers that were
            not seen to run, by class: layers not called, quantized, or run by code invisible to torch, such as
            TorchScript or a compiled extension.
    """
    dense: int
    per_sample: torch.Tensor
    by_module: Dict[str, ModuleMacs] = field(repr=False)
    uncounted: Dict[str, List[str]] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Mean MACs per sample, gates included, divided by those of the dense network."""
        return self.per_sample.double().mean().item() / self.dense


@dataclass
class MacFormula:
    """MACs of an image as a function of its gates, for images of one size.

    Attributes:
        dense: MACs per sample in the dense network, without gates.
        fixed: MACs that every sample uses: stem, shortcuts, head, and the gates themselves.
        switched: Gated convolutions by name: MACs with all gates open, and the names of the gates, each with its number
            of always open channels.
        groups: Number of groups of the grouped ones, by name.
    """
    dense: int
    fixed: int
    switched: Dict[str, Tuple[int, Dict[str, int]]]
    groups: Dict[str, int] = field(default_factory=dict)

    def used(self, masks: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """MACs of each sample, [N], float64. Each group of a convolution uses its open inputs times its open outputs.

        Args:
            masks: Masks by gate name, [N, num_gates] each. The result is differentiable in them.
        """
        total: Any = self.fixed
        for conv, (macs, ungated) in self.switched.items():
            opened = [F.pad(masks[name].double(), (0, always), value=1.) for name, always in ungated.items()]
            pairs, all_pairs = open_pairs(opened, self.groups.get(conv, 1))
            total = total + macs / all_pairs * pairs
        return total


class MacCounter(TorchFunctionMode):
    """Context that counts MACs over all forward passes of one batch, in its own thread.

    Args:
        model: A gated model, an accelerated one, or any other model of convolutions and linear layers.
        num_samples: Number of images in the batch; by default the first dimension of the model's input.

    Examples:
        >>> with MacCounter(model) as counter:
        >>>     output = model(images)
        >>> counter.macs()
    """

    def __init__(self, model: nn.Module, num_samples: Optional[int] = None) -> None:
        super().__init__()
        self._model = model
        self._given_samples = num_samples
        self._names: Dict[int, str] = {}  # module names by id
        self._layers: Dict[str, str] = {}  # class names of the modules with a weight matrix
        self._switches: Dict[str, List[Gate]] = {}  # gates over the inputs and outputs of each convolution
        self._overhead: Set[str] = set()  # modules that the dense network does not have
        for name, module in model.named_modules():
            self._names[id(module)] = name
            prefix = f'{name}.' if name else ''
            weight = dict(module.named_parameters(recurse=False)).get('weight')
            quantized = callable(getattr(type(module), 'weight', None))  # torch's quantized layers unpack their weight
            if quantized or weight is not None and weight.ndim > 1 and not isinstance(module, _WITHOUT_PRODUCTS):
                self._layers[name] = type(module).__name__
            if isinstance(module, Gating):
                self._overhead.update(inner_name for inner_name, _ in module.named_modules(prefix=name))
            for conv, pair in getattr(module, 'gated_convs', {}).items():
                switching = [gate for gate in pair if gate is not None]
                if switching:
                    self._switches[prefix + conv] = switching
        known = {id(gate) for switching in self._switches.values() for gate in switching}
        self._gate_names = {id(gate): name for name, gate in gates(model)}
        for gate_id, name in self._gate_names.items():
            if name and gate_id not in known:  # (a gate alone switches nothing)
                raise ValueError(
                    f"cannot tell what gate '{name}' switches: its block is not in this model, which may be a traced "
                    f'copy. Count the original model.')
        self._reset()

    def _reset(self) -> None:
        self._full: Dict[str, int] = {}  # MACs of the batch with everything open
        self._used: Dict[str, torch.Tensor] = {}  # MACs of each sample, where they depend on it
        self._open: Dict[int, torch.Tensor] = {}  # open channels of each sample, 0 or 1, by id of the gate
        self._uncounted: Dict[str, Dict[str, None]] = {}  # modules by operator, in call order
        self._batch: Optional[Tuple[int, torch.device]] = None  # number and device of the samples

    def __enter__(self) -> 'MacCounter':
        self._reset()
        return super().__enter__()

    @torch.compiler.disable  # a compiled model runs eagerly here
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        operator = operator_name(func)
        if func is report_decision:
            gate, mask = args
            self._open[id(gate)] = F.pad(mask.ne(0).long(), (0, gate.num_ungated), value=1)
        elif func is run_and_report:
            network, x = args
            if id(network) in self._names:
                self._add(self._names[id(network)], output[1].dense * len(x), x, output[1].per_sample)
        elif operator in MAC_RULES or operator in POOLING:
            name = self._running_module()
            if name is not None:
                self._record(name, operator, args, kwargs, output)
        return output

    def _running_module(self) -> Optional[str]:
        """Name of the innermost running module of the model; None if the model is not running."""
        frame: Optional[FrameType] = sys._getframe(1)  # the locals of frame 0 would hold the frame: a cycle
        while frame is not None:
            if frame.f_code is run_apart.__code__:
                return None
            name = self._names.get(id(frame.f_locals.get('self')))
            if name is not None:
                return name
            frame = frame.f_back
        return None

    def _record(self, name: str, operator: str, args: Any, kwargs: Any, output: Any) -> None:
        if operator in POOLING:
            if name in self._overhead:
                x = _first_tensor((args, kwargs))
                self._add(name, x.numel() if x.ndim > 2 else 0, x)
            return
        total = MAC_RULES[operator](output, *args, **kwargs)
        if total is not None:
            total *= num_mapped(_first_tensor(output))
        if total is None or operator in PARTLY_COUNTED:
            self._uncounted.setdefault(operator, {})[name] = None
        if total is not None:
            self._add(name, total, (args, kwargs), self._open_part(name, total) if name in self._switches else None)

    def _open_part(self, name: str, total: int) -> torch.Tensor:
        """MACs that each input uses of a gated convolution."""
        if any(id(gate) not in self._open for gate in self._switches[name]):
            raise ValueError(f"'{name}' runs before a gate that switches it, so its MACs are unknown.")
        pairs, all_pairs = open_pairs([self._open[id(gate)] for gate in self._switches[name]], self._groups(name))
        return _share(total, len(pairs)) // all_pairs * pairs

    def _groups(self, name: str) -> int:
        """Number of groups of a convolution, 1 for other modules."""
        return getattr(self._model.get_submodule(name), 'groups', 1)

    def _add(self, name: str, total: int, inputs: Any, used: Optional[torch.Tensor] = None) -> None:
        """Add the MACs of a call. Several passes, such as those of several crops, add up."""
        if self._batch is None:
            self._batch = self._find_batch(_first_tensor(inputs))
        self._full[name] = self._full.get(name, 0) + total
        if used is None:
            return
        num_samples = self._batch[0]
        if num_samples == 1:
            used = used.sum(0, keepdim=True)
        elif len(used) != num_samples:
            raise ValueError(
                f"the gates of '{name}' decided about {len(used)} inputs in a batch of {num_samples} images, and the "
                f'image of each input is unknown. Count the images one by one.')
        self._used[name] = self._used.get(name, 0) + used

    def _find_batch(self, x: torch.Tensor) -> Tuple[int, torch.device]:
        """Number (unless given) and device of the samples that the model was called with.

        The outermost call counts: inner modules may fold other dimensions into the batch.
        """
        if self._given_samples is not None:
            return self._given_samples, x.device
        dim = 0
        frame: Optional[FrameType] = sys._getframe(1)
        while frame is not None:
            if frame.f_code is _CALL and id(frame.f_locals['self']) in self._names:
                given = _first_tensor((frame.f_locals['args'], frame.f_locals['kwargs']))
                if given is not None:
                    module = frame.f_locals['self']
                    x, dim = given, int(isinstance(module, nn.RNNBase) and not module.batch_first)
            frame = frame.f_back
        return x.shape[dim], x.device

    def macs(self) -> Macs:
        """MACs counted since the context was entered."""
        num_samples, device = self._counted()
        by_module = {}
        for name, total in self._full.items():
            full = _share(total, num_samples)
            by_module[name] = ModuleMacs(
                dense=0 if name in self._overhead else full,
                per_sample=self._used[name] if name in self._used else torch.full(
                    (num_samples,), full, dtype=torch.int64, device=device),
            )
        return Macs(
            dense=sum(macs.dense for macs in by_module.values()),
            per_sample=torch.stack([macs.per_sample for macs in by_module.values()]).sum(0),
            by_module=by_module,
            uncounted=self._not_counted(),
        )

    def _not_counted(self) -> Dict[str, List[str]]:
        found = {operator: list(names) for operator, names in self._uncounted.items()}
        seen = {*self._full, *itertools.chain(*found.values())}
        for name, layer in self._layers.items():
            # A module may use the weight of its child without calling it, as attention does.
            if name not in seen and name.rpartition('.')[0] not in seen:
                found.setdefault(layer, []).append(name)
        return found

    def formula(self) -> MacFormula:
        """MACs counted since the context was entered, as a function of the gates."""
        num_samples, _ = self._counted()
        self._check_switches('formula')
        full = {name: _share(total, num_samples) for name, total in self._full.items()}
        return MacFormula(
            dense=sum(macs for name, macs in full.items() if name not in self._overhead),
            fixed=sum(macs for name, macs in full.items() if name not in self._switches),
            switched={
                name: (full[name], {self._gate_names[id(gate)]: gate.num_ungated for gate in switching})
                for name, switching in self._switches.items() if name in full},
            groups={name: groups for name in self._switches if (groups := self._groups(name)) > 1},
        )

    def parameters(self) -> torch.Tensor:
        """Number of parameters that each sample used, [N]: all but the weights of closed inputs and filters.

        Norms, biases and gates always count in full.
        """
        num_samples, device = self._counted()
        self._check_switches('parameters')
        num_parameters = sum(parameter.numel() for parameter in self._model.parameters())
        used = torch.full((num_samples,), float(num_parameters), dtype=torch.float64, device=device)
        for name, open_macs in self._used.items():
            weight: Any = self._model.get_submodule(name).weight
            used -= weight.numel() * (1 - open_macs.double() / _share(self._full[name], num_samples))
        return used

    def _check_switches(self, what: str) -> None:
        for name in self._used:
            if name not in self._switches:
                raise ValueError(
                    f"an accelerated network ('{name}') reports its MACs only, not the {what}: count the original "
                    f'network.')

    def _counted(self) -> Tuple[int, torch.device]:
        if self._batch is None:
            raise RuntimeError(
                'no MACs counted: the model did not run within the context, or was run by code invisible to torch, '
                'such as TorchScript.')
        return self._batch


def run_apart(model: nn.Module, x: torch.Tensor) -> Any:
    """Run a model that does not count as part of the model that is running now."""
    return model(x)


def run_and_report(network: Any, x: torch.Tensor) -> Tuple[Any, ModuleMacs]:
    """Run a network that counts its own MACs and report them to the counters of this thread.

    Args:
        network: A module with a method `run_with_cost` that returns the output and the MACs.
        x: A batch of images.
    """
    if has_torch_function_unary(x):
        return handle_torch_function(run_and_report, (x,), network, x)
    return network.run_with_cost(x)


@torch.no_grad()
def count_macs(model: nn.Module, x: torch.Tensor) -> Macs:
    """Count the MACs of a forward pass in evaluation mode; the model's mode is restored afterwards.

    Counted are convolutions, linear layers, the projections of attention and the matrix products of recurrent layers,
    as modules or as functions, one MAC per multiplication. Not counted are normalisation, activation, pooling, residual
    additions, biases and other matrix products, such as those of queries, keys and values; `uncounted` names the
    products. The total agrees with fvcore's convolution + linear.

    `dense` is the dense network without gates. In `per_sample` a convolution counts its open inputs times its open
    outputs, group by group, and a skipped block counts nothing. Shortcuts, stem and head count in full, and so does the
    overhead of the gates: the MACs inside `Gating` modules, plus the additions of average pooling there, one per value.
    Work that the images of a batch share, such as a position table, is divided among them.

    Args:
        model: A gated model, an accelerated one, or any other model of convolutions and linear layers.
        x: A batch of images.

    Examples:
        >>> macs = count_macs(model, images)
        >>> macs.dense, macs.per_sample.float().mean(), macs.share
    """
    model = unwrap(model)  # a compiled graph cannot be counted
    with evaluation_mode(model), MacCounter(model) as counter:
        model(x)
    return counter.macs()


def _share(total: int, num_samples: int) -> int:
    """MACs per sample."""
    return total // max(num_samples, 1)


def _first_tensor(values: Any) -> Any:
    """First tensor in nested lists, tuples and dicts; None if there is none."""
    if isinstance(values, torch.Tensor):
        return values
    if isinstance(values, dict):
        values = tuple(values.values())
    if isinstance(values, (list, tuple)):
        for value in values:
            found = _first_tensor(value)
            if found is not None:
                return found
    return None


@torch.no_grad()
def mac_formula(network: nn.Module, input_size: Tuple[int, ...]) -> MacFormula:
    """MACs of images of one size as a function of a network's gates. The network itself is not run.

    Args:
        network: A gated network.
        input_size: Channels, height and width of the images.
    """
    tensors: Dict[int, Any] = {id(p): nn.Parameter(p.to('meta'), requires_grad=False) for p in network.parameters()}
    tensors.update({id(buffer): buffer.to('meta') for buffer in network.buffers()})
    meta = copy.deepcopy(network, tensors).eval()
    for module in meta.modules():
        module._forward_hooks.clear()
    dtype = next(network.parameters()).dtype
    with MacCounter(meta) as counter:
        run_apart(meta, torch.empty(1, *input_size, dtype=dtype, device='meta'))
    return counter.formula()


class MacFormulas:
    """MAC formulas of a network, computed once per input size and number of gates."""

    def __init__(self) -> None:
        self._formulas: Dict[Any, MacFormula] = {}

    def find(self, network: nn.Module, input_size: Tuple[int, ...], masks: Mapping[str, torch.Tensor]) -> MacFormula:
        """Formula of a network whose gates gave these masks."""
        key = input_size, tuple((name, mask.shape[1]) for name, mask in masks.items())  # changed by pruning
        if key not in self._formulas:
            self._formulas[key] = mac_formula(network, input_size)
        return self._formulas[key]
