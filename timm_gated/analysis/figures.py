"""Figures of gates. Each is a pure function that returns a matplotlib Figure.

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)

The paper's Figures 1b, 5 and 6 and the class similarity that its text describes, for any gated model. Figures are
narrow enough for a phone and do not use pyplot, whose global state would leak into the user's session.
"""
from itertools import cycle
from typing import Any, List, Mapping, Optional, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from scipy.cluster import hierarchy

from ..loss import Prior, Snapshots
from .measures import ClassSimilarity, prior_cdf, prior_distance, spread_over
from .record import GateRecord
from .statistics import GateCounts

__all__ = [
    'MAX_STEPS', 'WIDTH', 'class_similarity_figure', 'firing_figure', 'gate_distribution_figure',
    'gates_over_training_figure', 'prior_figure',
]

WIDTH = 4.2  # inches: at the width of a phone, text of 9 points is 10 pixels high
MAX_STEPS = 32  # of a firing histogram; more would be narrower than a line
KIND_COLOURS = {'always_on': '#31688e', 'conditional': '#35b779', 'always_off': '#c8c8c8'}
CLASS_COLOURS = ('#d55e00', '#0072b2', '#cc79a7', '#e69f00', '#009e73', '#56b4e9')  # safe for colour-blind readers


def short_layers(names: Sequence[str]) -> List[str]:
    """Names of gate modules without their common prefix and suffix."""
    if len(names) < 2:
        return list(names)
    parts = [name.split('.') for name in names]
    shortest = min(map(len, parts)) - 1
    front = 0
    while front < shortest and len({part[front] for part in parts}) == 1:
        front += 1
    back = 0
    while front + back < shortest and len({part[-1 - back] for part in parts}) == 1:
        back += 1
    return ['.'.join(part[front:len(part) - back]) for part in parts]


def _grid(count: int, columns: int, row_height: float, sharey: bool = False) -> tuple:
    """Figure with a grid of `count` panels, and the panels."""
    columns = min(columns, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(WIDTH, row_height * rows + 0.6), layout='constrained')
    axes = figure.subplots(rows, columns, squeeze=False, sharey=sharey).ravel()
    for spare in axes[count:]:
        spare.remove()
    return figure, axes[:count]


def gate_distribution_figure(distributions: Mapping[str, Mapping[str, GateCounts]]) -> Figure:
    """Draw the share of always-on, conditional and always-off gates per layer, with models side by side.

    Args:
        distributions: Gate counts per layer, by model name.
    """
    if not distributions:
        raise ValueError('distributions must hold at least one model, got none.')
    rows = max(len(layers) for layers in distributions.values())
    figure = Figure(figsize=(WIDTH, 1.2 + 0.24 * max(rows, 4)), layout='constrained')
    axes = figure.subplots(1, len(distributions), squeeze=False)[0]
    for axis, (title, layers) in zip(axes, distributions.items(), strict=True):
        counts = np.array(list(layers.values()), dtype=float)
        shares = 100 * counts / counts.sum(1, keepdims=True)
        left = np.zeros(len(layers))
        for (kind, colour), share in zip(KIND_COLOURS.items(), shares.T, strict=True):
            axis.barh(np.arange(len(layers)), share, left=left, color=colour, height=0.86, label=kind.replace('_', ' '))
            left += share
        labels = short_layers(list(layers))
        repeated = axis is not axes[0] and labels == short_layers(list(next(iter(distributions.values()))))
        axis.set_yticks(np.arange(len(layers)), [] if repeated else labels)
        total = counts.sum(0) / counts.sum()
        on, conditional, off = (f'{100 * share:.0f} %' for share in total)
        axis.set_title(f'{title}\n{on} on, {conditional} conditional, {off} off', fontsize=9)
        axis.set(xlim=(0, 100), ylim=(len(layers) - 0.4, -0.6), xlabel='% of the gates')
        axis.spines[['top', 'right']].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc='outside lower center', ncols=3, frameon=False)
    return figure


