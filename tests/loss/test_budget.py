"""The MAC budget: its formula against the counter and by hand, its gradient, and its effect on a training"""
import copy

import pytest
import timm
import torch
import torch.nn as nn
from nets import images, shuffle
from sklearn.datasets import load_digits
from timm.task import ClassificationTask

from timm_gated import (
    GatedBottleneck,
    MacBudget,
    MacFormula,
    Step,
    budget_loss,
    count_macs,
    force_gates,
    gates,
    mac_formula,
)
from timm_gated.layers.gate_state import gate_masks

SMALL = dict(layers=(1, 1, 1), channels=(8, 8, 8))


def test_formula_by_hand():
    network = nn.Sequential(nn.Conv2d(3, 16, 1), GatedBottleneck(16, 4))
    formula = mac_formula(network, (3, 5, 6))
    stem, conv1, conv2, conv3 = (c * 30 for c in (3 * 16, 16 * 4, 9 * 4 * 4, 4 * 16))
    assert formula.dense == stem + conv1 + conv2 + conv3
    assert formula.fixed == stem + 16 * 30 + 2 * (16 * 16 + 16 * 4)
    assert formula.switched == {
        '1.conv1': (conv1, {'1.gate1': 0}), '1.conv2': (conv2, {'1.gate1': 0, '1.gate2': 0}),
        '1.conv3': (conv3, {'1.gate2': 0})}
    masks = {'1.gate1': torch.tensor([[1., 1., 0., 0.5]]), '1.gate2': torch.tensor([[0., 0., 0., 1.]])}
    assert formula.used(masks).tolist() == [formula.fixed + 2.5 / 4 * conv1 + 2.5 / 4 / 4 * conv2 + conv3 / 4]


@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('name, size', [
    ('gated_resnet18', (64, 48)), ('gated_resnet50', (40, 33)), ('gated_resnet20', (32, 32))])
def test_formula_is_what_the_counter_counts(name, size, training):
    model = shuffle(timm.create_model(name, num_classes=7)).train(training)
    x = images(4, 3, *size)
    model(x)
    formula, masks = mac_formula(model, (3, *size)), gate_masks(model)
    used = formula.used(masks)
    with force_gates(model, {n: mask.detach() for n, mask in masks.items()}):
        macs = count_macs(model, x)
    assert used.tolist() == macs.per_sample.tolist() and formula.dense == macs.dense
    assert used.requires_grad == training


def test_filters_without_a_gate_are_always_used():
    model = timm.create_model('gated_resnet20', gated_channels={'layer1.0': [3]}, inner_channels={'layer1.0': [7]})
    x = images(2, 3, 16, 16)
    with force_gates(model, 'closed'):
        assert mac_formula(model, (3, 16, 16)).used({
            name: torch.zeros(2, gate.num_gates) for name, gate in gates(model)}).tolist() == count_macs(
                model, x).per_sample.tolist()


def test_formula_leaves_the_network_alone():
    model = timm.create_model('gated_resnet20', **SMALL).train()
    model(images(2, 3, 16, 16))
    logits, before = model.layer1[0].gate1.logits, copy.deepcopy(model.state_dict())
    mac_formula(model, (3, 32, 32))
    assert model.layer1[0].gate1.logits is logits and model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_gradient():
    formula = MacFormula(dense=100, fixed=10, switched={'a': (60, {'x': 0}), 'b': (30, {'x': 0, 'y': 3})})
    torch.manual_seed(0)
    x, y = (torch.rand(3, n, dtype=torch.float64, requires_grad=True) for n in (4, 5))
    assert torch.autograd.gradcheck(lambda x, y: budget_loss(formula.used({'x': x, 'y': y}), 100, 0.4), (x, y))


def test_loss_by_hand():
    assert budget_loss(torch.tensor([30., 50.]), 100, 0.25) == pytest.approx(0.15 ** 2)


