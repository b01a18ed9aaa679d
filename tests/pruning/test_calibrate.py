"""Calibrated networks: MACs against the target, decisions by hand, saving, acceleration, errors and the tool"""
import copy
import json
import math
from typing import Any, Dict, List

import onnxruntime
import pytest
import timm
import torch
import torch.nn as nn
from models import freeze_decisions, open_share
from nets import shuffle
from small_analysis import CLASSES, MODEL_KWARGS, MODEL_OPTIONS, make_batches, make_net, write_images
from tool import run_tool

from timm_gated import (
    accelerate,
    calibrate,
    check_pretrained,
    count_macs,
    export_onnx,
    export_program,
    force_gates,
    gates,
    load_accelerated,
    mac_formula,
    save_pretrained,
)
from timm_gated.layers import inner_channels, logit_biases
from timm_gated.pruning.calibrate import MAX_PASSES
from timm_gated.pruning.filters import keep_used_filters

SMALL = dict(layers=(1, 1, 1), num_classes=7)
METHODS = {
    'batch shaping, L0': ('gated_resnet20', SMALL),
    'bottlenecks': ('gated_resnet50', dict(layers=(1, 1, 1, 1), channels=(16, 32, 64, 128), num_classes=7)),
    'grouped convolutions': (
        'gated_resnext50_32x4d', dict(layers=(1, 1, 1, 1), channels=(16, 32, 64, 128), num_classes=7)),
    'DGNet': ('dgnet_resnet18', dict(layers=(1, 1, 1, 1), channels=(16, 32, 64, 128), num_classes=7)),
    'ConvNet-AIG': ('convnet_aig_resnet20', dict(SMALL, layers=(2, 2, 2))),
    'GaterNet': ('gaternet_resnet20', SMALL),
    'SkipNet, recurrent': ('skipnet_resnet38', dict(SMALL, layers=(2, 2, 2))),
    'SkipNet, feed-forward': ('skipnet_resnet38', dict(SMALL, layers=(2, 2, 2), gate='ff2')),
}
methods = pytest.mark.parametrize('method', METHODS)


def make(method: str) -> nn.Module:
    name, kwargs = METHODS[method]
    torch.manual_seed(0)
    return shuffle(timm.create_model(name, **kwargs)).eval()


def make_images(model: nn.Module, batch_size: int = 20) -> List[torch.Tensor]:
    """Batches of images with different brightness and contrast, and a smaller one at the end."""
    generator = torch.Generator().manual_seed(1)
    size = 32 if model.conv1.weight.shape[-1] == 7 else 16
    colours = 2 * torch.randn(32, 3, 1, 1, generator=generator)
    images = torch.randn(32, 3, size, size, generator=generator) * torch.rand(32, 1, 1, 1, generator=generator)
    return list((images + colours).split(batch_size))


@torch.no_grad()
def share_of(model: nn.Module, batches: List[torch.Tensor]) -> float:
    return count_macs(model, torch.cat(batches)).share


@torch.no_grad()
def decisions(model: nn.Module, batches: List[torch.Tensor]) -> torch.Tensor:
    model(torch.cat(batches))
    return torch.cat([gate.decision for _, gate in gates(model)], dim=1)


@methods
@pytest.mark.parametrize('by', ['global', 'cost'])
def test_every_method_meets_its_target(method, by, tmp_path):
    """Up and down; saved and reloaded networks decide alike. The original does not change."""
    model = make(method).train()
    batches = make_images(model)
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    now = share_of(model, batches)
    possible = calibrate(model, batches, now, by).possible
    shares = []
    for part in (0.9, 0.6, 0.2):
        target = possible[0] + part * (possible[1] - possible[0])
        result = calibrate(model, [(images, None) for images in batches], target, by, tolerance=0.01)
        shares.append(result.share)
        assert result.share == pytest.approx(target, abs=0.01) and result.num_passes <= MAX_PASSES
        assert result.share == pytest.approx(share_of(result.model, batches))
        assert result.before == pytest.approx(now) and result.num_samples == 32
    assert shares == sorted(shares, reverse=True)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.training and not result.model.training and torch.equal(torch.get_rng_state(), random)

    save_pretrained(result.model, tmp_path / 'folder')
    again = check_pretrained(tmp_path / 'folder').eval()
    assert torch.equal(decisions(again, batches), decisions(result.model, batches))


