"""Analysis tools on the command line: reports, tables, figures and errors"""
import copy
import json
import os
import re
import shutil

import pytest
import timm
import torch
from _options import add_data_options
from forked import Done, run_script
from mmseg_small import write_config
from small_analysis import CLASSES, MODEL_KWARGS, MODEL_OPTIONS, make_net, write_images
from tool import TOOLS, load_tool, run_tool

from timm_gated import CifarResNet, accelerate, gates, instruction_sets, prune_static, save_pretrained
from timm_gated.analysis import create_data
from timm_gated.inference import mixed

NET = ['--model', 'gated_resnet20', *MODEL_OPTIONS]


def run(tool: str, *args) -> Done:
    return run_script(TOOLS / f'{tool}.py', *args, cwd=TOOLS.parent)


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp('images'), CLASSES)


@pytest.fixture(scope='module')
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp('runs')
    dense = timm.create_model('cifar_resnet20', **MODEL_KWARGS)
    for name, net in (('gated', make_net()), ('dense', dense)):
        torch.save({'state_dict': net.state_dict(), 'arch': 'any'}, folder / f'{name}.pth.tar')
    return folder


@pytest.fixture
def options(data, checkpoints, tmp_path):
    return [
        *NET, '--checkpoint', checkpoints / 'gated.pth.tar', '--data-dir', data, '--workers', '0', '--batch-size', '16',
        '--output', tmp_path / 'report']


def test_analyze_gates(options, checkpoints, tmp_path, capsys):
    assert run_tool('analyze_gates', *options, '--name', 'tiny', '--rare', '0.9', '--classes', 'ant', 'gnu') == 0
    shown = capsys.readouterr()
    assert 'tiny: 100%' in shown.err and str(tmp_path / 'report' / 'index.html') in shown.out
    content = json.loads((tmp_path / 'report' / 'gates.json').read_text())
    assert content['results'][0]['num_samples'] == 42 and [entry['name'] for entry in content['classes']] == CLASSES
    assert all(entry['num_samples'] == 6 for entry in content['classes'])
    assert (tmp_path / 'report' / 'extremes.png').stat().st_size > 5000
    other = [*options[:-1], tmp_path / 'other']
    dense = f'cifar_resnet20={checkpoints}/dense.pth.tar'
    assert run_tool('analyze_gates', *other, '--compare', tmp_path / 'report', '--dense', dense, '--limit', '14') == 0
    gated, dense = json.loads((tmp_path / 'other' / 'gates.json').read_text())['results']
    assert dense['name'] == 'cifar_resnet20, dense.pth.tar' and dense['num_gates'] == 0
    assert gated['num_samples'] == dense['num_samples'] == 14 and gated['subset_of'] == dense['subset_of'] == 42
    assert dense['mean_macs'] == gated['dense_macs']
    text = (tmp_path / 'other' / 'index.html').read_text()
    assert 'on 14 of 42 images, spread evenly' in text
    assert 'python tools/analyze_gates.py --model gated_resnet20' in text
    assert {path.name for path in tmp_path.iterdir()} == {'report', 'other'}


def test_evaluate_and_tradeoff(data, checkpoints, tmp_path):
    target = tmp_path / 'results' / 'evaluation.json'
    done = run(
        'evaluate', *NET, '--checkpoint', checkpoints / 'gated.pth.tar', f'cifar_resnet20={checkpoints}/dense.pth.tar',
        '--data-dir', data, '--workers', '0', '--output', target)
    assert done.returncode == 0, done.output[-3000:]
    gated, dense = json.loads(target.read_text())['results']
    assert gated['name'] == 'gated' and gated['num_gates'] == 24 and gated['macs_share'] < 1
    assert dense['model'] == 'cifar_resnet20' and dense['macs_share'] == 1 and dense['num_gates'] == 0
    assert f'{gated["top1"]:.2f}' in done.output and 'no gates' in done.output

    done = run(
        'tradeoff', target.parent, '--published', 'imagenet', '--output', tmp_path / 'tradeoff', '--series', 'both=*')
    assert done.returncode == 0, done.output[-3000:]
    assert done.output.count('measured') == 2 and done.output.count('published') == 9
    assert {path.name for path in tmp_path.iterdir()} == {'results', 'tradeoff.png', 'tradeoff.svg'}


