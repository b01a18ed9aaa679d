"""The native backend: runs a program with this package's own CPU kernels

The kernels (`timm_gated/csrc`) are plain C, built with the package and called through ctypes. They compute only open
filters and read them from weights that are packed once.
"""
import ctypes
import threading
from collections import Counter, OrderedDict
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_void_p
from dataclasses import replace
from typing import Any, Dict, List, Optional, Tuple

import torch

from .cost import without_data
from .program import (
    AdaptivePoolOp,
    ConcatOp,
    ConvOp,
    GateOp,
    Op,
    OutputOp,
    PoolOp,
    Program,
    SkipOp,
    SubsampleOp,
    check_images,
)
from .serialize import Network, decode, encode

__all__ = ['NativeRunner', 'fma_peak', 'instruction_sets', 'why_not']

_MAX_PLANS = 4  # image sizes to keep memory for, most recently used
_MAX_PIXELS = 2 ** 26  # per image (csrc/plan.c)
_VERSION = 7  # must equal tg_version()


class _ConvSpec(ctypes.Structure):
    """`conv_spec_t` (csrc/network.h)."""
    _fields_ = [(name, c_int) for name in (
        'source', 'target', 'residual', 'gate_in', 'gate_out', 'c_in', 'c_out', 'kernel', 'stride', 'dilation',
        'padding', 'relu')]


_SIGNATURES: Dict[str, Tuple[Any, List[Any]]] = {
    'tg_version': (c_int, []),
    'tg_error': (c_char_p, []),
    'tg_isa': (c_char_p, [c_int]),
    'tg_fma_peak': (c_int, [c_char_p, POINTER(c_double)]),
    'tg_network_new': (c_void_p, [c_char_p, c_int, c_int, c_int]),
    'tg_network_free': (None, [c_void_p]),
    'tg_add_conv': (c_int, [c_void_p, POINTER(_ConvSpec), c_void_p, c_void_p]),
    'tg_add_gate': (c_int, [c_void_p, *[c_int] * 5, *[c_void_p] * 4]),
    'tg_read_weights': (c_int, [c_void_p, c_int, *[c_void_p] * 4]),
    'tg_add_pool': (c_int, [c_void_p, *[c_int] * 7]),
    'tg_add_adaptive_pool': (c_int, [c_void_p, *[c_int] * 3]),
    'tg_add_place': (c_int, [c_void_p, *[c_int] * 6]),
    'tg_add_subsample': (c_int, [c_void_p, *[c_int] * 5]),
    'tg_add_skip': (c_int, [c_void_p, *[c_int] * 4]),
    'tg_add_output': (c_int, [c_void_p, c_int]),
    'tg_plan_new': (c_void_p, [c_void_p, c_int, c_int]),
    'tg_plan_free': (None, [c_void_p]),
    'tg_plan_algorithm': (c_char_p, [c_void_p, c_int]),
    'tg_plan_output': (c_int, [c_void_p, c_int, POINTER(c_int)]),
    'tg_workspace_new': (c_void_p, [c_void_p, c_int, c_int]),
    'tg_workspace_free': (None, [c_void_p]),
    'tg_run': (c_int, [c_void_p, c_void_p, c_int64, POINTER(c_void_p), c_int, c_void_p, c_void_p]),
}


def _load() -> Tuple[Optional[ctypes.CDLL], str]:
    try:
        from .. import _native  # type: ignore[attr-defined]
        library = ctypes.CDLL(_native.__file__)
        for name, (restype, argtypes) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = restype, argtypes
    except (ImportError, OSError, AttributeError) as error:
        return None, str(error)
    if library.tg_version() != _VERSION:
        return None, 'they were built from another version of the sources'
    return library, ''


_library, _load_error = _load()


def why_not() -> str:
    """Return why the native backend is not available, or an empty string if it is."""
    if _library is not None:
        return ''
    return (
        f'the native kernels were not built with the package ({_load_error}). Install a C compiler (GCC 12 or newer, '
        f"or Clang) and Python's headers, and install the package again.")


def instruction_sets() -> List[str]:
    """Return the instruction sets that the kernels can use on this machine, fastest first."""
    names: List[str] = []
    while _library is not None and (name := _library.tg_isa(len(names))) is not None:
        names.append(name.decode())
    return names


def fma_peak(isa: str) -> float:
    """Measure the peak of one core, in GFLOP/s: multiply-adds on registers.

    Args:
        isa: Instruction set.
    """
    gflops = c_double()
    _check(None, _get().tg_fma_peak(isa.encode(), gflops) != 0)
    return gflops.value


def _get() -> ctypes.CDLL:
    if _library is None:
        raise RuntimeError(why_not())
    return _library


def _check(result: Any, failed: bool) -> Any:
    if failed:
        message = _get().tg_error().decode()
        raise (MemoryError if message.startswith('out of memory') else ValueError)(f'native kernels: {message}.')
    return result


