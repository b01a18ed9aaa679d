"""Report on the gates of a model: figures, their data, and one page that shows everything

The report is written to a temporary folder and moved into place once it is complete.
"""
import json
import math
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Union

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
from .sample_figures import difficulty_figure, extremes_figure, macs_figure, specialised_figure
from .sources import FetchImage
from .statistics import GateCounts

__all__ = ['ReportOptions', 'check_target', 'load_distribution', 'write_report']

Distribution = Mapping[str, GateCounts]


@dataclass
class ReportOptions:
    """Options of a report.

    Attributes:
        name: Name of the model or run, for titles.
        model: Name of the architecture.
        checkpoint: Path of the weights.
        data: Description of the data set.
        classes: Classes to draw on the firing histograms; by default two similar ones and a dissimilar one.
        groups: Class names by group name, for the similarity of classes.
        gates: Gates to compare with the prior and to draw over training; by default evenly spaced ranks.
        prior: Prior of the batch-shaping loss; None without one.
        snapshots: Snapshots of the training run.
        compare: Gate distributions of other models, by name, to draw side by side.
        threshold: Share of inputs above which a gate counts as always on or off.
        rare: Maximum share of inputs for which a specialised gate may be open.
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
    """Return the folder as a path. Raise a ValueError if it exists and is not a report to overwrite."""
    path = Path(folder)
    if not overwrite and (path.is_file() or path.is_dir() and any(path.iterdir())):
        raise ValueError(f'{path} exists and is not empty: choose another output or use --overwrite.')
    if overwrite and path.exists() and not (path / 'gates.json').is_file() and (path.is_file() or any(path.iterdir())):
        raise ValueError(f'{path} is not a report (it has no gates.json): choose another output.')
    return path


def load_distribution(path: Union[str, Path]) -> Dict[str, Distribution]:
    """Load the gate distribution of another report, by the name of its model.

    Args:
        path: Folder of the report, or its gates.json.
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
            f'{path} is not the gates.json of a report: {type(error).__name__} {error}. Write a report with '
            f'`timm-gated analyze --output DIR`.') from error


def write_report(
        folder: Union[str, Path],
        record: GateRecord,
        fetch_image: FetchImage,
        options: Optional[ReportOptions] = None,
        overwrite: bool = False,
        progress: Callable[[List[Section]], Iterable[Section]] = iter,
) -> Path:
    """Write a report: index.html, PNG and SVG of every figure, gates.json, gates.parquet and samples.parquet.

    Args:
        folder: Folder of the report. It must be new or empty, unless `overwrite`.
        record: Record of a pass over a data set.
        fetch_image: Function that returns an image by index.
        options: Options of the report.
        overwrite: Whether to replace an existing report.
        progress: Function that wraps the list of figures to write, for example `tqdm.tqdm`.

    Returns:
        Folder of the report.
    """
    target = check_target(folder, overwrite)
    options = options or ReportOptions()
    if not record.layers:
        raise ValueError('the record has no gates to report on.')
    similarity, why_not = None, ''
    try:
        similarity = class_similarity(record, options.groups)
    except ValueError as error:
        if options.groups:
            raise
        why_not = str(error)
    sections = report_sections(record, fetch_image, options, similarity, why_not)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f'.{target.name}.') as scratch:
        made = Path(scratch) / 'new'
        made.mkdir()
        pictures = [write_figure(made, section) for section in progress(sections)]
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
    """The two most similar classes and the one least similar to the first."""
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
    """Sections of a report with their figures.

    Args:
        record: Record of a pass over a data set.
        fetch_image: Function that returns an image by index.
        options: Options of the report.
        similarity: Class similarity, None if classes cannot be compared.
        why_not: Reason why they cannot.
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
            'Filters of each layer from most to least used. Grey: all images, lines: single classes.',
            firing_figure(record, classes)),
        Section(
            'specialised', 'Specialised gates',
            f'Gates that are open for at most {options.rare:.0%} of the images, with the classes that open them most '
            f'often and the images with the highest logits.',
            specialised_figure(rare_gates, fetch_image) if rare_gates else None),
        Section(
            'extremes', 'Most and least expensive images', 'Images with the highest and the lowest MACs.',
            extremes_figure(record, fetch_image)),
        Section('macs', 'MACs per sample', 'Over all images and by class.', macs_figure(record)),
        Section(
            'difficulty', 'Do hard images cost more?', _difficulty_text(difficulty(record)),
            difficulty_figure(record)),
        Section(
            'class_similarity', 'Do similar classes use similar filters?',
            _similarity_text(similarity) if similarity else why_not,
            class_similarity_figure(similarity) if similarity else None),
    ]
    if options.prior is not None:
        sections.append(Section(
            'prior', 'Batch shaping: gates and their prior',
            'Distribution of σ(logit) of single gates over the data set and the prior of batch shaping. The distance '
            'is the batch-shaping loss of the data set.',
            prior_figure(record, options.prior, options.gates)))
    if not rare_gates:
        fires = record.examples.shape[1]
        sections[2].text = f'No gate is open for at least {fires} and at most {options.rare:.0%} of the images.'
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
        f'Mean MACs of correct images: {right}, of the others: {wrong}. Rank correlation of MACs with confidence: '
        f'{confidence}, with correctness: {correct}. Negative values mean that hard images cost more.')


def _similarity_text(similarity: ClassSimilarity) -> str:
    text = (
        'Correlation of the firing patterns of classes, clustered by average linkage (cophenetic correlation '
        f'{similarity.cophenetic:.2f}). The firing pattern of a class is the share of its images for which each gate '
        'was open, minus the mean over classes. ')
    if similarity.within is not None:
        text += (
            f'Mean correlation within groups: {similarity.within:.2f}, between groups: {similarity.between:.2f}. ')
    if similarity.confusion is not None:
        text += (
            f'Rank correlation of similarity and confusion rate over pairs of classes: {similarity.confusion:.2f}.')
    return text


def _numbers(record: GateRecord, options: ReportOptions, similarity: Optional[ClassSimilarity]) -> Dict[str, Any]:
    """Content of gates.json."""
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
    """Convert to plain Python values for JSON, with None for numbers that are not finite."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _gate_table(record: GateRecord, threshold: float) -> pyarrow.Table:
    """One row per gate, with one share column per class."""
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
    """One row per input, in the order of the data set."""
    columns = {'macs': record.macs, 'correct': record.correct, 'confidence': record.confidence}
    if record.labelled:
        columns |= {'label': record.label, 'prediction': record.prediction}
    return pyarrow.table(columns)