@pytest.mark.parametrize('method', ['batch shaping, L0', 'bottlenecks', 'grouped convolutions', 'ConvNet-AIG'])
def test_everything_carries_the_thresholds(method, tmp_path):
    """Acceleration, also in int8 and from a file, exports, and pruning have the decisions of the calibrated network."""
    model = make(method)
    batches = make_images(model)
    result = calibrate(model, batches, 0.8, tolerance=0.01)
    x = torch.cat(batches)
    assert not torch.equal(decisions(result.model, batches), decisions(model, batches))
    with torch.no_grad():
        expected = result.model(x)
    for fast in (accelerate(result.model), accelerate(result.model, 'torch')):
        torch.testing.assert_close(fast(x), expected, atol=1e-4, rtol=1e-4)
        assert count_macs(fast, x).share == pytest.approx(result.share, abs=1e-3)
    fast.save(tmp_path / 'fast.tgn')
    torch.testing.assert_close(load_accelerated(tmp_path / 'fast.tgn')(x), expected, atol=1e-4, rtol=1e-4)
    quantized = accelerate(result.model, precision='int8', calibration=batches)
    assert count_macs(quantized, x).share == pytest.approx(result.share, abs=0.02)
    export_onnx(result.model, str(tmp_path / 'model.onnx'), input_size=x.shape[1:], conditional=True)
    output, = onnxruntime.InferenceSession(tmp_path / 'model.onnx').run(None, {'images': x.numpy()})
    torch.testing.assert_close(torch.from_numpy(output), expected, atol=1e-4, rtol=1e-4)
    export_program(result.model, tmp_path / 'model.pt2', input_size=x.shape[1:])
    torch.testing.assert_close(torch.export.load(tmp_path / 'model.pt2').module()(x), expected, atol=1e-4, rtol=1e-4)
    if method != 'ConvNet-AIG':
        pruned = keep_used_filters(result.model, open_share(result.model, x), threshold=1.)
        with torch.no_grad():
            torch.testing.assert_close(pruned(x), expected, atol=1e-4, rtol=1e-4)
        assert inner_channels(pruned) != inner_channels(result.model)


@methods
def test_the_ends_of_the_range(method):
    """All gates are open or closed, exactly. A target beyond is an error that names the range."""
    model = make(method)
    batches = make_images(model)
    sides = {}
    for value in ('closed', 'open'):
        with force_gates(model, value):
            sides[value] = share_of(model, batches)
        result = calibrate(model, batches, sides[value])
        assert result.possible[value == 'open'] == pytest.approx(sides[value])
        assert abs(result.share - sides[value]) <= 0.002
    exact = calibrate(model, batches, sides['open'], by='global', tolerance=1e-9)
    assert decisions(exact.model, batches).all() and exact.share == pytest.approx(sides['open'])
    exact = calibrate(model, batches, sides['closed'], tolerance=1e-9)
    assert not decisions(exact.model, batches).any()
    text = f'from {sides["closed"]:.3f} .all gates closed. to {sides["open"]:.3f} .all gates open.*got '
    for share in (sides['closed'] / 2, sides['open'] + 0.01):
        with pytest.raises(ValueError, match=text):
            calibrate(model, batches, share)


@methods
def test_logit_biases(method):
    """Adding to a bias moves the logits of its gate by as much."""
    model = make(method)
    image = make_images(model)[0][:2]
    model(image)
    first = next(iter(dict(gates(model))))
    before = {name: gate.logits.detach() for name, gate in gates(model)}
    biases = logit_biases(model)
    assert biases.keys() == before.keys()
    biases[first] += 0.25
    model(image)
    torch.testing.assert_close(dict(gates(model))[first].logits, before[first] + 0.25)


def expected_thresholds(model: nn.Module, share: float, by: str) -> Dict[str, float]:
    """Thresholds that close the filters one by one, until the share of MACs is met; logits are the biases."""
    formula = mac_formula(model, (3, 8, 8))
    costs = {'layer1.0.gate1': 2 * 8 * 9 * 8 * 8, 'layer2.0.gate1': 2 * 8 * 9 * 4 * 4,
             'layer3.0.gate1': 2 * 8 * 9 * 2 * 2}
    offset = {name: math.log(cost) if by == 'cost' else 0. for name, cost in costs.items()}
    biases = {name: gate.fc2.bias.tolist() for name, gate in gates(model)}
    order = sorted((bias - offset[name], costs[name]) for name in costs for bias in biases[name])
    used = formula.fixed + sum(cost for _, cost in order)
    closed = 0
    while used / formula.dense > share:
        used -= order[closed][1]
        closed += 1
    # the nearest share: with or without the last filter
    if closed and abs((used + order[closed - 1][1]) / formula.dense - share) < abs(used / formula.dense - share):
        closed -= 1
    dial = (order[closed - 1][0] + order[closed][0]) / 2
    return {name: dial + offset[name] for name in costs}