class _Handle:
    """Owns an object of the library and keeps the objects that it refers to alive."""

    def __init__(self, pointer: Optional[int], free: Any, *keep: Any) -> None:
        self.pointer = _check(pointer, not pointer)
        self._free = free
        self._keep = keep

    def __del__(self) -> None:
        if getattr(self, 'pointer', None):
            self._free(self.pointer)


class _Plan:
    """A program for one image size, and its memory."""

    def __init__(self, network: _Handle, height: int, width: int) -> None:
        library = _get()
        self.handle = _Handle(library.tg_plan_new(network.pointer, height, width), library.tg_plan_free, network)
        self.outputs: List[Tuple[int, ...]] = []
        size = (c_int * 3)()
        while library.tg_plan_output(self.handle.pointer, len(self.outputs), size):
            self.outputs.append(tuple(size))
        self._idle: Dict[int, List[Tuple[int, _Handle]]] = {}  # by number of threads: samples at a time, memory

    def run(
            self,
            images: torch.Tensor,
            threads: int,
            num_open: Optional[torch.Tensor],
            milliseconds: Optional[torch.Tensor] = None,
    ) -> List[torch.Tensor]:
        library = _get()
        count = images.shape[0]
        if count == 0:
            return self._results(0)
        # Reuse the memory of an earlier call. Concurrent calls have their own.
        idle = self._idle.setdefault(threads, [])
        try:
            samples, workspace = idle.pop()
        except IndexError:
            samples = 0
        if samples < min(count, threads):
            samples = min(count, threads)
            workspace = _Handle(
                library.tg_workspace_new(self.handle.pointer, samples, threads), library.tg_workspace_free, self.handle)
        results = self._results(count)
        pointers = (c_void_p * len(results))(*(result.data_ptr() for result in results))
        status = library.tg_run(
            workspace.pointer, images.data_ptr(), count, pointers, len(results),
            *(None if tensor is None else tensor.data_ptr() for tensor in (num_open, milliseconds)))
        idle.append((samples, workspace))
        _check(None, status != 0)
        return results

    def _results(self, count: int) -> List[torch.Tensor]:
        return [torch.empty(count, *size, dtype=torch.float32, device='cpu') for size in self.outputs]


