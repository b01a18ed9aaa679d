"""GaterNet: semantic hashing, gater, MACs, objective and a short training"""
import copy

import pytest
import timm
import torch
import torch.nn as nn
from models import train
from nets import TINY, images, shuffle
from timm.models._features import FeatureGetterNet
from timm.task import ClassificationTask

from timm_gated import GateSparsity, accelerate, count_macs, force_gates, gates
from timm_gated.loss.objective import objectives
from timm_gated.models.gaternet import HashingGate, semantic_hashing

THIN = dict(layers=(1, 1, 1), channels=(8, 8, 8))


def create(**kwargs) -> nn.Module:
    torch.manual_seed(0)
    return shuffle(timm.create_model('gaternet_resnet20', num_classes=4, **TINY['gaternet_resnet20'], **kwargs))


# Semantic hashing


def test_semantic_hashing_by_hand():
    """With the same noise: even rows are hard, odd rows are soft, and both have the soft gradient."""
    logits = (3 * images(6, 50)).requires_grad_()
    torch.manual_seed(0)
    mask = semantic_hashing(logits)
    mask.sum().backward()
    torch.manual_seed(0)
    noisy = (logits.detach() + torch.randn(6, 50)).requires_grad_()
    soft = torch.clamp(1.2 * torch.sigmoid(noisy) - 0.1, 0, 1)
    soft.sum().backward()
    assert torch.equal(mask[0::2], (noisy > 0).float()[0::2])
    torch.testing.assert_close(mask[1::2], soft[1::2])
    torch.testing.assert_close(logits.grad, noisy.grad)
    values = soft.detach()[1::2]
    assert (values == 0).any() and (values == 1).any() and ((values > 0) & (values < 1)).any()
    assert not torch.equal(semantic_hashing(logits), mask)  # new noise


def test_evaluation_has_no_noise():
    gate = HashingGate(4, 3).eval()
    assert gate(torch.tensor([[-0.1, 0., 0.1], [2., -2., 1.]])).tolist() == [[0, 0, 1], [1, 0, 1]]


def test_a_gate_without_logits():
    model = create()
    with pytest.raises(RuntimeError, match='the gater has to read the images first'):
        model.layer1(images(2, 16, 8, 8))
    model(images(2, 3, 8, 8))
    with pytest.raises(RuntimeError, match='the gater has to read the images first'):
        model.layer1(images(3, 16, 8, 8))


# The gater


def test_every_gate_gets_its_own_logits():
    model, x = create().eval(), images(3, 3, 16, 16)
    model(x)
    gater = model.gater
    expected = gater.fc2(torch.relu(gater.bn(gater.fc1(gater.network(x)))))
    logits = torch.cat([gate.logits for _, gate in gates(model)], dim=1)
    torch.testing.assert_close(logits, expected)
    assert [gate.num_gates for _, gate in gates(model)] == [16, 32, 64] and len(set(logits[0].tolist())) == 112


def test_decisions_are_there_before_the_network_runs():
    model = create().eval()
    order = []
    model.gater.register_forward_hook(lambda *args: order.append('gater'))
    model.conv1.register_forward_hook(lambda *args: order.append('conv1'))
    model(images(2, 3, 16, 16))
    assert order == ['gater', 'conv1']


def test_a_copy_has_its_own_gates():
    model, x = create().eval(), images(2, 3, 16, 16)
    model(x)
    closed = copy.deepcopy(model)
    with torch.no_grad():
        closed.gater.fc2.bias.fill_(-100.)
        closed(x)
    assert all(gate.decision.max() == 0 for _, gate in gates(closed))
    assert any(gate.decision.max() == 1 for _, gate in gates(model))
    assert {n for n, _ in gates(closed)} == {'layer1.0.gate1', 'layer2.0.gate1', 'layer3.0.gate1'}


def test_one_image_trains():
    model = create().train()
    model(images(1, 3, 16, 16)).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_autocast_leaves_the_last_layers_in_full_precision():
    model = create().eval()
    with torch.autocast('cpu', dtype=torch.bfloat16), torch.no_grad():
        model(images(2, 3, 16, 16))
    logits = gates(model)[0][1].logits
    assert logits.dtype == torch.float32 and not torch.equal(logits, logits.bfloat16().float())



@pytest.mark.parametrize('feature_cls', ['list', 'hook', 'fx', 'getter'])
def test_features_are_of_gated_filters(feature_cls):
    kwargs = dict(features_only=True, feature_cls=feature_cls, out_indices=(1, 2))
    extractor, x = create(**kwargs).eval(), images(2, 3, 16, 16)
    with force_gates(extractor, 'open'):
        opened = extractor(x)
    assert not any(torch.allclose(a, b) for a, b in zip(extractor(x), opened, strict=True))


