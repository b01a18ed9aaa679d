"""The gates of a segmentor over its test data, for `timm_gated.analysis`

An image belongs to every class that its label map shows, so what a class has open is what images with it have open.
Its accuracy is the share of its labelled pixels that are right, its confidence the mean over its pixels.
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

from timm_gated.analysis import Data, Outcome, note_untrained
from timm_gated.utils import explained

from .checkpoints import extend_checkpoint_loader

__all__ = ['create_segmentation', 'load_config', 'relabel', 'segmentation_outcome']


def create_segmentation(
        config: str,
        checkpoint: str = '',
        cfg_options: Sequence[str] = (),
        device: str = 'cpu',
        untrained: bool = False,
) -> Tuple[nn.Module, Data]:
    """Make the model of an mmseg config and the loader of its `test_dataloader`.

    Args:
        config: Path of the config.
        checkpoint: Weights of the model; empty for those that the config loads (`load_from`).
        cfg_options: Settings to override, each KEY=VALUE as in mmseg's scripts.
        device: Where the model goes.
        untrained: Allow random weights, and load none without a checkpoint.
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
            f"gates decide once for every crop, so an image must be run as a whole: test_cfg.mode must be 'whole', got "
            f"'{model.test_cfg.get('mode')}'. Override it with --cfg-options model.test_cfg.mode=whole.")
    if checkpoint:
        with explained(f'{checkpoint} does not load into the model of {config}'):
            load_checkpoint(model, checkpoint, map_location='cpu', strict=True)  # or parts might stay random
    note_untrained(model, bool(checkpoint), allowed=untrained, remedy='Give --checkpoint FILE, or --untrained.')
    try:
        loader = Runner.build_dataloader(cfg.test_dataloader)
    except FileNotFoundError as error:
        raise ValueError(
            f"the data of the config's test_dataloader is not there: {error.filename} does not exist. Prepare the data "
            f"set as mmseg's docs/en/user_guides/2_dataset_prepare.md says, or give its place by --cfg-options "
            f'test_dataloader.dataset.data_root=DIR.') from error
    dataset: Any = loader.dataset
    class_names = list(dataset.metainfo['classes'])
    bgr = model.data_preprocessor.channel_conversion  # the pipeline loads BGR, and the model turns it

    def fetch_image(index: int) -> np.ndarray:
        pixels = dataset[index]['inputs'].permute(1, 2, 0).numpy()
        return np.ascontiguousarray(pixels[..., ::-1] if bgr else pixels)

    def step(batch: Any) -> Outcome:
        return segmentation_outcome(model.test_step(batch), len(class_names))

    return model.to(device).eval(), Data(loader, class_names, fetch_image, step)


def load_config(config: str, cfg_options: Sequence[str] = ()) -> Config:
    """Read an mmseg config.

    Args:
        config: Its path.
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
    """How a batch of a segmentor went.

    Args:
        results: Data samples of its prediction, with their label maps.
        num_classes: Number of classes that the segmentor chooses among.
        classes: Look at pixels of these labels only, and choose among them: all of the segmentor's outputs, in this
            order, or so many of its outputs.
    """
    members, correct, confidence = [], [], []
    for result in results:
        if 'gt_sem_seg' not in result:
            raise ValueError(
                'an image has no label map: the pipeline of the test_dataloader needs LoadAnnotations, as for mIoU.')
        logits = result.seg_logits.data
        if not logits.isfinite().all():
            raise ValueError(
                f'the output of the model is not finite (NaN or infinity) for {result.get("img_path", "an image")}: '
                f'the weights or the input are broken. Was the training stable?')
        truth, prediction = result.gt_sem_seg.data.flatten().to(logits.device), result.pred_sem_seg.data.flatten()
        if classes is not None:
            truth = relabel(truth, classes)
            logits = logits if len(logits) == len(classes) else logits[list(classes)]
            prediction = logits.argmax(0).flatten()
        num_members = num_classes if classes is None else len(classes)
        labelled = truth < num_members  # 255 is no class
        members.append(torch.bincount(truth[labelled], minlength=num_members) > 0)
        correct.append((truth == prediction)[labelled].float().mean().nan_to_num())
        confidence.append(torch.softmax(logits.float(), dim=0).amax(0).mean())
    return Outcome(torch.stack(members), torch.stack(correct), torch.stack(confidence))


def relabel(labels: torch.Tensor, classes: Sequence[int]) -> torch.Tensor:
    """Number labels within some classes; 255, no class, for all others."""
    numbers = torch.full((256,), 255, dtype=labels.dtype, device=labels.device)
    numbers[list(classes)] = torch.arange(len(classes), dtype=labels.dtype, device=labels.device)
    return numbers[labels.long()]
