"""Pruned networks: outputs, sizes, figures, saving and errors"""
import copy
import json
from typing import Dict

import pytest
import timm
import torch
import torch.nn as nn
from models import freeze_decisions, open_share
from nets import shuffle
from small_analysis import CLASSES, make_batches, make_net
from timm.data import resolve_input_data_config
from timm.models import get_model_args
from timm.models.resnet import BasicBlock, Bottleneck
from timm.task import ClassificationTask

from timm_gated import (
    CifarResNet,
    GatedBasicBlock,
    GatedResNet,
    MacBudget,
    accelerate,
    count_macs,
    gates,
    instruction_sets,
    prune_static,
    save_pretrained,
)
from timm_gated.layers.narrow import gated_channels, inner_channels
from timm_gated.models.slim_resnet import SlimResNet
from timm_gated.pruning.filters import keep_used_filters

NETWORKS = [
    ('gated_resnet20', {}, 16),
    ('gated_resnet20_w10', dict(layers=(1, 1, 1)), 16),
    ('gated_resnet18', dict(num_classes=7), 33),
    ('gated_resnet50', dict(num_classes=7, in_chans=1), 64),
    ('gated_resnet50', dict(
        num_classes=7, block_args=dict(gated_maps=(2,)), stem_type='deep', stem_width=32, avg_down=True), 64),
]
networks = pytest.mark.parametrize('name, kwargs, size', NETWORKS)


@torch.no_grad()
def make(name: str, **kwargs) -> nn.Module:
    """Network whose gates are always on, conditional or always off, due to a wide range of biases."""
    torch.manual_seed(0)
    model = shuffle(timm.create_model(name, **kwargs)).eval()
    for _, gate in gates(model):
        gate.fc2.bias.uniform_(-6, 6)
    return model


def images(model: nn.Module, size: int, count: int = 24) -> torch.Tensor:
    channels = model.conv1.weight.shape[1] if isinstance(model.conv1, nn.Conv2d) else 3
    return torch.randn(count, channels, size, size, generator=torch.Generator().manual_seed(2))


def agreeing(model: nn.Module, shares: Dict[str, torch.Tensor], threshold: float) -> torch.Tensor:
    """Samples of the last pass whose removed filters were off and whose removed gates were on."""
    fits = [
        ((gate.decision == 0) | ~(1 - shares[name] > threshold)).all(1)
        & ((gate.decision == 1) | ~(shares[name] > threshold)).all(1)
        for name, gate in gates(model)]
    return torch.stack(fits).all(0)


