"""Feature boosting and suppression: gate, blocks, MACs, and the schedule of the density"""
import copy

import pytest
import timm
import torch
import torch.nn as nn
from nets import SMALL, TINY, dense_counterpart, family, images, shuffle, without_gates
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask
from torch._dynamo.testing import CompileCounterWithBackend

from timm_gated import accelerate, checkpoint_filter_fn, count_macs, force_gates, gates
from timm_gated.models.fbs import FbsBasicBlock, SaliencyGate, Suppression, boost, winners

FBS = [name for name in SMALL if family(name) == 'fbs']
THIN = dict(layers=(1, 1, 1), channels=(8, 8, 8))


def densities(model: nn.Module) -> set:
    """Shares of computed channels of all gates."""
    return {gate.num_open.item() / gate.num_gates for _, gate in gates(model)}


# The gate


def test_winners_by_hand():
    scores = torch.tensor([[0.1, 0.9, 0.5, 0.3], [-0.1, -0.3, -0.2, 2.], [1., 1., 1., 1.]])
    mask = winners(scores, torch.tensor(2))
    assert mask[:2].tolist() == [[0, 1, 1, 0], [1, 0, 0, 1]] and mask[2].sum() == 2
    assert winners(scores, torch.tensor(4)).min() == 1


@pytest.mark.parametrize('density, num_gates, expected', [
    (1., 16, 16), (0.5, 16, 8), (0.51, 16, 9), (0.01, 16, 1), (0.07, 100, 7), (0.3, 10, 3), (1 - 0.9, 10, 1)])
def test_density_is_rounded_up(density, num_gates, expected):
    gate = SaliencyGate(4, num_gates)
    gate.set_density(density)
    for training in (False, True):
        gate.train(training)(images(3, 4))
        assert gate.decision.sum(1).tolist() == [expected] * 3


def test_state_of_the_gate():
    gate = shuffle(SaliencyGate(8, 6))
    gate.set_density(0.5)
    x = images(5, 8).abs()
    scale, mask = gate(x).unbind(1)
    torch.testing.assert_close(gate.logits, x @ gate.fc.weight.T + gate.fc.bias)
    saliency = torch.relu(gate.logits)
    assert torch.equal(mask, gate.mask) and torch.equal(mask, gate.decision) and not gate.log_odds
    assert torch.equal(scale, mask * saliency) and (gate.logits < 0).any()
    assert scale.sum(1).tolist() == pytest.approx(saliency.topk(3).values.sum(1).tolist())


def test_saliencies_start_around_one():
    model = timm.create_model('fbs_resnet20')
    assert all((gate.fc.bias == 1).all() for _, gate in gates(model))


def test_the_number_of_winners_is_restored_after_the_meta_device():
    gate = SaliencyGate(4, 10, device='meta')
    gate.set_density(0.3)
    gate.to_empty(device='cpu').init_non_persistent_buffers()
    assert gate.num_open == 3 and 'num_open' not in gate.state_dict()


# The blocks


def test_boost_by_hand():
    """mask * g * (output of the norm without its shift) + mask * shift"""
    torch.manual_seed(0)
    norm = shuffle(nn.BatchNorm2d(3)).eval()
    x, g, mask = images(2, 3, 4, 4), torch.rand(2, 3), torch.tensor([[1., 0., 1.], [0., 1., 1.]])
    without_shift = copy.deepcopy(norm)
    nn.init.zeros_(without_shift.bias)
    g4, mask4 = g[:, :, None, None], mask[:, :, None, None]
    expected = mask4 * g4 * without_shift(x) + mask4 * norm.bias[:, None, None]
    torch.testing.assert_close(boost(norm(x), torch.stack((mask * g, mask), 1), norm.bias), expected)


def test_block_by_hand():
    """Suppressed channels are zero regardless of the shift. The sum with the shortcut has all channels."""
    torch.manual_seed(0)
    block, x = shuffle(FbsBasicBlock(6, 6)).eval(), images(2, 6, 5, 5)
    for gate in (block.gate1, block.gate2):
        gate.set_density(0.5)
    seen = {}
    block.conv2.register_forward_pre_hook(lambda module, args: seen.update(inner=args[0]))
    out = block(x)
    closed = block.gate1.decision == 0
    assert closed.sum(1).tolist() == [3, 3] and not seen['inner'][closed].any() and seen['inner'][~closed].any()
    torch.testing.assert_close(block.gate1.logits, block.gate1.fc(x.abs().mean((2, 3))))
    torch.testing.assert_close(block.gate2.logits, block.gate2.fc(seen['inner'].mean((2, 3))))
    skipped = block.gate2.decision == 0
    assert torch.equal(out[skipped], torch.relu(x)[skipped])


