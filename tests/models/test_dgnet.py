"""DGNet: channel gates under a MAC budget"""
import pytest
import timm
import torch
import torch.nn as nn
from models import train
from nets import images

from timm_gated import ChannelGate, MacBudget, accelerate, count_macs, force_gates, gates, objectives, prune_static

THIN = dict(num_classes=4, channels=(8, 8, 16, 16))


def create(name: str = 'dgnet_resnet18', **kwargs) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(name, **dict(THIN, **kwargs))


@pytest.mark.parametrize('depth', [18, 34, 50])
def test_it_is_the_gated_resnet_with_another_loss(depth):
    model, gated = (timm.create_model(f'{method}_resnet{depth}', device='meta') for method in ('dgnet', 'gated'))
    shapes, expected = ({k: v.shape for k, v in net.state_dict().items()} for net in (model, gated))
    assert shapes == expected
    assert all(type(gate) is ChannelGate for _, gate in gates(model))
    (objective,) = objectives(model)
    assert isinstance(objective, MacBudget) and objective.budget == 0.5


def test_options():
    model = create(budget=0.3, budget_weight=2., gate_bias=0.1, gate_hidden=4)
    assert (model.mac_budget.budget, model.mac_budget.budget_weight) == (0.3, 2.)
    assert all((gate.fc2.bias == 0.1).all() and gate.fc2.in_features == 4 for _, gate in gates(model))
    with pytest.raises(TypeError, match='lam'):
        create(lam=0.75)  # an option of another objective


def test_gates_start_open():
    model = create().train()
    model(images(16, 3, 32, 32))
    assert all(gate.decision.mean() > 0.7 for _, gate in gates(model))


def test_macs_by_hand():
    """A quarter of the filters of one block is executed for one of two images."""
    model, x = create(layers=(1, 1, 1, 1)), images(2, 3, 64, 64)
    with force_gates(model, 'open'):
        opened = count_macs(model, x)
        with force_gates(model, {'layer3.0.gate1': torch.stack((torch.ones(16), (torch.arange(16) < 4).float()))}):
            macs = count_macs(model, x)
    block = 9 * 8 * 16 * 16 + 9 * 16 * 16 * 16  # conv1 from 8 channels, conv2 from 16, at 4 x 4
    assert (opened.per_sample - macs.per_sample).tolist() == [0, block * 3 // 4]
    overhead = sum(width * size ** 2 + width * 16 + 16 * gates_of for width, size, gates_of in (
        (64, 16, 8), (8, 16, 8), (8, 8, 16), (16, 4, 16)))
    assert opened.per_sample[0] == macs.dense + overhead


@pytest.mark.parametrize('bias, budget', [(2., 0.6), (-1., 0.8)])
def test_training_moves_the_share_to_the_budget(bias, budget):
    kwargs = dict(layers=(2, 1, 1, 1), channels=(64, 32, 32, 32))  # with small blocks the stem would have most MACs
    model = create(gate_bias=bias, budget=budget, budget_weight=100., **kwargs)
    first, last = train(model, images(32, 3, 32, 32), torch.arange(32) % 4)
    assert abs(first['macs_share'] - budget) > 0.1 and last['macs_share'] == pytest.approx(budget, abs=0.05)
    assert last['loss'] < first['loss'] and last['task_loss'] < first['task_loss']
    assert first['loss'] == pytest.approx(first['task_loss'] + 100 * first['budget_loss'], rel=1e-5)


@pytest.mark.parametrize('name', ['dgnet_resnet18', 'dgnet_resnet50'])
def test_accelerate(name):
    model, x = create(name, layers=(1, 1, 1, 1), gate_bias=0.).eval(), images(3, 3, 64, 64)
    fast = accelerate(model)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-4)
    assert 0.1 < torch.cat([gate.decision for _, gate in gates(model)], 1).mean() < 0.9


def test_prune():
    model, x = create(layers=(1, 1, 1, 1), gate_bias=0.).eval(), images(8, 3, 32, 32)
    pruned = prune_static(model, [(x, torch.arange(8) % 4)], threshold=1.)
    torch.testing.assert_close(pruned.model(x), model(x), rtol=1e-4, atol=1e-4)
    assert pruned.after.parameters < pruned.before.parameters
