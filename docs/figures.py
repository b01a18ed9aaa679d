"""Draw the figures of "How it works", into docs/images

    python docs/figures.py

Run it by hand after a change of what it shows: priors, gates and schedules are those of `timm_gated`.
"""
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
import timm
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

import timm_gated
from timm_gated.layers.gate import binary_concrete

FOLDER = Path(__file__).parent / 'images'
BLUE, GREEN, ORANGE, GREY = '#31688e', '#2a9d5c', '#d95f02', '#666666'
matplotlib.rcParams.update({
    'font.size': 10, 'svg.hashsalt': 'timm_gated', 'axes.spines.top': False, 'axes.spines.right': False})


def save(figure: Figure, name: str) -> None:
    figure.savefig(FOLDER / f'{name}.svg', metadata={'Date': None})


def batch_shaping() -> None:
    """Empirical CDFs of three gates over a batch, the CDF of the prior, and the distances between them."""
    prior, generator = timm_gated.Beta(), np.random.default_rng(0)
    x = torch.linspace(0, 1, 401)
    gates = {
        'always on': torch.from_numpy(generator.beta(20, 2, 24)).float(),
        'undecided': torch.from_numpy(generator.beta(12, 12, 24)).float(),
        'conditional': torch.from_numpy(generator.beta(0.6, 0.4, 24)).float()}
    figure = Figure(figsize=(9, 3.1), layout='constrained')
    for ax, (name, values) in zip(figure.subplots(1, 3, sharey=True), gates.items(), strict=True):
        values = values.sort().values
        targets = torch.arange(1, len(values) + 1) / (len(values) + 1)
        loss = timm_gated.batch_shaping_loss(values[:, None], prior)
        ax.plot(x, prior.cdf(x), color=BLUE, label='CDF of Beta(0.6, 0.4)')
        ax.vlines(values, prior.cdf(values), targets, color=ORANGE, linewidth=1, label='distance')
        ax.plot(values, targets, 'o', color=GREY, markersize=3, label='images, by rank')
        ax.set(title=f'{name}: loss {loss:.3f}', xlabel='σ(logit) of one gate', xlim=(-0.03, 1.03), ylim=(0, 1))
    figure.axes[0].set_ylabel('share of the batch')
    figure.axes[0].legend(frameon=False, fontsize=9)
    save(figure, 'batch_shaping')


def gate_noise() -> None:
    """How often a gate opens in training, and the relaxed samples that carry its gradient."""
    torch.manual_seed(0)
    figure = Figure(figsize=(9, 3.1), layout='constrained')
    left, right = figure.subplots(1, 2)
    logits = torch.linspace(-6, 6, 121)
    for noise, color in ((1., BLUE), (0.5, GREEN), (0., ORANGE)):
        opened = binary_concrete(logits.expand(20000, -1), noise=noise).mean(0)
        left.plot(logits, opened, color=color, label=f'noise × {noise:g}')
    left.set(title='share of open gates in training', xlabel='logit', ylabel='open')
    left.legend(frameon=False)
    noise = torch.logit(torch.rand(200000))
    for logit, color in ((-2., GREY), (0., GREEN), (2., BLUE)):
        relaxed = torch.sigmoid((logit + noise) / (2 / 3)).numpy()
        right.hist(
            relaxed, 60, range=(0, 1), density=True, histtype='step', color=color, label=f'logit {logit:g}')
    right.axvline(0.5, color=GREY, linestyle=':')
    right.set(
        title='relaxed samples; open above 0.5', xlabel='σ((logit + noise) / τ), τ = 2/3', ylabel='density',
        yscale='log')
    right.legend(frameon=False, ncols=3, loc='upper center')
    save(figure, 'gate_noise')


def schedules() -> None:
    """λ, γ and noise of a training from scratch and of one from a dense network."""
    figure = Figure(figsize=(9, 2.9), layout='constrained')
    runs = {
        'from scratch, 500 epochs': (500, dict()),
        'from a dense network, 20 epochs': (20, dict(from_dense=20, gamma=1.))}
    for ax, (title, (epochs, options)) in zip(figure.subplots(1, 2), runs.items(), strict=True):
        losses = timm.create_model('gated_resnet20', **options).gate_losses
        time = np.linspace(0, epochs, 501)
        weights = np.array([losses.weights(epoch) for epoch in time])
        for values, label, color in zip(weights.T, ('λ', 'γ'), (BLUE, ORANGE), strict=True):
            ax.plot(time, values / values.max(), color=color, label=f'{label}, up to {values.max():g}')
        noise = 1. if losses.noise_epochs == 'fixed' else None
        values = [timm_gated.linear_anneal(e, 1., *losses.noise_epochs) if noise is None else noise for e in time]
        ax.plot(time, values, color=GREY, linestyle='--', label='noise of the gates')
        ax.set(title=title, xlabel='epoch', ylabel='share of maximum', ylim=(-0.03, 1.08))
        ax.legend(frameon=False, loc='center right')
    save(figure, 'schedules')