def firing_figure(record: GateRecord, classes: Sequence[str] = (), max_layers: int = 18) -> Figure:
    """Draw how often each gate is open, per layer, sorted by its frequency over the data set.

    In layers with more than `MAX_STEPS` gates, a step is the mean of neighbouring gates.

    Args:
        record: Record of a pass over a data set.
        classes: Names of classes to draw on top.
        max_layers: Maximum number of layers; evenly spaced ones are drawn if there are more.
    """
    spans = list(record.spans())
    if not spans:
        raise ValueError('the record has no gates to draw.')
    indices = [record.class_index(name) for name in classes]
    chosen = spread_over(np.arange(len(spans)), max_layers)
    titles = short_layers(list(record.layers))
    figure, axes = _grid(len(chosen), 2, 1.25, sharey=True)
    for axis, position in zip(axes, chosen, strict=True):
        span = spans[position][1]
        share = 100 * record.open_share[span]
        order = np.argsort(-share, kind='stable')
        x = np.linspace(0, len(order), min(len(order), MAX_STEPS) + 1).round().astype(int)
        axis.stairs(_step_means(share[order], x), x, fill=True, color='#d9d9d9', label='all images')
        for colour, index in zip(cycle(CLASS_COLOURS), indices, strict=False):
            axis.stairs(
                _step_means(100 * record.open_share_by_class[index, span][order], x), x, color=colour, linewidth=1.2,
                label=record.class_names[index])
        axis.set_title(titles[position], fontsize=9)
        axis.set(xlim=(0, len(order)), ylim=(0, 101))
        axis.tick_params(labelsize=8)
    figure.supxlabel('gate, sorted by how often it is open', fontsize=9)
    figure.supylabel('% of the images for which it is open', fontsize=9)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc='outside upper center', ncols=2, frameon=False, fontsize=9)
    return figure