@pytest.mark.parametrize('workers', [0, 1])
def test_a_limit_keeps_the_shares_of_the_classes(workers, data, checkpoints, tmp_path, capsys):
    target = tmp_path / 'evaluation.json'
    command = [
        *NET, '--checkpoint', checkpoints / 'gated.pth.tar', '--data-dir', data, '--workers', workers,
        '--output', target]
    assert run_tool('evaluate', *command, '--limit', '14', '--batch-size', '4') == 0
    assert 'On 14 of the 42 images, spread evenly' in capsys.readouterr().out
    result, = json.loads(target.read_text())['results']
    assert (result['num_samples'], result['subset_of']) == (14, 42)
    options = load_tool('evaluate').make_parser('')
    add_data_options(options)
    args = options.parse_args(['--data-dir', str(data), '--workers', str(workers)])
    limited, whole = (create_data(make_net(), args, limit) for limit in (14, 42))
    assert torch.cat([labels for _, labels in limited.loader]).bincount().tolist() == [2] * 7
    assert (limited.fetch_image(3) == whole.fetch_image(9)).all() and whole.subset_of is None
    assert run_tool('evaluate', *command, '--limit', '0') == 1
    assert 'limit must be at least 1, got 0' in capsys.readouterr().err


def test_evaluate_accelerated(data, checkpoints, tmp_path, capsys):
    common = [
        *NET, '--checkpoint', checkpoints / 'gated.pth.tar', f'cifar_resnet20={checkpoints}/dense.pth.tar',
        '--data-dir', data, '--workers', '0', '--batch-size', '16', '--output', tmp_path / 'evaluation.json']
    assert run_tool('evaluate', *common) == 0
    plain = json.loads((tmp_path / 'evaluation.json').read_text())['results']
    shown = capsys.readouterr().out
    assert run_tool('evaluate', *common, '--accelerate', '--timed-images', '3') == 0
    results = json.loads((tmp_path / 'evaluation.json').read_text())['results']
    more = capsys.readouterr().out
    assert more.startswith(shown.partition('Results')[0])
    speeds = [result.pop('accelerate') for result in results]
    assert results == plain  # MACs and gate statistics do not include the accelerated network
    for speed, result in zip(speeds, results, strict=True):
        assert speed['different_predictions'] == 0 and speed['top1'] == pytest.approx(result['top1'])
        assert (speed['num_images'], speed['batch_size'], speed['threads']) == (3, 1, torch.get_num_threads())
        assert speed['isa'] == (instruction_sets() or [None])[0]
        assert speed['milliseconds']['accelerated'] > 0 and speed['milliseconds']['eager'] > 0
    assert speeds[0]['milliseconds']['dense'] > 0 and speeds[1]['milliseconds']['dense'] is None
    assert more.count('0 of 42') == 2 and f'{torch.get_num_threads()} thread' in more
    assert (speeds[0]['isa'] or 'torch backend') in more


def test_evaluate_a_pruned_network_in_int8(data, tmp_path, capsys, monkeypatch):
    """Filters that pruning left without a gate do not count as decisions."""
    monkeypatch.setattr(mixed, '_MARGIN', 0.)
    net, images = make_net(), torch.randn(8, 3, 16, 16)
    for _, gate in gates(net):
        with torch.no_grad():
            net(images)
            gate.fc2.bias -= gate.logits.median(0).values  # open for some images
            gate.fc2.bias[::2] = 99.  # always open
    pruned = prune_static(net, [(images, torch.zeros(8).long())]).model
    assert gates(pruned) and all(gate.num_ungated for _, gate in gates(pruned))
    save_pretrained(pruned, tmp_path / 'pruned')
    target = tmp_path / 'evaluation.json'
    assert run_tool(
        'evaluate', '--model', f'local-dir:{tmp_path}/pruned', '--pretrained', '--data-dir', data, '--workers', '0',
        '--accelerate', '--precision', 'int8', '--calibration-split', 'validation', '--timed-images', '1',
        '--output', target) == 0
    result, = json.loads(target.read_text())['results']
    assert result['accelerate']['equal_decisions'] > 0.9
    assert result['accelerate']['int8_convolutions'] == {'int8': 8, 'all': 8}
    assert '8 of 8' in capsys.readouterr().out


def test_evaluate_counts_different_predictions(data, checkpoints, tmp_path, monkeypatch):
    def negate_classifier(net, **kwargs):
        net = copy.deepcopy(net)
        classifier = net.get_classifier()
        for parameter in classifier.parameters():
            parameter.data.neg_()  # the least likely class
        return accelerate(net, **kwargs)

    monkeypatch.setattr('timm_gated.accelerate', negate_classifier)
    target = tmp_path / 'evaluation.json'
    assert run_tool(
        'evaluate', *NET, '--checkpoint', checkpoints / 'gated.pth.tar', '--data-dir', data, '--workers', '0',
        '--accelerate', '--timed-images', '1', '--output', target) == 0
    result, = json.loads(target.read_text())['results']
    assert result['accelerate']['different_predictions'] == 42


def test_the_dense_counterpart_has_the_weights_of_the_gated_network():
    net, images = make_net(), torch.randn(2, 3, 16, 16)
    dense = load_tool('evaluate').dense_counterpart(net)
    assert type(dense) is CifarResNet and not gates(dense)
    for _, gate in gates(net):
        torch.nn.init.zeros_(gate.fc2.weight)
        torch.nn.init.ones_(gate.fc2.bias)
    torch.testing.assert_close(dense(images), net(images))