Box = tuple[float, float, str, str]  # centre, text and colour


def diagram(name: str, boxes: Sequence[Box], arrows: Sequence[tuple[int, int, str]]) -> None:
    """Draw boxes, 2.4 wide and 0.8 high, and arrows between them."""
    width, height = (max(box[axis] for box in boxes) - min(box[axis] for box in boxes) for axis in (0, 1))
    figure = Figure(figsize=(8, 8 * (height + 1) / (width + 2.6)))
    ax: Axes = figure.add_axes((0, 0, 1, 1))
    for x, y, text, color in boxes:
        ax.add_patch(FancyBboxPatch(
            (x - 1.2, y - 0.4), 2.4, 0.8, boxstyle='round,pad=0,rounding_size=0.1', facecolor=f'{color}22',
            edgecolor=color))
        ax.text(x, y, text, ha='center', va='center', fontsize=8)
    for start, end, text in arrows:
        (x0, y0), (x1, y1) = boxes[start][:2], boxes[end][:2]
        if y0 == y1:
            tail, head = (x0 + 1.2, y0), (x1 - 1.2, y1)
            ax.text((tail[0] + head[0]) / 2, y0 + 0.1, text, ha='center', va='bottom', fontsize=7, color=GREY)
        else:
            step = np.sign(y1 - y0)
            tail, head = (x0, y0 + 0.4 * step), (x1, y1 - 0.4 * step)
            ax.text(x0 + 0.1, (tail[1] + head[1]) / 2, text, ha='left', va='center', fontsize=7, color=GREY)
        ax.annotate('', head, tail, arrowprops=dict(arrowstyle='->', color=GREY))
    ax.set(xlim=(-1.3, width + 1.3), ylim=(-0.5, height + 0.5))
    ax.axis('off')
    save(figure, name)


def diagrams() -> None:
    diagram('block', [
        (0, 1.5, 'input of the block', GREY), (3.6, 1.5, 'conv1, bn, ReLU', BLUE), (7.2, 1.5, 'conv2, bn', BLUE),
        (10.8, 1.5, '+ shortcut, ReLU', BLUE), (0, 0, 'global average pool', GREEN),
        (3.6, 0, 'FC 16, bn, ReLU, FC', GREEN), (7.2, 0, 'mask: 0 or 1\nper filter', GREEN)],
        [(0, 1, ''), (1, 2, '× mask'), (2, 3, ''), (0, 4, ''), (4, 5, ''), (5, 6, 'decide'), (6, 2, '')])
    diagram('training', [
        (0, 3, 'batch of images', GREY), (3.8, 3, 'gated network:\nmasks as arguments', BLUE), (7.6, 3, 'logits', GREY),
        (3.8, 1.5, 'gates keep the logits\nand masks of the pass', GREEN),
        (7.6, 1.5, 'task loss\n(cross-entropy, …)', BLUE),
        (0, 0, 'objective:\nschedules λ, γ, noise', ORANGE), (3.8, 0, 'batch shaping, L0,\nMAC budget', ORANGE),
        (7.6, 0, "timm's task:\none loss", BLUE)],
        [(0, 1, ''), (1, 2, ''), (1, 3, ''), (2, 4, ''), (3, 6, ''), (5, 6, 'weights'), (4, 7, ''), (6, 7, '+')])
    diagram('accelerate', [
        (0, 1.5, 'trained model', GREY), (3.8, 1.5, 'program: layers\nwith folded norms', BLUE),
        (7.6, 1.5, 'weights packed for\nthis CPU; int8', BLUE), (11.4, 1.5, 'model.tgn, for\nPython and C', GREY),
        (0, 0, 'image', GREY), (3.8, 0, 'gates of a block:\nlists of open filters', GREEN),
        (7.6, 0, 'kernels: only open\nrows and columns', BLUE), (11.4, 0, 'output, MACs,\ndecisions', GREY)],
        [(0, 1, 'compile'), (1, 2, 'prepare'), (2, 3, 'save'), (4, 5, ''), (5, 6, ''), (2, 6, ''), (6, 7, '')])
    diagram('mmseg', [
        (0, 3, "config, run by\nmmseg's train.py", GREY), (3.8, 3, 'GatedEncoderDecoder', BLUE),
        (11.4, 3, "mmseg's decode heads", BLUE), (0, 1.5, 'hooks: schedules,\nnoise, statistics', ORANGE),
        (3.8, 1.5, 'GatedResNetV1c, …:\ngates of timm_gated', GREEN), (7.6, 1.5, 'gate_losses', ORANGE),
        (11.4, 1.5, 'loss of the iteration', BLUE), (3.8, 0, 'MACsMetric:\nMACs per image', GREEN)],
        [(0, 1, 'builds'), (1, 2, ''), (1, 4, 'backbone'), (4, 5, 'logits'), (3, 4, ''), (5, 6, '+'), (2, 6, ''),
         (4, 7, 'count_macs')])


if __name__ == '__main__':
    batch_shaping()
    gate_noise()
    schedules()
    diagrams()