@pytest.mark.parametrize('kwargs, message', [
    (dict(budget=0.), 'budget must be a number > 0 and <= 1, got 0.0'),
    (dict(budget=1.5), 'budget must be a number > 0 and <= 1, got 1.5'),
    (dict(budget='half'), "budget must be a number > 0 and <= 1, got 'half'"),
    (dict(budget=0.5, budget_weight=-1), 'budget_weight must be a number >= 0, got -1'),
    (dict(budget_weight=3.), 'budget_weight needs a budget'),
])
def test_bad_options(kwargs, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model('gated_resnet20', **kwargs)


def test_terms_need_the_size_of_the_images():
    model = timm.create_model('gated_resnet20', budget=0.5, **SMALL)
    model(images(2, 3, 16, 16))
    with pytest.raises(ValueError, match='needs the step'):
        model.mac_budget.terms(model, 0)


def test_terms_follow_the_size_of_the_images():
    model = timm.create_model('gated_resnet20', budget=0.5, **SMALL).train()
    for size in (16, 24):
        x = images(4, 3, size, size)
        term = model.mac_budget.terms(model, 0, Step(x, model(x), torch.zeros(4)))['budget_loss']
        reported = model.mac_budget.stats(model)['macs_share'].item()
        with force_gates(model, {n: mask.detach() for n, mask in gate_masks(model).items()}):
            share = count_macs(model, x).share
        assert term.value.item() == pytest.approx((share - 0.5) ** 2) and term.weight == 10
        assert reported == pytest.approx(share)


def test_budget_joins_the_other_losses_in_the_stock_task():
    model = timm.create_model('gated_resnet20', budget=0.3, budget_weight=2., gamma_epochs='fixed', **SMALL)
    task = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)
    result = task(images(4, 3, 16, 16), torch.arange(4))
    expected = result['task_loss'] + sum(
        result[weight] * result[loss] for weight, loss in (
            ('lam', 'batch_shaping_loss'), ('gamma', 'l0_loss'), ('budget_weight', 'budget_loss')))
    assert result['budget_weight'] == 2 and 'macs_share' in result
    torch.testing.assert_close(result['loss'].double(), expected.double())
    torch.testing.assert_close(result['budget_loss'], (result['macs_share'] - 0.3) ** 2)
    copy.deepcopy(model)  # as EMA does, after a step


def test_budget_under_compile():
    torch._dynamo.reset()
    model = timm.create_model('gated_resnet20', budget=0.3, **SMALL)
    task = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)
    task.compile(backend='aot_eager')
    result = task(images(4, 3, 16, 16), torch.arange(4))
    result['budget_loss'].backward()
    assert all(gate.fc2.bias.grad.any() for _, gate in model.named_modules() if hasattr(gate, 'fc2'))


def test_no_budget_by_default():
    assert not hasattr(timm.create_model('gated_resnet20'), 'mac_budget')
    assert 'budget=0.5' in repr(MacBudget())


@pytest.mark.parametrize('bias, budget', [(3., 0.5), (-1., 0.7)])
def test_training_moves_the_share_to_the_budget(bias, budget):
    """From above and from below, in training and in evaluation, while the digits are learnt."""
    data = load_digits()
    x = nn.functional.interpolate(torch.tensor(data.images / 8 - 1).float()[:, None], size=16).expand(-1, 3, -1, -1)
    y = torch.tensor(data.target)
    torch.manual_seed(0)
    model = timm.create_model('gated_resnet20', lam=0., gamma=0., gate_bias=bias, budget=budget, **SMALL)
    task = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    before, losses, shares = count_macs(model, x[:256]).share, [], []
    for _ in range(80):
        index = torch.randint(len(x), (64,))
        result = task(x[index], y[index])
        optimizer.zero_grad()
        result['loss'].backward()
        optimizer.step()
        losses.append(result['task_loss'].item())
        shares.append(result['macs_share'].item())
    after = count_macs(model, x[:256]).share
    assert abs(before - budget) > 0.25 and abs(shares[0] - budget) > 0.25
    assert sum(shares[-10:]) / 10 == pytest.approx(budget, abs=0.06)
    assert abs(after - budget) < abs(before - budget) / 2  # without the noise of the training
    assert sum(losses[-10:]) < sum(losses[:10])
