"""`accelerate`: gated networks that compute only open filters

    fast = timm_gated.accelerate(model)
    fast(images)

The result is an evaluation-only module with the outputs of the network. Each image of a batch runs its own filters.
There are two backends: 'native', this package's own CPU kernels, and 'torch', which slices weights and runs on any
device.
"""
import copy
from functools import singledispatch
from typing import Any, Dict, List, Mapping, Optional, Tuple, Union

import torch
import torch.nn as nn
from torch.overrides import has_torch_function_unary

from ..layers import MacCounter, Macs, ModuleMacs, run_and_report
from ..utils import check_number
from .compiler import Trunk, compile_trunk, find_trunk, is_plain_classifier
from .cost import ProgramCost
from .native import NativeRunner, why_not
from .plan import ExecutionPlan, PlannedLayer
from .program import check_images
from .sliced import SlicedRunner

__all__ = ['Accelerated', 'accelerate', 'accelerated_parts']

BACKENDS = ('auto', 'native', 'torch')


class Accelerated(nn.Module):
    """An accelerated network: a trunk that a backend runs, then the head.

    The native backend also runs a head of average pooling and a linear layer: torch's threads would wait actively for
    more work afterwards, and slow down the next call.

    Attributes:
        backend: 'native' or 'torch'.
    """

    def __init__(
            self,
            parts: Trunk,
            backend: str,
            isa: Optional[str] = None,
            names: Optional[Mapping[int, str]] = None,
    ) -> None:
        super().__init__()
        self._runs_head = backend == 'native' and is_plain_classifier(parts.head)
        modules = [*parts.modules, (parts.head, True)] if self._runs_head else parts.modules
        program = compile_trunk(modules, names)  # type: ignore[arg-type]
        self.backend = backend
        self._assemble = parts.assemble
        self._cost = ProgramCost(program)
        self.runner: Union[NativeRunner, SlicedRunner] = (
            NativeRunner(program, isa) if backend == 'native' else SlicedRunner(program))
        self.head = None if self._runs_head else copy.deepcopy(parts.head)
        if backend == 'native' and self.head is not None:
            self.head.to('cpu', torch.float32)
        super().train(False)

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
        return self._finish(self._run(x), x.dtype)

    def _run(self, x: torch.Tensor) -> List[torch.Tensor]:
        if has_torch_function_unary(x):  # a MacCounter is active
            return run_and_report(self, x)[0]
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
        num_open = torch.empty(len(x), self._cost.num_gates, dtype=torch.int32, device='cpu')
        maps = self.runner(x, num_open)
        cost = self._cost.at(*x.shape[2:])
        return maps, ModuleMacs(cost.dense, cost.used(num_open).to(x.device))

    @torch.no_grad()
    def run_with_macs(self, x: torch.Tensor) -> Tuple[Any, Macs]:
        """Like `forward`, but also return the MACs per image. Thread-safe.

        Args:
            x: Batch of images.

        Example:
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
    def plan(self, image: Optional[torch.Tensor] = None, runs: int = 10) -> ExecutionPlan:
        """Time the layers of the network on an image; `print` shows the result as a table.

        Args:
            image: Batch of one image. By default noise of the size of the last call, for which the gates may decide
                differently than for real images.
            runs: Number of timed runs.

        Example:
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
        num_open = torch.empty(1, self._cost.num_gates, dtype=torch.int32)
        times = self.runner.profile(image, num_open, check_number(runs, 'runs', minimum=1, integer=True))
        rows = self._cost.by_operation(image.shape[2], image.shape[3], num_open[0].tolist())
        return ExecutionPlan(
            [PlannedLayer(name, operation, algorithm, macs, milliseconds)
             for (name, operation, macs), (algorithm, milliseconds) in zip(rows, times, strict=True)],
            self.runner.isa, torch.get_num_threads(), tuple(image.shape[1:]))


def accelerate(model: nn.Module, backend: str = 'auto', isa: Optional[str] = None) -> nn.Module:
    """Create an evaluation-only copy of a network that computes only open filters.

    Supported are gated and dense ResNets of this package and of timm (classifiers and features_only backbones), mmseg's
    ResNets with `mmseg_plugin`, and modules that contain such networks, for example segmentors. Outputs agree up to
    rounding, except that rounding may flip a gate whose logit is close to zero. Hooks of the network are not run.

    Args:
        model: Network to accelerate. Gates with a forced mask stay forced.
        backend: 'native', 'torch' or 'auto', which selects 'native' if it was built and the network is on the CPU.
        isa: Instruction set of the native kernels: 'avx512', 'avx2' or 'portable'. The fastest available by default.

    Example:
        >>> fast = accelerate(timm.create_model('gated_resnet34'))
        >>> fast.backend, fast(images)
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got '{backend}'.")
    if backend == 'native' and why_not():
        raise RuntimeError(f"backend='native' is not available: {why_not()}")
    if backend == 'auto':
        on_cpu = all(tensor.device.type == 'cpu' for tensor in model.state_dict().values())
        backend = 'native' if on_cpu and not why_not() else 'torch'
    if isa is not None and backend == 'torch':
        raise ValueError(f"isa is an option of the native backend, got '{isa}' with backend 'torch'.")

    names = {id(module): name for name, module in model.named_modules()}
    parts = find_trunk(model)
    if parts is not None:
        return Accelerated(parts, backend, isa, names)
    replacements: Dict[int, nn.Module] = {
        id(module): Accelerated(part, backend, isa, names) if isinstance(part, Trunk) else part
        for module, part in accelerated_parts(model)}
    if not replacements:
        raise ValueError(
            f'{type(model).__name__} contains no network that can be accelerated. Supported: ResNets of timm and of '
            f'this package, and of mmseg after `import mmseg_plugin`.')
    fast = copy.deepcopy(model, replacements)
    fast.eval()
    return fast


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
