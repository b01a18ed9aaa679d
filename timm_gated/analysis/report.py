"""A report on the gates of a model: figures, the numbers behind them, and one page that shows all

The folder appears whole or not at all: it is written beside its place, under another name, and moved.
"""
import json
import math
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Union

import numpy as np
import pyarrow
import pyarrow.parquet

from ..loss import Beta, Prior, Snapshots
from .figures import (
    class_similarity_figure,
    firing_figure,
    gate_distribution_figure,
    gates_over_training_figure,
    prior_figure,
)
from .measures import (
    ClassSimilarity,
    Difficulty,
    class_similarity,
    difficulty,
    prior_distance,
    specialised_gates,
    summary,
)
from .page import Section, render_page, write_figure
from .record import GateRecord
from .sample_figures import FetchImage, difficulty_figure, extremes_figure, macs_figure, specialised_figure
from .statistics import GateCounts

__all__ = ['ReportOptions', 'check_target', 'load_distribution', 'write_report']

Distribution = Mapping[str, GateCounts]


@dataclass
class ReportOptions:
    """What a report shows beside the record itself.

    Attributes:
        name: Of the model or run, for titles.
        model: Name of its architecture.
        checkpoint: Where its weights came from.
        data: What it ran over.
        classes: Classes to lay over the firing histograms; by default two that are alike and one that is not.
        groups: Names of classes by group, for the similarity of classes.
        gates: Gates to compare with the prior and to follow over training; by default some far apart.
        prior: Prior of the batch-shaping loss; None if there was none.
        snapshots: Of the training.
        compare: Distributions of other models, by name, to be drawn beside this one's.
        threshold: Share of inputs above which a gate counts as always on or always off.
        rare: Share of the inputs for which a specialised gate may be open, at most.
    """
    name: str = 'gated network'
    model: str = ''
    checkpoint: str = ''
    data: str = ''
    classes: Optional[Sequence[str]] = None
    groups: Optional[Mapping[str, Sequence[str]]] = None
    gates: Optional[Sequence[str]] = None
    prior: Optional[Prior] = field(default_factory=Beta)
    snapshots: Optional[Snapshots] = None
    compare: Mapping[str, Distribution] = field(default_factory=dict)
    threshold: float = 0.99
    rare: float = 0.1


def check_target(folder: Union[str, Path], overwrite: bool = False) -> Path:
    """Return a folder that may be written; refuse one that is there, unless it is a report to be overwritten."""
    path = Path(folder)
    if not overwrite and (path.is_file() or path.is_dir() and any(path.iterdir())):
        raise ValueError(f'{path} exists and is not empty: choose another output, or --overwrite.')
    if overwrite and path.exists() and not (path / 'gates.json').is_file() and (path.is_file() or any(path.iterdir())):
        raise ValueError(f'{path} is no report (it has no gates.json) and will not be overwritten: choose another.')
    return path


def load_distribution(path: Union[str, Path]) -> Dict[str, Distribution]:
    """Distribution of the gates of another report, by its name.

    Args:
        path: The report's folder, or its gates.json.
    """
    path = Path(path)
    path = path / 'gates.json' if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
        counts = {
            layer['name']: GateCounts(*(int(layer[kind]) for kind in GateCounts._fields))
            for layer in content['layers']}
        return {content['results'][0]['name']: counts}
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, LookupError, TypeError) as error:
        raise ValueError(
            f'{path} is no gates.json of a report: {type(error).__name__} {error}. `python tools/analyze_gates.py '
            f'--output DIR` makes a report.') from error