def test_errors_of_evaluate_accelerated(data, capsys):
    options = ['--untrained', '--data-dir', data, '--num-classes', '7', '--accelerate']
    assert run_tool('evaluate', '--model', 'vit_tiny_patch16_224', *options) == 1
    error = capsys.readouterr().err
    assert "--accelerate does not support 'vit_tiny_patch16_224'" in error and 'Run without --accelerate' in error
    for change, message in (
            (['--device', 'cuda'], 'got --device cuda. Give --device cpu'),
            (['--timed-images', '0'], '--timed-images must be at least 1, got 0')):
        with pytest.raises(SystemExit):
            run_tool('evaluate', '--model', 'gated_resnet20', *options, *change)
        assert message in capsys.readouterr().err


def test_segmentation(tmp_path):
    config = write_config(tmp_path)
    done = run(
        'analyze_gates', '--mmseg-config', config, '--untrained', '--output', tmp_path / 'report', '--rare', '0.9',
        '--limit', '2')
    assert done.returncode == 0, done.output[-3000:]
    content = json.loads((tmp_path / 'report' / 'gates.json').read_text())
    result, = content['results']
    assert (result['num_samples'], result['subset_of']) == (2, 3)
    assert 0 <= result['pixel_accuracy'] <= 100 and 'top1' not in result
    assert result['num_gates'] == 1920 and 0 < result['macs_share'] < 1.01
    # random label maps of 64 x 128 pixels show every class
    assert {entry['num_samples'] for entry in content['classes']} == {2} and content['classes'][0]['name'] == 'road'
    assert (tmp_path / 'report' / 'extremes.png').exists() and (tmp_path / 'report' / 'prior.png').exists()
    assert 'config (untrained network)' in (tmp_path / 'report' / 'index.html').read_text()
    assert result['name'] == 'config (untrained network)'
    assert run_tool('analyze_gates', '--mmseg-config', config, '--output', tmp_path / 'other', '--cfg-options',
                    'model.test_cfg.mode=slide') == 1


def test_a_segmentor_with_a_truncated_checkpoint(tmp_path, capsys):
    config, checkpoint = write_config(tmp_path), tmp_path / 'iter_2.pth'
    checkpoint.write_bytes(b'PK')
    options = ['--mmseg-config', config, '--checkpoint', checkpoint, '--output', tmp_path / 'report']
    assert run_tool('analyze_gates', *options) == 1
    assert f'{checkpoint} is truncated' in capsys.readouterr().err


@pytest.mark.parametrize('change, message', [
    (['--model', 'cifar_resnet20', '--checkpoint', '', '--untrained'], 'CifarResNet has no gates'),
    (['--model', 'no_such_model'], "'no_such_model' cannot be made.*list_models"),
    (['--checkpoint', 'nowhere.pth'], 'no checkpoint at nowhere.pth'),
    (['--data-dir', 'nowhere'], 'must be a folder of images, got nowhere; it does not exist.*prepare_cifar10.py'),
    (['--num-classes', '5', '--checkpoint', '', '--untrained'], 'data has 7 classes .*model has 5 output.*--class-map'),
    (['--classes', 'owl'], "no class 'owl'"),
    (['--gates', 'layer1/0'], "no gate 'layer1/0'"),
    (['--groups', 'animals'], "must be NAME=CLASS,CLASS,…, got 'animals'"),
    (['--snapshots', 'nowhere'], 'no gate snapshots'),
    (['--compare', 'nowhere'], 'is not the gates.json'),
    (['--dense', 'gated_resnet20', '--untrained'], "without gates, got 'gated_resnet20'"),
    (['--dense', 'no_such_model'], "'no_such_model' cannot be made"),
    (['--limit', '0'], 'limit must be at least 1, got 0'),
    (['--threshold', '2'], r'threshold must be in \(0.5, 1\], got 2'),
    (['--class-map', 'classes.pkl'], 'must be a text file .*classes.pkl'),
    (['--mmseg-config', 'nowhere.py'], 'there is no file nowhere.py'),
])
def test_errors_leave_no_report(options, change, message, tmp_path, capsys):
    assert run_tool('analyze_gates', *options, *change) == 1
    error = capsys.readouterr().err
    assert re.search(message, error.replace('\n', ' ')), error
    assert 'Traceback' not in error and list(tmp_path.iterdir()) == []


