"""Small segmentors, and a small version of the paper's segmentation experiment"""
from pathlib import Path
from typing import Any, Dict, List

import mmseg
import numpy as np
import torch
from mmengine.config import Config, ConfigDict
from mmengine.structures import PixelData
from mmseg.registry import MODELS
from mmseg.structures import SegDataSample
from paths import ROOT
from PIL import Image

SCRIPTS = Path(mmseg.__file__).parent / '.mim' / 'tools'  # mmseg's train.py and test.py
CONFIGS = sorted((ROOT / 'configs' / 'mmseg').glob('[!_]*/*.py'))
OTHERS = [path for path in CONFIGS if path.parent.name != 'pspnet']
BASE = ROOT / 'configs' / 'mmseg' / 'pspnet' / 'gated-pspnet_r50-d8_1xb6-150k_cityscapes-448x672.py'

# One of our configs with small images.
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
default_hooks = dict(logger=dict(interval=1), checkpoint=dict(interval=2))
train_cfg = dict(val_interval=2)
"""
# The paper's config, `BASE`, with a small network.
PSPNET = """
model = dict(
    data_preprocessor=dict(size=(64, 64)),
    backbone=dict(depth=18),
    decode_head=dict(in_channels=512, channels=32),
    auxiliary_head=dict(in_channels=256, channels=16))
custom_hooks = [
    dict(type='GateStatisticsHook'),
    dict(type='GateLossScheduleHook', loss_name='loss_batch_shaping', schedule='linear_anneal', begin=0, end=4)]
"""

LOSSES = [dict(type='BatchShapingLoss', loss_weight=0.2), dict(type='L0Loss', loss_weight=0.1)]
# The smallest segmentor with gates and both gate losses.
TINY: Dict[str, Any] = dict(
    type='GatedEncoderDecoder',
    backbone=dict(
        type='TIMMBackbone', model_name='gated_resnet20', features_only=True, pretrained=False, out_indices=(1, 2, 3),
        layers=(1, 1, 1), channels=(8, 8, 8)),
    decode_head=dict(
        type='FCNHead', in_channels=8, in_index=2, channels=8, num_convs=0, concat_input=False, dropout_ratio=0.,
        num_classes=5, loss_decode=dict(type='CrossEntropyLoss')),
    gate_losses=LOSSES)


def tiny_samples(count: int) -> List[Dict[str, Any]]:
    """Images and labels for `TINY`, as a dataset returns them."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(count):
        labels = torch.randint(5, (1, 16, 16), generator=generator)
        sample = SegDataSample(metainfo=dict(img_shape=(16, 16)), gt_sem_seg=PixelData(data=labels))
        colour = 3 * torch.randn(3, 1, 1, generator=generator)  # different enough for gates to decide differently
        samples.append(dict(inputs=torch.rand(3, 16, 16, generator=generator) + colour, data_samples=sample))
    return samples


def fcn_head(in_channels: int) -> Dict[str, Any]:
    return dict(
        type='FCNHead', in_channels=in_channels, in_index=3, channels=16, num_convs=1, num_classes=5, dropout_ratio=0.,
        norm_cfg=dict(type='BN'), loss_decode=dict(type='CrossEntropyLoss'))


def segmentor(backbone: Dict[str, Any], in_channels: int, **kwargs: Any) -> Any:
    """A gated segmentor with an FCN head of five classes on the last of four feature maps."""
    cfg = dict(
        type='GatedEncoderDecoder', backbone=backbone, decode_head=fcn_head(in_channels), train_cfg=dict(),
        test_cfg=dict(mode='whole'))
    return MODELS.build(ConfigDict({**cfg, **kwargs}))


def samples(count: int, size: int) -> List[SegDataSample]:
    """Data samples with random labels of five classes for square images."""
    shape = (size, size)
    metainfo = dict(img_shape=shape, ori_shape=shape, pad_shape=shape, padding_size=[0, 0, 0, 0])
    return [
        SegDataSample(metainfo=metainfo, gt_sem_seg=PixelData(data=torch.randint(5, (1, *shape))))
        for _ in range(count)]


def narrowed(path: Path) -> Dict[str, Any]:
    """Settings that give the model of a config small images and an eighth of its channels.

    Args:
        path: Path of the config.
    """
    model = Config.fromfile(path).model
    heads = {
        name: {
            key: [number // 8 for number in value] if isinstance(value, list) else value // 8
            for key, value in model[name].items() if key.endswith('channels')}
        for name in ('decode_head', 'auxiliary_head')}
    return dict(data_preprocessor=dict(size=(64, 64)), backbone=dict(base_channels=8, stem_channels=8), **heads)


def write_config(folder: Path, base: Path = BASE, settings: str = PSPNET) -> Path:
    """Write a dataset in Cityscapes' layout (four training and three validation images) and a config for it.

    Args:
        folder: Folder to write to.
        base: Config to inherit.
        settings: Further lines of the config.
    """
    data_root = folder / 'cityscapes'
    rng = np.random.default_rng(0)
    for split, count in (('train', 4), ('val', 3)):
        images, labels = data_root / 'leftImg8bit' / split / 'town', data_root / 'gtFine' / split / 'town'
        images.mkdir(parents=True)
        labels.mkdir(parents=True)
        for i in range(count):
            brightest = 255 * (i + 1) // count  # so that the mean, which gates see, differs
            Image.fromarray(rng.integers(0, brightest, (64, 128, 3), dtype=np.uint8)).save(
                images / f'town_{i:06d}_000000_leftImg8bit.png')
            Image.fromarray(rng.integers(0, 19, (64, 128), dtype=np.uint8)).save(
                labels / f'town_{i:06d}_000000_gtFine_labelTrainIds.png')
    config = folder / 'config.py'
    config.write_text(CONFIG.format(base=str(base), data_root=str(data_root)) + settings)
    return config
