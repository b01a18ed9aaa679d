"""`accelerate`: gated networks that compute only open filters

    fast = timm_gated.accelerate(model)
    fast(images)

The result is an evaluation-only module with the outputs of the network. Each image of a batch runs its own filters.
There are two backends: 'native', this package's own CPU kernels, and 'torch', which slices weights and runs on any
device. `fast.save` and `load_accelerated` store the result as a file.
"""
import copy
import itertools
from dataclasses import replace
from functools import singledispatch
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple, Union

import torch
import torch.nn as nn
from timm.layers import SelectAdaptivePool2d
from torch.overrides import has_torch_function_unary

from ..layers import MacCounter, Macs, ModuleMacs, run_and_report
from ..utils import check_number
from .calibration import RANGES, calibration_images, observe_ranges
from .compiler import compile_trunk, is_plain_classifier
from .cost import ProgramCost, without_data
from .mixed import quantize_slow_layers
from .native import NativeRunner, why_not
from .plan import ExecutionPlan, PlannedLayer
from .program import ConvOp, GateOp, Op, Program, check_images
from .serialize import Network, load_network, save_network
from .sliced import SlicedRunner, check_float
from .trunks import Trunk, find_trunk

__all__ = ['Accelerated', 'accelerate', 'accelerated_parts', 'load_accelerated']

BACKENDS = ('auto', 'native', 'torch')
PRECISIONS = ('float32', 'int8')


