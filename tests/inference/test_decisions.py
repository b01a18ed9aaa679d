"""Accelerated networks make the decisions of the masked ones, except for logits within rounding of zero

If rounding flips a gate, the outputs may differ by any amount. They must still equal those of the masked network with
the same decisions forced.
"""
import random
from typing import Any, Dict, List, Tuple

import mmseg_plugin  # noqa: F401  (before mmseg)

# isort: split
import pytest
import timm
import torch
import torch.nn as nn
from hypothesis import given
from nets import shuffle
from strategies import examples, seeds

from mmseg_plugin import GatedResNetV1d
from timm_gated import accelerate, force_gates, gates, instruction_sets
from timm_gated.inference import compile_trunk, compiler, find_trunk
from timm_gated.inference.native import NativeRunner
from timm_gated.inference.program import ConvOp, GateOp, Op, OutputOp, Program

ROUNDING = 1e-4  # of logits, relative to the largest one of the gate
TOLERANCE = 1e-4  # of outputs, relative to the largest one


def native_decisions(model: nn.Module, x: torch.Tensor, isa: str) -> Tuple[Dict[str, torch.Tensor], List[torch.Tensor]]:
    """Return the decisions of the native kernels by gate name, and their output maps."""
    program = compile_trunk(find_trunk(model).modules)
    ones, decisions = program.num_maps, program.num_maps + 1
    ops: List[Op] = []
    for op in program.ops:
        ops.append(op)
        if isinstance(op, GateOp):  # output a map that is 1 where the gate is open
            (size, _), channels = op.weight2.shape, op.weight1.shape[1]
            ops += [
                ConvOp(op.source, ones, torch.zeros(size, channels, 1, 1), torch.ones(size), gate_out=op.gate),
                ConvOp(ones, decisions, torch.eye(size)[:, :, None, None], torch.zeros(size), gate_in=op.gate),
                OutputOp(decisions)]
    outputs = NativeRunner(Program(program.in_channels, ops, program.num_maps + 2, program.num_gates), isa)(x)
    masks, maps, names = {}, [], iter(gates(model))
    for op in program.ops:
        if isinstance(op, GateOp):
            name, gate = next(names)
            masks[name] = outputs.pop(0)[:, :gate.num_gates, 0, 0]
        elif isinstance(op, OutputOp):
            maps.append(outputs.pop(0))
    return masks, maps


def largest(x: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude per image, at least 1."""
    return x.flatten(1).abs().amax(1).clamp(min=1).reshape(-1, *[1] * (x.ndim - 1))


@torch.no_grad()
def check(model: nn.Module, x: torch.Tensor, isa: str) -> List[float]:
    """Compare the kernels with the masked network and return the relative logits that rounding flipped."""
    masks, maps = native_decisions(model, x, isa)
    accelerated = accelerate(model, 'native', isa)(x)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(accelerated, maps, strict=True))
    with force_gates(model, masks):
        expected = model(x)
    for ours, theirs in zip(accelerated, expected, strict=True):
        torch.testing.assert_close(ours / largest(theirs), theirs / largest(theirs), atol=TOLERANCE, rtol=0)
    tipped = []
    for name, gate in gates(model):
        flipped = (gate.logits > 0) != masks[name].bool()
        tipped += (gate.logits.abs() / largest(gate.logits))[flipped].tolist()
    assert all(share < ROUNDING for share in tipped), f'a decision differs by more than rounding: {max(tipped)}'
    return tipped


def network(seed: int) -> Tuple[nn.Module, torch.Tensor]:
    """A network of bottlenecks with a deep stem and pooled shortcuts, and images of odd sizes."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    layers = [draw.randint(1, 3) for _ in range(4)]
    if draw.random() < 0.2:
        model: Any = GatedResNetV1d(
            50, base_channels=draw.randint(1, 24), stem_channels=2 * draw.randint(1, 32))
    else:
        model = timm.create_model(
            'gated_resnet50', features_only=True, layers=layers, channels=sorted(draw.randint(1, 64) for _ in layers),
            stem_type='deep', stem_width=draw.randint(1, 32), avg_down=True,
            gated_maps=draw.choice([(1,), (2,), (1, 2), (1, 2)]))
    shuffle(model, seed)
    model.eval()
    height, width = draw.choice([(97, 65), (draw.randint(1, 100), draw.randint(1, 100))])
    return model, torch.randn(2, 3, height, width)


native = pytest.mark.skipif(not instruction_sets(), reason='the kernels were not built')


@native
@examples(8)
@given(seed=seeds)
def test_bottlenecks_with_pooled_shortcuts(seed):
    model, x = network(seed)
    for isa in instruction_sets():
        check(model, x, isa)


def small_network() -> Tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = timm.create_model(
        'gated_resnet50', features_only=True, layers=(1, 1, 1, 1), channels=(16, 16, 32, 32), stem_type='deep',
        stem_width=8, avg_down=True)
    return shuffle(model).eval(), torch.randn(2, 3, 33, 65)


@native
@torch.no_grad()
def test_gates_within_rounding_of_zero():
    """All logits of the first image are close to zero, so the kernels may compute either sign."""
    model, x = small_network()
    for _, gate in gates(model):
        model(x)
        gate.fc2.bias -= gate.logits[0]
    for isa in instruction_sets():
        assert check(model, x, isa)


@native
@pytest.mark.parametrize('part, defect, message', [
    ('gate_op', lambda gate: gate.bias2.add_(0.05), 'a decision differs by more than rounding'),
    ('conv_op', lambda conv: conv.weight[0].mul_(1.01), 'not close')])
def test_a_defect(part, defect, message, monkeypatch):
    """Wrong decisions and wrong weights are detected."""
    model, x = small_network()
    original = getattr(compiler, part)

    def defective(*args: Any) -> Any:
        op = original(*args)
        defect(op)
        return op

    monkeypatch.setattr(compiler, part, defective)
    for isa in instruction_sets():
        with pytest.raises(AssertionError, match=message):
            check(model, x, isa)
