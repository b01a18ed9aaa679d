"""A training step walks the module tree once, and a changed model is noticed"""
import pytest
import timm
import torch
import torch.nn as nn
from timm.task import ClassificationTask

from timm_gated import Normal, gates, objectives, shape_features
from timm_gated.layers import LastPass, gate_density, gate_logits, gate_masks, gate_scores
from timm_gated.loss import find_objectives

SMALL = dict(layers=(1, 1, 1), channels=(8, 8, 8))


class Wrapper(nn.Module):
    """Contains a network under a name, as in feature distillation."""

    def __init__(self, student):
        super().__init__()
        self.student = student

    def forward(self, x):
        return self.student(x)


def make_task(name='gated_resnet20', wrap=False, **kwargs):
    model = timm.create_model(name, num_classes=4, **kwargs)
    return ClassificationTask(Wrapper(model) if wrap else model, nn.CrossEntropyLoss(), verbose=False)


def step(task):
    return task(torch.randn(4, 3, 16, 16), torch.arange(4))


@pytest.fixture
def walks(monkeypatch):
    """Modules whose tree was walked from the top, other than gates."""
    walked = []
    named_modules = nn.Module.named_modules

    def counting(self, memo=None, *args, **kwargs):
        if memo is None and self not in [gate for _, gate in found]:
            walked.append(self)
        return named_modules(self, memo, *args, **kwargs)

    def begin(model):
        found[:] = gates(model)
        monkeypatch.setattr(nn.Module, 'named_modules', counting)
        return walked

    found = []
    return begin


@pytest.mark.parametrize('ema', [False, True])
@pytest.mark.parametrize('name, kwargs', [
    ('gated_resnet20', dict(budget=0.5, **SMALL)),
    ('gated_resnet20', dict(wrap=True, budget=0.5, **SMALL)),
    ('skipnet_resnet38', dict(stage='hybrid')),
    ('convnet_aig_resnet20', {}),
    ('fbs_resnet20', {}),
    ('gaternet_resnet20', {}),
])
def test_one_walk_per_step(name, kwargs, ema, walks, tmp_path):
    if name == 'gated_resnet20':
        kwargs = dict(kwargs, snapshot_dir=str(tmp_path))
    task = make_task(name, **kwargs)
    if ema:
        task.setup_ema(decay=0.9)
    step(task)
    walked = walks(task.get_trainable_module())
    step(task)
    assert walked == [task.get_trainable_module()]


def test_one_walk_per_step_without_gates(walks):
    model = timm.create_model('resnet18', num_classes=4)
    shape_features(model, {'layer1.0.act1': Normal()})
    task = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)
    step(task)
    walked = walks(model)
    assert 'feature_shaping_loss' in step(task) and walked == [model]


def test_changes_of_the_model_are_noticed():
    task = make_task(**SMALL, gamma_epochs='fixed')
    model = task.get_trainable_module()
    step(task)
    model.layer1[0].gate1 = None
    result = step(task)
    logits = torch.cat([gate.logits for _, gate in gates(model)], 1)
    torch.testing.assert_close(result['l0_loss'], logits.sigmoid().mean())
    assert len(gates(model)) == 2

    model.layer2[0] = timm.create_model('gated_resnet20', **SMALL).layer2[0]
    step(task)['l0_loss'].backward()
    assert model.layer2[0].gate1.fc2.bias.grad.any()

    shape_features(model, {'layer1.0.act1': Normal()})
    assert 'feature_shaping_loss' in step(task)
    del model.gate_losses
    assert 'l0_loss' not in step(task)


def test_objectives_get_the_last_pass_of_their_parent():
    """Two networks in one model: each objective sees the gates of its own."""
    networks = nn.Sequential(*(timm.create_model('gated_resnet20', num_classes=3, **SMALL) for _ in range(2)))
    networks.append(networks[0].layer1[0].gate1)  # shared, and named by its first place
    last_pass, found = find_objectives(networks)
    assert last_pass.network is networks and last_pass.gates == gates(networks)
    assert [objective for objective, _ in found] == objectives(networks)
    for network, (objective, parent_pass) in zip(networks, found, strict=False):
        assert objective is network.gate_losses and parent_pass.network is network
        assert parent_pass.gates == gates(network)


def test_last_pass_is_that_of_the_functions():
    model = timm.create_model('gated_resnet20', **SMALL)
    last_pass = LastPass(model)
    assert LastPass.of(last_pass) is last_pass and gates(last_pass) == gates(model)
    for size in (2, 3):  # values are read on demand
        model(torch.randn(size, 3, 16, 16))
        assert len(last_pass.logits()) == size
        for function in (gate_logits, gate_scores):
            assert torch.equal(function(last_pass), function(model))
        for function in (gate_masks, gate_density):
            torch.testing.assert_close(function(last_pass), function(model), rtol=0, atol=0)
        losses, expected = (model.gate_losses.terms(given, 0)['l0_loss'].value for given in (last_pass, model))
        assert torch.equal(losses, expected)
