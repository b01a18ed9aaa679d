"""A small version of the paper's segmentation experiment, for the tests of mmseg's machinery"""
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[1]
BASE = ROOT / 'configs' / 'mmseg' / 'pspnet' / 'gated-pspnet_r50-d8_1xb6-150k_cityscapes-448x672.py'

# The paper's config, with a small network on small images.
CONFIG = """
_base_ = [{base!r}]
data_root = {data_root!r}
loader = dict(num_workers=0, persistent_workers=False)
train_pipeline = [
    dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'), dict(type='RandomCrop', crop_size=(64, 64)),
    dict(type='PackSegInputs')]
test_pipeline = [dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'), dict(type='PackSegInputs')]
train_dataloader = dict(batch_size=2, dataset=dict(data_root=data_root, pipeline=train_pipeline), **loader)
val_dataloader = dict(dataset=dict(data_root=data_root, pipeline=test_pipeline), **loader)
test_dataloader = val_dataloader
model = dict(
    data_preprocessor=dict(size=(64, 64)),
    backbone=dict(depth=18),
    decode_head=dict(in_channels=512, channels=32),
    auxiliary_head=dict(in_channels=256, channels=16))
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=2))
train_cfg = dict(val_interval=2)
custom_hooks = [
    dict(type='GateStatisticsHook'),
    dict(type='GateLossScheduleHook', loss_name='loss_batch_shaping', schedule='linear_anneal', begin=0, end=4)]
"""


def write_config(folder: Path) -> Path:
    """Make a data set of Cityscapes' layout (four training and three validation images) and a config that uses it."""
    data_root = folder / 'cityscapes'
    rng = np.random.default_rng(0)
    for split, count in (('train', 4), ('val', 3)):
        images, labels = data_root / 'leftImg8bit' / split / 'town', data_root / 'gtFine' / split / 'town'
        images.mkdir(parents=True)
        labels.mkdir(parents=True)
        for i in range(count):
            brightest = 255 * (i + 1) // count  # so that gates do not see the same average in all of them
            Image.fromarray(rng.integers(0, brightest, (64, 128, 3), dtype=np.uint8)).save(
                images / f'town_{i:06d}_000000_leftImg8bit.png')
            Image.fromarray(rng.integers(0, 19, (64, 128), dtype=np.uint8)).save(
                labels / f'town_{i:06d}_000000_gtFine_labelTrainIds.png')
    config = folder / 'config.py'
    config.write_text(CONFIG.format(base=str(BASE), data_root=str(data_root)))
    return config
