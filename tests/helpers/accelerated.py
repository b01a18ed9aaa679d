"""Helpers for tests of `accelerate`"""
import pytest
import torch
import torch.nn as nn

from timm_gated import MacCounter, accelerate, gates, instruction_sets

BACKENDS = [('native', isa) for isa in instruction_sets()] + [('torch', None)]

backends = pytest.mark.parametrize('backend, isa', BACKENDS, ids=lambda value: str(value))


def images(count: int = 3, height: int = 64, width: int = 64, channels: int = 3) -> torch.Tensor:
    return torch.randn(count, channels, height, width, generator=torch.Generator().manual_seed(1))


def is_decided(model: nn.Module) -> bool:
    """Whether all logits are far enough from zero that rounding cannot flip a gate."""
    return all(gate.forced is not None or (gate.logits.abs() > 1e-5).all() for _, gate in gates(model))


@torch.no_grad()
def check(model: nn.Module, x: torch.Tensor, backend: str, isa=None) -> None:
    """Check that outputs and MACs per image equal those of the masked network."""
    with MacCounter(model) as counter:
        expected = model(x)
    assert is_decided(model)
    fast = accelerate(model, backend, isa)
    assert fast.backend == backend
    actual = fast(x)
    assert type(actual) is type(expected)
    if isinstance(expected, torch.Tensor):
        actual, expected = [actual], [expected]
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        scale = theirs.abs().max().clamp(min=1) if theirs.numel() else 1
        torch.testing.assert_close(ours / scale, theirs / scale, atol=1e-4, rtol=0)
    macs = fast.run_with_macs(x)[1]
    assert macs.dense == counter.macs().dense and torch.equal(macs.per_sample, counter.macs().per_sample)