class Accelerated(nn.Module):
    """An accelerated network: a trunk that a backend runs, then the head.

    The native backend also runs a head of average pooling and a linear layer: torch's threads would wait actively for
    more work afterwards, and slow down the next call.

    Args:
        network: Program of the trunk, followed by that of the classifier if the head is one.
        backend: 'native' or 'torch'.
        isa: Instruction set of the native backend, the fastest available one by default.
        head: Any other head. It runs in torch.

    Attributes:
        backend: 'native' or 'torch'.
    """

    def __init__(
            self,
            network: Network,
            backend: str,
            isa: Optional[str] = None,
            head: Optional[nn.Module] = None,
    ) -> None:
        super().__init__()
        program, count = network.program, network.classifier
        classifier = program.ops[len(program.ops) - count:]
        self.backend = backend
        if backend == 'torch':
            check_float(program, why_not())
        self._assemble = network.assemble
        self._classifier = [without_data(op) for op in classifier]
        self._runs_head = backend == 'native' and count > 0
        if count and not self._runs_head:
            program = replace(program, ops=program.ops[:-count])
            head = _as_modules(classifier)
        self._cost = ProgramCost(program)
        gate_ops = sorted((op for op in program.ops if isinstance(op, GateOp)), key=lambda op: op.gate)
        self._gate_sizes = {op.name: len(op.weight2) for op in gate_ops}
        self.runner: Union[NativeRunner, SlicedRunner] = (
            NativeRunner(program, isa) if backend == 'native' else SlicedRunner(program))
        self.head = head
        if backend == 'native' and self.head is not None:
            self.head.to('cpu', torch.float32)
        super().train(False)

    def save(self, path: Union[str, Path]) -> None:
        """Save the network for `load_accelerated`, in float32. The file is written completely or not at all.

        The backbone of a segmentor whose decode head runs natively includes that head: `fast.backbone.save(path)`
        saves a network that returns the logits.

        Args:
            path: Path of the file.

        Examples:
            >>> fast.save('model.tgn')
            >>> fast = timm_gated.load_accelerated('model.tgn')
        """
        if self.head is not None and not self._classifier:
            head = ' '.join(str(self.head).split())
            raise ValueError(
                f'the network cannot be saved because its head runs in torch: {head}. Supported: average pooling, '
                f'optionally followed by a linear layer, and networks without a head.')
        save_network(Network(self._program(), self._assemble, len(self._classifier)), path)

    def _program(self) -> Program:
        """The program with the classifier."""
        program = self.runner.program
        if self._runs_head or not self._classifier:
            return program
        linear: Any = self.head[1]  # type: ignore[index]
        classifier = [
            replace(op, weight=linear.weight[:, :, None, None], bias=linear.bias) if isinstance(op, ConvOp) else op
            for op in self._classifier]
        return replace(program, ops=[*program.ops, *classifier])

    def extra_repr(self) -> str:
        return f'backend={self.backend}' + (f', isa={self.runner.isa}' if isinstance(self.runner, NativeRunner) else '')

    def train(self, mode: bool = True) -> 'Accelerated':
        if mode:
            raise ValueError('an accelerated network is for evaluation only; train the original network.')
        return self

    @torch.no_grad()
    def forward_features(self, x: torch.Tensor) -> Any:
        """Return the last map, or the features of a features_only network."""
        maps = self._run(x)
        return self._assemble(maps[:-1] if self._runs_head else maps)

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> Any:
        return self._finish(self._run(x, only_last=self._runs_head), x.dtype)

    def _run(self, x: torch.Tensor, only_last: bool = False) -> List[torch.Tensor]:
        if has_torch_function_unary(x):  # a MacCounter is active
            return run_and_report(self, x)[0]
        if isinstance(self.runner, NativeRunner):
            return self.runner(x, only_last=only_last)
        return self.runner(x)

    def _finish(self, maps: List[torch.Tensor], dtype: torch.dtype) -> Any:
        if self._runs_head:
            return maps[-1].flatten(1)
        features = self._assemble(maps)
        if self.head is None:
            return features
        if self.backend == 'torch' or dtype == torch.float32:
            return self.head(features)
        return self.head(features.float()).to(dtype)  # float32, like the trunk

    def run_with_cost(self, x: torch.Tensor) -> Tuple[List[torch.Tensor], ModuleMacs]:
        """Return the maps that the program outputs, and the MACs."""
        num_open = torch.empty(len(x), self._cost.num_counts, dtype=torch.int32, device='cpu')
        maps = self.runner(x, num_open)
        cost = self._cost.at(*x.shape[2:])
        return maps, ModuleMacs(cost.dense, cost.used(num_open).to(x.device))

    @torch.no_grad()
    def run_with_macs(self, x: torch.Tensor) -> Tuple[Any, Macs]:
        """Like `forward`, but also return the MACs per image. Thread-safe.

        Args:
            x: Batch of images.

        Examples:
            >>> output, macs = fast.run_with_macs(images)
            >>> macs.per_sample, macs.share
        """
        check_images(x, self._cost.in_channels)
        cost = self._cost.at(*x.shape[2:])
        if cost.network is None:  # count the head once per image size
            with MacCounter(self) as counter:
                output = self(x)
            macs = counter.macs()
            if len(x):
                cost.network = macs
            return output, macs
        maps, trunk = self.run_with_cost(x)
        by_module = {
            name: ModuleMacs(part.dense, torch.full_like(trunk.per_sample, part.dense)) if name else trunk
            for name, part in cost.network.by_module.items()}
        per_sample = trunk.per_sample + (cost.network.dense - trunk.dense)
        return self._finish(maps, x.dtype), Macs(
            cost.network.dense, per_sample, by_module, cost.network.uncounted)

    @torch.no_grad()
    def run_with_decisions(self, x: torch.Tensor) -> Tuple[Any, Dict[str, torch.Tensor]]:
        """Like `forward`, but also return the channels that each gate leaves open. Thread-safe.

        Args:
            x: Batch of images.

        Returns:
            Output, and decisions by name of the gate, [N, channels], bool. Channels without a gate, which pruning may
            leave, follow and are open.

        Examples:
            >>> output, decisions = fast.run_with_decisions(images)
            >>> decisions['layer1.0.gate1'].float().mean()
        """
        check_images(x, self._cost.in_channels)
        sizes = list(self._gate_sizes.values())
        is_open = torch.empty(len(x), sum(sizes), dtype=torch.bool, device=x.device)
        output = self._finish(self.runner(x, is_open=is_open), x.dtype)
        return output, dict(zip(self._gate_sizes, is_open.split(sizes, dim=1), strict=True))

    @torch.no_grad()
    def plan(self, image: Optional[torch.Tensor] = None, runs: int = 10) -> ExecutionPlan:
        """Time the layers of the network on an image; `print` shows the result as a table.

        Args:
            image: Batch of one image. By default noise of the size of the last call, for which the gates may decide
                differently than for real images.
            runs: Number of timed runs.

        Examples:
            >>> print(fast.plan(image))
        """
        if not isinstance(self.runner, NativeRunner):
            raise ValueError(f"plan times the native kernels, but the backend is '{self.backend}'.")
        if image is None:
            if self.runner.last_size is None:
                raise ValueError('the network has not been run yet: pass an image to plan.')
            image = torch.randn(1, self._cost.in_channels, *self.runner.last_size)
        check_images(image, self._cost.in_channels)
        if len(image) != 1:
            raise ValueError(f'plan times one image, got a batch of {len(image)}.')
        num_open = torch.empty(1, self._cost.num_counts, dtype=torch.int32)
        times = self.runner.profile(image, num_open, check_number(runs, 'runs', minimum=1, integer=True))
        rows = self._cost.by_operation(image.shape[2], image.shape[3], num_open[0].tolist())
        return ExecutionPlan(
            [PlannedLayer(name, operation, algorithm, macs, milliseconds)
             for (name, operation, macs), (algorithm, milliseconds) in zip(rows, times, strict=True)],
            self.runner.isa, torch.get_num_threads(), tuple(image.shape[1:]))


