"""The inference benchmark, as a user runs it, on small images"""
import json
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch
from PIL import Image

TOOL = Path(__file__).parents[1] / 'tools' / 'benchmark_inference.py'
SMALL = ['--networks', '18', '--img-size', '64', '--rounds', '2', '--threads', '1']


def run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(TOOL), *arguments], capture_output=True, text=True, timeout=600, check=False)


def test_table_figure_and_timings(tmp_path):
    output = tmp_path / 'bench'
    done = run(*SMALL, '--keep', '0.5', '1', '--batch-sizes', '1', '3', '--dense-runtimes', 'eager', 'onnxruntime',
               'openvino', '--output', str(output))
    assert done.returncode == 0, done.stderr[-3000:]
    assert {path.name for path in output.iterdir()} == {'table.txt', 'results.json', 'speed.png'}
    assert (output / 'table.txt').read_text() in done.stdout
    with Image.open(output / 'speed.png') as figure:
        assert figure.width > figure.height
    results = json.loads((output / 'results.json').read_text())
    assert results['weights'] == 'random (untrained)' and 'weights: random (untrained)' in done.stdout
    assert {'cpu', 'cores', 'kernels', 'torch', 'openvino'} <= set(results['machine'])
    rows = results['rows']
    assert len(rows) == 2 * (3 + 2 * 3)
    for row in rows:
        assert len(row['times']) == (2 if row['batch_size'] == 1 else 5) and min(row['times']) > 0
    macs = {row['keep']: row['gmacs'] for row in rows if row['runtime'] != 'masked'}
    assert macs[0.5] < 0.6 * macs[1.0] and macs[1.0] == pytest.approx(macs[None], rel=0.01)
    native = next(line.split() for line in done.stdout.splitlines() if line.startswith('gated_resnet18  native'))
    assert native[2:4] == ['50', '%'] and native[-1] == '%'


def test_simulation(tmp_path):
    done = run(*SMALL, '--keep', '0.5', '0', '--simulate', '2', '--simulate-batch-size', '2', '--output', str(tmp_path))
    assert done.returncode == 0, done.stderr[-3000:]
    rows = json.loads((tmp_path / 'results.json').read_text())['rows']
    assert [(row['network'], row['runtime'], len(row['times'])) for row in rows] == [
        ('resnet18', 'eager', 1), ('gated_resnet18', 'simulated', 2), ('gated_resnet18', 'simulated', 2)]


def test_a_checkpoint_without_gates_is_refused(tmp_path):
    torch.save(timm.create_model('resnet18').state_dict(), tmp_path / 'dense.pth')
    done = run(*SMALL, '--checkpoint', str(tmp_path / 'dense.pth'), '--dense-runtimes', 'eager', '--batch-sizes', '1',
               '--output', str(tmp_path / 'bench'))
    assert done.returncode == 1 and 'dense.pth has no weights for the gates' in done.stderr
    assert not list((tmp_path / 'bench').iterdir())


@pytest.mark.parametrize('arguments, message', [
    (['--keep', '1.5'], 'between 0 and 1'),
    (['--rounds', '0'], 'at least 1'),
    (['--checkpoint', 'model.pth'], 'say which'),
    (['--checkpoint', 'model.pth', '--networks', '18'], '--checkpoint model.pth does not exist'),
    (['--data-dir', 'nowhere'], '--data-dir nowhere does not exist'),
])
def test_bad_arguments(arguments, message, tmp_path):
    done = run(*arguments, '--output', str(tmp_path / 'bench'))
    assert done.returncode == 2 and message in done.stderr
    assert not (tmp_path / 'bench').exists()
