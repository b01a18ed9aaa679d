"""Losses and gradients are finite in all precisions and for all logits; half precision skips no steps"""
from contextlib import nullcontext
from typing import Any, Dict, Tuple

import pytest
import timm
import torch
import torch.nn as nn
from timm.task import ClassificationTask

from timm_gated import (
    Beta,
    Mixture,
    Normal,
    RelaxedBernoulli,
    Uniform,
    batch_shaping_loss,
    gates,
    l0_loss,
)
from timm_gated.layers.gate import Gating, binary_concrete
from timm_gated.layers.macs import MacFormula
from timm_gated.layers.skip_gates import STAGES, SkipGate
from timm_gated.loss.budget import budget_loss
from timm_gated.models.convnet_aig import target_rate_loss
from timm_gated.models.fbs import SaliencyGate, winners
from timm_gated.models.gaternet import semantic_hashing
from timm_gated.models.skipnet import reinforce_loss

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
PRIORS = [
    Beta(), Beta(0.05, 0.05), Beta(learnable=True), RelaxedBernoulli(), Uniform(), Normal(), Mixture('beta', 'uniform')]


def million_logits(dtype: torch.dtype) -> torch.Tensor:
    """Logits, [1000, 1000]: common ones, all magnitudes up to the largest number, and columns of a single value.

    In half precision some become infinite, as in a network.
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
        grad, = torch.autograd.grad(2. ** 16 * loss.sum(), logits)  # initial scale of a GradScaler
        assert grad.isfinite().all(), name
    torch.manual_seed(0)
    mask = binary_concrete(logits)
    assert ((mask == 0) | (mask == 1)).all()
    assert torch.autograd.grad(mask.sum(), logits)[0].isfinite().all()


@pytest.mark.parametrize('dtype', DTYPES, ids=str)
def test_a_million_logits_of_every_method(dtype):
    """Masks and their losses, from logits in float32 or float64."""
    logits = million_logits(dtype).detach().to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    torch.manual_seed(0)
    gate = SkipGate()
    masks = {'concrete': binary_concrete(logits, temperature=1.), 'hashing': semantic_hashing(logits)}
    for gate.stage in STAGES:
        masks[gate.stage] = gate.sample(logits)
    formula = MacFormula(dense=1000, fixed=10, switched={'conv': (900, {'gate': 0})})
    losses = {'reinforce': reinforce_loss(logits, masks.pop('hybrid'), torch.rand(1000))}
    for name, mask in masks.items():
        assert ((mask >= 0) & (mask <= 1)).all(), name
        losses[f'{name} mask'] = mask.sum()
        losses[f'{name} sparsity'] = mask.abs().mean()
        losses[f'{name} target rate'] = target_rate_loss(mask.mean(0), torch.full((1000,), 0.3))
        losses[f'{name} budget'] = budget_loss(formula.used({'gate': mask}), formula.dense, 0.3)
    for name, loss in losses.items():
        assert loss.isfinite(), name
        grad, = torch.autograd.grad(2. ** 16 * loss, logits, retain_graph=True)  # initial scale of a GradScaler
        assert grad.isfinite().all() and grad.any(), name
    assert (winners(logits, torch.tensor(300)).sum(1) == 300).all()


SMALL: Dict[str, Any] = dict(layers=(2, 2, 2), channels=(8, 8, 8))
# Every method, with all its losses.
METHODS: Dict[str, Tuple[str, Dict[str, Any]]] = {
    'gated': ('gated_resnet20', dict(SMALL, gamma_epochs='fixed', budget=0.5)),
    'dgnet': ('dgnet_resnet18', dict(layers=(1, 1, 1, 1), channels=(8, 8, 8, 8), budget=0.5)),
    'convnet_aig': ('convnet_aig_resnet20', dict(SMALL, budget=0.5)),
    'gaternet': ('gaternet_resnet20', dict(SMALL, budget=0.5)),
    'skipnet': ('skipnet_resnet38', dict(SMALL, stage='supervised', budget=0.5)),
    'skipnet_soft': ('skipnet_resnet38', dict(SMALL, stage='soft', gate='ff1', budget=0.5)),
    'skipnet_hybrid': ('skipnet_resnet38', dict(SMALL, stage='hybrid', gate='ff2')),
    'fbs': ('fbs_resnet20', dict(SMALL, density=0.5, density_epochs='fixed')),
}


@torch.no_grad()
def saturate(model: nn.Module) -> None:
    """Give gates logits of 100, of the largest finite numbers, and infinite ones, of both signs.

    Saliencies, which scale feature maps, are at most 100: infinite ones would give NaN.
    """
    gating = [module for module in model.modules() if isinstance(module, Gating) and module.state_dict()]
    for index, module in enumerate(gating):
        layer = next((getattr(module, name) for name in ('fc2', 'fc') if hasattr(module, name)), None)
        if layer is None:  # recurrent gates after the first share its layer
            continue
        largest = 100 if isinstance(module, SaliencyGate) else torch.finfo(layer.bias.dtype).max
        values = torch.tensor([largest, -largest, 100., -100., 1.], dtype=layer.bias.dtype).roll(index)
        layer.bias.copy_(values.repeat(layer.out_features)[:layer.out_features])
        if not isinstance(module, SaliencyGate):
            infinite = layer.bias.abs() == largest
            layer.weight[infinite] = layer.bias[infinite, None]
        if hasattr(module, 'bn'):
            module.bn.bias[0] = 10.


@pytest.mark.parametrize('autocast, dtype', [
    (torch.bfloat16, torch.float32), (torch.float16, torch.float32), (None, torch.bfloat16), (None, torch.float32),
    (None, torch.float64)], ids=str)
@pytest.mark.parametrize('method', METHODS)
def test_saturated_gates_train(method, autocast, dtype):
    torch.manual_seed(0)
    name, options = METHODS[method]
    model = timm.create_model(name, dtype=dtype, **options)
    saturate(model)
    task = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)
    with torch.autocast('cpu', dtype=autocast) if autocast else nullcontext():
        result = task(torch.randn(4, 3, 16, 16, dtype=dtype), torch.arange(4))
    logits = torch.cat([gate.logits for _, gate in gates(model)], 1)
    assert (logits.abs() > 90).any() and (method == 'fbs' or logits.isinf().any())
    numbers = {name: value for name, value in result.items() if isinstance(value, torch.Tensor)}
    assert len(numbers) > 4 and all(value.isfinite().all() for value in numbers.values()), numbers
    result['loss'].backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad.isfinite().all(), key


def skips(name: str, seed: int, batch_size: int, **kwargs) -> bool:
    """Whether a fresh GradScaler skips the first step of a training in float16."""
    torch.manual_seed(seed)
    model = timm.create_model(name, **kwargs)
    task = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.), torch.amp.GradScaler('cpu')
    with torch.autocast('cpu', dtype=torch.float16):
        loss = task(torch.randn(batch_size, 3, 32, 32), torch.randint(10, (batch_size,)))['loss']
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale() < 2 ** 16


@pytest.mark.parametrize('name, options', [
    ('cifar_resnet20', dict()), ('gated_resnet20', dict(gamma_epochs='fixed')), ('gated_resnet20', dict(budget=0.5)),
    ('convnet_aig_resnet20', dict()), ('gaternet_resnet20', dict()), ('skipnet_resnet38', dict(stage='hybrid')),
    ('fbs_resnet20', dict())])
def test_no_step_is_skipped(name, options):
    """Neither for the dense network nor for a gated one, though small batches have large gradients."""
    assert [seed for seed in range(6) if skips(name, seed, batch_size=4, layers=(1, 1, 1), **options)] == []


@pytest.mark.parametrize('name', ['cifar_resnet20', 'gated_resnet20'])
def test_no_step_of_a_deep_network_is_skipped(name):
    """With 4 images both networks skip some steps: the gradients of the classifier's weights are too large."""
    assert not skips(name, seed=0, batch_size=32)