@pytest.mark.parametrize('training', [False, True])
@pytest.mark.parametrize('name', FBS)
def test_density_one_is_the_dense_network_up_to_the_saliencies(name, training):
    """With FC weights 0 and biases 1, all saliencies are 1, and the outputs are equal."""
    torch.manual_seed(0)
    model = shuffle(timm.create_model(name, num_classes=4, density=1., **TINY[name])).train(training)
    dense = shuffle(dense_counterpart(name, num_classes=4, **TINY[name]), seed=1).train(training)
    model.load_state_dict(checkpoint_filter_fn(dense.state_dict(), model))
    x = images(3, 3, 64, 64)
    assert not torch.allclose(model(x), dense(x))
    without_gates(model)
    dense.load_state_dict({key: model.state_dict()[key] for key in dense.state_dict()})
    assert torch.equal(model(x), dense(x))


def test_accelerate_refuses_the_blocks_by_name():
    with pytest.raises(ValueError, match='FbsBasicBlock.*cannot be accelerated'):
        accelerate(timm.create_model('fbs_resnet20'))


# MACs by hand


@pytest.mark.parametrize('stride', [1, 2])
def test_macs_of_a_block(stride):
    block = FbsBasicBlock(8, 10, stride, nn.Conv2d(8, 10, 1, stride))
    block.gate1.set_density(0.3)
    block.gate2.set_density(0.5)
    macs = count_macs(block, images(2, 8, 8, 6))
    before, after = 48, 48 // stride ** 2
    shortcut, overhead = 8 * 10 * after, 8 * before + 8 * 10 + 10 * after + 10 * 10
    assert macs.dense == 9 * 8 * 10 * after + 9 * 10 * 10 * after + shortcut
    used = 9 * 8 * 3 * after + 9 * 3 * 5 * after + shortcut + overhead
    assert macs.per_sample.tolist() == [used, used]


def test_macs_of_a_network():
    """ResNet-20 at density 0.25."""
    macs = count_macs(timm.create_model('fbs_resnet20', density=0.25), images(1, 3, 32, 32))
    used = 9 * 3 * 16 * 32 ** 2 + 64 * 10
    for inner, width, size, reading, blocks in (
            (16, 16, 32, 32, 3), (16, 32, 16, 32, 1), (32, 32, 16, 16, 2), (32, 64, 8, 16, 1), (64, 64, 8, 8, 2)):
        convs = 9 * inner * (width // 4) * size ** 2 + 9 * (width // 4) * (width // 4) * size ** 2
        saliencies = inner * reading ** 2 + inner * width + width * size ** 2 + width * width
        used += blocks * (convs + saliencies)
    assert macs.per_sample.tolist() == [used]
    assert macs.dense == count_macs(timm.create_model('cifar_resnet20'), images(1, 3, 32, 32)).dense


@pytest.mark.parametrize('name', ['fbs_resnet18', 'fbs_resnet34', 'fbs_resnet20', 'fbs_resnet32'])
def test_the_default_is_half_of_the_macs(name):
    model = timm.create_model(name)
    assert count_macs(model, images(1, *model.pretrained_cfg['input_size'])).share == pytest.approx(0.5, abs=0.015)


# The objective


def test_l1_by_hand():
    model = timm.create_model('fbs_resnet20', saliency_weight=0.5, **THIN).train()
    result = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)(images(4, 3, 16, 16), torch.arange(4))
    expected = sum(torch.relu(gate.logits).sum() for _, gate in gates(model)) / 4
    torch.testing.assert_close(result['saliency_loss'], expected)
    torch.testing.assert_close(result['loss'], result['task_loss'] + 0.5 * expected)
    assert timm.create_model('fbs_resnet20').gate_losses.saliency_weight == 1e-8
    assert 'density=0.6' in repr(Suppression())


@pytest.mark.parametrize('epochs, expected', [
    ('fixed', [0.25] * 5), ((1, 4), [1, 1, 0.75, 0.5, 0.25]), ([0, 2], [1, 0.625, 0.25, 0.25, 0.25])])
def test_schedule(epochs, expected):
    objective = Suppression(0.25, epochs)
    assert [objective.density_at(epoch) for epoch in range(5)] == pytest.approx(expected)