def write_report(
        folder: Union[str, Path],
        record: GateRecord,
        fetch_image: FetchImage,
        options: Optional[ReportOptions] = None,
        overwrite: bool = False,
) -> Path:
    """Write a report: index.html, PNG and SVG of every figure, gates.json, gates.parquet and samples.parquet.

    Args:
        folder: Where to; it must not exist, or be empty, unless `overwrite`.
        record: Of a pass over a data set.
        fetch_image: Fetches an image by its index.
        options: What to show.
        overwrite: Replace an older report.

    Returns:
        The folder.
    """
    target = check_target(folder, overwrite)
    options = options or ReportOptions()
    if not record.layers:
        raise ValueError('the record is of a model without gates: there is nothing to report.')
    similarity, why_not = None, ''
    try:
        similarity = class_similarity(record, options.groups)
    except ValueError as error:
        if options.groups:  # asked for
            raise
        why_not = str(error)
    sections = report_sections(record, fetch_image, options, similarity, why_not)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f'.{target.name}.') as scratch:
        made = Path(scratch) / 'new'
        made.mkdir()
        pictures = [write_figure(made, section) for section in sections]
        content = _numbers(record, options, similarity)
        (made / 'gates.json').write_text(json.dumps(_finite(content), indent=1, allow_nan=False), encoding='utf-8')
        pyarrow.parquet.write_table(_gate_table(record, options.threshold), made / 'gates.parquet')
        pyarrow.parquet.write_table(_sample_table(record), made / 'samples.parquet')
        about = ', '.join(part for part in (options.model, options.checkpoint, options.data) if part)
        page = render_page(f'Gates of {options.name}', about, content, sections, pictures)
        (made / 'index.html').write_text(page, encoding='utf-8')
        if target.exists():
            os.replace(target, Path(scratch) / 'old')
        os.replace(made, target)
    return target


def _default_classes(similarity: Optional[ClassSimilarity]) -> List[str]:
    """Two classes that are alike and the one that is least like the first of them."""
    if similarity is None:
        return []
    off_diagonal = similarity.correlation - 3 * np.eye(len(similarity.names))
    first, second = np.unravel_index(off_diagonal.argmax(), off_diagonal.shape)
    return [similarity.names[k] for k in (first, second, similarity.correlation[first].argmin())]


def report_sections(
        record: GateRecord,
        fetch_image: FetchImage,
        options: ReportOptions,
        similarity: Optional[ClassSimilarity],
        why_not: str,
) -> List[Section]:
    """The sections of a report, with their figures.

    Args:
        record: Of a pass over a data set.
        fetch_image: Fetches an image by its index.
        options: What to show.
        similarity: Of the classes, None if they cannot be compared.
        why_not: The reason for that.
    """
    rare_gates = specialised_gates(record, rare=options.rare)
    classes = _default_classes(similarity) if options.classes is None else options.classes
    above = f'{options.threshold:.0%}'
    sections = [
        Section(
            'gate_distribution', 'Always on, conditional, always off',
            f'A gate is always on (off) if it is on (off) for more than {above} of the images.',
            gate_distribution_figure({options.name: record.counts_by_layer(options.threshold), **options.compare})),
        Section(
            'firing', 'How often each filter runs',
            'For each layer, its filters from the most to the least used; grey: all images, lines: single classes.',
            firing_figure(record, classes)),
        Section(
            'specialised', 'Specialised gates',
            f'Gates that are open for at most {options.rare:.0%} of the images, with the share of the images of each '
            f'class that open them, and the images with their highest logits.',
            specialised_figure(rare_gates, fetch_image) if rare_gates else None),
        Section(
            'extremes', 'The dearest and the cheapest images', 'Images with the highest and with the lowest MACs.',
            extremes_figure(record, fetch_image)),
        Section('macs', 'MACs a sample', 'Over all images, and by class.', macs_figure(record)),
        Section(
            'difficulty', 'Does it spend more on hard images?', _difficulty_text(difficulty(record)),
            difficulty_figure(record)),
        Section(
            'class_similarity', 'Do similar classes use similar filters?',
            _similarity_text(similarity) if similarity else why_not,
            class_similarity_figure(similarity) if similarity else None),
    ]
    if options.prior is not None:
        sections.append(Section(
            'prior', 'Batch shaping: gates against their prior',
            'Distribution of σ(logit) of single gates over the data set, against the prior of batch shaping; the '
            'distance is the batch-shaping loss of the whole set.',
            prior_figure(record, options.prior, options.gates)))
    if not rare_gates:
        fires = record.examples.shape[1]
        sections[2].text = f'No gate fires for at least {fires} images and at most {options.rare:.0%} of them.'
    if options.snapshots is not None:
        recorded = [name for name in options.gates or () if name in options.snapshots.names]
        sections.append(Section(
            'training', 'Single gates over training',
            'Distribution of σ(logit) of single gates over the training images of each epoch, without noise.',
            gates_over_training_figure(options.snapshots, recorded or None)))
    return sections


