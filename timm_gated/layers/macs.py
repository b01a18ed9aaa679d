"""Multiply-accumulates, of the dense network and of each sample

The convention is the gating paper's; `count_macs` states it.

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)

The counter is a `TorchFunctionMode`: it sees the calls of its own thread, functional ones too. It leaves no hooks on
modules, which another thread may be running, and finds the module of a call in the stack of Python's frames.
"""
import copy
import itertools
import sys
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Dict, List, Mapping, Optional, Set, Tuple

import torch
import torch.nn as nn
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function_unary

from ..utils import evaluation_mode, unwrap
from .gate import Gate, Gating, gates, report_decision
from .mac_rules import MAC_RULES, PARTLY_COUNTED, POOLING, num_mapped, operator_name

__all__ = ['count_macs', 'mac_formula', 'MacCounter', 'MacFormula', 'Macs', 'ModuleMacs', 'run_and_report', 'run_apart']

_CALL = nn.Module._call_impl.__code__  # what `module(...)` runs, with the arguments as they were given
_WITHOUT_PRODUCTS = nn.Embedding, nn.EmbeddingBag, nn.LayerNorm


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
        by_module: Both, for every module that counts, by name. An accelerated network counts as one.
        uncounted: Names of the modules with matrix products that are not in the counts, by operator; and, by class,
            names of the layers that were not seen to run: not called, quantized, or run by code that torch does not
            show, such as TorchScript or a compiled extension.
    """
    dense: int
    per_sample: torch.Tensor
    by_module: Dict[str, ModuleMacs] = field(repr=False)
    uncounted: Dict[str, List[str]] = field(default_factory=dict)

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


class MacCounter(TorchFunctionMode):
    """Counts MACs while the context lasts, over all forward passes of one batch.

    Counted is what the model runs in the thread of the context.

    Args:
        model: A gated model, an accelerated one, or any other model of convolutions and linear layers.
        num_samples: Number of images in the batch; by default the first dimension of what the model is called with.

    Example:
        >>> with MacCounter(model) as counter:
        >>>     output = model(images)
        >>> counter.macs()
    """

    def __init__(self, model: nn.Module, num_samples: Optional[int] = None) -> None:
        super().__init__()
        self._model = model
        self._given_samples = num_samples
        self._names: Dict[int, str] = {}  # of the modules, by id
        self._layers: Dict[str, str] = {}  # classes of those that have a matrix of their own
        self._switches: Dict[str, List[Gate]] = {}  # gates over the inputs and the outputs of convolutions
        self._overhead: Set[str] = set()  # what the plain network does not have
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
            if name and gate_id not in known:  # (a gate by itself switches nothing)
                raise ValueError(
                    f"cannot tell what gate '{name}' switches: its block is not in this model (a traced copy, maybe). "
                    f'Count the model that it was made from.')
        self._reset()

    def _reset(self) -> None:
        self._full: Dict[str, int] = {}  # MACs of the batch with everything open
        self._used: Dict[str, torch.Tensor] = {}  # and what each sample used of them, where that depends on it
        self._num_open: Dict[int, torch.Tensor] = {}  # of each gate, by id, for each sample
        self._uncounted: Dict[str, Dict[str, None]] = {}  # modules by operator, in the order of their calls
        self._batch: Optional[Tuple[int, torch.device]] = None  # number of samples, and where they are

    def __enter__(self) -> 'MacCounter':
        self._reset()
        return super().__enter__()

    @torch.compiler.disable  # (a compiled model runs eagerly here)
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        operator = operator_name(func)
        if func is report_decision:
            gate, mask = args
            self._num_open[id(gate)] = mask.count_nonzero(dim=1) + gate.num_ungated
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
        """The innermost module of the model that is running; None if the model does not run."""
        frame: Optional[FrameType] = sys._getframe(1)  # (the locals of this frame would refer to the frame: a cycle)
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
                self._add(name, x.numel() if x.ndim > 2 else 0, x)  # (of maps)
            return
        total = MAC_RULES[operator](output, *args, **kwargs)
        if total is not None:
            total *= num_mapped(_first_tensor(output))
        if total is None or operator in PARTLY_COUNTED:
            self._uncounted.setdefault(operator, {})[name] = None
        if total is not None:
            self._add(name, total, (args, kwargs), self._open_part(name, total) if name in self._switches else None)

    def _open_part(self, name: str, total: int) -> torch.Tensor:
        """What each input uses of a convolution that gates switch."""
        used: Any = None
        for gate in self._switches[name]:
            if id(gate) not in self._num_open:
                raise ValueError(f"'{name}' runs before a gate that switches it, so that its MACs are not known.")
            num_open = self._num_open[id(gate)]
            used = _share(total, len(num_open)) if used is None else used
            used = used // (gate.num_gates + gate.num_ungated) * num_open
        return used

    def _add(self, name: str, total: int, inputs: Any, used: Optional[torch.Tensor] = None) -> None:
        """Take in a call; further passes add up, such as those of other crops."""
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
                f"the gates of '{name}' decided about {len(used)} inputs in a batch of {num_samples} images: which of "
                f'them belong to which image is not known. Count the images one by one.')
        self._used[name] = self._used.get(name, 0) + used

    def _find_batch(self, x: torch.Tensor) -> Tuple[int, torch.device]:
        """Number and device of the samples that the model was called with, unless its number is given.

        Those of the outermost call: modules within may fold something else into the batch.
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
        """What was counted since the context was entered."""
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
            # (a module may use the weight of its child without calling it, as attention does)
            if name not in seen and name.rpartition('.')[0] not in seen:
                found.setdefault(layer, []).append(name)
        return found

    def formula(self) -> MacFormula:
        """What was counted since the context was entered, as a function of the gates."""
        num_samples, _ = self._counted()
        self._check_switches('formula')
        full = {name: _share(total, num_samples) for name, total in self._full.items()}
        return MacFormula(
            dense=sum(macs for name, macs in full.items() if name not in self._overhead),
            fixed=sum(macs for name, macs in full.items() if name not in self._switches),
            switched={
                name: (full[name], {self._gate_names[id(gate)]: gate.num_ungated for gate in switching})
                for name, switching in self._switches.items() if name in full},
        )

    def parameters(self) -> torch.Tensor:
        """Parameters that each sample used, [N]: all but the weights of filters, and of their inputs, that were off.

        Norms, biases and gates count in full.
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
                    f"an accelerated network ('{name}') tells its MACs only, not the {what}: count the network that it "
                    f'was made from.')

    def _counted(self) -> Tuple[int, torch.device]:
        if self._batch is None:
            raise RuntimeError(
                'no MACs counted: the model did not run while the context lasted, or was run by code that torch does '
                'not show, such as TorchScript.')
        return self._batch


def run_apart(model: nn.Module, x: torch.Tensor) -> Any:
    """Run a model for itself: it does not count as part of the model that may be running now."""
    return model(x)


def run_and_report(network: Any, x: torch.Tensor) -> Tuple[Any, ModuleMacs]:
    """Run a network that knows its own MACs, which torch does not show, and tell them to the counters of this thread.

    Args:
        network: A module with a method `run_with_cost`, which gives the output and the MACs.
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
    additions and biases, nor products of matrices as such, those of queries, keys and values among them; `uncounted`
    names the latter. The total agrees with fvcore's convolution + linear.

    `dense` is the plain network without its gates. `per_sample` is what an image costs: a convolution counts its open
    inputs times its open outputs, and nothing in a block that is skipped; shortcuts, stem and head count in full; and
    so does the overhead of the gates, which is all that counts within `Gating` modules, and the additions of average
    pooling there, one per value. What the images of a batch share, such as a table of positions, is divided among them.

    Args:
        model: A gated model, an accelerated one, or any other model of convolutions and linear layers.
        x: A batch of images.

    Example:
        >>> macs = count_macs(model, images)
        >>> macs.dense, macs.per_sample.float().mean(), macs.share
    """
    model = unwrap(model)  # (of a compiled graph there is nothing to count)
    with evaluation_mode(model), MacCounter(model) as counter:
        model(x)
    return counter.macs()


def _share(total: int, num_samples: int) -> int:
    """One sample's part of the MACs of a batch."""
    return total // max(num_samples, 1)


def _first_tensor(values: Any) -> Any:
    """The first tensor among arguments, also within lists and dicts; None if there is none."""
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
    """What images of one size cost, as a function of a network's gates. The network itself is not run.

    Args:
        network: A gated network.
        input_size: Channels, height and width of the images.
    """
    tensors: Dict[int, Any] = {id(p): nn.Parameter(p.to('meta'), requires_grad=False) for p in network.parameters()}
    tensors.update({id(buffer): buffer.to('meta') for buffer in network.buffers()})
    twin = copy.deepcopy(network, tensors).eval()
    for module in twin.modules():  # whoever listens to the network does not want to hear of its copy
        module._forward_hooks.clear()
    dtype = next(network.parameters()).dtype
    with MacCounter(twin) as counter:
        run_apart(twin, torch.empty(1, *input_size, dtype=dtype, device='meta'))
    return counter.formula()
