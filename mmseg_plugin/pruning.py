"""`prune_static`, `specialize` and `calibrate` for segmentors

As in `timm_gated.pruning`, with mmseg's loaders and pixel accuracy. An image belongs to every class in its label map.
mmseg's scripts test or fine-tune the result with the config of `pruned_config` and the pruned weights.
"""
import copy
from pathlib import Path
from typing import Any, Dict, Iterable, Iterator, List, Optional, Sequence, Union

import torch
import torch.nn as nn
from mmengine.config import Config
from mmseg.registry import DATASETS

from timm_gated.analysis import Outcome
from timm_gated.layers import gates
from timm_gated.pruning import Calibrated, Pruned, calibrate_with, check_classes, check_repeatable, prune_with
from timm_gated.utils import new_folder

from .analysis import relabel, segmentation_outcome
from .backbones import GatedResNet, backbone_cfg

__all__ = ['calibrate', 'prune_static', 'pruned_config', 'save', 'specialize']

_GATE_HOOKS = ('GateLossScheduleHook', 'GateStatisticsHook')


def prune_static(
        model: nn.Module,
        loader: Iterable[Any],
        threshold: float = 0.99,
        eval_loader: Optional[Iterable[Any]] = None,
) -> Pruned:
    """Remove filters whose gate is always off and gates that are always on.

    Args:
        model: Segmentor with a gated backbone of this package.
        loader: Test loader of mmseg that classifies the gates. Its pipeline must have `LoadAnnotations`.
        threshold: Share of images above which a gate counts as always off or always on, in (0.5, 1].
        eval_loader: Test loader that the figures are measured on; `loader` by default.
    """
    num_classes = _num_classes(model)

    def segment(network: Any, batch: Any) -> Outcome:
        return segmentation_outcome(network.test_step(batch), num_classes)

    names = [str(label) for label in range(num_classes)]
    return prune_with(model, segment, names, loader, threshold, adapt=_without_losses, eval_loader=eval_loader)


def specialize(
        model: nn.Module,
        loader: Iterable[Any],
        classes: Sequence[int],
        threshold: float = 0.99,
        eval_loader: Optional[Iterable[Any]] = None,
) -> Pruned:
    """Extract the sub-network for some of the classes, without gates and with heads for these classes only.

    Only images that contain one of the classes are used. Accuracy is measured on the pixels of these classes, with the
    predictions of the original network restricted to them. To fine-tune the result, train it with `pruned_config`.

    Args:
        model: Segmentor with a gated backbone of this package.
        loader: Test loader of mmseg that classifies the gates. Its pipeline must have `LoadAnnotations`.
        classes: Labels of the classes, in the order of the outputs.
        threshold: Share of images above which a gate counts as always off, in (0.5, 1]. Its filter is removed.
        eval_loader: Test loader that the figures are measured on; `loader` by default.
    """
    num_classes = _num_classes(model)
    classes = check_classes(classes, num_classes)
    for head in _heads(model):
        _check_head(head)
    for source in filter(None, (loader, eval_loader)):
        check_repeatable(source)

    def segment(network: Any, batch: Any) -> Outcome:
        return segmentation_outcome(network.test_step(batch), num_classes, classes)

    def adapt(network: nn.Module) -> nn.Module:
        for head in _heads(network):
            _cut_head(head, classes)
        return _without_losses(network)

    return prune_with(
        model, segment, [str(label) for label in classes], _ImagesWith(loader, classes), threshold, keep_gates=False,
        adapt=adapt, eval_loader=None if eval_loader is None else _ImagesWith(eval_loader, classes))


def calibrate(
        model: nn.Module,
        loader: Iterable[Any],
        share: float = 0.6,
        by: str = 'cost',
        tolerance: float = 0.002,
) -> Calibrated:
    """Shift the thresholds of a segmentor's gates so that its average MACs, heads included, meet a share.

    Args:
        model: Segmentor with a gated backbone.
        loader: Test loader of mmseg. It needs no annotations.
        share: Average MACs as a share of those of the dense segmentor.
        by: How the thresholds are shifted, see `timm_gated.calibrate`.
        tolerance: Largest difference between `share` and the measured share.
    """
    def segment(network: Any, batch: Any) -> None:
        network.test_step(batch)

    return calibrate_with(model, segment, loader, share, by, tolerance)


