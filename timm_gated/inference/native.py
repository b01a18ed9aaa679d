"""The native backend: runs a program with this package's own CPU kernels

The kernels (`timm_gated/csrc`) are plain C, built with the package and called through ctypes. They compute only open
filters and read them from weights that are packed once.
"""
import ctypes
from ctypes import POINTER, c_char_p, c_double, c_int, c_int64, c_void_p
from dataclasses import replace
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

import torch

from .cost import without_data
from .program import ChannelConvOp, Int8ConvOp, Int8LinearOp, Op, OutputOp, Program, QuantizeOp, check_images
from .serialize import Network, decode, encode

__all__ = ['NativeRunner', 'fma_peak', 'instruction_sets', 'why_not']

_PATH = Path(__file__).parents[1] / '_native.so'
_MAX_PIXELS = 2 ** 26  # per image (csrc/plan.c)
_VERSION = 10  # must equal TG_VERSION (csrc/timm_gated.h)


class _Tensor(ctypes.Structure):
    """`tensor_t` (csrc/network.h)."""
    _fields_ = [('data', c_void_p), ('type', c_int), ('num_dims', c_int), ('shape', c_int64 * 4)]


class _Batch(ctypes.Structure):
    """`batch_t` (csrc/network.h)."""
    _fields_ = [
        ('images', c_void_p), ('count', c_int64), ('outputs', POINTER(c_void_p)), ('num_open', c_void_p),
        ('is_open', c_void_p), ('milliseconds', c_void_p)]


# csrc/timm_gated.h and csrc/model.h
_SIGNATURES: Dict[str, Tuple[Any, List[Any]]] = {
    'tg_version': (c_int, []),
    'tg_error': (c_char_p, []),
    'tg_isa': (c_char_p, [c_int]),
    'tg_fma_peak': (c_int, [c_char_p, POINTER(c_double)]),
    'tg_free': (None, [c_void_p]),
    'tg_output_size': (c_int, [c_void_p, c_int, c_int, c_int, POINTER(c_int)]),
    'tg_model_new': (c_void_p, [c_char_p, c_int64, c_int64, c_int64]),
    'tg_model_add': (c_int, [c_void_p, POINTER(c_int64), POINTER(_Tensor)]),
    'tg_model_weights': (c_int, [c_void_p, c_int, *[c_void_p] * 4]),
    'tg_model_run': (c_int, [c_void_p, POINTER(_Batch), c_int, c_int, c_int]),
    'tg_model_algorithm': (c_char_p, [c_void_p, c_int, c_int, c_int]),
}
_MAX_TENSORS = 5  # of an operation (csrc/network.h)
_TYPES = (torch.int64, torch.float32, torch.uint8, torch.int8, torch.int32)  # `type_t` (csrc/network.h)


def _load() -> Tuple[Optional[ctypes.CDLL], str]:
    try:
        library = ctypes.CDLL(str(_PATH))
        for name, (restype, argtypes) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype, function.argtypes = restype, argtypes
    except (OSError, AttributeError) as error:
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
        'or Clang), and install the package again.')


def instruction_sets(precision: str = 'float32') -> List[str]:
    """Return the instruction sets that the kernels can use on this machine, fastest first.

    Args:
        precision: 'float32' or 'int8'. In float32, 'avxvnni' equals 'avx2' and is not listed.
    """
    names: List[str] = []
    while _library is not None and (name := _library.tg_isa(len(names))) is not None:
        names.append(name.decode())
    return [name for name in names if precision == 'int8' or name != 'avxvnni']


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


_KEPT = (ChannelConvOp, Int8ConvOp, Int8LinearOp, QuantizeOp)  # tensors that are small or not packed


class _Model:
    """A model of the library."""

    def __init__(self, isa: str, program: Program) -> None:
        library = _get()
        self.pointer = library.tg_model_new(isa.encode(), program.in_channels, program.num_maps, program.num_gates)
        _check(None, not self.pointer)
        tensors = encode(Network(program))
        for index, row in enumerate(tensors['operations']):
            described = (_Tensor * _MAX_TENSORS)()
            names = [
                name for name, value in vars(program.ops[index]).items() if isinstance(value, (torch.Tensor, tuple))]
            # A convolution without a shortcut has no ratio.
            own = {
                name: _contiguous(tensors[f'{index}.{name}']) for name in names if f'{index}.{name}' in tensors}
            for name, tensor in own.items():
                place = described[names.index(name)]
                place.data, place.type, place.num_dims = tensor.data_ptr(), _TYPES.index(tensor.dtype), tensor.ndim
                place.shape[:tensor.ndim] = tensor.shape
            _check(None, library.tg_model_add(self.pointer, (c_int64 * len(row))(*row.tolist()), described) != 0)

    def __del__(self) -> None:
        if getattr(self, 'pointer', None):
            _get().tg_free(self.pointer)