def test_empty_data_and_a_class_without_images(options, checkpoints, tmp_path, capsys):
    empty = tmp_path / 'empty' / 'validation'
    (empty / 'ant').mkdir(parents=True)
    assert run_tool('analyze_gates', *options, '--data-dir', empty.parent) == 1
    assert 'no data in' in capsys.readouterr().err

    some = write_images(tmp_path / 'some', CLASSES[:3])
    assert run_tool('analyze_gates', *options, '--data-dir', some) == 1
    assert 'Labels follow the order of the folders' in capsys.readouterr().err
    names = tmp_path / 'classes.txt'
    names.write_text('\n'.join(CLASSES) + '\n')
    assert run_tool('analyze_gates', *options, '--data-dir', some, '--class-map', names) == 0
    assert 'Classes without images: dog, eel, fox, gnu' in (tmp_path / 'report' / 'index.html').read_text()


def test_a_checkpoint_that_could_run_code_is_refused(options, tmp_path, capsys):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / 'pwned'),)

    torch.save({'state_dict': Evil()}, tmp_path / 'evil.pth')
    assert run_tool('analyze_gates', *options, '--checkpoint', tmp_path / 'evil.pth') == 1
    assert 'evil.pth does not load into' in capsys.readouterr().err and not (tmp_path / 'pwned').exists()


def test_errors_in_results(tmp_path, capsys):
    assert run_tool('tradeoff') == 1
    assert 'no results to draw' in capsys.readouterr().err
    assert run_tool('tradeoff', tmp_path) == 1
    assert 'holds neither evaluation.json nor gates.json' in capsys.readouterr().err
    (tmp_path / 'x.json').write_text('[]')
    assert run_tool('tradeoff', tmp_path / 'x.json') == 1
    assert 'x.json is not a result of tools/evaluate.py' in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_tool('tradeoff', tmp_path, '--series', 'l0')
    assert "must be NAME=PATTERN, as in 'L0 alone=l0_*', got 'l0'" in capsys.readouterr().err
    assert run_tool('evaluate', '--checkpoint', 'a.pth') == 1
    assert "the model of 'a.pth' is unknown" in capsys.readouterr().err


@pytest.mark.parametrize('tool', ['analyze_gates', 'evaluate', 'tradeoff'])
def test_help(tool, capsys):
    with pytest.raises(SystemExit) as stop:
        run_tool(tool, '--help')
    assert stop.value.code == 0 and 'tools/' in capsys.readouterr().out


def test_benchmark_runs(capsys):
    run_tool('benchmark_analysis', '--images', '2', '--batch-size', '2', '--rounds', '1')
    assert re.search(r'\(untrained\).* plain [\d.]+ s, recorded [\d.]+ s, [\d.]+ times as', capsys.readouterr().out)


def test_prune(data, checkpoints, tmp_path, capsys):
    shutil.copytree(data / 'validation', tmp_path / 'images' / 'train')
    shutil.copytree(data / 'validation', tmp_path / 'images' / 'validation')
    options = [
        *NET, '--checkpoint', checkpoints / 'gated.pth.tar', '--data-dir', tmp_path / 'images', '--workers', '0',
        '--batch-size', '16', '--threshold', '0.8']
    assert run_tool('prune', *options) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert re.fullmatch(r'layer1.0.gate1: \d dead.*, \d always on.*, \d conditional', lines[0])
    listed = re.search(r'(\d) dead \(([\d, -]+)\)', printed)
    count = sum(len(range(int(a), int(b or a) + 1)) for a, b in re.findall(r'(\d+)(?:-(\d+))?', listed.group(2)))
    assert int(listed.group(1)) == count
    assert 'parameters' in printed and 'Pruned network' not in printed

    assert run_tool('prune', *options, '--output', tmp_path / 'pruned') == 0
    pruned = timm.create_model(f'local-dir:{tmp_path / "pruned"}', pretrained=True)
    assert sum(p.numel() for p in pruned.parameters()) < sum(p.numel() for p in make_net().parameters())

    assert run_tool(
        'prune', *options, '--classes', 'gnu', 'ant', '--split', 'train', '--eval-split', 'validation', '--epochs', '1',
        '--output', tmp_path / 'two') == 0
    shown = capsys.readouterr().err
    assert 'fine-tuning: 100%' in shown and 'figures: 100%' in shown
    two = timm.create_model(f'local-dir:{tmp_path / "two"}', pretrained=True)
    assert two.num_classes == 2 and not gates(two)


@pytest.mark.parametrize('more, message', [
    (['--classes', 'ant', 'elk'], "there is no class 'elk'; the classes: ant, bee"),
    (['--classes', 'ant'], 'two or more different labels'),
    (['--threshold', '0.5'], r'threshold must be in \(0.5, 1\], got 0.5'),
])
def test_errors_of_prune(data, checkpoints, more, message, capsys):
    options = [*NET, '--checkpoint', checkpoints / 'gated.pth.tar', '--data-dir', data, '--workers', '0']
    assert run_tool('prune', *options, *more) == 1
    assert re.search(message, capsys.readouterr().err)
