"""Quantised programs on all instruction sets: the same bits as the reference in NumPy"""
import re
from collections import Counter
from typing import Any, List

import pytest
import torch
from deciding_gates import deciding_gate, numbered_images
from hypothesis import assume, event, given
from hypothesis import strategies as st
from int8_programs import STYLES, int8_conv, int8_programs, quantised_channels, quantised_scale, zeros
from int8_reference import grid_images, run_reference
from strategies import decisions, examples, seeds

from timm_gated import instruction_sets
from timm_gated.inference.native import NativeRunner
from timm_gated.inference.program import (
    AdaptivePoolOp,
    ConvOp,
    DequantizeOp,
    GateOp,
    Int8ConvOp,
    Int8LinearOp,
    OutputOp,
    PoolOp,
    Program,
    QuantizeOp,
    SkipOp,
    SubsampleOp,
)

ISAS = instruction_sets('int8')
sizes = st.integers(1, 40)
threads_of_calls = st.sampled_from([1, 1, 2])


def run(program: Program, x: torch.Tensor, isa: str, threads: int = 1) -> tuple:
    num_open = torch.zeros(len(x), program.num_gates, dtype=torch.int32)
    torch.set_num_threads(threads)
    try:
        return NativeRunner(program, isa)(x, num_open), num_open
    finally:
        torch.set_num_threads(1)


def same(actual: List[torch.Tensor], expected: List[torch.Tensor], where: str) -> None:
    for index, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        torch.testing.assert_close(
            ours, theirs, atol=0, rtol=0, equal_nan=True, msg=lambda text: f'{where}, output {index}: {text}')  # noqa: B023


def check(program: Program, x: torch.Tensor, threads: int = 1) -> None:
    """Outputs and gates of all instruction sets equal the reference bit for bit."""
    expected = run_reference(program, x)
    for isa in ISAS:
        outputs, num_open = run(program, x, isa, threads)
        assert torch.equal(num_open, expected.num_open), isa
        same(outputs, expected.outputs, isa)


FEATURES: dict = {
    'gated input': lambda op: isinstance(op, Int8ConvOp) and op.gate_in is not None,
    'shortcut': lambda op: isinstance(op, Int8ConvOp) and op.residual is not None,
    'stride': lambda op: isinstance(op, Int8ConvOp) and op.stride > 1,
    'dilation': lambda op: isinstance(op, Int8ConvOp) and op.dilation > 1,
    'linear': lambda op: isinstance(op, Int8LinearOp),
    'pool': lambda op: isinstance(op, PoolOp),
    'subsample': lambda op: isinstance(op, SubsampleOp),
    'dequantise': lambda op: isinstance(op, DequantizeOp),
    'float': lambda op: type(op) is ConvOp,
    'skip': lambda op: isinstance(op, SkipOp),
}
REFUSED = 'are too small|are too large|a shortcut of|out of memory|reads a map of'


def test_random_programs():
    seen: Counter = Counter()

    @examples(300)
    @given(arguments=int8_programs(), height=st.integers(1, 20), width=st.integers(1, 20),
           count=st.integers(1, 3), threads=threads_of_calls, seed=seeds)
    def check_program(arguments, height, width, count, threads, seed):
        seen['all'] += 1
        try:
            program = Program(*arguments)
        except ValueError as error:
            event(f'refused: {str(error).split(", ", 1)[1][:40]}')
            seen[str(error).split(", ", 1)[1][:40]] += 1
            return
        x = grid_images(count, program.in_channels, height, width, seed=seed)
        try:
            run(program, x, ISAS[0])
        except (ValueError, MemoryError) as error:
            assert re.search(REFUSED, str(error)), error
            event('refused for the size of the images')
            seen['size ' + str(error)[:60]] += 1
            return
        expected = run_reference(program, x)
        seen['exact'] += expected.exact
        assert expected.exact or any(type(op) is ConvOp or isinstance(op, (AdaptivePoolOp, GateOp)) for op in program.ops)
        seen.update(['runs', *(name for name, has in FEATURES.items() if any(map(has, program.ops)))])
        results = [run(program, x, isa, threads) for isa in ISAS]
        if expected.exact:
            for isa, (outputs, num_open) in zip(ISAS, results, strict=True):
                assert torch.equal(num_open, expected.num_open), isa
                same(outputs, expected.outputs, isa)

    try:
        check_program()
    finally:
        print(seen)
