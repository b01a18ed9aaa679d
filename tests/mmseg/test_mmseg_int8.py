"""Segmentors in int8, calibrated with mmseg's loaders and with tensors"""
import itertools
from typing import Any

import mmseg_plugin  # noqa: F401  (must precede imports of mmseg)

# isort: split
import pytest
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmengine.runner import Runner
from mmseg.registry import MODELS
from mmseg_small import write_config
from nets import shuffle

from timm_gated import accelerate
from timm_gated.inference.calibration import calibration_images


@pytest.fixture(scope='module')
def segmentation(tmp_path_factory) -> Any:
    """A small gated PSPNet, a loader of the training images, and its batches as the network gets them."""
    cfg = Config.fromfile(write_config(tmp_path_factory.mktemp('int8')))
    cfg.model.backbone.update(base_channels=16, stem_channels=16)
    cfg.model.decode_head.in_channels, cfg.model.auxiliary_head.in_channels = 128, 64
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = shuffle(MODELS.build(cfg.model)).eval()
        cfg.val_dataloader.update(batch_size=2)
        loader = Runner.build_dataloader(cfg.val_dataloader)
    return model, loader, [model.data_preprocessor(batch)['inputs'] for batch in loader]


def segment(model: Any, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(images, mode='tensor')


def test_images_are_those_of_inference(segmentation):
    model, loader, batches = segmentation
    assert [len(batch) for batch in batches] == [2, 1] and batches[0].dtype == torch.float32
    for calibration in (loader, iter(loader), batches, [(images, None) for images in batches]):
        for images, expected in zip(calibration_images(calibration, model), batches, strict=True):
            assert torch.equal(images, expected)


@pytest.mark.parametrize('kind', ['loader', 'generator', 'tensor'])
def test_int8_is_close_to_float32(segmentation, kind):
    model, loader, batches = segmentation
    images = torch.cat(batches)
    calibration = {'loader': loader, 'generator': itertools.islice(loader, 2), 'tensor': images}[kind]
    expected = segment(model, images)
    fast = accelerate(model, precision='int8', calibration=calibration)
    assert (segment(fast, images) - expected).std() < 0.15 * expected.std()
    predicted = [result.pred_sem_seg.data for batch in loader for result in fast.test_step(batch)]
    assert len(predicted) == 3 and predicted[0].shape == (1, 64, 128)


def test_generator_for_several_networks(segmentation):
    """Each network gets all batches."""
    model, _, batches = segmentation
    other = MODELS.build(dict(type='GatedResNet', depth=18, base_channels=8, stem_channels=8))
    pair, images = nn.ModuleList([model.backbone, shuffle(other)]).eval(), batches[0]
    fast = accelerate(pair, precision='int8', calibration=(batch for batch in batches))
    with torch.no_grad():
        for network, original in zip(fast, pair, strict=True):
            for ours, theirs in zip(network(images), original(images), strict=True):
                assert (ours - theirs).std() < 0.15 * theirs.std()


def test_batches_of_other_networks(segmentation):
    model, loader, _ = segmentation
    with pytest.raises(ValueError, match='images must be a dense tensor, got dict'):
        accelerate(model.backbone, precision='int8', calibration=loader)
