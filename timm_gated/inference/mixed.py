"""Choice between int8 and float32, layer by layer

Without dot products of bytes (VNNI), an int8 convolution is not always faster than Winograd's algorithm in float32. The
layers are timed on this machine, in both forms, and each one keeps the faster form.
"""
import statistics
import time
from typing import Dict, List, Optional, Set

import torch

from .calibration import Range
from .native import NativeRunner
from .program import ConvOp, Program
from .quantize import quantize, tied_convolutions

__all__ = ['quantize_slow_layers']

_RUNS = 5
_MARGIN = 0.9  # share of the int8 time, since conversions between the forms take time too


def quantize_slow_layers(
        program: Program,
        ranges: Dict[int, Range],
        method: str,
        image: torch.Tensor,
        isa: Optional[str] = None,
) -> Program:
    """Quantise a program, except for the convolutions that this machine runs faster in float32.

    Args:
        program: Program in float32.
        ranges: Ranges from `observe_ranges`.
        method: How the range of a map is chosen, see `quantize`.
        image: Batch of one image to time the layers on.
        isa: Instruction set, the fastest available one by default.
    """
    quantised = quantize(program, ranges, method)
    runner = NativeRunner(quantised, isa)
    keep = _faster(program, _times(NativeRunner(program, isa), program, image), _times(runner, quantised, image))
    if not keep:
        return quantised
    mixed = quantize(program, ranges, method, keep)
    return mixed if _is_faster(NativeRunner(mixed, isa), runner, image) else quantised


def _times(runner: NativeRunner, program: Program, image: torch.Tensor) -> List[float]:
    """Milliseconds of each convolution."""
    num_open = torch.empty(1, program.num_counts, dtype=torch.int32)
    times = runner.profile(image, num_open, _RUNS)
    return [ms for op, (_, ms) in zip(program.ops, times, strict=True) if isinstance(op, ConvOp)]


def _faster(program: Program, in_float: List[float], in_int8: List[float]) -> Set[int]:
    """Indices of the convolutions that are clearly faster in float32, all that are tied together."""
    indices = [index for index, op in enumerate(program.ops) if isinstance(op, ConvOp)]
    floats, int8s = (dict(zip(indices, times, strict=True)) for times in (in_float, in_int8))
    return set().union(*(
        tied for tied in tied_convolutions(program)
        if sum(floats[index] for index in tied) < _MARGIN * sum(int8s[index] for index in tied)))


def _is_faster(first: NativeRunner, second: NativeRunner, image: torch.Tensor) -> bool:
    """Whether the first one runs an image in less time."""
    times: Dict[NativeRunner, List[float]] = {first: [], second: []}
    for _ in range(_RUNS + 1):
        for runner, own in times.items():
            start = time.perf_counter()
            runner(image)
            own.append(time.perf_counter() - start)
    return statistics.median(times[first][1:]) < statistics.median(times[second][1:])