@networks
def test_threshold_of_one_changes_no_output(name, kwargs, size):
    """Gates that never changed on the data can be removed exactly."""
    model = make(name, **kwargs)
    x = images(model, size)
    pruned = keep_used_filters(model, open_share(model, x), threshold=1.)
    assert sum(p.numel() for p in pruned.parameters()) < sum(p.numel() for p in model.parameters())
    with torch.no_grad():
        torch.testing.assert_close(pruned(x), model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('name, kwargs', [
    ('gated_resnet20', dict(layers=(1, 1, 1))), ('gated_resnet50', dict(layers=(1, 1, 1, 1)))])
def test_equal_where_removed_filters_were_off(name, kwargs):
    """These samples keep their outputs; the threshold is low enough to change others."""
    model = make(name, num_classes=7, **kwargs)
    spread = torch.linspace(-3, 3, 64)[:, None, None, None]  # makes the decisions differ
    x = images(model, 32, count=64) * (spread.flip(0).abs() + 0.5) + spread
    shares = open_share(model, x)
    pruned = keep_used_filters(model, shares, threshold=0.9)
    with torch.no_grad():
        expected, actual = model(x), pruned(x)
    fits = agreeing(model, shares, 0.9)
    assert 0 < fits.sum() < len(x)
    torch.testing.assert_close(actual[fits], expected[fits], atol=1e-5, rtol=1e-5)
    assert (actual - expected)[~fits].abs().max() > 1e-3


def test_layers_by_hand():
    """Of 8 filters, 3 are always off, 2 are always on and 3 are conditional."""
    model = make_net()
    block = model.layer1[0]
    share = torch.tensor([0., 0.5, 1., 0.004, 0.2, 0.999, 0., 0.9])
    everything = {name: torch.full((8,), 0.5) for name, _ in gates(model)}
    pruned = keep_used_filters(model, {**everything, 'layer1.0.gate1': share})
    small = pruned.layer1[0]
    order = [1, 4, 7, 2, 5]  # conditional filters first
    assert torch.equal(small.conv1.weight, block.conv1.weight[order])
    assert torch.equal(small.bn1.running_var, block.bn1.running_var[order])
    assert torch.equal(small.conv2.weight, block.conv2.weight[:, order])
    assert torch.equal(small.gate1.fc2.bias, block.gate1.fc2.bias[order[:3]])
    assert (small.gate1.num_gates, small.gate1.num_ungated) == (3, 2)
    assert (small.conv1.out_channels, small.bn1.num_features, small.conv2.in_channels) == (5, 5, 5)
    assert inner_channels(pruned) == {'layer1.0': [5], 'layer2.0': [8], 'layer3.0': [8]}
    assert gated_channels(pruned) == {'layer1.0': [3], 'layer2.0': [8], 'layer3.0': [8]}
    assert model.layer1[0].conv1.out_channels == 8  # not changed

    with torch.no_grad():
        before, after = count_macs(model, torch.zeros(1, 3, 8, 8)), count_macs(pruned, torch.zeros(1, 3, 8, 8))
    assert before.dense - after.dense == 2 * 3 * 8 * 9 * 8 * 8  # three filters and the weights that read them
    opened = int(small.gate1.decision.sum())
    macs = after.by_module
    assert macs['layer1.0.conv1'].per_sample.tolist() == [(opened + 2) * 8 * 9 * 8 * 8]
    assert macs['layer1.0.gate1.fc2'].per_sample.tolist() == [16 * 3]


def test_a_map_without_filters():
    """One filter is kept, whose output is ignored; the block adds a constant."""
    model = freeze_decisions(make('gated_resnet50', num_classes=7))
    with torch.no_grad():
        for gate in (model.layer1[0].gate1, model.layer2[1].gate2):
            gate.fc2.bias.fill_(-1.)
    x = images(model, 64, count=2)
    pruned = keep_used_filters(model, open_share(model, x))
    assert pruned.layer1[0].conv1.out_channels == 1 and pruned.layer2[1].conv2.out_channels == 1
    with torch.no_grad():
        torch.testing.assert_close(pruned(x), model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('name, network_cls, block_cls', [
    ('gated_resnet20', CifarResNet, BasicBlock), ('gated_resnet18', SlimResNet, BasicBlock),
    ('gated_resnet50', SlimResNet, Bottleneck)])
def test_without_gates_the_network_is_dense(name, network_cls, block_cls):
    model = freeze_decisions(make(name, num_classes=7))
    x = images(model, 32, count=4)
    pruned = keep_used_filters(model, open_share(model, x))
    assert type(pruned) is network_cls and type(pruned.layer1[0]) is block_cls
    assert not any('gate' in key for key in pruned.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(pruned(x), model(x), atol=1e-5, rtol=1e-5)


def test_pruning_twice():
    model = make('gated_resnet20')
    x = images(model, 16)
    once = keep_used_filters(model, open_share(model, x), threshold=1.)
    shares = open_share(once, x[:6])
    twice = keep_used_filters(once, shares, threshold=1.)
    assert sum(p.numel() for p in twice.parameters()) < sum(p.numel() for p in once.parameters())
    with torch.no_grad():
        torch.testing.assert_close(twice(x[:6]), model(x[:6]), atol=1e-5, rtol=1e-5)


@networks
@pytest.mark.parametrize('keep_gates', [True, False], ids=['gated', 'dense'])
def test_saved_and_rebuilt(name, kwargs, size, keep_gates, tmp_path):
    model = make(name, **kwargs)
    x = images(model, size, count=4)
    pruned = keep_used_filters(model, open_share(model, x), threshold=0.9, keep_gates=keep_gates)
    save_pretrained(pruned, tmp_path / 'pruned')
    names = sorted(path.name for path in tmp_path.rglob('*'))
    assert names == ['README.md', 'config.json', 'model.safetensors', 'pruned']
    again = timm.create_model(f'local-dir:{tmp_path / "pruned"}', pretrained=True).eval()
    assert type(again) is type(pruned)
    with torch.no_grad():
        assert torch.equal(again(x), pruned(x))
        for backend, isa in [('native', isa) for isa in instruction_sets()] + [('torch', None)]:
            torch.testing.assert_close(accelerate(again, backend, isa)(x), pruned(x), atol=1e-4, rtol=1e-4)
    assert get_model_args(again)['inner_channels'] == inner_channels(pruned)
    assert again.num_classes == model.num_classes
    assert tuple(again.pretrained_cfg['mean']) == resolve_input_data_config(model)['mean']

    features = timm.create_model(f'local-dir:{tmp_path / "pruned"}', features_only=True, pretrained=True).eval()
    with torch.no_grad():
        for ours, theirs in zip(features(x), again.forward_intermediates(x, intermediates_only=True), strict=True):
            assert torch.equal(ours, theirs)


def test_saving_is_complete_or_not_at_all(tmp_path, monkeypatch):
    model = make('gated_resnet20')
    (tmp_path / 'full').mkdir()
    (tmp_path / 'full' / 'mine.txt').write_text('mine')
    with pytest.raises(ValueError, match='full exists already'):
        save_pretrained(model, tmp_path / 'full')
    with pytest.raises(ValueError, match="'resnet18', which is not a model of this package"):
        save_pretrained(timm.create_model('resnet18'), tmp_path / 'other')
    with pytest.raises(ValueError, match='was not created by timm.create_model'):
        save_pretrained(GatedResNet(GatedBasicBlock, (1, 1, 1, 1)), tmp_path / 'other')
    with pytest.raises(ValueError, match="'norm_layer' is not serializable"):
        save_pretrained(timm.create_model('gated_resnet20', norm_layer=nn.BatchNorm2d), tmp_path / 'other')

    def fail(*args, **kwargs):
        raise OSError('no space left')
    monkeypatch.setattr('timm.models._hub.save_config_for_hf', fail)
    with pytest.raises(OSError, match='no space left'):
        save_pretrained(model, tmp_path / 'other')
    assert [path.name for path in tmp_path.iterdir()] == ['full']
    assert (tmp_path / 'full' / 'mine.txt').read_text() == 'mine'


def test_config_holds_the_widths(tmp_path):
    model = make('gated_resnet20', layers=(1, 1, 1), num_classes=7)
    pruned = keep_used_filters(model, open_share(model, images(model, 16)))
    pruned.reset_classifier(3)
    config = json.loads((save_pretrained(pruned, tmp_path / 'new' / 'folder') / 'config.json').read_text())
    assert config['architecture'] == 'gated_resnet20' and config['num_classes'] == 3
    args = config['model_args']
    assert args['inner_channels'] == inner_channels(pruned) and args['gated_channels'] == gated_channels(pruned)
    assert args['num_classes'] == 3 and args['layers'] == [1, 1, 1]


def test_prune_static_and_its_table():
    model, batches = make_net(), make_batches()
    with torch.no_grad():
        for _, gate in gates(model):
            gate.fc2.bias.copy_(torch.linspace(-20, 20, 8))
    before = copy.deepcopy(model.state_dict())
    pruned = prune_static(model, batches)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert sum(pruned.gates) == 24 and pruned.gates.always_off > 0 and pruned.gates.always_on > 0
    x, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    for net, figures in ((model, pruned.before), (pruned.model, pruned.after)):
        with torch.no_grad():
            accuracy = 100 * (net(x).argmax(1) == labels).double().mean().item()
            macs = count_macs(net, x)
        assert figures.parameters == sum(p.numel() for p in net.parameters())
        assert figures.accuracy == pytest.approx(accuracy)
        assert (figures.dense_macs, figures.mean_macs) == (macs.dense, macs.per_sample.double().mean().item())
    assert pruned.after.dense_macs < pruned.before.dense_macs
    lines = str(pruned).splitlines()
    assert lines[0].split() == ['before', 'after', 'change']
    assert lines[1].split()[1] == f'{pruned.before.parameters / 1e6:.3f}' and lines[4].startswith('accuracy')


def test_eval_loader():
    model, batches = make_net(), make_batches()
    other = make_batches(2, seed=5)
    pruned = prune_static(model, batches, eval_loader=other)
    x, labels = (torch.cat(parts) for parts in zip(*other, strict=True))
    with torch.no_grad():
        assert pruned.before.accuracy == pytest.approx(100 * (model(x).argmax(1) == labels).double().mean().item())


def test_pruned_networks_train():
    """With timm's task, the gate losses and a budget."""
    model = make('gated_resnet20', layers=(1, 1, 1), num_classes=7, budget=0.6)
    x = images(model, 16)
    shares = {name: torch.linspace(0, 1, gate.num_gates) for name, gate in gates(model)}
    pruned = keep_used_filters(model, shares, threshold=0.8)
    assert all(gate.num_ungated for _, gate in gates(pruned))
    task = ClassificationTask(pruned, nn.CrossEntropyLoss())
    pruned.train()
    result = task(x, torch.arange(len(x)) % 7)
    assert {'batch_shaping_loss', 'l0_loss', 'budget_loss'} <= result.keys()
    result['loss'].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in pruned.parameters())
    expected = count_macs_in_training(pruned)
    assert result['macs_share'] == pytest.approx(expected)
    assert isinstance(pruned.mac_budget, MacBudget)


def count_macs_in_training(model: nn.Module) -> float:
    """Share of MACs in the last pass: three blocks at 16, 8 and 4 pixels."""
    dense = fixed = 16 * 3 * 9 * 16 ** 2 + 64 * 7
    used = torch.zeros(1)
    for index, size in ((1, 16), (2, 8), (3, 4)):
        block = getattr(model, f'layer{index}')[0]
        width = 16 * 2 ** (index - 1)
        inputs = max(16, width // 2)
        opened = block.gate1.decision.sum(1) + block.gate1.num_ungated
        used = used + opened * (inputs + width) * 9 * size ** 2
        dense += block.conv1.out_channels * (inputs + width) * 9 * size ** 2
        size_in = size if index == 1 else 2 * size
        fixed += inputs * size_in ** 2 + inputs * 16 + 16 * block.gate1.num_gates
    return (used.double().mean().item() + fixed) / dense


def test_bad_data_and_networks():
    model, batches = make_net(), make_batches(classes=5)
    with pytest.raises(ValueError, match='can be read only once'):
        prune_static(model, iter(batches))
    with pytest.raises(ValueError, match=r'threshold must be in \(0.5, 1\], got 0.2'):
        prune_static(model, batches, threshold=0.2)
    with pytest.raises(ValueError, match='has no gates'):
        prune_static(timm.create_model('cifar_resnet20', num_classes=len(CLASSES)), batches)
    with pytest.raises(ValueError, match='the data set is empty'):
        prune_static(model, [])
    with pytest.raises(ValueError, match='FeatureListNet has no classes'):
        prune_static(timm.create_model('gated_resnet20', features_only=True), batches)

    def read():
        raise AssertionError('the data was read before the check')
        yield
    unread = type('Unread', (), {'__iter__': lambda self: read()})()
    with pytest.raises(ValueError, match='AigGate'):
        prune_static(timm.create_model('convnet_aig_resnet20'), unread)


@pytest.mark.parametrize('options, message', [
    (dict(inner_channels={'layer9.0': [3]}), "no residual block 'layer9.0'; its blocks: layer1.0, layer1.1"),
    (dict(inner_channels={'layer1.0': [3, 4]}), 'inner_channels of layer1.0 must be 1 whole number'),
    (dict(inner_channels={'layer1.0': [17]}), 'within 1 to 16; got'),
    (dict(inner_channels={'layer1.0': [0]}), 'within 1 to 16; got'),
    (dict(inner_channels={'layer1.0': 3}), 'must be 1 whole number'),
    (dict(inner_channels={'layer1.0': [3]}, gated_channels={'layer1.0': [4]}), 'gated_channels of layer1.0'),
])
def test_bad_widths(options, message):
    with pytest.raises(ValueError, match=message):
        timm.create_model('gated_resnet20', **options)


def test_saved_configs_hold_the_model_only(tmp_path):
    """The config has neither snapshot_dir nor device, but the changed pooling and the label names."""
    model = make('gated_resnet20', layers=(1, 1, 1), snapshot_dir=str(tmp_path / 'snapshots'), device='cpu')
    model.reset_classifier(2, global_pool='max')
    save_pretrained(model, tmp_path / 'saved', label_names=['cat', 'dog'])
    config = json.loads((tmp_path / 'saved' / 'config.json').read_text())
    assert config['label_names'] == ['cat', 'dog'] and config['num_classes'] == 2
    assert not {'snapshot_dir', 'device'} & config['model_args'].keys()
    again = timm.create_model(f'local-dir:{tmp_path / "saved"}', pretrained=True).eval()
    x = images(model, 16)
    with torch.no_grad():
        assert torch.equal(again(x), model(x))
    assert again.gate_losses.snapshots is None


def test_shares_must_fit():
    model = make_net()
    with pytest.raises(ValueError, match=r"open_share has \[4\] for 'layer1.0.gate1'"):
        keep_used_filters(model, {'layer1.0.gate1': torch.ones(4)})
    with pytest.raises(ValueError, match=r"for 'layer9.0.gate1'; .*layer1.0.gate1, layer2.0.gate1"):
        keep_used_filters(model, {'layer9.0.gate1': torch.ones(8)})


def test_activation_that_is_not_zero_at_zero():
    model = timm.create_model('gated_resnet20', layers=(1, 1, 1), gate_before_act=True, act_layer='sigmoid')
    with pytest.raises(ValueError, match='closed before Sigmoid.* is not zero after it'):
        keep_used_filters(model, {'layer1.0.gate1': torch.zeros(16)})


def test_blocks_that_cannot_be_made_narrower():
    class Mix(nn.Conv2d):
        def __init__(self, channels: int, stride: int, **kwargs) -> None:
            super().__init__(channels, channels, stride, stride, **kwargs)

    model = timm.create_model('gated_resnet18', aa_layer=Mix)  # works without pruning
    with pytest.raises(ValueError, match='Mix between its convolutions'):
        keep_used_filters(model, {'layer2.0.gate1': torch.zeros(128)})
    with pytest.raises(ValueError, match='inner_channels of layer1.0 must be multiples of 32, .* got 60'):
        timm.create_model('slim_resnext50_32x4d', inner_channels={'layer1.0': [64, 60]})
    with pytest.raises(ValueError, match='gated_channels of layer1.0 must be 0 or 64.* got 32'):
        timm.create_model(
            'gated_resnext50_32x4d', inner_channels={'layer1.0': [64, 64]}, gated_channels={'layer1.0': [32, 64]})


def test_slim_resnets_are_timm_resnets():
    dense, slim = timm.create_model('resnet18').eval(), timm.create_model('slim_resnet18').eval()
    slim.load_state_dict(dense.state_dict())
    x = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(slim(x), dense(x))
    narrow = timm.create_model('slim_resnet18', inner_channels={'layer1.0': [5]})
    assert narrow.layer1[0].conv1.weight.shape == (5, 64, 3, 3) and narrow.layer1[0].bn1.weight.shape == (5,)
