"""Common behaviour of the commands: fast help, weights, and error messages"""
import json
import re
import subprocess
import sys

import pytest
import timm
import torch
from small_analysis import CLASSES, MODEL_KWARGS, write_images
from small_analysis import MODEL_OPTIONS as SMALL
from tool import DEVELOPER, TOOLS, load_tool, run_tool

import timm_gated
from timm_gated.analysis import PUBLISHED
from timm_gated.analysis.sources import create_network, title
from timm_gated.models._registry import check_model_name
from timm_gated_cli.__main__ import COMMANDS
from timm_gated_cli.__main__ import main as timm_gated_main
from timm_gated_cli._options import add_model_options, make_parser

HEAVY = {'torch', 'timm', 'timm_gated', 'mmseg_plugin', 'mmengine', 'scipy', 'matplotlib', 'huggingface_hub'}


# Help


def run_python(*command) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, '-X', 'importtime', *command], capture_output=True, text=True, timeout=60)


def imported(done: subprocess.CompletedProcess) -> set:
    """Top-level packages that a process has imported."""
    lines = [line for line in done.stderr.splitlines() if line.startswith('import time:')]
    return {line.rpartition('|')[2].strip().partition('.')[0] for line in lines}


@pytest.mark.parametrize('command', [[name] for name in COMMANDS] + [
    ['hub', command] for command in ('save', 'card', 'push', 'pull')] + [[]], ids=' '.join)
def test_help_needs_no_torch(command):
    done = run_python('-m', 'timm_gated_cli', *command, '--help')
    assert done.returncode == 0, done.stderr[-2000:]
    assert 'timm_gated_cli' in imported(done) and not imported(done) & HEAVY
    assert done.stdout.startswith(' '.join(['usage: timm-gated', *command]))
    assert len(command) == 2 or ' '.join(['\n    timm-gated', *command]) in done.stdout, 'no example in the help'


@pytest.mark.parametrize('script', [
    *(f'{command.module}.py' for command in COMMANDS.values()), *(f'dev/{name}.py' for name in DEVELOPER)])
def test_help_of_a_script(script):
    done = run_python(TOOLS / script, '--help')
    assert done.returncode == 0 and not imported(done) & HEAVY
    assert done.stdout.startswith(f'usage: {script.removeprefix("dev/")} ')
    assert not script.startswith('dev/') or f'python tools/{script}' in done.stdout, 'no example in the help'


def test_a_mistyped_option_needs_no_torch():
    done = run_python('-m', 'timm_gated_cli', 'evaluate', '--modle', 'gated_resnet20')
    assert done.returncode == 2 and '--modle' in done.stderr and not imported(done) & HEAVY


def test_every_command_is_listed(capsys):
    modules = {path.stem for path in TOOLS.glob('[!_]*.py')}
    assert {command.module for command in COMMANDS.values()} <= modules
    with pytest.raises(SystemExit):
        timm_gated_main(['--help'])
    shown = capsys.readouterr().out
    assert all(f'  {name} ' in shown and command.about in shown for name, command in COMMANDS.items())
    with pytest.raises(SystemExit) as stop:
        timm_gated_main(['evalute'])
    assert stop.value.code == 2 and "invalid choice: 'evalute'" in capsys.readouterr().err


def test_a_command_gets_its_arguments(monkeypatch, capsys):
    monkeypatch.setattr(sys, 'argv', sys.argv)
    assert timm_gated_main(['configs', 'timm/cifar10/gated_resnet20.yaml']) == 0
    assert capsys.readouterr().out == 'timm/cifar10/gated_resnet20.yaml\n'
    assert timm_gated_main(['configs', 'none']) == 2
    assert capsys.readouterr().err == "error: no config matches 'none'; `timm-gated configs` lists them.\n"


@pytest.mark.parametrize('argv, extra', [
    (['analyze', '--output', 'x'], 'analysis'), (['convert', '--to', 'timm', 'x', 'y'], 'mmseg'),
    (['prune', '--mmseg-config', 'x.py'], 'mmseg')])