@pytest.mark.parametrize('kwargs, message', [
    (dict(density=0.), 'density must be a number > 0 and <= 1, got 0.0'),
    (dict(density=1.5), 'density must be a number > 0 and <= 1, got 1.5'),
    (dict(density_epochs=(3, 1)), 'density_epochs must satisfy'),
    (dict(saliency_weight=-1), 'saliency_weight must be a number >= 0, got -1'),
    (dict(inner_channels={'layer1.0': [9]}), 'only maps under a ChannelGate .* SaliencyGate'),
    (dict(budget=0.5), 'decided by its density, not learnt.* got budget=0.5'),
])
def test_bad_options(kwargs, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model('fbs_resnet20', **kwargs)


def make_task(**kwargs) -> ClassificationTask:
    torch.manual_seed(0)
    model = timm.create_model('fbs_resnet20', **dict(THIN, density=0.25, density_epochs=(0, 3), **kwargs))
    return ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)


def train_epochs(task: ClassificationTask, epochs: int) -> list:
    """Densities of two training steps and one evaluation per epoch."""
    seen, model = [], task.get_trainable_module()
    for _ in range(epochs):
        model.train()
        seen += [task(images(4, 3, 16, 16), torch.arange(4))['gate_density'].item() for _ in range(2)]
        model.eval()(images(1, 3, 16, 16))
        seen.append(torch.cat([gate.decision for _, gate in gates(model)], 1).mean().item())
    return seen


SEEN = [density for density in (1., 0.75, 0.5, 0.25, 0.25) for _ in range(3)]


def test_training_lowers_the_density_and_evaluation_follows():
    task = make_task()
    assert densities(task.get_trainable_module()) == {0.25}  # the final density, until training starts
    assert train_epochs(task, 5) == SEEN


def test_density_of_a_resumed_training():
    first, resumed = make_task(), make_task()
    seen = train_epochs(first, 2)
    state = copy.deepcopy(first.get_checkpoint_state())
    resumed.load_checkpoint_state(state['state_dict'], state['task_state'])
    assert densities(resumed.get_trainable_module()) == {0.75}  # before the first step
    assert seen + train_epochs(resumed, 3) == SEEN
    fresh = timm.create_model('fbs_resnet20', density=0.5, **THIN)
    fresh.load_state_dict(state['state_dict'])
    assert densities(fresh) == {0.5}


def test_density_of_the_ema():
    task = make_task()
    ema = task.setup_ema(decay=0.5)
    train_epochs(task, 2)
    task.update_ema()
    assert densities(ema) == densities(task.get_trainable_module()) == {0.75}


def test_density_changes_without_another_compilation():
    torch._dynamo.reset()
    task = make_task()
    counter = CompileCounterWithBackend('aot_eager')
    model = task.get_trainable_module()
    task.trainable_module = torch.compile(model, backend=counter)
    for epoch in range(4):
        task.set_epoch(epoch)
        task(images(4, 3, 16, 16), torch.arange(4))['loss'].backward()
        assert densities(model) == {SEEN[3 * epoch]}
    assert counter.frame_count == 1


def test_forcing_stays_forced():
    model = timm.create_model('fbs_resnet20', **THIN).eval()
    with force_gates(model, 'closed'):
        model(images(2, 3, 16, 16))
    assert all(not gate.decision.any() for _, gate in gates(model))


def test_training_learns_while_the_density_falls():
    torch.manual_seed(0)
    kwargs = dict(layers=(2, 2, 2), channels=(8, 8, 8), density=0.5, density_epochs=(0, 4), saliency_weight=0.02)
    model = timm.create_model('fbs_resnet20', **kwargs)
    task = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)
    optimizer = create_optimizer_v2(model, opt='momentum', lr=0.02, weight_decay=5e-4)
    x, y = images(64, 3, 16, 16), torch.arange(64) % 10
    results = []
    for epoch in range(5):
        model.train()
        for _ in range(12):
            result = task(x, y)
            optimizer.zero_grad()
            result['loss'].backward()
            optimizer.step()
            results.append((result['loss'].item(), result['saliency_loss'].item()))
        assert result['gate_density'] == 1 - epoch / 8
    (first_loss, first_saliency), (last_loss, last_saliency) = results[0], results[-1]
    assert last_loss < 0.9 * first_loss and last_saliency < first_saliency
    assert count_macs(model, x[:1]).share < 0.6


@pytest.mark.parametrize('name', ['fbs_resnet20', 'fbs_resnet32'])
def test_a_new_network_does_not_diverge(name):
    """Saliencies scale the maps from which later saliencies are predicted."""
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    with torch.no_grad():
        assert model(2 * torch.randn(4, 3, 32, 32)).abs().max() < 1000
