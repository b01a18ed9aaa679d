"""Choice between int8 and float32, layer by layer

Without dot products of bytes (VNNI), an int8 convolution is not always faster than Winograd's algorithm in float32. The
layers are timed on this machine, in both forms, and each one keeps the faster form.
"""
import time
from typing import Callable, Dict, List, Optional, Set

import torch

from .calibration import Range
from .native import NativeRunner
from .program import ConvOp, Program
from .quantize import quantize, tied_convolutions

__all__ = ['quantize_slow_layers']

_RUNS = 7
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
    keep = _faster(program, NativeRunner(program, runner.isa), quantised, runner, image)
    if not keep:
        return quantised
    mixed = quantize(program, ranges, method, keep)
    return mixed if _is_faster(NativeRunner(mixed, runner.isa), runner, image) else quantised


def _faster(
        program: Program, runner: NativeRunner, quantised: Program, int8_runner: NativeRunner,
        image: torch.Tensor) -> Set[int]:
    """Indices of the convolutions that are clearly faster in float32, all that are tied together."""
    floats, int8s = _shortest(
        lambda: _layer_times(runner, program, image), lambda: _layer_times(int8_runner, quantised, image))
    places = {
        index: place for place, index in enumerate(
            index for index, op in enumerate(program.ops) if isinstance(op, ConvOp))}
    return set().union(*(
        tied for tied in tied_convolutions(program)
        if sum(floats[places[index]] for index in tied) < _MARGIN * sum(int8s[places[index]] for index in tied)))


def _is_faster(first: NativeRunner, second: NativeRunner, image: torch.Tensor) -> bool:
    """Whether the first one runs an image in less time."""
    (first_ms,), (second_ms,) = _shortest(lambda: _total_time(first, image), lambda: _total_time(second, image))
    return first_ms < second_ms


def _shortest(first: Callable[[], List[float]], second: Callable[[], List[float]]) -> List[List[float]]:
    """Shortest of the times that two functions return. They run in turns: other load of the machine affects both."""
    rounds = [(first(), second()) for _ in range(_RUNS)]
    return [[min(times) for times in zip(*own, strict=True)] for own in zip(*rounds, strict=True)]


def _layer_times(runner: NativeRunner, program: Program, image: torch.Tensor) -> List[float]:
    """Milliseconds of each convolution."""
    num_open = torch.empty(1, program.num_counts, dtype=torch.int32)
    times = runner.profile(image, num_open, runs=1)
    return [ms for op, (_, ms) in zip(program.ops, times, strict=True) if isinstance(op, ConvOp)]


def _total_time(runner: NativeRunner, image: torch.Tensor) -> List[float]:
    runner(image)  # warm the caches
    start = time.perf_counter()
    runner(image)
    return [time.perf_counter() - start]
