"""Gated segmentors and backbones from the weights of dense ones: one line in a config"""
import copy
import logging
from pathlib import Path
from typing import Any, Dict

import mmseg_plugin  # noqa: F401  (must precede imports of mmseg)

# isort: split
import pytest
import torch
import torch.nn as nn
from mmengine.config import Config, ConfigDict
from mmengine.registry import DefaultScope
from mmengine.runner import load_checkpoint
from mmseg.registry import MODELS
from mmseg_small import OTHERS, narrowed
from nets import images, shuffle

from timm_gated import force_gates, gates

IMAGES = images(2, 3, 64, 64)
SIZE = dict(depth=50, base_channels=8, stem_channels=8)
# Gated backbones and their dense counterparts
BACKBONES = [
    (dict(type='GatedResNetV1c', **SIZE), dict(type='ResNetV1c', **SIZE)),
    (dict(type='GatedResNeXt', groups=4, base_width=4, **SIZE), dict(type='ResNeXt', groups=4, base_width=4, **SIZE)),
    (dict(type='TimmGatedBackbone', model_name='gated_resnet18'), dict(type='ResNet', depth=18)),
]
backbones = pytest.mark.parametrize('gated, dense', BACKBONES, ids=[gated['type'] for gated, _ in BACKBONES])


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setattr('mmengine.runner.checkpoint.load_from_http', lambda *args, **kwargs: pytest.fail('downloaded'))


def build(cfg: Dict[str, Any]) -> Any:
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = MODELS.build(cfg)
    model.eval()
    return model


def gate_weights(model: nn.Module) -> Dict[str, torch.Tensor]:
    return {
        f'{name}.{key}': value.clone() for name, gate in gates(model) for key, value in gate.state_dict().items()}


def initialize(model: Any, caplog: Any) -> None:
    """Initialise as mmengine's runner does; gates keep their initialisation, with a message."""
    before, count = gate_weights(model), len(gates(model))
    with caplog.at_level(logging.WARNING):
        model.init_weights()
    assert f'no weights for {count} of {count} gates; these keep their fresh initialisation' in caplog.text
    assert all(torch.equal(value, before[key]) for key, value in gate_weights(model).items()) and before


@backbones
@pytest.mark.parametrize('source', ['backbone', 'segmentor', 'prefix'])
def test_backbones(gated, dense, source, tmp_path, caplog):
    """From the weights of a backbone, of a network, or of the part of a network that mmengine's option selects."""
    trained, path = shuffle(build(dense)), str(tmp_path / 'dense.pth')
    weights = trained.state_dict()
    if source != 'backbone':
        weights = {f'backbone.{key}': value for key, value in weights.items()} | {'head.fc.weight': torch.zeros(5, 8)}
    torch.save({'state_dict': weights, 'meta': {}}, path)
    init_cfg = dict(type='Pretrained', checkpoint=path) | (dict(prefix='backbone.') if source == 'prefix' else {})
    backbone = build(dict(gated, init_cfg=init_cfg))
    initialize(backbone, caplog)
    assert 'unexpected key' not in caplog.text
    with torch.no_grad(), force_gates(backbone, 'open'):
        for ours, theirs in zip(backbone(IMAGES)[-4:], trained(IMAGES), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@backbones
def test_other_networks(gated, dense, tmp_path):
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / 'linear.pth')
    backbone = build(dict(gated, init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'linear.pth'))))
    with pytest.raises(ValueError, match='no weights for a Gated.*are called weight, bias|missing: '):
        backbone.init_weights()


def dense_model(path: Path) -> ConfigDict:
    """The dense model of a config."""
    cfg = Config.fromfile(path)
    cfg.merge_from_dict(dict(model=narrowed(path)))
    model = copy.deepcopy(cfg.model)
    model.update(type='EncoderDecoder')
    model.backbone.update(type=model.backbone.type.removeprefix('Gated'), init_cfg=None)
    for option in ('count_macs', 'gate_losses'):
        del model[option]
    return model


@pytest.mark.parametrize('path', [path for path in OTHERS if '_r50' not in path.stem], ids=lambda path: path.stem)
def test_segmentors(path, tmp_path, caplog):
    """With `init_cfg` of the segmentor, the weights of the backbone that the config names are not downloaded."""
    trained, checkpoint = shuffle(build(dense_model(path))), str(tmp_path / 'dense.pth')
    torch.save({'state_dict': trained.state_dict(), 'meta': {}}, checkpoint)
    cfg = Config.fromfile(path)
    cfg.merge_from_dict(dict(model=narrowed(path)))
    loaded = build(cfg.model)
    load_checkpoint(loaded, checkpoint)  # as with `load_from`
    cfg.model.init_cfg = dict(type='Pretrained', checkpoint=checkpoint)
    initialized = build(cfg.model)
    initialize(initialized, caplog)
    with torch.no_grad():
        expected = trained(IMAGES, mode='tensor')
        for gated in (loaded, initialized):
            with force_gates(gated, 'open'):
                torch.testing.assert_close(gated(IMAGES, mode='tensor'), expected, atol=1e-4, rtol=1e-4)
