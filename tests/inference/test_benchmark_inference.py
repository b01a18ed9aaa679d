"""tools/benchmark_inference.py, on small images"""
import json
from pathlib import Path

import pytest
import timm
import torch
from forked import run_script
from PIL import Image
from tool import TOOLS, run_tool

SMALL = ['--networks', '18', '--img-size', '64', '--rounds', '2', '--threads', '1']


def read_rows(output: Path) -> list:
    return json.loads((output / 'results.json').read_text())['rows']


def test_table_figure_and_timings(tmp_path):
    output = tmp_path / 'bench'
    done = run_script(
        TOOLS / 'benchmark_inference.py', *SMALL, '--keep', '0.5', '1', '--batch-sizes', '1', '--dense-runtimes',
        'eager', 'onnxruntime', 'openvino', '--output', output, cwd=tmp_path)
    assert done.returncode == 0, done.output[-3000:]
    assert {path.name for path in output.iterdir()} == {'table.txt', 'results.json', 'speed.png'}
    assert (output / 'table.txt').read_text() in done.output
    with Image.open(output / 'speed.png') as figure:
        assert figure.width > figure.height
    results = json.loads((output / 'results.json').read_text())
    assert results['weights'] == 'random (untrained)' and 'weights: random (untrained)' in done.output
    assert {'cpu', 'cores', 'kernels', 'torch', 'openvino'} <= set(results['machine'])
    rows = results['rows']
    assert len(rows) == 3 + 2 * 3
    for row in rows:
        assert len(row['times']) == 2 and min(row['times']) > 0
    macs = {row['keep']: row['gmacs'] for row in rows if row['runtime'] != 'masked'}
    assert macs[0.5] < 0.6 * macs[1.0] and macs[1.0] == pytest.approx(macs[None], rel=0.01)
    native = next(line.split() for line in done.output.splitlines() if line.startswith('gated_resnet18  native'))
    assert native[2:4] == ['50', '%'] and native[-1] == '%'


def test_batch_sizes(tmp_path, capsys):
    run_tool('benchmark_inference', *SMALL, '--keep', '0.5', '--batch-sizes', '1', '3', '--dense-runtimes', 'eager',
             '--isa', 'portable', '--output', tmp_path)
    assert json.loads((tmp_path / 'results.json').read_text())['machine']['kernels'] == 'portable'
    assert [(row['batch_size'], row['runtime'], len(row['times'])) for row in read_rows(tmp_path)] == [
        (size, runtime, rounds) for size, rounds in ((1, 2), (3, 5))
        for runtime in ('eager', 'masked', 'torch', 'native')]
    table = capsys.readouterr().out
    assert 'batch 1, 1 thread\n' in table and 'batch 3, 1 thread\n' in table


def test_simulation(tmp_path):
    run_tool('benchmark_inference', *SMALL, '--keep', '0.5', '0', '--simulate', '2', '--simulate-batch-size', '2',
             '--output', tmp_path)
    assert [(row['network'], row['runtime'], len(row['times'])) for row in read_rows(tmp_path)] == [
        ('resnet18', 'eager', 1), ('gated_resnet18', 'simulated', 2), ('gated_resnet18', 'simulated', 2)]


def test_a_checkpoint_without_gates_is_refused(tmp_path, capsys):
    torch.save(timm.create_model('resnet18').state_dict(), tmp_path / 'dense.pth')
    assert run_tool(
        'benchmark_inference', *SMALL, '--checkpoint', tmp_path / 'dense.pth', '--dense-runtimes', 'eager',
        '--batch-sizes', '1', '--output', tmp_path / 'bench') == 1
    assert 'dense.pth has no weights for the gates' in capsys.readouterr().err
    assert not list((tmp_path / 'bench').iterdir())


@pytest.mark.parametrize('arguments, message', [
    (['--keep', '1.5'], 'between 0 and 1'),
    (['--rounds', '0'], 'at least 1'),
    (['--checkpoint', 'model.pth'], 'needs a single network'),
    (['--checkpoint', 'model.pth', '--networks', '18'], '--checkpoint model.pth does not exist'),
    (['--data-dir', 'nowhere'], '--data-dir nowhere does not exist'),
])
def test_bad_arguments(arguments, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        run_tool('benchmark_inference', *arguments, '--output', tmp_path / 'bench')
    assert stop.value.code == 2 and message in capsys.readouterr().err
    assert not (tmp_path / 'bench').exists()