@pytest.mark.parametrize('by', ['global', 'cost'])
@pytest.mark.parametrize('share', [0.85, 0.5, 0.2])
def test_thresholds_by_hand(by, share):
    """With logits that do not depend on the image."""
    model = freeze_decisions(make_net())
    with torch.no_grad():
        biases = torch.linspace(-3, 3, 24)[torch.randperm(24, generator=torch.Generator().manual_seed(0))]
        for (_, gate), part in zip(gates(model), biases.split(8), strict=True):
            gate.fc2.bias.copy_(part)
    result = calibrate(model, make_batches(), share, by, tolerance=1e-6)
    for name, threshold in expected_thresholds(model, share, by).items():
        torch.testing.assert_close(result.thresholds[name], torch.full((8,), threshold), atol=1e-5, rtol=0)
        gate = dict(gates(result.model))[name]
        assert torch.equal(gate.fc2.bias > 0, dict(gates(model))[name].fc2.bias > threshold)


def test_cheap_filters_stay_open_longer():
    model, batches = make('batch shaping, L0'), make_images(make('batch shaping, L0'))
    found = {
        by: open_share(calibrate(model, batches, 0.4, by).model, torch.cat(batches)) for by in ('global', 'cost')}
    assert found['cost']['layer1.0.gate1'].mean() < found['global']['layer1.0.gate1'].mean()
    assert found['cost']['layer3.0.gate1'].mean() > found['global']['layer3.0.gate1'].mean()


@pytest.mark.parametrize('by', ['global', 'cost'])
def test_the_current_share_changes_nothing(by):
    model = make('batch shaping, L0')
    batches = make_images(model)
    once = calibrate(model, batches, 0.5, by)
    for start, share in ((model, share_of(model, batches)), (once.model, 0.5)):
        result = calibrate(start, batches, share, by)
        assert result.num_passes == 1 and result.share == result.before
        assert not torch.cat(list(result.thresholds.values())).any()
        assert all(torch.equal(value, start.state_dict()[key]) for key, value in result.model.state_dict().items())


def test_an_empty_batch_changes_nothing():
    model = make('batch shaping, L0')
    batches = make_images(model)
    shares = [calibrate(model, loader, 0.5).share for loader in (batches, [batches[0][:0], *batches])]
    assert shares[0] == shares[1]


def test_forced_gates_are_not_forced_in_the_copy():
    model = make('batch shaping, L0')
    batches = make_images(model)
    with force_gates(model, 'open'):
        result = calibrate(model, batches, 0.5)
        assert all(gate.forced is not None for _, gate in gates(model))
    assert result.share == pytest.approx(share_of(result.model, batches)) == pytest.approx(0.5, abs=0.002)


def test_pruned_networks():
    """Filters without a gate always run; the range of the shares says so."""
    model = make('batch shaping, L0')
    batches = make_images(model)
    shares = {name: torch.linspace(0, 1, gate.num_gates) for name, gate in gates(model)}
    pruned = keep_used_filters(model, shares, threshold=0.8)
    assert all(gate.num_ungated for _, gate in gates(pruned))
    result = calibrate(pruned, batches, 0.6)
    assert result.share == pytest.approx(share_of(result.model, batches)) == pytest.approx(0.6, abs=0.002)
    assert result.possible[0] > calibrate(model, batches, 0.6).possible[0]


def test_a_gate_shared_by_blocks():
    model = make_net(layers=(2, 1, 1))
    model.layer1[1].gate1 = model.layer1[0].gate1
    batches = make_batches()
    result = calibrate(model, batches, 0.5, tolerance=0.01)
    x = torch.cat([images for images, _ in batches])
    assert result.share == pytest.approx(count_macs(result.model, x).share) == pytest.approx(0.5, abs=0.01)
    assert result.model.layer1[1].gate1 is result.model.layer1[0].gate1


def test_features_and_images_of_several_sizes():
    model = timm.create_model('gated_resnet20', features_only=True, out_indices=(1, 2), **MODEL_KWARGS).eval()
    batches = [torch.randn(6, 3, size, size) for size in (8, 16)]
    result = calibrate(shuffle(model), batches, 0.6, tolerance=0.01)
    with torch.no_grad():
        macs = [count_macs(result.model, x) for x in batches]
    used, dense = sum(m.per_sample.sum().item() for m in macs), sum(6 * m.dense for m in macs)
    assert used / dense == pytest.approx(result.share) == pytest.approx(0.6, abs=0.01)


def test_decisions_that_jump_over_the_target():
    """One image and one decision: the nearer of two shares is returned."""
    model = freeze_decisions(make('ConvNet-AIG'))
    batches = make_images(model)
    with torch.no_grad():
        for _, gate in gates(model):  # all decisions change at once
            gate.fc2.bias.zero_()
    closed, opened = calibrate(model, batches, share_of(model, batches)).possible
    for share, nearest in ((closed + 0.2 * (opened - closed), closed), (opened - 0.2 * (opened - closed), opened)):
        result = calibrate(model, batches, share, by='global')
        assert result.share == pytest.approx(nearest) and result.target == share


