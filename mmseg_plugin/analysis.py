"""Gate analysis of segmentors: models and test data for `timm_gated.analysis`

An image belongs to every class in its label map, so the open gates of a class are those of all images that contain it.
The accuracy of an image is the share of correct labelled pixels; its confidence is the mean over its pixels.
"""
import argparse
from pathlib import Path
from typing import Any, Iterable, Optional, Sequence, Tuple

import numpy as np
import torch
import torch.nn as nn
from mmengine.config import Config, DictAction
from mmengine.registry import init_default_scope
from mmengine.runner import Runner, load_checkpoint
from mmseg.registry import MODELS

from timm_gated.analysis import Data, Outcome, limit_loader, note_untrained
from timm_gated.utils import explained

from .checkpoints import extend_checkpoint_loader

__all__ = ['create_segmentation', 'load_config', 'relabel', 'segmentation_outcome']


def create_segmentation(
        config: str,
        checkpoint: str = '',
        cfg_options: Sequence[str] = (),
        device: str = 'cpu',
        untrained: bool = False,
        limit: Optional[int] = None,
) -> Tuple[nn.Module, Data]:
    """Build the model of an mmseg config and the loader of its `test_dataloader`.

    Args:
        config: Path of the config.
        checkpoint: Path of the weights; `load_from` of the config if empty.
        cfg_options: Settings to override, each KEY=VALUE as in mmseg's scripts.
        device: Device of the model.
        untrained: Whether random weights are allowed; `load_from` of the config is then ignored.
        limit: Maximum number of images, spread evenly over the data set; None for all.
    """
    cfg = load_config(config, cfg_options)
    checkpoint = checkpoint or (not untrained and cfg.get('load_from')) or ''
    if checkpoint and not Path(checkpoint).is_file():
        raise ValueError(f'there is no file {checkpoint}.')
    init_default_scope(cfg.get('default_scope', 'mmseg'))
    model = MODELS.build(cfg.model)
    extend_checkpoint_loader()  # (mmseg's own segmentors do not)
    if model.test_cfg.get('mode') != 'whole':
        raise ValueError(
            f"test_cfg.mode must be 'whole', got '{model.test_cfg.get('mode')}': with sliding windows gates decide per "
            f"crop, not per image. Override it with --cfg-options model.test_cfg.mode=whole.")
    if checkpoint:
        with explained(f'{checkpoint} does not load into the model of {config}'):
            load_checkpoint(model, checkpoint, map_location='cpu', strict=True)
    note_untrained(model, bool(checkpoint), allowed=untrained, remedy='Give --checkpoint FILE, or --untrained.')
    try:
        loader: Any = Runner.build_dataloader(cfg.test_dataloader)
    except FileNotFoundError as error:
        raise ValueError(
            f'the data of test_dataloader is missing: {error.filename} does not exist. Prepare the dataset as '
            f"described in mmseg's docs/en/user_guides/2_dataset_prepare.md, or set its location with --cfg-options "
            f'test_dataloader.dataset.data_root=DIR.') from error
    class_names = list(loader.dataset.metainfo['classes'])
    loader, subset_of = limit_loader(loader, limit)
    bgr = model.data_preprocessor.channel_conversion  # the pipeline loads BGR, the model converts it

    def fetch_image(index: int) -> np.ndarray:
        pixels = loader.dataset[index]['inputs'].permute(1, 2, 0).numpy()
        return np.ascontiguousarray(pixels[..., ::-1] if bgr else pixels)

    def step(batch: Any) -> Outcome:
        return segmentation_outcome(model.test_step(batch), len(class_names))

    return model.to(device).eval(), Data(loader, class_names, fetch_image, step, subset_of)


def load_config(config: str, cfg_options: Sequence[str] = ()) -> Config:
    """Read an mmseg config.

    Args:
        config: Path of the config.
        cfg_options: Settings to override, each KEY=VALUE as in mmseg's scripts.
    """
    if not Path(config).is_file():
        raise ValueError(f'there is no file {config}.')
    parser = argparse.ArgumentParser()
    parser.add_argument('--cfg-options', nargs='*', action=DictAction, default={})
    cfg = Config.fromfile(config)
    cfg.merge_from_dict(parser.parse_args(['--cfg-options', *cfg_options]).cfg_options)
    return cfg


def segmentation_outcome(
        results: Iterable[Any],
        num_classes: int,
        classes: Optional[Sequence[int]] = None,
) -> Outcome:
    """Classes, accuracy and confidence of each image of a batch.

    Args:
        results: Predicted data samples with label maps.
        num_classes: Number of classes of the segmentor; unused if `classes` is given.
        classes: Labels to restrict pixels and predictions to. The outputs of the segmentor are those of these labels,
            in this order, or of all labels.
    """
    members, correct, confidence = [], [], []
    for result in results:
        if 'gt_sem_seg' not in result:
            raise ValueError(
                'an image has no label map: add LoadAnnotations to the pipeline of test_dataloader, as for mIoU.')
        logits = result.seg_logits.data
        if not logits.isfinite().all():
            raise ValueError(
                f'the output of the model is not finite (NaN or infinity) for {result.get("img_path", "an image")}: '
                f'the weights or the input are invalid. Check that the training was stable.')
        truth, prediction = result.gt_sem_seg.data.flatten().to(logits.device), result.pred_sem_seg.data.flatten()
        if classes is not None:
            truth = relabel(truth, classes)
            logits = logits if len(logits) == len(classes) else logits[list(classes)]
            prediction = logits.argmax(0).flatten()
        num_members = num_classes if classes is None else len(classes)
        labelled = truth < num_members  # 255 is ignored
        members.append(torch.bincount(truth[labelled], minlength=num_members) > 0)
        correct.append((truth == prediction)[labelled].float().mean().nan_to_num())
        confidence.append(torch.softmax(logits.float(), dim=0).amax(0).mean())
    return Outcome(torch.stack(members), torch.stack(correct), torch.stack(confidence))


def relabel(labels: torch.Tensor, classes: Sequence[int]) -> torch.Tensor:
    """Replace each label by its position in `classes`, and all other labels by 255 (ignored)."""
    numbers = torch.full((256,), 255, dtype=labels.dtype, device=labels.device)
    numbers[list(classes)] = torch.arange(len(classes), dtype=labels.dtype, device=labels.device)
    return numbers[labels.long()]