def test_features_only_uses_the_getter():
    for kwargs in ({}, dict(feature_cls='list')):
        extractor = create(features_only=True, **kwargs)
        assert isinstance(extractor, FeatureGetterNet) and not objectives(extractor)
    with pytest.raises(ValueError, match="feature_cls='dict' .* without its gater; use 'getter'"):
        create(features_only=True, feature_cls='dict')



def test_options_of_the_gater():
    kwargs = dict(gater='cifar_resnet32', gater_args=dict(channels=(4, 4, 4)), gater_hidden=6, gater_bias=-1.)
    model = timm.create_model('gaternet_resnet20', in_chans=1, **kwargs)
    assert model.gater.network.num_features == 4 and len(model.gater.network.layer1) == 5
    assert model.gater.fc1.out_features == 6 and (model.gater.fc2.bias == -1).all()
    assert model.eval()(images(2, 1, 32, 32)).shape == (2, 10)
    assert not any(option.startswith('gater') for option in model.dense_args)
    timm.create_model(model.dense_variant, **model.dense_args)


@pytest.mark.parametrize('kwargs, message', [
    (dict(gater_hidden=0), 'gater_hidden must be a whole number >= 1, got 0'),
    (dict(gater_bias='open'), "gater_bias must be a number, got 'open'"),
    (dict(sparsity_weight=-1), 'sparsity_weight must be a number >= 0, got -1'),
    (dict(inner_channels={'layer1.0': [9]}), 'only maps under a ChannelGate .* HashingGate'),
])
def test_bad_options(kwargs, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model('gaternet_resnet20', **kwargs)


@pytest.mark.parametrize('features_only', [False, True])
def test_accelerate_refuses(features_only):
    with pytest.raises(ValueError, match='cannot be accelerated'):
        accelerate(timm.create_model('gaternet_resnet20', features_only=features_only))


# MACs by hand


def test_macs_of_a_network():
    """Half of the filters of the second block are executed for one of two images."""
    model, x = create(), images(2, 3, 32, 32)
    half = torch.stack((torch.ones(32), (torch.arange(32) < 16).float()))
    with force_gates(model, 'open'), force_gates(model, {'layer2.0.gate1': half}):
        macs = count_macs(model, x)
    stem, head = 9 * 3 * 16 * 32 ** 2, 64 * 4
    block1, block2, block3 = 9 * (16 * 16 + 16 * 16) * 1024, 9 * (16 * 32 + 32 * 32) * 256, 9 * (32 * 64 + 64 * 64) * 64
    # The gater is half as wide: stem, three blocks, additions of the pooling, and the two linear layers.
    gater = 9 * 3 * 8 * 1024 + 9 * (8 * 8 + 8 * 8) * 1024 + 9 * (8 * 16 + 16 * 16) * 256 + 9 * (16 * 32 + 32 * 32) * 64
    gater += 32 * 64 + 32 * 16 + 16 * (16 + 32 + 64)
    dense = stem + block1 + block2 + block3 + head
    assert macs.dense == dense
    assert macs.per_sample.tolist() == [dense + gater, dense + gater - block2 // 2]


# The objective


def test_l1_by_hand():
    model = timm.create_model('gaternet_resnet20', sparsity_weight=0.5, **THIN).train()
    result = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)(images(4, 3, 16, 16), torch.arange(4))
    masks = torch.cat([gate.mask for _, gate in gates(model)], dim=1)
    assert masks.shape == (4, 24)
    torch.testing.assert_close(result['sparsity_loss'], masks.sum() / 24 / 4)
    torch.testing.assert_close(result['loss'], result['task_loss'] + 0.5 * masks.mean())
    assert 'sparsity_weight=0.1' in repr(GateSparsity())



@pytest.mark.parametrize('sparsity, budget', [(3., None), (0., 0.6)])
def test_training_moves_the_gates(sparsity, budget):
    """L1 closes gates, or a budget is met, while the task loss falls."""
    torch.manual_seed(0)
    kwargs = dict(layers=(2, 1, 1), channels=(16, 16, 16), sparsity_weight=sparsity, budget=budget)
    kwargs.update(budget_weight=30. if budget else None, gater_args=dict(layers=(1, 1, 1), channels=(4, 4, 4)))
    model = timm.create_model('gaternet_resnet20', **kwargs)
    first, last = train(model, images(64, 3, 16, 16), torch.arange(64) % 10)
    assert last['loss'] < first['loss'] and last['task_loss'] < first['task_loss']
    if budget is None:
        assert last['sparsity_loss'] < 0.7 * first['sparsity_loss']
    else:
        assert last['macs_share'] == pytest.approx(budget, abs=0.08)
