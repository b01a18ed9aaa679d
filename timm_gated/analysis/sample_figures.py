"""Figures of inputs: their MACs, and the inputs that open a rare gate

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)

A record does not hold the images. The caller passes a function that returns an image by index.
"""
from typing import Any, List, Sequence

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from .figures import WIDTH
from .measures import SpecialisedGate, difficulty, right_inputs, spread_over
from .record import GateRecord
from .sources import FetchImage

__all__ = ['amount', 'difficulty_figure', 'extremes_figure', 'macs_figure', 'specialised_figure']


def _unit(macs: np.ndarray) -> tuple:
    """Divisor and prefix of the unit of MACs."""
    return (1e9, 'G') if macs.max() >= 1e9 else (1e6, 'M')


def amount(macs: float) -> str:
    """MACs with their unit."""
    divisor, unit = _unit(np.array(macs))
    return f'{macs / divisor:.2f} {unit}'


def _show(axis: Any, image: np.ndarray) -> None:
    small = Image.fromarray(image)
    small.thumbnail((256, 256))  # limits the size of the SVG
    axis.imshow(small, interpolation='nearest' if max(small.size) < 100 else 'antialiased')
    axis.set_xticks([])
    axis.set_yticks([])
    for spine in axis.spines.values():
        spine.set_visible(False)


def specialised_figure(gates: Sequence[SpecialisedGate], fetch_image: FetchImage, columns: int = 6) -> Figure:
    """Draw rarely open gates: the classes that open them and the images with the highest logits.

    Args:
        gates: Gates from `specialised_gates`.
        fetch_image: Function that returns an image by index.
        columns: Number of images per gate.
    """
    if not gates:
        raise ValueError('no gates to draw; increase `rare` of `specialised_gates`.')
    figure = Figure(figsize=(WIDTH, 1.2 * len(gates)), layout='constrained')
    rows = figure.subfigures(len(gates), 1, squeeze=False)[:, 0]
    for row, gate in zip(rows, gates, strict=True):
        triggers = ', '.join(f'{name} {100 * share:.0f} %' for name, share in gate.classes)
        name = f'{gate.name}: {100 * gate.open_share:.1f} % of the images'
        row.suptitle(f'{name}\n{triggers}', fontsize=9, x=0.01, ha='left')
        axes = row.subplots(1, columns, squeeze=False)[0]
        for axis in axes:
            axis.set_axis_off()
        for axis, index in zip(axes, gate.examples, strict=False):
            _show(axis, fetch_image(index))
    return figure


def extremes(record: GateRecord, count: int) -> List[np.ndarray]:
    """Inputs with the highest MACs, in descending order, and with the lowest, in ascending order."""
    order = np.argsort(record.macs, kind='stable')
    return [order[::-1][:count], order[:count]]


def extremes_figure(record: GateRecord, fetch_image: FetchImage, columns: int = 5, rows: int = 2) -> Figure:
    """Draw the images with the highest and the lowest MACs.

    Args:
        record: Record of a pass over a data set.
        fetch_image: Function that returns an image by index.
        columns: Number of images per row.
        rows: Number of rows for each of the two.
    """
    figure = Figure(figsize=(WIDTH, 2 * (0.3 + 1.1 * rows)), layout='constrained')
    halves: Any = figure.subfigures(2, 1)
    titles = ('highest MACs', 'lowest MACs')
    for half, title, chosen in zip(halves, titles, extremes(record, rows * columns), strict=True):
        half.suptitle(title, fontsize=10)
        axes = half.subplots(rows, columns, squeeze=False).ravel()
        for axis in axes:
            axis.set_axis_off()
        for axis, index in zip(axes, chosen, strict=False):
            axis.set_axis_on()
            _show(axis, fetch_image(int(index)))
            name = f'{record.class_names[record.label[index]]}\n' if record.labelled else ''
            axis.set_xlabel(f'{name}{amount(record.macs[index])}', fontsize=8)
    return figure


def macs_figure(record: GateRecord, max_classes: int = 20) -> Figure:
    """Draw MACs per sample over the data set and by class, in ascending order of the mean.

    Args:
        record: Record of a pass over a data set.
        max_classes: Maximum number of classes; evenly spaced ones are drawn if there are more.
    """
    divisor, unit = _unit(record.macs)
    macs = record.macs / divisor
    present = record.present_classes()
    groups = {k: macs[record.of_class(k)] for k in present}
    chosen = [present[i] for i in spread_over(np.array([groups[k].mean() for k in present]), max_classes)]
    figure = Figure(figsize=(WIDTH, 2.4 + 0.28 * len(chosen)), layout='constrained')
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(1.6, max(0.28 * len(chosen), 0.5)))
    top.hist(macs, bins=50, color='#31688e')
    share = f'{100 * record.macs_share:.1f} % of dense'
    top.axvline(macs.mean(), color='#d55e00', label=f'mean {macs.mean():.4g} {unit}, {share}')
    top.set_ylabel('images')
    figure.legend(loc='outside upper center', frameon=False, fontsize=9)
    if chosen:
        bottom.boxplot(
            [groups[k] for k in chosen], orientation='horizontal', whis=(5, 95), showfliers=False, widths=0.6,
            patch_artist=True, boxprops=dict(facecolor='#b5cde0'), medianprops=dict(color='#d55e00'))
        bottom.set_yticks(range(1, len(chosen) + 1), [record.class_names[k] for k in chosen])
    bottom.set_xlabel(f'{unit} MACs per sample')
    return figure


def difficulty_figure(record: GateRecord, bins: int = 10) -> Figure:
    """Draw MACs against correctness and confidence.

    Args:
        record: Record of a pass over a data set.
        bins: Number of groups of equal size, by confidence.
    """
    divisor, unit = _unit(record.macs)
    macs, right = record.macs / divisor, right_inputs(record)
    numbers = difficulty(record)
    figure = Figure(figsize=(WIDTH, 5), layout='constrained')
    top, bottom = figure.subplots(2, 1)
    edges = np.histogram_bin_edges(macs, 40)
    names = ('correct', 'wrong') if record.labelled else ('more accurate half', 'less accurate half')
    for name, chosen, colour in zip(names, (right, ~right), ('#31688e', '#d55e00'), strict=True):
        if chosen.any():
            top.hist(
                macs[chosen], edges, weights=np.full(chosen.sum(), 100 / chosen.sum()), histtype='step', color=colour,
                linewidth=1.5, label=f'{name}: {chosen.sum()} images, mean {macs[chosen].mean():.4g} {unit}')
    top.set(xlabel=f'{unit} MACs per sample', ylabel='% of these images')
    figure.legend(loc='outside upper center', frameon=False, fontsize=9)

    order = np.argsort(record.confidence, kind='stable')
    groups = [group for group in np.array_split(order, bins) if len(group)]
    confidence = [f'{record.confidence[group].mean():.2f}' for group in groups]
    y = np.array([macs[group].mean() for group in groups])
    error = np.array([macs[group].std() / max(len(group) - 1, 1) ** 0.5 for group in groups])
    bottom.errorbar(range(len(groups)), y, 2 * error, marker='o', color='#31688e', capsize=3)
    rank = 'none' if numbers.macs_confidence is None else f'{numbers.macs_confidence:.3f}'
    bottom.set_title(f'rank correlation of MACs and confidence: {rank}', fontsize=9)
    bottom.set_xticks(range(len(groups)), confidence)
    bottom.set(xlabel='mean confidence, in groups of equal size', ylabel=f'{unit} MACs, mean ± 2 s.e.')
    return figure