def test_a_missing_extra_is_named(argv, extra, monkeypatch, capsys):
    def main():
        raise ModuleNotFoundError("No module named 'thing'")
    monkeypatch.setattr(sys, 'argv', sys.argv)
    monkeypatch.setattr(load_tool(COMMANDS[argv[0]].module), 'main', main)
    with pytest.raises(SystemExit) as stop:
        timm_gated_main(argv)
    assert stop.value.code == 2 and f"pip install 'timm-gated[{extra}]'" in capsys.readouterr().err


def test_choices_are_those_of_the_library():
    assert sorted(load_tool('tradeoff').ACCURACY) == sorted(PUBLISHED)


def test_options_of_the_model(capsys):
    parser = make_parser('')
    add_model_options(parser)
    args = parser.parse_args(['--model-kwargs', 'layers=(1,1)', 'act_layer=gelu', 'path=/a=b', 'flag=True'])
    assert args.model_kwargs == dict(layers=(1, 1), act_layer='gelu', path='/a=b', flag=True)
    with pytest.raises(SystemExit):
        parser.parse_args(['--model-kwargs', 'layers'])
    assert "must be KEY=VALUE, got 'layers'" in capsys.readouterr().err


# Weights


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    """Image folder with ten classes, like CIFAR-10."""
    return write_images(tmp_path_factory.mktemp('ten'), [f'class{i}' for i in range(7)] + ['x', 'y', 'z'], per_class=1)


@pytest.fixture(scope='module')
def seven(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp('seven'), CLASSES, per_class=1)


@pytest.fixture(scope='module')
def dense(tmp_path_factory):
    """Checkpoint without gates."""
    path = tmp_path_factory.mktemp('dense') / 'dense.pth'
    torch.save(timm.create_model('cifar_resnet20', **MODEL_KWARGS).state_dict(), path)
    return path


def options(*args, **kwargs):
    parser = make_parser('')
    add_model_options(parser, **kwargs)
    return parser.parse_args([str(arg) for arg in args])


@pytest.mark.parametrize('model', ['gated_resnet20.l0_c10', 'gated_resnet20', 'cifar_resnet20'])
def test_without_a_checkpoint_weights_are_the_pretrained_ones(model):
    network, expected = create_network(model, '', options()), timm.create_model(model, pretrained=True)
    for key, value in expected.state_dict().items():
        assert torch.equal(network.state_dict()[key], value), key
    assert title(network, model) == f'{model.partition(".")[0]}.{expected.pretrained_cfg["tag"]}'


def test_evaluate_pretrained_weights(images, tmp_path, capsys):
    common = ['--data-dir', images, '--workers', '0', '--output', tmp_path / 'evaluation.json']
    figures = []
    for more in (['--model', 'gated_resnet20'], ['--model', 'gated_resnet20.bas_c10', '--pretrained']):
        assert run_tool('evaluate', *more, *common) == 0
        assert capsys.readouterr().out.splitlines()[2].startswith('gated_resnet20.bas_c10  ')
        result, = json.loads((tmp_path / 'evaluation.json').read_text())['results']
        assert result['name'] == 'gated_resnet20.bas_c10' and not result['untrained']
        figures.append(result['mean_macs'])
    assert figures[0] == figures[1]


@pytest.mark.parametrize('tool, more', [
    ('evaluate', []), ('analyze_gates', ['--output', 'new']), ('prune', []), ('prune', ['--output', 'new']),
    ('export_onnx', ['--output', 'new.onnx']), ('hub', ['--output', 'new']), ('soak_inference', []),
])
@pytest.mark.parametrize('model, others', [
    ('gated_resnet38', ''), ('gated_resnet20.untrained', 'There are weights for gated_resnet20.bas_c10'),
    ('gated_resnet34', 'There are weights for gated_resnet34.a1_in1k, ')])
