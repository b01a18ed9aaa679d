"""Model cards: description, measured figures, training settings and usage of a model

A card is the `README.md` of a model on the hub, with the metadata that the hub reads. It contains only figures that the
caller measured. Its pictures are files beside it: the gates of each layer, and accuracy against MACs.
"""
import math
import re
from pathlib import PurePath
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch.nn as nn
import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from .. import analysis
from ..analysis import GateCounts
from ..layers import gates

__all__ = ['PICTURES', 'SOMEWHERE', 'IllustratedCard', 'model_card', 'training_settings']

SOMEWHERE = 'owner/name'  # placeholder in the card of a model that is not on the hub yet

PICTURES = GATES, TRADE_OFF = 'gates.png', 'trade_off.png'  # files beside the card of a folder

_PAPER = 'arXiv:1907.06627'
_CITATION = """\
@inproceedings{bejnordi2020batchshaping,
  title     = {Batch-shaping for learning conditional channel gated networks},
  author    = {Babak Ehteshami Bejnordi and Tijmen Blankevoort and Max Welling},
  booktitle = {International Conference on Learning Representations},
  year      = {2020}
}"""

# Training settings that depend on the machine, such as folders and logs, and do not affect the result.
_MACHINE_SETTINGS = {
    'config', 'data', 'data_dir', 'device', 'device_modules', 'experiment', 'local_rank', 'log_interval', 'log_wandb',
    'output', 'pin_mem', 'resume', 'snapshot_dir', 'snapshot_gates', 'wandb_project', 'wandb_resume_id', 'wandb_tags',
    'workers'}


class IllustratedCard(ModelCard):
    """Model card with pictures.

    Attributes:
        pictures: Content of the PNG files that the text refers to, by name. They belong into the folder of the card.
    """
    pictures: Dict[str, bytes]


def model_card(
        model: nn.Module,
        figures: Optional[Mapping[str, Any]] = None,
        dataset: str = '',
        split: str = '',
        training: Union[str, Mapping[str, Any]] = '',
        license: str = '',
        tag: str = '',
        others: Sequence[Mapping[str, Any]] = (),
) -> IllustratedCard:
    """Create the card of a model, with pictures if the figures have gates or there are other results.

    Args:
        model: Model of this package, created by `timm.create_model`.
        figures: Measured figures, from `timm_gated.analysis.summary` or one result of `timm-gated evaluate`.
        dataset: Dataset the figures were measured on, by its name on the hub, such as 'uoft-cs/cifar10'. Without it the
            figures are in the text, but not in the metadata.
        split: Dataset split the figures were measured on.
        training: Training command, or training settings (see `training_settings`).
        license: License of the weights, by default that of the model's config.
        tag: Tag of the weights if they are part of this package (see `timm_gated.models._registry`). The names of the
            pictures then begin with the name of the model.
        others: Results of other models on the same data, such as the dense counterpart, to draw accuracy against MACs.

    Examples:
        >>> card = model_card(model, summary(record), 'uoft-cs/cifar10', 'test', 'python train.py …')
        >>> save_pretrained(model, 'folder', card=card)
    """
    cfg: Dict[str, Any] = model.pretrained_cfg  # type: ignore[assignment]
    name = f'{cfg["architecture"]}.{tag}' if tag else cfg['architecture']
    license = license or cfg.get('license') or ''
    layers = (figures or {}).get('layers')
    figures = _checked(model, figures or {})
    task = 'image-classification' if model.num_classes else 'image-feature-extraction'
    results = _results(figures, task, dataset, split) if dataset else None
    data = ModelCardData(
        license=license or None,
        library_name='timm',
        pipeline_tag=task,
        tags=[task, 'timm', 'timm_gated', 'conditional-computation'],
        datasets=[dataset] if dataset else None,
        metrics=['accuracy'] if 'top1' in figures else None,
        model_name=name if results else None,
        eval_results=results,
    )
    kind = 'whose gates decide, for each image, what of it is computed' if gates(model) else 'without gates'
    pictures, shown = _pictures(name, figures, layers or {}, others, f'{name}.' if tag else '')
    sections = [
        f'# {name}',
        f'`{cfg["architecture"]}` of timm-gated: a residual network {kind}. It is a timm model, and takes images of '
        f'{" × ".join(map(str, cfg["input_size"]))}.',
        '## Figures', _figures(model, figures, f' of {dataset}{f", {split}" if split else ""}' if dataset else ''),
        *shown,
        '## Use', _block('python', _usage(name if tag else f'hf-hub:{SOMEWHERE}')),
    ]
    if training:
        sections += ['## Training', *_training(training)]
    if license:
        sections += ['## Licence', f'{license}']
    papers = cfg.get('paper_ids') or ()
    papers = [paper for paper in ([papers] if isinstance(papers, str) else papers) if paper != _PAPER]
    links = [f'<https://arxiv.org/abs/{paper.split(":")[1]}>' for paper in papers if paper.startswith('arXiv:')]
    cited = [f'Of the network: {", ".join(links)}. Of gates and batch shaping:'] if links else []
    sections += ['## Citation', *cited, _block('bibtex', _CITATION)]
    card = IllustratedCard(f'---\n{data.to_yaml()}\n---\n\n' + '\n\n'.join(sections) + '\n')
    card.pictures = pictures
    return card


