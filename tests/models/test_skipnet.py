"""SkipNet: gates, blocks, MACs, the gradient of the hybrid loss, and short trainings"""
import copy
import itertools

import pytest
import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from models import dense_copy, train
from nets import SMALL, TINY, family, gate_loss, images, shuffle
from timm.task import ClassificationTask

from timm_gated import (
    GateStatistics,
    Skipping,
    Step,
    accelerate,
    count_macs,
    force_gates,
    gates,
    mac_formula,
    reinforce_loss,
)
from timm_gated.analysis.record import record_classifier
from timm_gated.layers.gate_state import gate_masks
from timm_gated.layers.skip_gates import GATES, FeedForwardGate1, FeedForwardGate2, RecurrentGate
from timm_gated.models.skipnet import SkipBasicBlock, SkipBottleneck

SKIPNETS = [name for name in SMALL if family(name) == 'skipnet']
THIN = dict(layers=(2, 2, 2), channels=(8, 8, 8), num_classes=4)
DATA = images(32, 3, 16, 16), torch.arange(32) % 4


def create(name: str = 'skipnet_resnet38', **kwargs) -> nn.Module:
    torch.manual_seed(0)
    return shuffle(timm.create_model(name, **kwargs))


# The gates


def test_recurrent_gates_are_one_lstm_over_the_blocks():
    model = create(**THIN).eval()
    inputs = {}
    for name, gate in gates(model):
        gate.register_forward_hook(lambda module, args, output, name=name: inputs.update({name: args[0]}))
    model(images(3, 3, 16, 16))

    (_, first), *others = gates(model)
    lstm = nn.LSTM(10, 10)
    lstm.load_state_dict({f'{key}_l0': value for key, value in first.lstm.state_dict().items()})
    projected = torch.stack([gate.proj(inputs[name].mean((2, 3))) for name, gate in gates(model)])
    expected = first.fc(lstm(projected)[0])
    torch.testing.assert_close(torch.stack([gate.logits for _, gate in gates(model)]), expected)
    assert len(others) == 4 and not any(hasattr(gate, 'lstm') or hasattr(gate, 'fc') for _, gate in others)


def test_memory_does_not_outlive_the_forward_pass():
    model = create(**THIN).eval()
    x = images(5, 3, 16, 16)
    expected = model(x)
    model(images(2, 3, 24, 24) * 10)
    assert torch.equal(model(x), expected)


def test_copies_have_an_lstm_of_their_own():
    model = create(**THIN)
    model.train()(images(4, 3, 16, 16)).sum().backward()
    closed = copy.deepcopy(model)
    with torch.no_grad():
        gates(closed)[0][1].fc.bias.fill_(-100.)
    closed.eval()(images(4, 3, 16, 16))
    assert all((gate.logits < -50).all() for _, gate in gates(closed))
    model.eval()(images(4, 3, 16, 16))
    assert all((gate.logits > -50).all() for _, gate in gates(model))


def test_a_later_block_by_itself():
    """Its gate needs the LSTM of the first one."""
    model = create(**THIN).eval()
    for part, channels in ((model.layer2, 8), (model.layer3[1], 8)):
        with pytest.raises(RuntimeError, match='told nothing of the gates before it'):
            part(images(2, channels, 8, 8))



