"""mmseg's train.py and test.py run our configs: train, validate, stop, resume, test; on one and two processes"""
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import mmseg_plugin  # noqa: F401  (must precede imports of mmseg)

# isort: split
import pytest
import torch
from forked import run_script
from mmseg.apis import init_model
from mmseg_small import OTHERS, SCRIPTS, narrowed, write_config
from paths import HELPERS
from safetensors.torch import load_file
from tool import run_tool


def run(folder: Path, *command: Any) -> str:
    """Run a script in a folder: mmengine writes files for communication (`.dist_test`) to the current one."""
    env = dict(os.environ, OMP_NUM_THREADS='1')
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=600, env=env, cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout + done.stderr


def run_forked(folder: Path, script: Path, *args: Any, processes: int = 1) -> str:
    done = run_script(script, *args, cwd=folder, processes=processes)
    assert done.returncode == 0, done.output[-6000:]
    return done.output


def scalars(work_dir: Path) -> list:
    files = sorted(work_dir.glob('*/vis_data/scalars.json'))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def test_train_resume_test(tmp_path):
    config, work_dir = str(write_config(tmp_path)), tmp_path / 'work'
    common = (SCRIPTS / 'train.py', config, '--work-dir', work_dir)

    log = run(tmp_path, *common, '--cfg-options', 'train_cfg.max_iters=2')
    assert re.search(r'mIoU: [\d.]+.*GMACs: [\d.]+ .*MACs_share: [\d.]+', log)
    assert 'Gates: gates/density' in log and 'gates/layer4/always_off' in log

    run_forked(tmp_path, *common, '--resume', '--cfg-options', 'train_cfg.max_iters=4')
    steps = [entry for entry in scalars(work_dir) if 'loss_batch_shaping' in entry]
    weights = {entry['step']: entry['weight_batch_shaping'] for entry in steps}
    assert weights == pytest.approx({1: 0.2, 2: 0.15, 3: 0.1, 4: 0.05})  # as without interruption
    for entry in steps:
        assert 0 < entry['gate_density'] < 1
        parts = entry['decode.loss_ce'] + entry['aux.loss_ce'] + entry['loss_batch_shaping']
        assert entry['loss'] == pytest.approx(parts, rel=1e-4)
    assert any('gates/layer1/conditional' in entry for entry in scalars(work_dir))

    log = run_forked(tmp_path, SCRIPTS / 'test.py', config, work_dir / 'iter_4.pth', '--work-dir', work_dir)
    share = float(re.search(r'MACs_share: ([\d.]+)', log).group(1))
    assert 20 < share < 101 and 'aAcc' in log

    # The checkpoint, which contains the history of the log, loads for inference and for timm.
    model = init_model(config, str(work_dir / 'iter_4.pth'), device='cpu')
    run_tool('convert_checkpoint', '--to', 'timm', work_dir / 'iter_4.pth', tmp_path / 'timm.safetensors')
    converted = load_file(tmp_path / 'timm.safetensors')
    assert torch.equal(converted['layer1.0.gate1.fc1.weight'], model.backbone.layer1[0].gate1.fc1.weight)


@pytest.mark.parametrize('path', OTHERS, ids=lambda path: path.stem.split('_1xb')[0])
def test_other_segmentors_train(path, tmp_path):
    settings = f'model = {narrowed(path)}; model["backbone"]["init_cfg"] = None'
    config, work_dir = write_config(tmp_path, path, settings), tmp_path / 'work'
    log = run_forked(
        tmp_path, SCRIPTS / 'train.py', config, '--work-dir', work_dir, '--cfg-options', 'train_cfg.max_iters=2')
    steps = [entry for entry in scalars(work_dir) if 'loss' in entry]
    assert [entry['step'] for entry in steps] == [1, 2]
    for entry in steps:
        parts = entry['decode.loss_ce'] + entry['aux.loss_ce'] + entry['loss_batch_shaping']
        assert entry['loss'] == pytest.approx(parts, rel=1e-4) and 0 < entry['gate_density'] < 1
    assert 0 < float(re.search(r'MACs_share: ([\d.]+)', log).group(1)) < 101
    assert 'gates/layer4/always_off' in log and (work_dir / 'iter_2.pth').is_file()


def test_two_processes(tmp_path):
    """Three images on two processes: the image that the sampler repeats must not count."""
    config = str(write_config(tmp_path))
    run_forked(
        tmp_path, HELPERS / 'mmseg_distributed_worker.py', config, str(tmp_path), processes=2)
    first, second = (json.loads((tmp_path / f'rank{rank}.json').read_text()) for rank in (0, 1))
    assert first == second and first['checksum'] != first['initial_checksum']

    checkpoint = str(tmp_path / 'work' / 'iter_2.pth')
    log = run_forked(tmp_path, SCRIPTS / 'test.py', config, checkpoint, '--work-dir', str(tmp_path / 'one'))
    for name in ('mIoU', 'aAcc', 'GMACs', 'MACs_share'):
        assert float(re.search(rf' {name}: ([\d.]+)', log).group(1)) == pytest.approx(first['metrics'][name], abs=1e-2)
    assert 0 < first['gates']['gates/density'] < 1
    assert dict(re.findall(r'(gates/\S+): ([\d.]+)', log)) == {k: f'{v:.4f}' for k, v in first['gates'].items()}