def test_a_model_without_weights_is_refused(tool, more, model, others, images, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = ['--data-dir', images] if tool in ('evaluate', 'analyze_gates', 'prune') else []
    command = ['save'] if tool == 'hub' else []
    assert run_tool(tool, *command, '--model', model, *data, *more) == 2
    error = capsys.readouterr().err
    assert f"no pretrained weights for '{model}'" in error and others in error
    assert {'soak_inference': '--no-pretrained'}.get(tool, 'Give --checkpoint FILE') in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('part', ['network', 'gates', 'head'])
def test_untrained_networks_say_so(part, dense, seven, tmp_path, capsys):
    weights = {
        'network': SMALL, 'gates': [*SMALL, '--checkpoint', dense], 'head': ['--num-classes', '7', '--pretrained']}
    command = ['--model', 'gated_resnet20', *weights[part], '--data-dir', seven, '--workers', '0']
    mark = f'(untrained {part})'
    if part == 'network':
        assert run_tool('evaluate', *command) == 2  # the pretrained weights do not fit
        assert re.search('another depth.* Give --checkpoint FILE, or --untrained', capsys.readouterr().err)
    else:
        assert run_tool('evaluate', *command) == 2
        assert f'no weights for the {part}, which would be untrained. Give --checkpoint' in capsys.readouterr().err
    command.append('--untrained')
    assert run_tool('evaluate', *command, '--output', tmp_path / 'evaluation.json') == 0
    assert mark in capsys.readouterr().out.splitlines()[2]
    assert run_tool('prune', *command) == 0
    assert mark in capsys.readouterr().out.splitlines()[0]
    assert run_tool('tradeoff', tmp_path, '--output', tmp_path / 'tradeoff') == 0
    assert mark in capsys.readouterr().out


def test_a_report_of_an_untrained_network_says_so(dense, seven, tmp_path):
    assert run_tool(
        'analyze_gates', '--model', 'gated_resnet20', *SMALL, '--checkpoint', dense, '--untrained', '--data-dir', seven,
        '--workers', '0', '--output', tmp_path / 'report', '--name', 'mine', '--rare', '1') == 0
    assert 'Gates of mine (untrained gates)' in (tmp_path / 'report' / 'index.html').read_text()
    result, = json.loads((tmp_path / 'report' / 'gates.json').read_text())['results']
    assert result['name'] == 'mine (untrained gates)'


def test_untrained_networks_are_not_kept(tmp_path, capsys):
    with pytest.raises(SystemExit):
        run_tool('prune', '--model', 'gated_resnet38', '--untrained', '--output', tmp_path / 'pruned')
    assert '--output needs a trained network' in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run_tool('hub', 'save', '--model', 'gated_resnet38', '--untrained', '--output', tmp_path / 'saved')
    evaluation = tmp_path / 'evaluation.json'
    evaluation.write_text(json.dumps({'results': [{'name': 'mine', 'top1': 10., 'untrained': 'untrained network'}]}))
    assert run_tool('hub', 'save', '--model', 'gated_resnet20', '--output', tmp_path / 'saved', '--evaluation',
                    evaluation) == 2
    assert "the figures of 'mine'" in capsys.readouterr().err and not (tmp_path / 'saved').exists()


def test_export_of_an_untrained_network_says_so(tmp_path, capsys):
    assert run_tool('export_onnx', '--model', 'gated_resnet20', *SMALL, '--untrained', '--input-size', 3, 8, 8,
                    '--output', tmp_path / 'net.pt2') == 0
    assert 'net.pt2: gated_resnet20 (untrained network), ' in capsys.readouterr().out


def test_benchmarks_say_that_networks_are_untrained(capsys):
    run_tool('benchmark_training', '--only', 'step', '--depth', '18', '--batch-size', '2', '--image-size', '32',
             '--rounds', '1')
    run_tool('soak_inference', '--no-pretrained', '--count', '10', '--growth', '1000')
    run_tool('soak_inference', '--no-pretrained', '--count', '10', '--growth', '1000', '--precision', 'int8')
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and all('untrained' in line for line in lines)


# Errors


@pytest.mark.parametrize('name, message', [
    ('gated_resnet21', "no model 'gated_resnet21'; near: .*gated_resnet20"),
    ('Gated_ResNet20', "no model 'Gated_ResNet20'; near: .*gated_resnet20"),
    ('gatedresnet20.bas_c10', "no model 'gatedresnet20'; near: .*gated_resnet20"),
    ('aig', "no model 'aig'; near: .*convnet_aig_resnet"),
    ('qqqqqqqqqqqq', r"no model 'qqqqqqqqqqqq'\. timm\.list_models\(\)"),
    ('gated_resnet20.bas', "'gated_resnet20' has no tag 'bas'; its tags: bas_c10, .*l0_c10, untrained"),
    ('resnet18.nothing', "'resnet18' has no tag 'nothing'; its tags: .*a1_in1k"),
    ('local-dir:nowhere', "no folder 'nowhere': .* does not exist.*timm-gated hub save --output nowhere"),
])
def test_names_that_do_not_exist(name, message, tmp_path, capsys):
    with pytest.raises(ValueError, match=message):
        check_model_name(name)
    for tool, more in (('evaluate', ['--data-dir', tmp_path]), ('export_onnx', ['--output', tmp_path / 'x.onnx']),
                       ('benchmark_analysis', []), ('soak_inference', [])):
        assert run_tool(tool, '--model', name, *more) == 2
        assert re.search(message, capsys.readouterr().err)


def test_names_that_exist():
    for name in (*timm_gated.list_gated_models(), 'resnet18', 'resnet18.a1_in1k', 'hf-hub:owner/name'):
        check_model_name(name)


def test_names_in_other_options(dense, capsys):
    assert run_tool('evaluate', '--checkpoint', f'cifar_resnet21={dense}') == 2
    assert re.search("no model 'cifar_resnet21'.*near: .*cifar_resnet20", capsys.readouterr().err)
    assert run_tool('model_table', 'gated_resnet21') == 2
    assert re.search('near: .*gated_resnet20', capsys.readouterr().err)


def test_folders_that_do_not_exist(seven, tmp_path, capsys):
    model = ['--model', 'gated_resnet20', *SMALL, '--untrained']
    assert run_tool('evaluate', *model, '--data-dir', tmp_path / 'no') == 2
    assert re.search('/no; it does not exist. .*prepare-cifar10 .*--output .*/no', capsys.readouterr().err)
    assert run_tool('evaluate', *model, '--data-dir', seven, '--split', 'train') == 2
    assert "has no split 'train'; it has validation" in capsys.readouterr().err
    for tool in ('card', 'push'):
        assert run_tool('hub', tool, tmp_path / 'no', *(['me/model'] if tool == 'push' else [])) == 2
        assert re.search("no folder '.*/no': .* does not exist.*timm-gated hub save", capsys.readouterr().err)
    assert run_tool('tradeoff', tmp_path / 'no') == 2
    assert re.search('/no does not exist: write it with `timm-gated evaluate', capsys.readouterr().err)
    report = ['--data-dir', seven, '--output', tmp_path / 'report']
    assert run_tool('analyze_gates', *model, *report, '--compare', tmp_path / 'no') == 2
    assert re.search('/no .*No such file.*timm-gated analyze', capsys.readouterr().err)
    assert run_tool('analyze_gates', *model, *report, '--snapshots', tmp_path / 'no') == 2
    assert re.search('/no, which does not exist.*snapshot_dir=', capsys.readouterr().err)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_classes_is_a_split(seven):
    assert run_tool('evaluate', '--model', 'gated_resnet20', *SMALL, '--untrained', '--workers', '0', '--data-dir',
                    seven / 'validation') == 0


def test_a_checkpoint_of_another_depth(images, tmp_path, capsys, caplog):
    torch.save(timm.create_model('gated_resnet32').state_dict(), tmp_path / 'other.pth')
    for model in ('gated_resnet20', 'cifar_resnet20'):
        assert run_tool('evaluate', '--model', model, '--checkpoint', tmp_path / 'other.pth', '--data-dir', images) == 2
        error = capsys.readouterr().err
        assert re.fullmatch(
            "error: the checkpoint .*other.pth does not load into '.*': the checkpoint is of another depth: its stages "
            r'have 5-5-5 blocks, those of this .* have 3-3-3\. \(RuntimeError\)\n', error), error
    assert 'fresh initialisation' not in caplog.text
