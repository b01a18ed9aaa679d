"""All precisions: losses are finite and gradients are numbers, whatever the logits; half precision skips no steps"""
from contextlib import nullcontext
from typing import Dict, Optional

import pytest
import timm
import torch
import torch.nn as nn
from timm.task import ClassificationTask
from torch.nn.functional import cross_entropy

from timm_gated import (
    Beta,
    Mixture,
    Normal,
    RelaxedBernoulli,
    Uniform,
    batch_shaping_loss,
    force_gates,
    gates,
    l0_loss,
)
from timm_gated.gate import binary_concrete
from timm_gated.objective import gate_masks

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
PRIORS = [
    Beta(), Beta(0.05, 0.05), Beta(learnable=True), RelaxedBernoulli(), Uniform(), Normal(), Mixture('beta', 'uniform')]


def million_logits(dtype: torch.dtype) -> torch.Tensor:
    """[1000, 1000]: common ones, all magnitudes up to the largest number, and single values in whole columns.

    In half precision some of them become infinite, as they would in a network.
    """
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(1000, 1000, generator=generator, dtype=torch.float64)
    logits[:, 200:400] *= 100
    exponents = torch.empty(1000, 500, dtype=torch.float64).uniform_(-45, 39, generator=generator)
    logits[:, 400:900] = torch.sign(logits[:, 400:900]) * 10 ** exponents
    logits[:, 900:950] = torch.sign(logits[:, 900:950]) * 100
    for column, value in zip(range(950, 1000), [0., 100., -100., torch.inf, -torch.inf] * 10, strict=True):
        logits[:, column] = value
    return logits.to(dtype).requires_grad_()


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
def test_a_million_logits(dtype):
    logits = million_logits(dtype)
    assert logits.isinf().any() and (logits.abs() == 100).any()
    losses = {'l0': l0_loss(logits, 'none')}
    losses.update({str(prior): batch_shaping_loss(torch.sigmoid(logits), prior, 'none') for prior in PRIORS})
    for name, loss in losses.items():
        assert loss.dtype == torch.promote_types(dtype, torch.float32)
        assert loss.isfinite().all(), name
        grad, = torch.autograd.grad(2. ** 16 * loss.sum(), logits)  # a GradScaler's first scale
        assert grad.isfinite().all(), name
    torch.manual_seed(0)
    mask = binary_concrete(logits)
    assert ((mask == 0) | (mask == 1)).all()
    assert torch.autograd.grad(mask.sum(), logits)[0].isfinite().all()


@torch.no_grad()
def saturate(model: nn.Module) -> None:
    """Give gates logits of 100 and of the largest numbers there are, of both signs, and infinite ones."""
    for _, gate in gates(model):
        largest = torch.finfo(gate.fc2.bias.dtype).max
        values = torch.tensor([100., -100., largest, -largest, 1.], dtype=gate.fc2.bias.dtype)
        gate.fc2.bias.copy_(values.repeat(gate.num_gates)[:gate.num_gates])
        gate.fc2.weight[2::5, 0] = largest
        gate.fc2.weight[3::5, 0] = -largest
        gate.bn.bias[0] = 10.


@pytest.mark.parametrize('autocast, dtype', [
    (torch.bfloat16, torch.float32), (torch.float16, torch.float32), (None, torch.bfloat16), (None, torch.float32),
    (None, torch.float64)], ids=str)
def test_saturated_gates_train(autocast, dtype):
    torch.manual_seed(0)
    model = timm.create_model(
        'gated_resnet20', layers=(1, 1, 1), channels=(8, 8, 8), gamma_epochs='fixed', budget=0.5, dtype=dtype)
    saturate(model)
    task = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)
    with torch.autocast('cpu', dtype=autocast) if autocast else nullcontext():
        result = task(torch.randn(4, 3, 16, 16, dtype=dtype), torch.arange(4))
    logits = torch.cat([gate.logits for _, gate in gates(model)], 1)
    assert (logits == torch.inf).any() and (logits == -torch.inf).any() and (logits.abs() > 90).any()
    losses = {name: result[name] for name in ('loss', 'batch_shaping_loss', 'l0_loss', 'budget_loss')}
    assert all(loss.isfinite() for loss in losses.values()), losses
    result['loss'].backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def skips(model: nn.Module, loss: torch.Tensor) -> bool:
    """Whether a fresh GradScaler skips the step."""
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.), torch.amp.GradScaler('cpu')
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    return scaler.get_scale() < 2 ** 16


def first_step(seed: int, fixed: Optional[Dict[str, torch.Tensor]] = None) -> tuple:
    torch.manual_seed(seed)
    model = timm.create_model('gated_resnet20', layers=(1, 1, 1), gamma_epochs='fixed')
    x, y = torch.randn(4, 3, 32, 32), torch.randint(10, (4,))
    with torch.autocast('cpu', dtype=torch.float16):
        if fixed is not None:
            with force_gates(model, fixed):
                return skips(model, cross_entropy(model(x), y)), fixed
        loss = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)(x, y)['loss']
    return skips(model, loss), {name: mask.detach() for name, mask in gate_masks(model).items()}


def test_gates_have_no_step_skipped():
    """Whatever a GradScaler skips with small batches, it skips without gates that learn: with the same fixed masks."""
    steps = []
    for seed in range(12):
        skipped, masks = first_step(seed)
        steps.append((skipped, first_step(seed, masks)[0]))
    assert [seed for seed, (gated, plain) in enumerate(steps) if gated and not plain] == []
    assert not all(plain for _, plain in steps)