class NativeRunner:
    """Runs a program on the CPU in float32.

    Args:
        program: Program to run.
        isa: Instruction set, the fastest available one by default.

    Attributes:
        isa: Instruction set.
    """

    def __init__(self, program: Program, isa: Optional[str] = None) -> None:
        library = _get()
        self._ops = [without_data(op) for op in program.ops]  # their weights are packed
        self._chosen_isa = isa
        self.isa = isa or instruction_sets()[0]
        self._network = _Handle(
            library.tg_network_new(self.isa.encode(), program.in_channels, program.num_maps, program.num_gates),
            library.tg_network_free)
        self._in_channels, self._num_maps, self._num_gates = program.in_channels, program.num_maps, program.num_gates
        self._plans: OrderedDict[Tuple[int, int], _Plan] = OrderedDict()
        self._lock = threading.Lock()
        self._channels = Counter({0: program.in_channels})  # by map
        for op in program.ops:
            _check(None, self._add(op) != 0)
            self._note_channels(op)
        self._num_native = [len(op.sources) if isinstance(op, ConcatOp) else 1 for op in program.ops]  # per operation

    def _add(self, op: Op) -> int:
        library, network = _get(), self._network.pointer

        def number(value: Optional[int]) -> int:
            return -1 if value is None else value

        if isinstance(op, ConvOp):
            c_out, c_in, kernel = op.weight.shape[:3]
            weight, bias = _floats(op.weight), _floats(op.bias)
            spec = _ConvSpec(
                op.source, op.target, number(op.residual), number(op.gate_in), number(op.gate_out), c_in, c_out, kernel,
                op.stride, op.dilation, op.padding, op.relu)
            return library.tg_add_conv(network, spec, weight.data_ptr(), bias.data_ptr())
        if isinstance(op, GateOp):
            (hidden, c_in), size = op.weight1.shape, len(op.weight2)
            tensors = [_floats(tensor) for tensor in (op.weight1, op.bias1, op.weight2, op.bias2)]
            return library.tg_add_gate(
                network, op.source, op.gate, c_in, hidden, size, *(tensor.data_ptr() for tensor in tensors))
        if isinstance(op, PoolOp):
            return library.tg_add_pool(
                network, op.average, op.source, op.target, op.kernel, op.stride, op.padding, op.ceil_mode)
        if isinstance(op, AdaptivePoolOp):
            return library.tg_add_adaptive_pool(network, op.source, op.target, op.bins)
        if isinstance(op, ConcatOp):
            return self._add_concat(op)
        if isinstance(op, SubsampleOp):
            return library.tg_add_subsample(network, op.source, op.target, op.stride, op.before, op.after)
        if isinstance(op, SkipOp):
            return library.tg_add_skip(network, op.source, op.target, op.gate, op.count)
        assert isinstance(op, OutputOp)
        return library.tg_add_output(network, op.source)

    def _note_channels(self, op: Op) -> None:
        if isinstance(op, ConvOp):
            self._channels[op.target] = len(op.weight)
        elif isinstance(op, ConcatOp):
            self._channels[op.target] = sum(self._channels[source] for source in op.sources)
        elif isinstance(op, SubsampleOp):
            self._channels[op.target] = self._channels[op.source] + op.before + op.after
        elif isinstance(op, (PoolOp, AdaptivePoolOp)):
            self._channels[op.target] = self._channels[op.source]

    def _add_concat(self, op: ConcatOp) -> int:
        total = sum(self._channels[source] for source in op.sources)
        before = status = 0
        for source in op.sources:
            status = status or _get().tg_add_place(
                self._network.pointer, source, op.target, op.sources[0], before, total, op.align_corners)
            before += self._channels[source]
        return status

    @property
    def program(self) -> Program:
        """The program that is run, with float32 tensors on the CPU. Its weights are unpacked at each call."""
        ops, index = [], 0
        for op, count in zip(self._ops, self._num_native, strict=True):
            ops.append(self._with_weights(op, index))
            index += count
        return Program(self._in_channels, ops, self._num_maps, self._num_gates)

    def _with_weights(self, op: Op, index: int) -> Op:
        tensors: Dict[str, Any] = {
            name: torch.empty(value.shape, dtype=torch.float32, device='cpu')
            for name, value in vars(op).items() if isinstance(value, torch.Tensor)}
        if not tensors:
            return op
        names = ('weight1', 'bias1', 'weight2', 'bias2') if isinstance(op, GateOp) else ('weight', 'bias')
        pointers = [tensors[name].data_ptr() for name in names]
        _check(None, _get().tg_read_weights(
            self._network.pointer, index, *pointers, *[None] * (4 - len(pointers))) != 0)
        return replace(op, **tensors)

    def __deepcopy__(self, memo: Any) -> 'NativeRunner':
        return self  # immutable

    def __reduce__(self) -> Any:
        return _restored, (*encode(Network(self.program)), self._chosen_isa)  # packed for the machine that loads it

    @torch.compiler.disable
    def __call__(self, images: torch.Tensor, num_open: Optional[torch.Tensor] = None) -> List[torch.Tensor]:
        """Run a batch and return the output maps of the program.

        Args:
            images: Batch of images.
            num_open: Output tensor for the number of open channels per image and gate, [N, gates], int32.
        """
        if torch.jit.is_tracing():
            raise ValueError('an accelerated network cannot be traced; trace the original network.')
        check_images(images, self._in_channels)
        if images.device.type != 'cpu':
            raise ValueError(
                f"the native backend runs on the CPU, but the images are on '{images.device}'; use backend='torch'.")
        height, width = images.shape[2:]
        if height * width > _MAX_PIXELS:
            raise ValueError(f'the native backend takes images of up to {_MAX_PIXELS} pixels, got {height} x {width}.')
        dtype = images.dtype
        images = _floats(images)
        results = self._plan(height, width).run(images, torch.get_num_threads(), num_open)
        return [result.to(dtype) for result in results]

    @property
    def last_size(self) -> Optional[Tuple[int, int]]:
        """Height and width of the images of the last call."""
        return next(reversed(self._plans), None)

    def profile(self, image: torch.Tensor, num_open: torch.Tensor, runs: int) -> List[Tuple[str, float]]:
        """Time the operations of the program.

        Args:
            image: Batch of one image.
            num_open: Output tensor for the number of open channels per gate, [1, gates], int32.
            runs: Number of runs after a first one.

        Returns:
            Algorithm of each operation, empty if it is not a convolution, and its median time in milliseconds.
        """
        self(image, num_open)
        plan = self._plan(*image.shape[2:])
        times = torch.zeros(runs, sum(self._num_native), dtype=torch.float64)
        for row in times:
            plan.run(_floats(image), torch.get_num_threads(), num_open, row)
        medians = [part.sum() for part in times.median(0).values.split(self._num_native)]
        algorithms = [
            _get().tg_plan_algorithm(plan.handle.pointer, index) or b'' for index in range(times.shape[1])]
        first = [sum(self._num_native[:index]) for index in range(len(self._num_native))]
        return [(algorithms[at].decode(), float(ms)) for at, ms in zip(first, medians, strict=True)]

    def _plan(self, height: int, width: int) -> _Plan:
        with self._lock:
            plan = self._plans.pop((height, width), None) or _Plan(self._network, height, width)
            self._plans[height, width] = plan
            if len(self._plans) > _MAX_PLANS:
                self._plans.popitem(last=False)
        return plan


def _restored(tensors: Dict[str, torch.Tensor], text: str, isa: Optional[str]) -> NativeRunner:
    return NativeRunner(decode(tensors, text).program, isa)


def _floats(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to a contiguous float32 tensor on the CPU."""
    return tensor.detach().to('cpu', torch.float32).contiguous().resolve_neg()