def _difficulty_text(numbers: Difficulty) -> str:
    right, wrong = (
        'none' if macs is None else f'{macs / 1e6:.2f} M' for macs in (numbers.macs_right, numbers.macs_wrong))
    confidence, correct = (
        'undefined' if rank is None else f'{rank:.3f}' for rank in (numbers.macs_confidence, numbers.macs_correct))
    return (
        f'Mean MACs of images that were right: {right}, of the others: {wrong}. Rank correlation of MACs with '
        f'confidence: {confidence}, with being right: {correct}; negative means that hard images cost more.')


def _similarity_text(similarity: ClassSimilarity) -> str:
    text = (
        'A class’s firing pattern is the share of its images for which each gate was open, less the mean over the '
        'classes; shown is the correlation of the patterns, clustered by average linkage (cophenetic correlation '
        f'{similarity.cophenetic:.2f}). ')
    if similarity.within is not None:
        text += (
            f'Classes of the same group correlate by {similarity.within:.2f} on average, classes of different groups '
            f'by {similarity.between:.2f}. ')
    if similarity.confusion is not None:
        text += (
            f'Over pairs of classes, the rank correlation of this similarity with how often the model takes one for '
            f'the other is {similarity.confusion:.2f}.')
    return text


def _numbers(record: GateRecord, options: ReportOptions, similarity: Optional[ClassSimilarity]) -> Dict[str, Any]:
    """All that goes into gates.json."""
    layers = []
    for (name, span), counts in zip(record.spans(), record.counts_by_layer(options.threshold).values(), strict=True):
        layers.append({
            'name': name, 'num_gates': span.stop - span.start, 'gate_density': record.open_share[span].mean(),
            **counts._asdict()})
    classes: List[Dict[str, Any]] = []
    for index, name in enumerate(record.class_names):
        chosen = record.of_class(index)
        classes.append({
            'name': name, 'num_samples': int(chosen.sum()),
            'mean_macs': record.macs[chosen].mean() if chosen.any() else None,
            'accuracy': 100 * record.correct[chosen].mean(dtype=np.float64) if chosen.any() else None,
            'gate_density': record.open_share_by_class[index].mean() if chosen.any() else None})
    result = {'name': options.name, 'model': options.model, 'checkpoint': options.checkpoint, 'data': options.data}
    content: Dict[str, Any] = {
        'results': [{**result, **summary(record, options.threshold)}],
        'layers': layers,
        'classes': classes,
        'difficulty': asdict(difficulty(record)),
        'specialised_gates': [asdict(gate) for gate in specialised_gates(record, rare=options.rare)],
        'prior': None if options.prior is None else {
            'prior': f'{type(options.prior).__name__}({options.prior.extra_repr()})',
            'mean_distance': prior_distance(record, options.prior).mean()},
        'class_similarity': None,
    }
    if similarity is not None:
        content['class_similarity'] = {
            'names': similarity.names, 'correlation': similarity.correlation.tolist(),
            **{key: getattr(similarity, key) for key in ('cophenetic', 'confusion', 'within', 'between')}}
    return content


def _finite(value: Any) -> Any:
    """Plain Python numbers for JSON, and null for what is not finite."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _gate_table(record: GateRecord, threshold: float) -> pyarrow.Table:
    """One row a gate; a column for the share of each class."""
    columns: Dict[str, Any] = {
        'module': [name for name, count in record.layers.items() for _ in range(count)],
        'gate': np.concatenate([np.arange(count) for count in record.layers.values()]),
        'kind': [GateCounts._fields[kind] for kind in record.kinds(threshold)],
        'open_share': record.open_share,
    }
    for name, share in zip(record.class_names, record.open_share_by_class, strict=True):
        columns[f'open_share/{name}'] = share.astype(np.float32)
    return pyarrow.table(columns)


def _sample_table(record: GateRecord) -> pyarrow.Table:
    """One row an input, in the order of the data set."""
    columns = {'macs': record.macs, 'correct': record.correct, 'confidence': record.confidence}
    if record.labelled:
        columns |= {'label': record.label, 'prediction': record.prediction}
    return pyarrow.table(columns)