def accelerate(
        model: nn.Module,
        backend: str = 'auto',
        isa: Optional[str] = None,
        precision: str = 'float32',
        calibration: Any = None,
        calibration_range: str = 'percentile',
) -> nn.Module:
    """Create an evaluation-only copy of a network that computes only open filters.

    Supported are gated and dense ResNets of this package and of timm (classifiers and features_only backbones), also
    with groups, SE or ECA attention, and blur or average pooling against aliasing; mmseg's ResNets with `mmseg_plugin`;
    and modules that contain such networks, for example segmentors. Outputs agree up to rounding, except that rounding
    may flip a gate whose logit is close to zero. Hooks of the network are not run.

    Args:
        model: Network to accelerate. Gates with a forced mask stay forced.
        backend: 'native', 'torch' or 'auto', which selects 'native' if it was built and the network is on the CPU.
        isa: Instruction set of the native kernels: 'avx512', 'avxvnni' (int8 only), 'avx2' or 'portable'. The fastest
            available by default.
        precision: 'float32', or 'int8': post-training quantisation of convolutions for the native backend.
        calibration: Images for int8, as the network gets them: a tensor, or a loader of images, with or without labels.
            For a segmentor of mmseg it may be a loader of mmseg. A few hundred images give good ranges.
        calibration_range: How the range of a map is chosen in int8: 'percentile', 'mse' or 'max'.

    Examples:
        >>> fast = accelerate(timm.create_model('gated_resnet34'))
        >>> fast.backend, fast(images)
        >>> small = accelerate(model, precision='int8', calibration=loader)
    """
    on_cpu = all(tensor.device.type == 'cpu' for tensor in model.state_dict().values())
    backend = _choose_backend(backend, isa, on_cpu)
    _check_precision(precision, calibration, calibration_range, backend)
    names = {id(module): name for name, module in model.named_modules()}

    def make(parts: Trunk) -> Accelerated:
        network, head = _network_of(parts, names)
        if precision == 'int8':
            images = calibration_images(calibration, model)
            first = next(images)
            program = _in_float32(network.program)
            ranges = observe_ranges(program, itertools.chain([first], images))
            program = quantize_slow_layers(program, ranges, calibration_range, first[:1], isa)
            network = replace(network, program=program)
        return Accelerated(network, backend, isa, head)

    parts = find_trunk(model)
    if parts is not None:
        return make(parts)
    found = accelerated_parts(model)
    if isinstance(calibration, Iterator) and sum(isinstance(part, Trunk) for _, part in found) > 1:
        calibration = list(calibration)  # each network goes through it
    replacements: Dict[int, nn.Module] = {
        id(module): make(part) if isinstance(part, Trunk) else part for module, part in found}
    if not replacements:
        raise ValueError(
            f'{type(model).__name__} contains no network that can be accelerated. Supported: ResNets of timm and of '
            f'this package, and of mmseg after `import mmseg_plugin`.')
    fast = copy.deepcopy(model, replacements)
    fast.eval()
    return fast