def pruned_config(cfg: Config, model: Any, classes: Optional[Sequence[int]] = None) -> Config:
    """Config of a pruned segmentor.

    Args:
        cfg: Config of the original segmentor.
        model: Pruned segmentor.
        classes: Labels of a specialised segmentor, to which its datasets are restricted.
    """
    cfg = copy.deepcopy(cfg)
    cfg.model.backbone = backbone_cfg(model.backbone)
    cfg.model.pretrained = None
    cfg.resume = False
    if isinstance(model.backbone, GatedResNet):
        return cfg
    cfg.model.gate_losses = []
    cfg.custom_hooks = [
        hook for hook in cfg.get('custom_hooks', []) if str(hook['type']).rpartition('.')[2] not in _GATE_HOOKS]
    if classes is not None:
        for head in ('decode_head', 'auxiliary_head'):
            for head_cfg in _listed(cfg.model.get(head)):
                head_cfg.num_classes = len(classes)
                for loss in _listed(head_cfg.get('loss_decode')):
                    if isinstance(loss.get('class_weight'), list):
                        loss.class_weight = [loss.class_weight[label] for label in classes]
        for loader in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
            for dataset in _datasets(cfg[loader].dataset if cfg.get(loader) else None):
                names = _class_names(dataset)
                dataset.metainfo = dict(classes=[names[label] for label in classes])
    return cfg


def save(model: nn.Module, cfg: Config, directory: Union[str, Path], classes: Optional[Sequence[int]] = None) -> None:
    """Save a pruned or calibrated segmentor as `config.py` and `weights.pth` in a new folder, for mmseg's scripts.

    Args:
        model: Pruned or calibrated segmentor.
        cfg: Config of the original segmentor.
        directory: Path of the folder.
        classes: Labels of a specialised segmentor.
    """
    cfg = pruned_config(cfg, model, classes)
    cfg.load_from = str(Path(directory).resolve() / 'weights.pth')  # train.py starts from these weights
    with new_folder(directory) as partial:
        cfg.dump(partial / 'config.py')
        torch.save({'state_dict': model.state_dict()}, partial / 'weights.pth')


def _datasets(dataset: Any) -> List[Any]:
    """Configs of the innermost datasets, inside wrappers such as RepeatDataset and ConcatDataset."""
    inner = [*_listed((dataset or {}).get('dataset')), *_listed((dataset or {}).get('datasets'))]
    return [found for each in inner for found in _datasets(each)] if inner else _listed(dataset)


def _class_names(dataset: Any) -> Sequence[str]:
    chosen = (dataset.get('metainfo') or {}).get('classes')
    if chosen is not None:
        return chosen
    return DATASETS.get(dataset['type']).METAINFO['classes']


def _listed(value: Any) -> List[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _heads(model: Any) -> List[Any]:
    """All decode heads and auxiliary heads."""
    return [head for name in ('decode_head', 'auxiliary_head') for head in _modules(getattr(model, name, None))]


def _modules(value: Any) -> List[Any]:
    return list(value) if isinstance(value, nn.ModuleList) else _listed(value)


def _num_classes(model: Any) -> int:
    return _heads(model)[0].num_classes


def _without_losses(model: Any) -> nn.Module:
    """Remove the gate losses of a segmentor that has no gates left."""
    if hasattr(model, 'gate_losses') and not gates(model):
        model.gate_losses = nn.ModuleList()
    return model


def _check_head(head: Any) -> None:
    """Reject a head with parameters per class outside its last layer."""
    last = getattr(head, 'conv_seg', None)
    by_class = [
        name for name, parameter in head.named_parameters()
        if len(parameter) == head.num_classes and not name.startswith('conv_seg.')]
    if not isinstance(last, nn.Conv2d) or head.out_channels != head.num_classes or by_class:
        raise ValueError(
            f'a {type(head).__name__} cannot be reduced to some classes: conv_seg alone does not define its outputs.')


def _cut_head(head: Any, classes: Sequence[int]) -> None:
    """Keep the outputs of some classes, in place."""
    full = head.conv_seg
    head.conv_seg = nn.Conv2d(full.in_channels, len(classes), 1).to(full.weight)
    with torch.no_grad():
        head.conv_seg.weight.copy_(full.weight[list(classes)])
        head.conv_seg.bias.copy_(full.bias[list(classes)])
    head.num_classes = head.out_channels = len(classes)
    for loss in _modules(head.loss_decode):
        if isinstance(getattr(loss, 'class_weight', None), list):
            loss.class_weight = [loss.class_weight[label] for label in classes]


class _ImagesWith:
    """Loader of the images that contain one of some classes."""

    def __init__(self, loader: Iterable[Any], classes: Sequence[int]) -> None:
        self.loader = loader
        self.classes = classes

    def __iter__(self) -> Iterator[Dict[str, Any]]:
        for batch in self.loader:
            shown = [bool((relabel(s.gt_sem_seg.data, self.classes) < 255).any()) for s in batch['data_samples']]
            if any(shown):
                yield {name: [part for part, show in zip(parts, shown, strict=True) if show]
                       for name, parts in batch.items()}
