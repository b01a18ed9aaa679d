"""ConvNet-AIG: gate, blocks, MACs, target rates and a short training"""
import pytest
import timm
import torch
import torch.nn as nn
from models import train
from nets import images, shuffle
from timm.task import ClassificationTask

from timm_gated import TargetRate, count_macs, force_gates, gates, target_rate_loss
from timm_gated.models.convnet_aig import AigBasicBlock, AigBottleneck, AigGate

HIDDEN = 16


# The gate


def test_logit_is_open_less_closed():
    gate = shuffle(AigGate(8, 1)).eval()
    x = images(5, 8)
    hidden = torch.relu(gate.bn(gate.fc1(x)))
    closed, opened = gate.fc2(hidden).unbind(1)
    mask = gate(x)
    assert gate.num_gates == 1 and gate.fc2.out_features == 2
    torch.testing.assert_close(gate.logits[:, 0], opened - closed)
    assert torch.equal(mask[:, 0], (opened > closed).float())


def test_sample_is_the_straight_through_gumbel_softmax():
    """Open with the probability of the softmax, with the gradient of the softmax of the noisy outcomes."""
    gate = AigGate(8, 1)
    outcomes = torch.tensor([[0.3, 1.1]]).expand(20_000, 2).clone().requires_grad_()
    logits = outcomes[:, 1:] - outcomes[:, :1]
    torch.manual_seed(0)
    gate.sample(logits).sum().backward()
    ours = outcomes.grad.mean(0)

    theirs = outcomes.detach().clone().requires_grad_()
    torch.manual_seed(0)
    sample = nn.functional.gumbel_softmax(theirs, tau=1., hard=True)
    sample[:, 1].sum().backward()
    assert gate.sample(logits).mean().item() == pytest.approx(torch.softmax(outcomes[0], 0)[1].item(), abs=0.01)
    torch.testing.assert_close(ours, theirs.grad.mean(0), rtol=0.03, atol=0)


def test_most_blocks_run_at_first():
    model = timm.create_model('convnet_aig_resnet110')
    assert all(gate.fc2.bias.tolist() == pytest.approx([0.1, 2.]) for _, gate in gates(model))
    assert all(0.0005 < gate.fc2.weight.std() < 0.0015 for _, gate in gates(model))
    model.train()(images(8, 3, 32, 32))
    decisions = torch.cat([gate.decision for _, gate in gates(model)], 1)
    assert decisions.mean().item() == pytest.approx(0.87, abs=0.05)


@pytest.mark.parametrize('bias', [2., (1., 2., 3.), (0.1, float('nan'))])
def test_bad_bias(bias):
    with pytest.raises(ValueError, match='bias of a gate must be'):
        timm.create_model('convnet_aig_resnet20', gate_bias=bias)


# The networks



@pytest.mark.parametrize('block, planes', [(AigBasicBlock, 16), (AigBottleneck, 4)])
def test_each_image_runs_or_skips_the_block(block, planes):
    torch.manual_seed(0)
    block = shuffle(block(16, planes)).eval()
    x = images(3, 16, 6, 6)
    with torch.no_grad():
        with force_gates(block, 'open'):
            run = block(x)
        with force_gates(block, {'gate': [[0], [1], [0]]}):
            out = block(x)
    skipped = torch.relu(x)
    assert not torch.allclose(run, skipped)
    assert torch.equal(out, torch.stack((skipped[0], run[1], skipped[2])))


def test_drop_path_goes_together_with_the_gate():
    block = shuffle(timm.create_model('convnet_aig_resnet20', drop_path_rate=0.5)).layer3[2].train()
    x = images(64, 64, 4, 4)
    with force_gates(block, {'gate': torch.arange(64)[:, None] % 2}):
        out = block(x)
    changed = (out != torch.relu(x)).flatten(1).any(1)
    assert not changed[0::2].any()
    assert 4 < changed[1::2].sum() < 28  # of 32, half dropped


def test_parameters_are_the_published_ones():
    """21.85 M parameters for ResNet-34."""
    model, dense = (timm.create_model(name, device='meta') for name in ('convnet_aig_resnet34', 'resnet34'))
    extra = sum(p.numel() for p in model.parameters()) - sum(p.numel() for p in dense.parameters())
    widths = [64] * 3 + [64] + [128] * 3 + [128] + [256] * 5 + [256] + [512] * 2
    assert extra == sum(width * HIDDEN + HIDDEN + 2 * HIDDEN + HIDDEN * 2 + 2 for width in widths)
    assert sum(p.numel() for p in model.parameters()) == 21_852_232


# MACs by hand


@pytest.mark.parametrize('stride', [1, 2])
def test_macs_of_a_bottleneck(stride):
    block = AigBottleneck(16, 4, stride, nn.Conv2d(16, 16, 1, stride))
    with force_gates(block, {'gate': [[0], [1]]}):
        macs = count_macs(block, images(2, 16, 8, 6))
    before, after = 48, 48 // stride ** 2
    branch, shortcut = 16 * 4 * before + 9 * 4 * 4 * after + 4 * 16 * after, 16 * 16 * after
    overhead = 16 * 48 + 16 * HIDDEN + HIDDEN * 2
    assert macs.dense == branch + shortcut
    assert macs.per_sample.tolist() == [shortcut + overhead, branch + shortcut + overhead]


