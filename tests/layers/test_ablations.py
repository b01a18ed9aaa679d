"""The paper's ablations: gates on other maps of the block, gates before the ReLU, and a changing prior"""
import pytest
import timm
import torch
import torch.nn as nn
from nets import images
from timm.task import ClassificationTask

from timm_gated import accelerate, count_macs, force_gates, gates
from timm_gated.layers.gated_blocks import GatedBasicBlock, GatedBottleneck
from timm_gated.loss.feature_shaping import gate_prior
from timm_gated.loss.gate_losses import batch_shaping_loss
from timm_gated.loss.priors import Beta, Mixture
from timm_gated.pruning.filters import keep_used_filters


@pytest.mark.parametrize('name, kwargs', [
    ('gated_resnet20', dict(gated_maps=(0, 1, 2))),
    ('gated_resnet20', dict(gate_before_act=True)),
    ('gated_resnet50', dict(gated_maps=(0, 1, 2, 3), gate_before_act=True)),
])
def test_open_gates_are_the_dense_network(name, kwargs):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=5, **kwargs).eval()
    dense = timm.create_model({'gated_resnet20': 'cifar_resnet20', 'gated_resnet50': 'resnet50'}[name], num_classes=5)
    dense.load_state_dict({k: v for k, v in model.state_dict().items() if k in dense.state_dict()})
    dense.eval()
    x = images(2, 3, 32, 32)
    with torch.no_grad(), force_gates(model, 'open'):
        torch.testing.assert_close(model(x), dense(x), atol=1e-6, rtol=1e-6)


def test_what_each_map_is():
    """Closed gates on the branch leave the shortcut; closed gates on the input leave the branch of a zero input."""
    torch.manual_seed(0)
    x = images(2, 8, 6, 6)
    block = GatedBasicBlock(8, 8, gated_maps=(2,)).eval()
    with torch.no_grad(), force_gates(block, 'closed'):
        assert torch.equal(block(x), x.relu())
    block = GatedBottleneck(8, 2, gated_maps=(3,)).eval()
    with torch.no_grad(), force_gates(block, 'closed'):
        assert torch.equal(block(x), x.relu())
    block = GatedBasicBlock(8, 8, gated_maps=(0,)).eval()
    with torch.no_grad(), force_gates(block, 'closed'):
        branch = block.bn2(block.conv2(block.act1(block.bn1(block.conv1(torch.zeros_like(x))))))
        torch.testing.assert_close(block(x), (x + branch).relu())


def test_macs_by_hand():
    """Gates over all three maps of a basic block: open inputs times open outputs of each convolution."""
    torch.manual_seed(0)
    block = GatedBasicBlock(8, 12, downsample=nn.Conv2d(8, 12, 1), gated_maps=(0, 1, 2))
    opened = {'gate0': 3, 'gate1': 5, 'gate2': 7}
    masks = {name: (torch.arange(8 if name == 'gate0' else 12) < count).float() for name, count in opened.items()}
    with force_gates(block, masks):
        macs = count_macs(block, images(1, 8, 4, 4))
    overhead = 8 * 16 + 3 * 8 * 16 + 16 * (8 + 12 + 12)
    assert macs.per_sample.tolist() == [16 * (9 * 3 * 5 + 9 * 5 * 7 + 8 * 12) + overhead]


@pytest.mark.parametrize('before', [False, True], ids=['after', 'before'])
def test_before_the_relu_a_closed_gate_feels_nothing(before):
    """The values are equal, but the gradient of a ReLU at zero is zero, so a closed gate cannot learn to open."""
    torch.manual_seed(0)
    block = GatedBasicBlock(8, 8, gate_before_act=before)
    x = images(1, 8, 6, 6)
    output = block(x)
    output.square().sum().backward()
    closed = block.gate1.decision[0] == 0
    assert 0 < closed.sum() < 8
    assert (block.gate1.fc2.bias.grad[closed] == 0).all() == before
    block.gate_before_act = not before
    with torch.no_grad(), force_gates(block, {'gate1': block.gate1.decision}):
        assert torch.equal(block(x), output)


def test_accelerate():
    model = timm.create_model('gated_resnet20', gate_before_act=True).eval()
    x = images(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(accelerate(model)(x), model(x), atol=1e-4, rtol=1e-4)
    for maps in ((0, 1), (1, 2)):
        with pytest.raises(ValueError, match='a gate masks its input or its output'):
            accelerate(timm.create_model('gated_resnet20', gated_maps=maps))


def test_pruning_is_for_inner_maps():
    model = timm.create_model('gated_resnet20', gated_maps=(0, 1))
    with pytest.raises(ValueError, match="gate 'layer1.0.gate0' .* only inner maps"):
        keep_used_filters(model, {name: torch.full((gate.num_gates,), 0.5) for name, gate in gates(model)})


def test_mixture():
    first, second = Beta(0.6, 0.4), Beta(0.2, 0.8)
    x = torch.linspace(0.01, 0.99, 50, dtype=torch.float64)
    for share in (0., 0.3, 1.):
        mixture = Mixture(first, second, share)
        expected = (1 - share) * first.cdf(x) + share * second.cdf(x)
        torch.testing.assert_close(mixture.cdf(x), expected)
        torch.testing.assert_close(mixture.pdf(x), (1 - share) * first.pdf(x) + share * second.pdf(x))
    assert torch.autograd.gradcheck(Mixture(first, second, 0.3).cdf, (x.clone().requires_grad_(),))
    with pytest.raises(ValueError, match=r'share must be in \[0, 1\], got 1.5'):
        Mixture(first, second, 1.5)


def test_prior_that_grows_sparser():
    model = timm.create_model(
        'gated_resnet20', layers=(1, 1, 1), prior_end=dict(type='beta', a=0.2, b=0.8), prior_epochs=(0, 4), lam=1.,
        lam_epochs='fixed', gamma=0.)
    task = ClassificationTask(model, nn.CrossEntropyLoss())
    x, labels = images(8, 3, 16, 16), torch.arange(8)
    for epoch, share in enumerate((0., 0.25, 0.5, 0.75, 1., 1.)):
        model.train()
        result = task(x, labels)
        logits = torch.cat([gate.logits for _, gate in gates(model)], dim=1)
        prior = Mixture(Beta(0.6, 0.4), Beta(0.2, 0.8), share)
        assert result['batch_shaping_loss'].item() == pytest.approx(
            batch_shaping_loss(torch.sigmoid(logits), prior, 'sum').item(), rel=1e-5)
        assert gate_prior(model).share == share, epoch


@pytest.mark.parametrize('kwargs', [dict(prior_end='uniform'), dict(prior_epochs=(0, 4))])
def test_a_moving_prior_needs_both(kwargs):
    with pytest.raises(ValueError, match='prior_end and prior_epochs must be given together'):
        timm.create_model('gated_resnet20', **kwargs)
