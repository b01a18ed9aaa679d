"""The configs of configs/mmseg and the options that their README describes"""
import logging
import re
from types import SimpleNamespace
from typing import Any

import mmseg_plugin  # noqa: F401  (must precede imports of mmseg)

# isort: split
import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.hub import get_config
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DefaultScope
from mmseg.registry import DATASETS, HOOKS, METRICS, MODELS
from mmseg_small import CONFIGS, OTHERS
from paths import ROOT
from PIL import Image

from timm_gated import gates
from timm_gated.models._builder import from_dense_options
from timm_gated.utils import installation

README = (ROOT / 'configs' / 'mmseg' / 'README.md').read_text()


def build(cfg: Config) -> Any:
    """The model of a config, without values of its parameters."""
    with torch.device('meta'):
        return MODELS.build(cfg.model)


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)
def test_config_builds(path):
    cfg = Config.fromfile(path)
    model = build(cfg)
    gated = path.stem.startswith('gated')
    assert bool(gates(model)) == gated
    wrapper = build_optim_wrapper(model, cfg.optim_wrapper)
    gate_parameters = {id(p) for _, gate in gates(model) for p in gate.parameters()}
    for group in wrapper.param_groups:
        for parameter in group['params']:
            expected = 1e-6 if id(parameter) in gate_parameters else 1e-4
            assert group['weight_decay'] == pytest.approx(expected)
    assert not any(isinstance(m, torch.nn.SyncBatchNorm) for m in model.modules())
    if 'from-dense' in path.stem:
        assert [(loss.loss_name, loss.loss_weight) for loss in model.gate_losses] == [
            ('loss_batch_shaping', 0.003), ('loss_mac_budget', 20.), ('loss_distillation', 1.)]
        recipe = from_dense_options(cfg.max_iters)  # as for timm
        assert cfg.model.backbone.gate_cfg.bias == recipe['gate_bias']
        assert model.gate_losses[0].loss_weight == recipe['lam']
        assert [(hook.begin, hook.end) for hook in cfg.custom_hooks[:2]] == [
            recipe['lam_epochs'], recipe['noise_epochs']]
        assert cfg.model.init_cfg.checkpoint == cfg.model.gate_losses[2].teacher_ckpt
        assert (ROOT / cfg.model.gate_losses[2].teacher_config).is_file()
    elif gated:
        lam = 0.05 if 'lam0.05' in path.stem else 0.2
        assert [(loss.loss_name, loss.loss_weight) for loss in model.gate_losses] == [('loss_batch_shaping', lam)]


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)
def test_macs_are_counted_where_a_metric_reports_them(path):
    cfg = Config.fromfile(path)
    for evaluator in (cfg.val_evaluator, cfg.test_evaluator):
        metrics = evaluator if isinstance(evaluator, list) else [evaluator]
        assert cfg.model.get('count_macs', False) == any(metric.type == 'MACsMetric' for metric in metrics)


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)
def test_checkpoints_are_written_atomically_and_load(path, monkeypatch):
    """Dense configs too: building their segmentor lets mmengine load its checkpoints."""
    cfg, calls = Config.fromfile(path), []
    assert cfg.default_hooks.checkpoint.backend_args == dict(backend='timm_gated_local')
    monkeypatch.setattr(installation, '_pending', [lambda: calls.append(True)])
    build(cfg)
    assert calls


@pytest.mark.parametrize('path', [path for path in CONFIGS if 'cityscapes' in path.stem], ids=lambda path: path.stem)
def test_cityscapes_schedule(path):
    cfg = Config.fromfile(path)
    assert cfg.train_dataloader.batch_size == 6 and cfg.train_cfg.max_iters == 150000
    assert [step.type for step in cfg.train_dataloader.dataset.pipeline] == [
        'LoadImageFromFile', 'LoadAnnotations', 'RandomResize', 'RandomCrop', 'RandomFlip', 'PackSegInputs']
    assert cfg.train_dataloader.dataset.pipeline[3].crop_size == (448, 672)
    assert cfg.optim_wrapper.optimizer.lr == 0.02 and cfg.param_scheduler[0].eta_min == 0
    assert cfg.param_scheduler[0].power == 0.9 and cfg.model.test_cfg.mode == 'whole'
    weights = {'r18': 'resnet18_v1c', 'r50': 'resnet50_v1c', 'x50-32x4d': 'resnext50_32x4d'}
    pretrained = cfg.model.backbone.get('init_cfg', {}).get('checkpoint')
    name = re.search(r'_(r18|r50|x50-32x4d)[-_]', path.stem).group(1)
    assert pretrained == (f'open-mmlab://{weights[name]}' if 'in1k-pre' in path.stem else None)
    assert cfg.model.get('pretrained') is None