def _step_means(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Means of consecutive values between edges."""
    return np.add.reduceat(values, edges[:-1]) / np.diff(edges)


def prior_figure(record: GateRecord, prior: Prior, gates: Optional[Sequence[str]] = None) -> Figure:
    """Draw the empirical CDF of sigmoid(logit) of some gates over the data set against the CDF of the prior.

    Args:
        record: Record of a pass over a data set.
        prior: Prior of the batch-shaping loss.
        gates: Names of gates, such as 'layer1.0.gate1/3'. Default: the closest to the prior, the farthest and two
            in between.
    """
    if not len(record.open_share):
        raise ValueError('the record has no gates to compare with the prior.')
    distance = prior_distance(record, prior)
    chosen = spread_over(distance, 4) if gates is None else [record.gate_index(name) for name in gates]
    edges = np.linspace(0, 1, record.histogram.shape[1] + 1)
    empirical = np.pad(record.histogram.cumsum(1), ((0, 0), (1, 0))) / record.num_samples
    expected = prior_cdf(prior, len(distance), edges)
    figure, axes = _grid(len(chosen), 2, 1.9, sharey=True)
    for axis, index in zip(axes, chosen, strict=True):
        axis.plot(edges, empirical[index], color='#31688e', label='gate, over the data set')
        axis.plot(edges, expected[:, index], color='#d55e00', linestyle='--', label=type(prior).__name__ + ' prior')
        axis.fill_between(edges, empirical[index], expected[:, index], color='#d55e00', alpha=0.15)
        axis.set_title(f'{record.gate_name(index)}\ndistance {distance[index]:.4f}', fontsize=9)
        axis.set(xlim=(0, 1), ylim=(0, 1.01))
    figure.supxlabel('σ(logit)', fontsize=9)
    figure.supylabel('share of the images up to it', fontsize=9)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc='outside upper center', ncols=2, frameon=False, fontsize=9)
    return figure


def gates_over_training_figure(snapshots: Snapshots, gates: Optional[Sequence[str]] = None) -> Figure:
    """Draw the distribution of single gates over training (the paper's Figure 1b) below the loss weights.

    Args:
        snapshots: Snapshots of a training run.
        gates: Names of recorded gates. Default: the most open at the end, the least open and two in between.
    """
    if gates is None:
        chosen = spread_over(-snapshots.mean()[-1], 4)
    else:
        unknown = [name for name in gates if name not in snapshots.names]
        if unknown:
            raise ValueError(
                f"the snapshots do not have gate '{unknown[0]}'; they have {', '.join(snapshots.names[:8])} …")
        chosen = [snapshots.names.index(name) for name in gates]
    figure = Figure(figsize=(WIDTH, 1.2 + 1.15 * len(chosen)), layout='constrained')
    axes = figure.subplots(1 + len(chosen), 1, sharex=True, height_ratios=[0.7] + [1] * len(chosen))
    epochs = snapshots.epochs
    edges = np.append(epochs - 0.5, epochs[-1] + 0.5)
    for (name, values), colour in zip(sorted(snapshots.weights.items()), ('#d55e00', '#0072b2'), strict=False):
        label = {'lam': 'λ, batch shaping', 'gamma': 'γ, L0'}.get(name, name)
        top = values.max()
        axes[0].plot(epochs, values / (top or 1), color=colour, label=f'{label} (up to {top:.3g})')
    axes[0].set(ylabel='weight', ylim=(-0.05, 1.1), yticks=[0, 1], yticklabels=['0', 'max'])
    figure.legend(loc='outside upper center', ncols=2, frameon=False, fontsize=9)
    density = snapshots.counts / snapshots.counts.sum(-1, keepdims=True) * snapshots.counts.shape[-1]
    image: Any = None
    for axis, index in zip(axes[1:], chosen, strict=True):
        image = axis.pcolormesh(
            edges, np.linspace(0, 1, density.shape[-1] + 1), density[:, index].T, cmap='magma',
            norm=LogNorm(0.03, density.max(), clip=True), rasterized=True)
        axis.set_title(snapshots.names[index], fontsize=9)
        axis.set(ylim=(0, 1), ylabel='σ(logit)')
    axes[-1].set_xlabel('epoch')
    figure.colorbar(image, ax=list(axes[1:]), label='density over the images', pad=0.01)
    return figure


def class_similarity_figure(similarity: ClassSimilarity, max_labels: int = 60) -> Figure:
    """Draw a clustered heat map of the similarity of classes in the filters they use.

    Args:
        similarity: Class similarity.
        max_labels: Maximum number of classes drawn with names.
    """
    count = len(similarity.names)
    figure = Figure(figsize=(WIDTH, WIDTH + 0.7), layout='constrained')
    tree, heat = figure.subplots(2, 1, height_ratios=(1, 5))
    _draw_tree(tree, similarity.linkage, count)
    image = heat.imshow(similarity.correlation, cmap='RdBu_r', vmin=-1, vmax=1, aspect='auto')
    if count <= max_labels:
        size = 9 if count <= 20 else 5
        heat.set_xticks(range(count), similarity.names, rotation=90, fontsize=size)
        heat.set_yticks(range(count), similarity.names, fontsize=size)
        if count <= 12:
            for (row, column), value in np.ndenumerate(similarity.correlation):
                heat.text(
                    column, row, f'{value:.1f}'.replace('-0.0', '0.0'), ha='center', va='center', fontsize=7,
                    color='white' if abs(value) > 0.6 else 'black')
    else:
        heat.set_xticks([])
        heat.set_yticks([])
    figure.colorbar(image, ax=heat, label='correlation of firing patterns', shrink=0.8)
    figure.suptitle(_similarity_title(similarity), fontsize=9)
    return figure


def _similarity_title(similarity: ClassSimilarity) -> str:
    lines = []
    if similarity.within is not None:
        lines.append(f'correlation within groups {similarity.within:.2f}, between groups {similarity.between:.2f}')
    if similarity.confusion is not None:
        lines.append(f'rank correlation with confusions {similarity.confusion:.2f}')
    return '\n'.join(lines or [f'cophenetic correlation {similarity.cophenetic:.2f}'])


def _draw_tree(axis: Axes, linkage: np.ndarray, count: int) -> None:
    drawing = hierarchy.dendrogram(linkage, no_plot=True)
    for x, y in zip(drawing['icoord'], drawing['dcoord'], strict=True):
        axis.plot((np.array(x) - 5) / 10, y, color='#555555', linewidth=1)  # SciPy places leaves at 5, 15, 25, ...
    axis.set_xlim(-0.5, count - 0.5)
    axis.set_axis_off()