def test_print():
    model, batches = make_net(), make_batches()
    result = calibrate(model, batches, 0.5)
    lines = str(result).splitlines()
    assert lines[0].split() == ['before', 'after', 'target']
    assert lines[1].split()[-4:] == [
        f'{result.share * result.dense_macs / 1e6:.2f}', 'M', f'{0.5 * result.dense_macs / 1e6:.2f}', 'M']
    assert lines[2].split()[-3:] == [f'{result.before:.1%}', f'{result.share:.1%}', '50.0%']
    assert 'images: 64' in lines[3] and f'passes: {result.num_passes}' in lines[3]


@pytest.mark.parametrize('kwargs, message', [
    (dict(share=0), 'share must be a number > 0, got 0'),
    (dict(share=1.5), r'share must be from 0\.\d+ .*got 1.5'),
    (dict(tolerance=0.), 'tolerance must be a number > 0'),
    (dict(by='layer'), "by must be one of global, cost, got 'layer'"),
])
def test_bad_options(kwargs, message):
    with pytest.raises(ValueError, match=message):
        calibrate(make_net(), make_batches(), **kwargs)


def test_bad_networks_and_data():
    with pytest.raises(ValueError, match='has no gates'):
        calibrate(timm.create_model('cifar_resnet20'), make_batches())
    with pytest.raises(ValueError, match="'layer1.0.gate1' is a SaliencyGate, which has no threshold.*density"):
        calibrate(timm.create_model('fbs_resnet20'), make_batches())
    with pytest.raises(ValueError, match='can be read only once'):
        calibrate(make_net(), iter(make_batches()))
    for empty in ([], [torch.zeros(0, 3, 8, 8)]):
        with pytest.raises(ValueError, match='the data set is empty'):
            calibrate(make_net(), empty)
    with pytest.raises(ValueError, match='images or .images, labels., got a dict'):
        calibrate(make_net(), [{'image': torch.zeros(2, 3, 8, 8)}])
    with pytest.raises(ValueError, match="logit of gate 'layer1.0.gate1' is not finite"):
        calibrate(make_net(), [torch.full((2, 3, 8, 8), torch.nan)])


@pytest.fixture(scope='module')
def options(tmp_path_factory) -> List[Any]:
    folder = tmp_path_factory.mktemp('images')
    torch.save({'state_dict': make_net().state_dict()}, folder / 'net.pth')
    return ['--model', 'gated_resnet20', *MODEL_OPTIONS, '--checkpoint', folder / 'net.pth',
            '--data-dir', write_images(folder / 'data', CLASSES), '--workers', '0', '--batch-size', '8']


def test_tool_saves(options, tmp_path, capsys):
    assert run_tool(
        'calibrate', *options, '--share', '0.5', '--tolerance', '0.02', '--images', '20',
        '--output', tmp_path / 'half') == 0
    shown = capsys.readouterr()
    assert 'images: 20' in shown.out and '50.0%: 100%' in shown.err and f'network: {tmp_path / "half"}' in shown.out
    biases = [net.layer1[0].gate1.fc2.bias for net in (check_pretrained(tmp_path / 'half'), make_net())]
    assert not torch.equal(*biases)
    assert run_tool('calibrate', *options, '--output', tmp_path / 'half') == 2
    assert 'half exists already' in capsys.readouterr().err


def test_tool_sweeps(options, tmp_path, capsys):
    target = tmp_path / 'results' / 'sweep.json'
    assert run_tool(
        'calibrate', *options, '--share', '0.8', '0.4', '--tolerance', '0.02', '--eval-split', 'validation',
        '--results', target, '--json') == 0
    high, low = json.loads(target.read_text())['results']
    assert (high['target'], low['target']) == (0.8, 0.4) and high['num_samples'] == 42
    assert all(result['macs_share'] == pytest.approx(result['calibrated_share']) for result in (high, low))
    shown = capsys.readouterr()
    assert shown.out == target.read_text() and f'{low["top1"]:.2f}' in shown.err
    assert run_tool('tradeoff', target, '--x', 'share', '--output', tmp_path / 'figure') == 0
    assert capsys.readouterr().out.count('net, by cost') == 2


@pytest.mark.parametrize('wrong, message', [
    (['--output', 'x', '--share', '0.5', '0.6'], '--output needs a single --share, got 2'),
    (['--results', 'x'], '--results needs --eval-split'),
    (['--images', '0'], '--images must be at least 1'),
])
def test_tool_errors(wrong, message, capsys):
    with pytest.raises(SystemExit):
        run_tool('calibrate', *wrong)
    assert message in capsys.readouterr().err