def training_settings(args: Mapping[str, Any]) -> Dict[str, Any]:
    """Training settings without those that are unset or depend on the machine.

    Paths are removed; only the file name of `initial_checkpoint` is kept.

    Args:
        args: Settings, as timm's `train.py` writes them to `args.yaml`.
    """
    settings = {}
    for key, value in args.items():
        if isinstance(value, Mapping):
            value = training_settings(value)
        elif key == 'initial_checkpoint' and value:
            value = PurePath(value).name
        if key in _MACHINE_SETTINGS or value is None or value in ('', [], {}) or _is_path(value):
            continue
        settings[key] = value
    return settings


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and re.match(r'(/|~|\.\.?/|[A-Za-z]:[\\/]|\\\\)', value) is not None


def _checked(model: nn.Module, figures: Mapping[str, Any]) -> Dict[str, Any]:
    """Return the known figures; raise a ValueError if they are of another model."""
    numbers = (
        'num_samples', 'subset_of', 'top1', 'top5', 'pixel_accuracy', 'mean_macs', 'dense_macs', 'macs_share',
        'parameters', 'parameters_used', 'num_gates', 'gate_density', 'threshold', *GateCounts._fields)
    known = {key: figures[key] for key in numbers if figures.get(key) is not None}
    for key, value in known.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f'the figure {key} must be a number, got {value!r}.')
    own = {
        'parameters': sum(parameter.numel() for parameter in model.parameters()),
        'num_gates': sum(gate.num_gates for _, gate in gates(model))}
    layers = {layer: sum(counts.values()) for layer, counts in (figures.get('layers') or {}).items()}
    if layers and layers != {layer: gate.num_gates for layer, gate in gates(model)}:
        raise ValueError(f'the figures are of another model, with gates in {", ".join(layers)}. Evaluate this one.')
    for key, value in own.items():
        if key in known and known[key] != value:
            raise ValueError(
                f'the figures are of another model: {key} is {known[key]} there, and {value} here. Evaluate this one.')
    return known


def _results(figures: Mapping[str, Any], task: str, dataset: str, split: str) -> Optional[List[EvalResult]]:
    metrics = (('top1', 'accuracy', 'top-1'), ('top5', 'top_5_accuracy', 'top-5'))
    return [
        EvalResult(
            task_type=task, dataset_type=dataset, dataset_name=dataset, dataset_split=split or None,
            metric_type=kind, metric_name=name, metric_value=round(figures[key], 2))
        for key, kind, name in metrics if key in figures] or None


