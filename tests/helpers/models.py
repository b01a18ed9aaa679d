"""Models for the tests, images and short trainings"""
import functools
from typing import Dict, List

import timm
import torch
import torch.nn as nn
from nets import dense_counterpart, shuffle
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask

from timm_gated import Gating, gates


def images(size: int = 32, batch: int = 2, in_chans: int = 3) -> torch.Tensor:
    return torch.randn(batch, in_chans, size, size, generator=torch.Generator().manual_seed(0))


def create(name: str, seed: int = 0, **kwargs) -> nn.Module:
    torch.manual_seed(seed)
    return shuffle(timm.create_model(name, **kwargs), seed)


def dense_copy(name: str, model: nn.Module, **kwargs) -> nn.Module:
    """Dense counterpart of a gated model with the same weights, in the same mode."""
    dense = dense_counterpart(name, **kwargs).train(model.training)
    own = model.state_dict()
    dense.load_state_dict({key: own[key] for key in dense.state_dict()})
    return dense


@functools.cache
def blueprint(name: str) -> nn.Module:
    """Model on the meta device. It is shared: do not change it."""
    return timm.create_model(name, device='meta')


@functools.cache
def dense_blueprint(name: str) -> nn.Module:
    return dense_counterpart(name, device='meta')


@torch.no_grad()
def freeze_decisions(model: nn.Module) -> nn.Module:
    """Make the decisions of channel gates independent of the input. In place."""
    for _, gate in gates(model):
        gate.fc2.weight.zero_()
    return model


@torch.no_grad()
def open_share(model: nn.Module, x: torch.Tensor) -> Dict[str, torch.Tensor]:
    """Share of images for which each gate is open, by name of the gate module."""
    model(x)
    return {name: gate.decision.double().mean(0) for name, gate in gates(model)}


def gate_parameters(model: nn.Module) -> set:
    return {f'{name}.{parameter}' for name, gate in gates(model) for parameter, _ in gate.named_parameters()}


def assert_gates_have_gradients(model: nn.Module) -> None:
    for name, gating in model.named_modules():
        if isinstance(gating, Gating):
            for parameter in gating.parameters():
                assert parameter.grad is not None and parameter.grad.isfinite().all(), name
            assert all(parameter.grad.any() for parameter in list(gating.parameters())[-2:]), name  # the last layer


def train(
        model: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int = 60, lr: float = 0.1) -> List[Dict[str, float]]:
    """Train with timm's task and optimizer; returns the mean results of the first and of the last five steps."""
    task = ClassificationTask(model.train(), nn.CrossEntropyLoss(), verbose=False)
    optimizer = create_optimizer_v2(model, opt='momentum', lr=lr, weight_decay=1e-4)
    results = []
    for _ in range(steps):
        result = task(x, y)
        optimizer.zero_grad()
        result['loss'].backward()
        optimizer.step()
        results.append({key: torch.as_tensor(value).item() for key, value in result.items() if key != 'output'})
    return [{key: sum(r[key] for r in part) / 5 for key in results[0]} for part in (results[:5], results[-5:])]
