"""Killed and resumed trainings with mmseg's train.py; truncated checkpoints of mmengine"""
from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from effort import TIMES
from killing import Kill, assert_equal, live, random_kills, was_killed
from mmengine.runner import CheckpointLoader
from mmseg_resume_worker import train
from mmseg_small import write_config
from safetensors.torch import save_file

from mmseg_plugin.compat import history_allowed
from timm_gated.utils.installation import install

KILLS = 6 * TIMES
ITERS = 8 + 4 * KILLS
# No random crops: they are drawn before a hook can seed them. Checkpoints are small and frequent.
CONFIG = f"""
_base_ = ['./config.py']
custom_imports = dict(imports=['mmseg_plugin', 'mmseg_resume_worker'], allow_failed_imports=False)
randomness = dict(seed=0)
train_dataloader = dict(dataset=dict(pipeline=[
    dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'), dict(type='Resize', scale=(64, 64)),
    dict(type='PackSegInputs')]))
model = dict(
    backbone=dict(base_channels=8, stem_channels=8),
    decode_head=dict(in_channels=64, channels=8),
    auxiliary_head=dict(in_channels=32, channels=8),
    gate_losses=[
        dict(type='BatchShapingLoss', loss_weight=0.2, reduction='sum'), dict(type='L0Loss', loss_weight=0.1)])
param_scheduler = [dict(type='PolyLR', power=0.9, begin=0, end={ITERS}, by_epoch=False)]
train_cfg = dict(max_iters={ITERS}, val_interval=4)
custom_hooks = [
    dict(type='ReportHook'),
    dict(type='GateLossScheduleHook', loss_name='loss_batch_shaping', schedule='linear_anneal', begin=0, end={ITERS}),
    dict(type='GateLossScheduleHook', loss_name='loss_l0', schedule='linear_warmup', begin=2, end={ITERS})]
"""


def small_config(folder: Path) -> Path:
    write_config(folder)
    config = folder / 'small.py'
    config.write_text(CONFIG)
    return config


def key(report: Dict[str, Any]) -> Any:
    return report['iter'], 'metrics' in report


def test_killed_and_resumed(tmp_path):
    config = small_config(tmp_path)
    reference = live(train, config, tmp_path / 'reference')
    assert reference.exitcode == 0, (tmp_path / 'reference.log').read_text()[-3000:]
    expected = {key(report): report for report in reference.reports}
    assert len(expected) == len(reference.reports) == ITERS + ITERS // 4

    # After four iterations and a validation, the best weights (0.9 MB) are written and the last checkpoint again.
    while_last_is_rewritten = Kill(5, size=1300000)
    kills = random_kills(seed=0, number=KILLS - 1, max_steps=4, max_delay=0.2, sizes=range(100000, 1700000))
    reports, starts = [], []
    for kill in (while_last_is_rewritten, *kills, None):
        life = live(train, config, tmp_path / 'killed', '--resume', kill=kill)
        assert was_killed(life) if kill else life.exitcode == 0, (tmp_path / 'killed.log').read_text()[-3000:]
        reports += life.reports
        starts += [life.reports[0]['iter']] if life.reports else []
    assert starts[:2] == [0, 4]  # resumed from the checkpoint that was being rewritten
    assert [report for report in reports if report != expected[key(report)]] == []
    with history_allowed():
        mine, other = (torch.load(tmp_path / run / f'iter_{ITERS}.pth') for run in ('killed', 'reference'))
    for part in ('state_dict', 'optimizer', 'param_schedulers'):
        assert_equal(mine[part], other[part])
    # The best score is not compared: mmengine does not repeat a killed validation.
    for part in ('iter', 'epoch'):
        assert mine['meta'][part] == other['meta'][part]
    for part in ('iter', 'epoch', 'max_iters', 'max_epochs'):
        assert mine['message_hub']['runtime_info'][part] == other['message_hub']['runtime_info'][part]


def test_killed_while_writing_last_checkpoint(tmp_path):
    config, work_dir = small_config(tmp_path), tmp_path / 'work'
    work_dir.mkdir()
    (work_dir / 'last_checkpoint').write_text('')
    assert live(train, config, work_dir, '--resume').exitcode == 1
    log = (tmp_path / 'work.log').read_text()
    assert 'killed while it wrote the file last_checkpoint' in log and '--resume --cfg-options load_from=PATH' in log


@pytest.mark.parametrize('suffix', ['.pth', '.safetensors'])
def test_cut_checkpoint(tmp_path, suffix):
    install()
    path, older = tmp_path / f'iter_4{suffix}', tmp_path / f'iter_2{suffix}'
    weights = {name: torch.rand(50) for name in 'abc'}
    for file in (path, older):
        save_file(weights, file) if suffix == '.safetensors' else torch.save({'state_dict': weights}, file)
    content = path.read_bytes()
    assert CheckpointLoader.load_checkpoint(str(path))
    message = rf'iter_4{suffix} is truncated.* first: iter_2{suffix}\. .* load_from='
    for size in [*range(20), *range(20, len(content) - 70, 7), *range(len(content) - 70, len(content))]:
        path.write_bytes(content[:size])
        with pytest.raises(Exception, match=message):
            CheckpointLoader.load_checkpoint(str(path), map_location='cpu')


@pytest.mark.parametrize('suffix', ['.pth', '.safetensors'])
def test_missing_checkpoint(tmp_path, suffix):
    install()
    (save_file if suffix == '.safetensors' else torch.save)({'x': torch.ones(1)}, tmp_path / f'iter_2{suffix}')
    message = rf'iter_4{suffix} can not be found\.\n.* first: iter_2{suffix}\. .* load_from='
    with pytest.raises(FileNotFoundError, match=message):
        CheckpointLoader.load_checkpoint(str(tmp_path / f'iter_4{suffix}'))