@pytest.mark.parametrize('path', [path for path in OTHERS if 'x50' not in path.stem], ids=lambda path: path.stem)
def test_networks_are_those_of_mmseg(path):
    """With gates, and with BN instead of SyncBN."""
    name = path.stem.removeprefix('gated-').split('_1xb6')[0]
    theirs = get_config(f'mmseg::{path.parent.name}/{name}_4xb2-80k_cityscapes-512x1024.py').model
    ours = Config.fromfile(path).model
    assert ours.backbone.init_cfg.checkpoint == theirs.pretrained
    for part in ('backbone', 'decode_head', 'auxiliary_head'):
        theirs[part].norm_cfg.type = 'BN'
    theirs.backbone.update(type='GatedResNetV1c', init_cfg=ours.backbone.init_cfg)
    theirs.data_preprocessor.size = (448, 672)
    theirs.update(
        type='GatedEncoderDecoder', pretrained=None, count_macs=True, gate_losses=ours.gate_losses, _scope_='mmseg')
    assert ours.to_dict() == theirs.to_dict()


def snippet(section: str) -> str:
    return re.search(r'```python\n(.*?)```', README.partition(f'## {section}\n')[2], re.DOTALL).group(1)


def test_readme_lists_the_configs():
    table = README.replace('…', '1xb6-150k-in1k-pre_cityscapes-448x672')
    listed = {name.rpartition('/')[2] for name in re.findall(r'^\| `(.*?)`', table, re.MULTILINE)}
    assert {path.stem for path in CONFIGS if 'cityscapes' in path.stem} <= listed


def test_another_network_of_mmseg(tmp_path):
    """The config of the README."""
    config = tmp_path / 'config.py'
    config.write_text(snippet('Configs').replace('../_base_', str(ROOT / 'configs' / 'mmseg' / '_base_')))
    model = build(Config.fromfile(config))
    assert type(model.decode_head).__name__ == 'ASPPHead' and len(gates(model)) == 32 and model.count_macs


def test_options_of_the_readme():
    options: dict = {}
    exec(snippet('Config options'), options)
    path = 'configs/mmseg/pspnet/gated-pspnet_r50-d8_1xb6-150k_cityscapes-448x672.py'
    assert path in README
    cfg = Config.fromfile(ROOT / path)
    cfg.merge_from_dict(dict(model=options['model'], optim_wrapper=options['optim_wrapper']))
    model = MODELS.build(cfg.model)
    hooks = [HOOKS.build(hook) for hook in options['custom_hooks']]
    assert all(METRICS.build(metric) for metric in options['val_evaluator'])
    runner = SimpleNamespace(model=model, max_iters=100, max_epochs=10, logger=logging.getLogger('runner'))
    for hook in hooks[:3]:
        hook.before_train(runner)
    assert model.count_macs
    assert [loss.loss_name for loss in model.gate_losses] == [
        'loss_batch_shaping', 'loss_l0', 'loss_mac_budget', 'loss_distillation', 'loss_feature_shaping']
    build_optim_wrapper(model, cfg.optim_wrapper)


def test_camvid(tmp_path):
    for kind, suffix, values in (('images', 'jpg', (6, 8, 3)), ('annotations', 'png', (6, 8))):
        (tmp_path / kind / 'train').mkdir(parents=True)
        Image.fromarray(np.full(values, 5, dtype=np.uint8)).save(tmp_path / kind / 'train' / f'0001.{suffix}')
    cfg = Config.fromfile(ROOT / 'configs' / 'mmseg' / 'pspnet' / 'gated-pspnet_r18-d8_1xb8-600_camvid-160x208.py')
    cfg = cfg.train_dataloader.dataset
    cfg.data_root = str(tmp_path)
    cfg.pipeline = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'), dict(type='PackSegInputs')]
    with DefaultScope.overwrite_default_scope('mmseg'):
        data_set = DATASETS.build(cfg)
        assert (data_set[0]['data_samples'].gt_sem_seg.data == 5).all()
    assert len(data_set) == 1 and data_set.metainfo['classes'][5] == 'tree' and len(data_set.metainfo['palette']) == 11