@pytest.mark.parametrize('gate', GATES)
def test_gradient_checkpointing(gate):
    """Blocks are recomputed from the last to the first, each with its original LSTM state."""
    model = create(gate=gate, **THIN).train()
    recomputed = copy.deepcopy(model)
    recomputed.set_grad_checkpointing()
    for net in (model, recomputed):
        (net(images(4, 3, 16, 16)).pow(2).sum() + gate_loss(net)).backward()
    for (name, p), q in zip(model.named_parameters(), recomputed.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize('stage', ['supervised', 'hybrid'])
def test_compiled_training_without_a_second_compilation(stage):
    torch._dynamo.reset()
    model = create(stage=stage, **dict(THIN, layers=(1, 1, 1))).train()
    compiled = torch.compile(model, backend='aot_eager', fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            (compiled(images(4, 3, 16, 16)).sum() + gate_loss(model)).backward()


@pytest.mark.parametrize('gate', ['ff1', 'ff2'])
def test_open_feed_forward_gates_are_exactly_the_dense_network(gate):
    for name, training in itertools.product(SKIPNETS, (False, True)):
        model = create(name, num_classes=4, gate=gate, **TINY[name]).train(training)
        dense = dense_copy(name, model, num_classes=4, **TINY[name])
        with force_gates(model, 'open'):
            assert torch.equal(model(images(3, 3, 64, 64)), dense(images(3, 3, 64, 64)))
        assert all(torch.equal(model.get_buffer(key), value) for key, value in dense.named_buffers())


@pytest.mark.parametrize('gate_layer, shapes', [
    (FeedForwardGate1, [(5, 6), (5, 6), (3, 3)]), (FeedForwardGate2, [(5, 6)])])
def test_feed_forward_gates(gate_layer, shapes):
    gate = shuffle(gate_layer(8, 1)).eval()
    seen = []
    for module in gate.modules():
        if isinstance(module, (nn.Conv2d, nn.MaxPool2d)):
            module.register_forward_hook(lambda module, args, output: seen.append(tuple(output.shape[2:])))
    x = images(3, 8, 10, 12)
    mask = gate(x)
    assert seen == shapes
    closed, opened = gate.fc(gate.body(x)).unbind(1)
    torch.testing.assert_close(torch.sigmoid(gate.logits[:, 0]), torch.softmax(torch.stack((closed, opened)), 0)[1])
    assert torch.equal(mask[:, 0], (opened > closed).float())
    assert gate(images(1, 8, 1, 1)).shape == (1, 1)


@pytest.mark.parametrize('gate_layer', GATES.values())
def test_masks_in_training(gate_layer):
    gate = shuffle(gate_layer(8, 1)).train()
    logits = torch.linspace(-3, 3, 7, requires_grad=True)[:, None]
    probability = torch.sigmoid(logits)

    (gradient,) = torch.autograd.grad(probability.sum(), logits)
    supervised = gate.sample(logits)
    assert supervised.flatten().tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert torch.equal(torch.autograd.grad(supervised.sum(), logits)[0], gradient)

    gate.stage = 'soft'
    assert torch.equal(gate.sample(logits), probability)

    gate.stage = 'hybrid'
    samples = torch.stack([gate.sample(logits) for _ in range(4000)])
    assert set(samples.unique().tolist()) == {0., 1.} and not samples.requires_grad
    torch.testing.assert_close(samples.mean(0), probability.detach(), rtol=0, atol=0.04)


def test_options_of_the_gates():
    model = timm.create_model('skipnet_resnet38', gate_hidden=6, gate_bias=2.5)
    first = gates(model)[0][1]
    assert first.lstm.hidden_size == first.fc.in_features == 6 and first.fc.bias.tolist() == [2.5]
    model = timm.create_model('skipnet_resnet38', gate='ff2', gate_bias=2.5)
    assert all(isinstance(gate, FeedForwardGate2) and gate.fc.bias.tolist() == [0, 2.5] for _, gate in gates(model))
    assert all(isinstance(gate, RecurrentGate) for _, gate in gates(timm.create_model('skipnet_resnet38')))


@pytest.mark.parametrize('kwargs, message', [
    (dict(gate='lstm'), "gate must be one of rnn, ff1, ff2, got 'lstm'"),
    (dict(stage='rl'), "stage must be one of supervised, soft, hybrid, got 'rl'"),
    (dict(alpha=-1), 'alpha must be a number >= 0, got -1'),
    (dict(rl_weight='much'), "rl_weight must be a number >= 0, got 'much'"),
    (dict(discount=-0.1), 'discount must be a number >= 0, got -0.1'),
    (dict(gate_hidden=0), 'hidden_channels of a gate must be'),
    (dict(gate_bias=float('nan')), 'bias of a gate must be'),
    (dict(stage='hybrid', budget=0.5), 'a budget trains gates through their masks.*got budget=0.5. Use alpha'),
])
def test_bad_options(kwargs, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model('skipnet_resnet38', **kwargs)


# The blocks


@pytest.mark.parametrize('block, planes', [(SkipBasicBlock, 16), (SkipBottleneck, 4)])
def test_each_image_runs_or_skips_the_block(block, planes):
    torch.manual_seed(0)
    block, x = shuffle(block(16, planes)).eval(), images(3, 16, 6, 6)
    with torch.no_grad():
        with force_gates(block, 'open'):
            run = block(x)
        with force_gates(block, {'gate': [[0], [1], [0]]}):
            out = block(x)
    assert torch.equal(out, torch.stack((x[0], run[1], x[2])))


@pytest.mark.parametrize('block, planes', [(SkipBasicBlock, 32), (SkipBottleneck, 8)])
def test_the_shortcut_of_a_block_that_changes_the_shape(block, planes):
    """A skipped block outputs its shortcut, and the norm of the shortcut sees every batch once."""
    torch.manual_seed(0)
    shortcut = nn.Sequential(nn.Conv2d(16, 32, 1, 2), nn.BatchNorm2d(32))
    block, x = block(16, planes, 2, shortcut).train(), images(3, 16, 6, 6)
    with force_gates(block, 'closed'):
        out = block(x)
    assert block.downsample[1].num_batches_tracked == 1 and (out < 0).any()
    assert torch.equal(out, copy.deepcopy(shortcut)(x))
    assert set(block.state_dict()) >= {'downsample.0.weight', 'downsample.1.running_mean'}


def test_soft_masks_interpolate_between_block_and_shortcut():
    block, x = shuffle(SkipBasicBlock(16, 16)).train(), images(3, 16, 6, 6)
    block.gate.stage = 'soft'
    with force_gates(block, 'open'):
        run = block(x)
    out = block(x)
    mask = torch.sigmoid(block.gate.logits)[:, :, None, None]
    torch.testing.assert_close(out, mask * run + (1 - mask) * x)


# MACs by hand


@pytest.mark.parametrize('gate, overhead', [
    # pool, projection, four products of an LSTM step, output
    ('rnn', lambda c, h, w: c * h * w + c * 10 + 4 * 10 * (10 + 10) + 10),
    # two 3x3 convolutions, at a half and a quarter of the size, pool, two outputs
    ('ff1', lambda c, h, w: 9 * c * c * (h // 2 * w // 2 + h // 4 * w // 4) + c * h // 4 * w // 4 + 2 * c),
    ('ff2', lambda c, h, w: 9 * c * c * h // 2 * w // 2 + c * h // 2 * w // 2 + 2 * c),
])
def test_macs_of_a_network(gate, overhead):
    """One block per stage of ResNet-38 is skipped for one of two images. Max pooling has no MACs."""
    model, x = timm.create_model('skipnet_resnet38', gate=gate), images(2, 3, 32, 32)
    with force_gates(model, 'open'):
        opened = count_macs(model, x)
        with force_gates(model, {f'layer{stage}.{stage}.gate': [[1], [0]] for stage in (1, 2, 3)}):
            macs = count_macs(model, x)
    blocks = sum(2 * 9 * c * c * size ** 2 for c, size in ((16, 32), (32, 16), (64, 8)))
    assert (opened.per_sample - macs.per_sample).tolist() == [0, blocks]
    assert macs.dense == count_macs(timm.create_model('cifar_resnet38'), x).dense
    inputs = [(16, 32)] * 6 + [(32, 16)] * 6 + [(64, 8)] * 5  # of all blocks but the first
    assert macs.per_sample[0] == macs.dense + sum(overhead(c, size, size) for c, size in inputs)


def test_shortcut_of_a_skipped_block_counts():
    block = SkipBottleneck(16, 4, 2, nn.Sequential(nn.Conv2d(16, 16, 1, 2)))
    with force_gates(block, {'gate': [[0], [1]]}):
        macs = count_macs(block, images(2, 16, 8, 6))
    branch, shortcut = 16 * 4 * 48 + 9 * 4 * 4 * 12 + 4 * 16 * 12, 16 * 16 * 12
    overhead = 16 * 48 + 16 * 10 + 4 * 10 * 20 + 10
    assert macs.dense == branch + shortcut
    assert macs.per_sample.tolist() == [shortcut + overhead, branch + shortcut + overhead]


@pytest.mark.parametrize('gate', GATES)
def test_formula_is_what_the_counter_counts(gate):
    model, x = create(gate=gate, **THIN).eval(), images(6, 3, 24, 20)
    macs = count_macs(model, x)
    model(x)
    assert mac_formula(model, (3, 24, 20)).used(gate_masks(model)).tolist() == macs.per_sample.tolist()


def test_statistics_and_record():
    model = create(**THIN).eval()
    x, y = images(8, 3, 16, 16), torch.arange(8) % 4
    statistics = GateStatistics()
    model(x)
    statistics.update(model)
    record = record_classifier(model, [(x, y)], class_names=list('abcd'))
    decisions = torch.cat([gate.decision for _, gate in gates(model)], 1)
    assert statistics.density() == pytest.approx(decisions.mean().item())
    assert record.open_share.tolist() == pytest.approx(decisions.mean(0).tolist())
    assert record.macs.tolist() == count_macs(model, x).per_sample.tolist()


def test_accelerate_refuses_the_blocks_by_name():
    with pytest.raises(ValueError, match='SkipBasicBlock.*cannot be accelerated'):
        accelerate(timm.create_model('skipnet_resnet38'))


# The objective


def test_reinforce_loss_by_hand():
    """Two images and three blocks: the return of a decision is the sum of the later rewards."""
    logits = torch.tensor([[0., 1., -1.], [2., 0., 0.]], requires_grad=True)
    decisions, losses = torch.tensor([[1., 0., 0.], [0., 1., 1.]]), torch.tensor([0.5, 2.])
    returns = torch.tensor([[0.2 - 0.5, 0.2 - 0.5, 0.1 - 0.5], [0.1 - 2, -2, -2]])
    log_probabilities = torch.where(decisions == 1, F.logsigmoid(logits), F.logsigmoid(-logits))
    loss = reinforce_loss(logits, decisions, losses, alpha=0.3)
    torch.testing.assert_close(loss, -(log_probabilities * returns).sum() / 2)

    discounted = torch.tensor([[0.5 * (0.1 + 0.5 * (0.1 - 0.25)), 0.1 + 0.5 * (0.1 - 0.25), 0.1 - 0.25]])
    loss = reinforce_loss(logits[:1], decisions[:1], losses[:1], alpha=0.3, discount=0.5)
    torch.testing.assert_close(loss, -(log_probabilities[:1] * discounted).sum())


def test_gradient_of_the_reinforce_loss():
    torch.manual_seed(0)
    logits, decisions = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.rand(3, 4).round().double()
    losses = torch.rand(3, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda logits: reinforce_loss(logits, decisions, losses, 0.3, 0.9), logits)


def hybrid_net(alpha: float) -> nn.Module:
    """Network with three gates. Norms are in evaluation mode, so that images are independent."""
    kwargs = dict(layers=(2, 1, 1), channels=(4, 4, 4), num_classes=3, gate_hidden=3, dtype=torch.float64)
    model = create(stage='hybrid', alpha=alpha, **kwargs).train()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    return model


def courses(model: nn.Module, x: torch.Tensor):
    """Yield all decisions of three gates with the output, and the probability of the decisions per image."""
    for course in itertools.product((0., 1.), repeat=3):
        decisions = torch.tensor(course, dtype=x.dtype)
        with force_gates(model, {name: mask[None] for (name, _), mask in zip(gates(model), decisions, strict=True)}):
            output = model(x)
        logits = torch.cat([gate.logits for _, gate in gates(model)], 1)
        yield decisions, output, torch.sigmoid(torch.where(decisions == 1, logits, -logits)).prod(1)


def gradient(loss: torch.Tensor, model: nn.Module) -> torch.Tensor:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(loss, parameters, retain_graph=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in gradients])


def expected_gradient(model: nn.Module, x: torch.Tensor, y: torch.Tensor, alpha: float) -> torch.Tensor:
    """Gradient of E[cross entropy - alpha * share of skipped blocks], averaged over images."""
    total = torch.zeros((), dtype=x.dtype)
    for decisions, output, probability in courses(model, x):
        losses = F.cross_entropy(output, y, reduction='none') - alpha * (1 - decisions).mean()
        total = total + (probability * losses).mean()
    return gradient(total, model)


@pytest.mark.parametrize('alpha', [0., 2.])
def test_hybrid_gradient_has_the_right_expectation(alpha):
    """The gradients of the hybrid loss for all decisions, weighted by their probability, give the exact gradient."""
    model, (x, y) = hybrid_net(alpha), (images(2, 3, 8, 8).double(), torch.tensor([0, 2]))
    exact, mean = expected_gradient(model, x, y, alpha), 0.
    for image, label in zip(x.split(1), y.split(1), strict=True):
        for _, output, probability in courses(model, image):
            (term,) = model.gate_losses.terms(model, 0, Step(image, output, label)).values()
            loss = F.cross_entropy(output, label) + term.weight * term.value
            mean = mean + probability.detach() / len(x) * gradient(loss, model)
    torch.testing.assert_close(mean, exact, rtol=1e-9, atol=1e-12)
    assert exact.norm() > 0.01


def test_sampled_hybrid_gradient_converges_to_the_expectation():
    """The gradient of timm's task converges; without the REINFORCE term it does not."""
    alpha, repeats = 2., 1000
    model, (x, y) = hybrid_net(alpha), (images(3, 3, 8, 8).double(), torch.tensor([0, 1, 2]))
    exact = expected_gradient(model, x, y, alpha)
    torch.manual_seed(0)
    task = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)
    result = task(x.repeat(repeats, 1, 1, 1), y.repeat(repeats))  # independent samples of the gates
    assert (gradient(result['loss'], model) - exact).norm() < 0.1 * exact.norm()
    assert (gradient(result['task_loss'], model) - exact).norm() > 0.3 * exact.norm()


def test_terms():
    recipes = [timm.create_model(f'skipnet_resnet{depth}', device='meta').gate_losses for depth in (110, 101)]
    assert [(recipe.stage, recipe.alpha) for recipe in recipes] == [('supervised', 0.1), ('supervised', 0.01)]
    assert all((recipe.rl_weight, recipe.discount) == (1, 1) for recipe in recipes)
    x, y = images(6, 3, 16, 16), torch.arange(6) % 4
    result = ClassificationTask(create(**THIN), nn.CrossEntropyLoss(), verbose=False)(x, y)
    assert result['loss'] is result['task_loss'] and 0 < result['gate_density'] == result['gate_density_eval'] < 1

    model = create(stage='hybrid', alpha=0.5, rl_weight=0.2, discount=0.9, **THIN)
    task = ClassificationTask(model, nn.CrossEntropyLoss(label_smoothing=0.1), verbose=False)
    result = task(x, y)
    logits, decisions = (torch.cat([getattr(g, key) for _, g in gates(model)], 1) for key in ('logits', 'decision'))
    losses = F.cross_entropy(result['output'], y, reduction='none')
    torch.testing.assert_close(result['reinforce_loss'], reinforce_loss(logits, decisions, losses, 0.5, 0.9))
    torch.testing.assert_close(result['loss'], result['task_loss'] + 0.2 * result['reinforce_loss'])
    mixed = model.gate_losses.terms(model, 0, Step(x, result['output'], F.one_hot(y, 4).float()))  # as after mixup
    torch.testing.assert_close(mixed['reinforce_loss'].value, result['reinforce_loss'])
    with pytest.raises(ValueError, match='needs the step'):
        model.gate_losses.terms(model, 0)
    assert 'stage=hybrid, alpha=0.5' in repr(model) and 'stage=supervised' in repr(Skipping())



@pytest.mark.parametrize('gate', GATES)
@pytest.mark.parametrize('stage', ['supervised', 'soft'])
def test_supervised_training_learns_images_and_gates(stage, gate):
    torch.manual_seed(0)
    model = timm.create_model('skipnet_resnet38', stage=stage, gate=gate, gate_bias=0., **THIN)
    model.eval()(DATA[0])
    before = torch.cat([gate.logits for _, gate in gates(model)], 1)
    first, last = train(model, *DATA, steps=40)
    assert last['loss'] < 0.8 * first['loss']
    model.eval()(DATA[0])
    after = torch.cat([gate.logits for _, gate in gates(model)], 1)
    assert ((after > 0) != (before > 0)).any() and (after - before).abs().mean() > 0.1


@pytest.mark.parametrize('bias, budget', [(2., 0.6), (-2., 0.8)])
def test_supervised_training_under_a_budget(bias, budget):
    torch.manual_seed(0)
    model = timm.create_model('skipnet_resnet38', gate_bias=bias, budget=budget, budget_weight=20., **THIN)
    first, last = train(model, *DATA)
    before, after = (abs(means['macs_share'] - budget) for means in (first, last))
    assert before > 0.2 and after < before / 2
    assert last['task_loss'] < first['task_loss']


@pytest.mark.parametrize('gate', GATES)
def test_hybrid_training_skips_blocks_for_their_reward(gate):
    torch.manual_seed(0)
    model = timm.create_model('skipnet_resnet38', stage='hybrid', alpha=10., gate=gate, gate_bias=1., **THIN)
    first, last = train(model, *DATA, lr=0.05)
    assert last['gate_density'] < first['gate_density'] - 0.3
    assert last['gate_density_eval'] < first['gate_density_eval']
    assert last['task_loss'] < first['task_loss']