def test_macs_of_a_network():
    """One block per stage of ResNet-20 is skipped for one of two images."""
    model, x = timm.create_model('convnet_aig_resnet20'), images(2, 3, 32, 32)
    with force_gates(model, 'open'):
        opened = count_macs(model, x)
        with force_gates(model, {f'layer{stage}.{stage - 1}.gate': [[1], [0]] for stage in (1, 2, 3)}):
            macs = count_macs(model, x)
    stage1, stage2, stage3 = 2 * 9 * 16 * 16 * 32 ** 2, 2 * 9 * 32 * 32 * 16 ** 2, 2 * 9 * 64 * 64 * 8 ** 2
    assert (opened.per_sample - macs.per_sample).tolist() == [0, stage1 + stage2 + stage3]
    overhead = 0
    for width, size, blocks in ((16, 32, 3), (16, 32, 1), (32, 16, 2), (32, 16, 1), (64, 8, 2)):
        overhead += blocks * (width * size ** 2 + width * HIDDEN + HIDDEN * 2)
    assert macs.dense == count_macs(timm.create_model('cifar_resnet20'), x).dense
    assert macs.per_sample[0] == macs.dense + overhead


# The objective


def test_target_rate_loss_by_hand():
    rates, targets = torch.tensor([0.5, 0.9, 0.2, 0.7]), torch.tensor([0.7, 0.7, 1., 0.8])
    torch.testing.assert_close(target_rate_loss(rates, targets), torch.tensor((0.04 + 0.04 + 0.01) / 4))


def test_gradient_of_the_target_rate_loss():
    torch.manual_seed(0)
    rates = torch.rand(5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0.7, 1., 0.6, 0.7, 0.8], dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda rates: target_rate_loss(rates, targets), rates)
    assert torch.autograd.grad(target_rate_loss(rates, targets), rates)[0][1] == 0


def test_recipes():
    imagenet, cifar, fifty = (
        timm.create_model(f'convnet_aig_resnet{depth}', device='meta').gate_losses for depth in (34, 110, 50))
    assert (imagenet.target_rate, imagenet.target_weight, imagenet.block_rates) == (0.7, 1, None)
    assert (cifar.target_rate, cifar.target_weight, cifar.block_rates) == (0.6, 2, None)
    assert fifty.block_rates == [1, 1, .8, 1, .7, .7, .7, 1, .7, .7, .7, .7, .7, 1, .7, 1]
    deep = timm.create_model('convnet_aig_resnet101', target_rate=0.5, device='meta').gate_losses
    assert deep.block_rates == [1] * 8 + [.5] * 25
    half = timm.create_model('convnet_aig_resnet50', target_rate=0.5, device='meta').gate_losses
    assert half.block_rates == [1, 1, .8, 1, .5, .5, .5, 1, .5, .5, .5, .5, .5, 1, .7, 1]


@pytest.mark.parametrize('kwargs, message', [
    (dict(target_rate=1.1), 'target_rate must be a number >= 0 and <= 1, got 1.1'),
    (dict(target_rate=-0.1), 'target_rate must be a number >= 0 and <= 1, got -0.1'),
    (dict(target_weight=-1), 'target_weight must be a number >= 0, got -1'),
    (dict(block_rates=[0.5] * 8), 'each of the 9 gated blocks, got 8'),
    (dict(block_rates=[0.5] * 8 + [2]), 'each of block_rates must be .* got 2'),
])
def test_bad_options(kwargs, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model('convnet_aig_resnet20', **kwargs)


def test_loss_is_on_the_sampled_decisions():
    model = timm.create_model('convnet_aig_resnet20', block_rates=[1, None, 0.2] * 3).train()
    result = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)(images(8, 3, 32, 32), torch.arange(8))
    rates = torch.cat([gate.decision for _, gate in gates(model)], 1).mean(0)
    expected = ((0.6 - rates[1::3]) ** 2 + (0.2 - rates[2::3]) ** 2).sum() / 9
    torch.testing.assert_close(result['target_rate_loss'], expected)
    torch.testing.assert_close(result['loss'], result['task_loss'] + 2 * expected)
    assert result['gate_density'] == rates.mean() and result['gate_density_eval'] == 1
    assert 'target_rate=0.7' in repr(TargetRate())


@pytest.mark.parametrize('target', [0.3, 0.95])
def test_training_moves_the_blocks_to_their_target(target):
    torch.manual_seed(0)
    kwargs = dict(layers=(2, 2, 2), channels=(8, 8, 8), target_rate=target, target_weight=20.)
    model = timm.create_model('convnet_aig_resnet20', **kwargs)
    first, last = train(model, images(64, 3, 16, 16), torch.arange(64) % 10, lr=0.05)
    assert abs(last['gate_density'] - target) < min(0.05, abs(first['gate_density'] - target))
    assert last['task_loss'] < 0.9 * first['task_loss']