class NativeRunner:
    """Runs a program on the CPU.

    Args:
        program: Program to run.
        isa: Instruction set, the fastest available one by default.

    Attributes:
        isa: Instruction set.
        last_size: Height and width of the images of the last call.
    """

    def __init__(self, program: Program, isa: Optional[str] = None) -> None:
        _get()
        self._ops = [op if isinstance(op, _KEPT) else without_data(op) for op in program.ops]
        self._in_channels, self._num_maps, self._num_gates = program.in_channels, program.num_maps, program.num_gates
        self._num_counts = program.num_counts
        self._chosen_isa = isa
        is_int8 = any(isinstance(op, Int8ConvOp) for op in program.ops)
        self.isa = isa or instruction_sets('int8' if is_int8 else 'float32')[0]
        self.last_size: Optional[Tuple[int, int]] = None
        self._num_outputs = sum(isinstance(op, OutputOp) for op in program.ops)
        self._model = _Model(self.isa, program)

    @property
    def program(self) -> Program:
        """The program that is run, with float32 tensors on the CPU. Its weights are unpacked at each call."""
        ops = [self._with_weights(op, index) for index, op in enumerate(self._ops)]
        return Program(self._in_channels, ops, self._num_maps, self._num_gates)

    def _with_weights(self, op: Op, index: int) -> Op:
        tensors: Dict[str, Any] = {
            name: torch.empty(value.shape, dtype=torch.float32, device='cpu')
            for name, value in vars(op).items() if isinstance(value, torch.Tensor)}
        if not tensors or isinstance(op, _KEPT):
            return op
        pointers = [tensor.data_ptr() for tensor in tensors.values()]
        _check(None, _get().tg_model_weights(self._model.pointer, index, *pointers, *[None] * (4 - len(pointers))) != 0)
        return replace(op, **tensors)

    def __deepcopy__(self, memo: Any) -> 'NativeRunner':
        return self  # immutable

    def __reduce__(self) -> Any:
        return _restored, (encode(Network(self.program)), self._chosen_isa)  # packed for the machine that loads it

    @torch.compiler.disable
    def __call__(
            self,
            images: torch.Tensor,
            num_open: Optional[torch.Tensor] = None,
            only_last: bool = False,
            is_open: Optional[torch.Tensor] = None,
    ) -> List[torch.Tensor]:
        """Run a batch and return the output maps of the program.

        Args:
            images: Batch of images.
            num_open: Output tensor for the counts of each image, [N, counts], int32.
            only_last: Whether to return the last map alone, in a list.
            is_open: Output tensor for the decisions, [N, channels of all gates], bool.
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
        results = self._run(_floats(images), num_open, only_last=only_last, is_open=is_open)
        self.last_size = height, width
        return [result.to(images.dtype) for result in results]

    def _run(
            self,
            images: torch.Tensor,
            num_open: Optional[torch.Tensor] = None,
            milliseconds: Optional[torch.Tensor] = None,
            only_last: bool = False,
            is_open: Optional[torch.Tensor] = None,
    ) -> List[torch.Tensor]:
        library, model = _get(), self._model.pointer
        count, _, height, width = images.shape
        assert num_open is None or num_open.shape == (count, self._num_counts)
        results = []
        size = (c_int * 3)()
        pointers = (c_void_p * self._num_outputs)()  # NULL: not wanted
        for index in range(self._num_outputs - 1 if only_last else 0, self._num_outputs):
            _check(None, library.tg_output_size(model, index, height, width, size) != 0)
            results.append(torch.empty(count, *size, dtype=torch.float32, device='cpu'))
            pointers[index] = results[-1].data_ptr()
        batch = _Batch(
            images.data_ptr(), count, pointers,
            *(None if tensor is None else tensor.data_ptr() for tensor in (num_open, is_open, milliseconds)))
        _check(None, library.tg_model_run(model, batch, height, width, torch.get_num_threads()) != 0)
        return results

    def profile(self, image: torch.Tensor, num_open: torch.Tensor, runs: int) -> List[Tuple[str, float]]:
        """Time the operations of the program.

        Args:
            image: Batch of one image.
            num_open: Output tensor for the counts of the image, [1, counts], int32.
            runs: Number of runs after a first one.

        Returns:
            Algorithm of each operation, empty if it is not a convolution, and its median time in milliseconds.
        """
        images = _floats(image)
        self._run(images, num_open)
        times = torch.zeros(runs, len(self._ops), dtype=torch.float64)
        for row in times:
            self._run(images, num_open, row)
        height, width = image.shape[2:]
        algorithms = [
            _check(name, name is None).decode() for name in (
                _get().tg_model_algorithm(self._model.pointer, height, width, index)
                for index in range(len(self._ops)))]
        return list(zip(algorithms, times.median(0).values.tolist(), strict=True))


def _restored(tensors: Dict[str, torch.Tensor], isa: Optional[str]) -> NativeRunner:
    return NativeRunner(decode(tensors).program, isa)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().resolve_neg()


def _floats(tensor: torch.Tensor) -> torch.Tensor:
    """Convert to a contiguous float32 tensor on the CPU."""
    return _contiguous(tensor.to('cpu', torch.float32))