def load_accelerated(path: Union[str, Path], backend: str = 'auto', isa: Optional[str] = None) -> Accelerated:
    """Load an accelerated network from a file that `save` wrote. The original network is not needed.

    Weights are packed for the instruction set. The content of the file is checked: a damaged file raises a
    `ValueError`. Files contain no code.

    Args:
        path: Path of the file.
        backend: 'native', 'torch' or 'auto', which selects 'native' if it was built.
        isa: Instruction set of the native kernels, as for `accelerate`. The fastest available by default.

    Examples:
        >>> timm_gated.accelerate(model).save('model.tgn')
        >>> fast = timm_gated.load_accelerated('model.tgn')
    """
    backend = _choose_backend(backend, isa, on_cpu=True)
    return Accelerated(load_network(path), backend, isa)


def _choose_backend(backend: str, isa: Optional[str], on_cpu: bool) -> str:
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got '{backend}'.")
    if backend == 'native' and why_not():
        raise RuntimeError(f"backend='native' is not available: {why_not()}")
    if backend == 'auto':
        backend = 'native' if on_cpu and not why_not() else 'torch'
    if isa is not None and backend == 'torch':
        raise ValueError(f"isa is an option of the native backend, got '{isa}' with backend 'torch'.")
    return backend


def _check_precision(precision: str, calibration: Any, calibration_range: str, backend: str) -> None:
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got '{precision}'.")
    if calibration_range not in RANGES:
        raise ValueError(f"calibration_range must be one of {', '.join(RANGES)}, got '{calibration_range}'.")
    if precision == 'float32':
        if calibration is not None:
            raise ValueError("calibration is an option of precision='int8'.")
        return
    if backend != 'native':
        reason = f': {why_not()}' if why_not() else ', and the network on the CPU.'
        raise ValueError(f"precision='int8' needs the native backend{reason}")
    if calibration is None:
        raise ValueError(
            "precision='int8' needs calibration=..., a loader of a few hundred images as the network gets them.")


def _network_of(parts: Trunk, names: Mapping[int, str]) -> Tuple[Network, Optional[nn.Module]]:
    """The program of a trunk, with the classifier if the head is one; and any other head."""
    if not is_plain_classifier(parts.head):
        return Network(compile_trunk(parts.modules, names), parts.assemble), copy.deepcopy(parts.head)
    pool, linear = parts.head  # type: ignore[misc]
    count = 2 if isinstance(linear, nn.Identity) else 3  # operations, with the output
    program = compile_trunk([*parts.modules, (pool, False), (linear, True)], names)
    return Network(program, parts.assemble, count), None


def _in_float32(program: Program) -> Program:
    """The program with float32 tensors on the CPU."""
    def convert(op: Op) -> Op:
        tensors: Dict[str, Any] = {
            name: value.to('cpu', torch.float32) for name, value in vars(op).items() if isinstance(value, torch.Tensor)}
        return replace(op, **tensors)

    return replace(program, ops=[convert(op) for op in program.ops])


def _as_modules(classifier: Sequence[Op]) -> nn.Sequential:
    """The operations of a classifier as the modules that a network of timm has."""
    linear: nn.Module = nn.Identity()
    for op in classifier:
        if isinstance(op, ConvOp):
            linear = nn.Linear(op.weight.shape[1], op.weight.shape[0], device='meta')
            linear.weight, linear.bias = (
                nn.Parameter(tensor.detach().clone(), False) for tensor in (op.weight[:, :, 0, 0], op.bias))
    return nn.Sequential(SelectAdaptivePool2d(pool_type='avg', flatten=True), linear)


@singledispatch
def accelerated_parts(model: nn.Module) -> List[Tuple[nn.Module, Union[Trunk, nn.Module]]]:
    """Return the submodules to replace, each with its trunk or its replacement. Other packages may register theirs.

    By default, the trunks of the outermost submodules that can be accelerated.
    """
    found: List[Tuple[nn.Module, Union[Trunk, nn.Module]]] = []
    for child in model.children():
        parts = find_trunk(child)
        if parts is not None:
            found.append((child, parts))
        else:
            found.extend(accelerated_parts(child))
    return found