def _figures(model: nn.Module, figures: Mapping[str, Any], data: str) -> str:
    """Table of the figures, and how they were measured."""
    parameters = f'{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.3f} M'
    rows: List[Tuple[str, str]] = []
    for key, name in (('top1', 'top-1 accuracy'), ('top5', 'top-5 accuracy'), ('pixel_accuracy', 'accuracy of pixels')):
        if key in figures:
            rows.append((name, f'{figures[key]:.2f} %'))
    if 'mean_macs' in figures:
        rows.append(('MACs of an image, on average', f'{figures["mean_macs"] / 1e6:.2f} M'))
    if 'macs_share' in figures:
        rows.append((
            'share of the MACs of the network without gates', f'{100 * figures["macs_share"]:.1f} %' + (
                f' of {figures["dense_macs"] / 1e6:.2f} M' if 'dense_macs' in figures else '')))
    rows.append(('parameters', parameters))
    if 'parameters_used' in figures:
        rows.append(('of which an image used, on average', f'{figures["parameters_used"] / 1e6:.3f} M'))
    counts = GateCounts(*(figures.get(kind, -1) for kind in GateCounts._fields))
    if min(counts) >= 0:
        rows.append((
            'gates', f'{counts.always_on} always on, {counts.conditional} conditional, {counts.always_off} always off'))
    if 'gate_density' in figures:
        rows.append(('open gates, on average', f'{100 * figures["gate_density"]:.1f} %'))
    table = '\n'.join(['| | |', '| --- | --- |', *(f'| {name} | {value} |' for name, value in rows)])
    if not figures:
        return f'{table}\n\nNothing else was measured.'
    count = f'{figures["num_samples"]:,} images' if 'num_samples' in figures else 'images'
    if 'subset_of' in figures:
        count = f'{figures["num_samples"]:,} of the {figures["subset_of"]:,} images, spread evenly,'
    notes = [f'Measured on {count}{data}.']
    if 'threshold' in figures and min(counts) >= 0:
        share = f'{100 * figures["threshold"]:g} %'
        notes.append(f'A gate is always on, or off, if it is so for more than {share} of them.')
    return f'{table}\n\n{" ".join(notes)}'


def _pictures(
        name: str,
        figures: Mapping[str, Any],
        layers: Mapping[str, Mapping[str, int]],
        others: Sequence[Mapping[str, Any]],
        prefix: str,
) -> Tuple[Dict[str, bytes], List[str]]:
    """Pictures of a card by file name, and the Markdown that shows them."""
    pictures, shown = {}, []
    if layers:
        pictures[f'{prefix}{GATES}'] = analysis.gates_picture(name, layers)
        shown.append(f'![Always-on, conditional and always-off gates of each layer]({prefix}{GATES})')
    if figures and others:
        own = {**figures, 'name': name, 'model': name}
        pictures[f'{prefix}{TRADE_OFF}'] = analysis.trade_off_picture(own, others)
        points = ', '.join(
            f'{other["name"]} {other["top1"]:.2f} % at {other["mean_macs"] / 1e6:.2f} M' for other in (own, *others))
        shown.append(f'![Top-1 accuracy against mean MACs: {points}]({prefix}{TRADE_OFF})')
    return pictures, shown


def _usage(name: str) -> str:
    return f"""\
import timm
import timm_gated  # registers the model

model = timm.create_model('{name}', pretrained=True).eval()"""


def _training(training: Union[str, Mapping[str, Any]]) -> List[str]:
    if isinstance(training, str):
        return [_block('bash', training.strip())]
    settings = yaml.safe_dump(dict(training), sort_keys=False, allow_unicode=True).strip()
    return ["By timm's `train.py`, with `--data-dir` and these settings as `--config`:", _block('yaml', settings)]


def _block(language: str, text: str) -> str:
    fence = '```'
    while fence in text:
        fence += '`'
    return f'{fence}{language}\n{text}\n{fence}'
