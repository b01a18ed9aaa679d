"""Training of the gated models with timm: gradient checkpointing, parameter groups, weight decay, EMA, freezing"""
import copy
import re

import pytest
import timm
import torch
import torch.nn as nn
from models import assert_gates_have_gradients, blueprint, create, gate_parameters, images
from nets import GATED, SMALL, TINY, family, gate_loss, gating_keys
from timm.models import group_parameters
from timm.optim import create_optimizer_v2
from timm.utils import ModelEmaV3, freeze

from timm_gated import gates


@pytest.mark.parametrize('name', SMALL)
def test_gradient_checkpointing_changes_nothing(name):
    layers = [2] * len(TINY[name]['layers'])
    model = create(name, num_classes=4, drop_path_rate=0.1, **dict(TINY[name], layers=layers)).train()
    recomputed = copy.deepcopy(model)
    recomputed.set_grad_checkpointing()
    x, target = images(batch=4), torch.tensor([0, 1, 2, 3])
    losses = []
    for m in (model, recomputed):
        torch.manual_seed(5)
        loss = nn.functional.cross_entropy(m(x), target) + gate_loss(m)
        loss.backward()
        losses.append(loss)
    torch.testing.assert_close(*losses, rtol=0, atol=1e-6)
    for (n, p), q in zip(model.named_parameters(), recomputed.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-6, msg=n)
    assert_gates_have_gradients(recomputed)
    recomputed.set_grad_checkpointing(False)
    assert not recomputed.grad_checkpointing


@pytest.mark.parametrize('name', ['gaternet_resnet20', 'skipnet_resnet38'])
def test_two_forward_passes_before_their_backward_passes(name):
    """The carry of one pass does not leak into the other, with and without gradient checkpointing."""
    grads = []
    for checkpointing in (False, True):
        model = create(name, num_classes=4, layers=(2, 2, 2), channels=(8, 8, 8)).train()
        model.set_grad_checkpointing(checkpointing)
        torch.manual_seed(1)
        outputs = [model(images(16, batch=4) * scale) for scale in (1, 3)]
        sum(output.pow(2).sum() for output in outputs).backward()
        grads.append({n: parameter.grad for n, parameter in model.named_parameters()})
    for n, grad in grads[0].items():
        torch.testing.assert_close(grads[1][n], grad, rtol=1e-4, atol=1e-5, msg=n)


@pytest.mark.parametrize('name', SMALL)
def test_gate_losses_train_the_gates_under_gradient_checkpointing(name):
    """Without any other loss: the stored logits have a graph although the blocks are recomputed."""
    model = create(name, num_classes=4, **TINY[name]).train()
    model.set_grad_checkpointing()
    model(images(batch=4))
    gate_loss(model).backward()
    assert_gates_have_gradients(model)
    first = model.conv1 if family(name) != 'gaternet' else model.gater.network.conv1
    assert first.weight.grad.any()  # through the input of the gates


@pytest.mark.parametrize('coarse', [False, True])
@pytest.mark.parametrize('name', GATED)
def test_group_matcher(name, coarse):
    model = blueprint(name)
    groups = group_parameters(model, model.group_matcher(coarse=coarse))
    grouped = [n for names in groups.values() for n in names]
    assert sorted(grouped) == sorted(n for n, _ in model.named_parameters())
    blocks = [n for n, _ in model.named_modules() if re.fullmatch(r'layer\d\.\d+', n)]
    stages = {n.split('.')[0] for n in blocks}
    assert len(groups) == 2 + len(stages if coarse else blocks)  # two for stem and head
    group_of = {n: index for index, names in groups.items() for n in names}
    for n in blocks:
        assert {group_of[key] for key in grouped if key.startswith(f'{n}.')} == {group_of[f'{n}.conv1.weight']}
    assert {n for n in grouped if group_of[n] == min(group_of.values())} == {'conv1.weight', 'bn1.weight', 'bn1.bias'}
    last = {n for n in grouped if group_of[n] == max(group_of.values())}
    assert last - gating_keys(model) == {'fc.weight', 'fc.bias'}


@pytest.mark.parametrize('name', GATED)
def test_no_weight_decay_is_exactly_the_gates(name):
    model = blueprint(name)
    assert model.no_weight_decay() == gate_parameters(model)


@pytest.mark.parametrize('kwargs', [
    dict(filter_bias_and_bn=True), dict(filter_bias_and_bn=False),
    dict(filter_bias_and_bn=True, layer_decay=0.75), dict(filter_bias_and_bn=False, layer_decay=0.75)])
@pytest.mark.parametrize('name', SMALL)
def test_optimizer_decays_no_gate(name, kwargs):
    model = timm.create_model(name, **TINY[name])
    optimizer = create_optimizer_v2(model, opt='sgd', lr=0.1, weight_decay=5e-4, momentum=0.9, **kwargs)
    names = {p: n for n, p in model.named_parameters()}
    decay = {names[p]: group['weight_decay'] for group in optimizer.param_groups for p in group['params']}
    assert set(decay) == set(names.values())
    assert all(decay[n] == 0. for n in gate_parameters(model))
    others = set(decay) - gate_parameters(model)
    for n in others:
        exempt = kwargs['filter_bias_and_bn'] and model.get_parameter(n).ndim <= 1
        assert decay[n] == (0. if exempt else 5e-4), n


def test_optimizer_trains_the_gates():
    model = create('gated_resnet20', num_classes=4).train()
    optimizer = create_optimizer_v2(model, opt='momentum', lr=0.1, weight_decay=5e-4)
    before = {n: p.clone() for n, p in model.named_parameters()}
    (model(images(batch=4)).pow(2).sum() + gate_loss(model)).backward()
    optimizer.step()
    assert not any(torch.equal(model.get_parameter(n), before[n]) for n in gate_parameters(model) if 'fc1.b' not in n)


def test_ema_after_a_training_step():
    model = create('gated_resnet20', num_classes=4).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(images(batch=4)).pow(2).sum() + gate_loss(model)).backward()
    before = copy.deepcopy(model.state_dict())
    ema = ModelEmaV3(model, decay=0.75)
    optimizer.step()
    ema.update(model)
    for n, p in model.named_parameters():
        expected = 0.75 * before[n] + 0.25 * p
        torch.testing.assert_close(ema.module.get_parameter(n), expected, msg=n)
    assert not torch.equal(ema.module.layer1[0].gate1.fc2.weight, before['layer1.0.gate1.fc2.weight'])
    assert ema.module(images()).isfinite().all()
    assert len(gates(ema)) == 9


def test_freeze():
    model = create('gated_resnet18', num_classes=4)
    freeze(model, ['conv1', 'bn1', 'layer1'])
    frozen = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    assert any('gate1' in n for n in frozen)
    model.train()
    (model(images(64)).sum() + gate_loss(model)).backward()
    assert all(model.get_parameter(n).grad is None for n in frozen)
    assert model.layer2[0].gate1.fc2.weight.grad.any()


def test_sync_batch_norm_conversion():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(create('gated_resnet20', num_classes=4))
    assert all(isinstance(gate.bn, nn.SyncBatchNorm) for _, gate in gates(model))
    assert model.eval()(images()).isfinite().all()
