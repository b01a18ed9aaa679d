"""Quick start: a gated ResNet and its dense counterpart on handwritten digits

Trains `cifar_resnet20` and `gated_resnet20` on the digits of scikit-learn (1,797 images of 8 x 8, part of its package),
with the task, optimizer and scheduler of timm's train.py. Prints a table of accuracy and MACs and draws the
distribution of the gates over training.

Batch shaping first matches every gate to the paper's Beta(0.6, 0.4) prior, so that filters become conditional. The L0
loss then closes the gates that the task does not need.

    timm-gated demo --output output/demo
    timm-gated demo --epochs 60 --gamma 0.02
"""
from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, NamedTuple, Optional, Tuple

from timm_gated_cli._options import add_json_option, execute, format_table, make_parser

if TYPE_CHECKING:
    import numpy as np
    import torch.nn as nn
    from torch.utils.data import DataLoader

    from timm_gated import GateCounts, GateLosses


class Evaluation(NamedTuple):
    accuracy: float
    dense_macs: int
    mean_macs: float
    counts: Optional[GateCounts]
    probabilities: Optional[np.ndarray]  # sigmoid(logit) of every gate and image


def digits(batch_size: int, seed: int) -> Tuple[DataLoader, DataLoader]:
    """Create the loaders of 80 % and 20 % of the digits, at 16 x 16 pixels."""
    import numpy as np
    import torch
    import torch.nn.functional as F
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from torch.utils.data import DataLoader, TensorDataset
    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16
    x = F.interpolate((x - x.mean()) / x.std(), scale_factor=2, mode='bilinear')
    y = torch.from_numpy(labels)
    train, test = train_test_split(np.arange(len(y)), test_size=0.2, stratify=labels, random_state=seed)
    generator = torch.Generator().manual_seed(seed)
    return (
        DataLoader(TensorDataset(x[train], y[train]), batch_size, shuffle=True, drop_last=True, generator=generator),
        DataLoader(TensorDataset(x[test], y[test]), batch_size),
    )


def evaluate(model: nn.Module, loader: DataLoader) -> Evaluation:
    import torch

    from timm_gated import GateStatistics, MacCounter, gates
    model.eval()
    statistics = GateStatistics()
    correct, macs, dense, probabilities = 0, [], 0, []
    for images, labels in loader:
        with torch.no_grad(), MacCounter(model) as counter:
            correct += int((model(images).argmax(1) == labels).sum())
        if gates(model):
            statistics.update(model)
            probabilities.append(torch.cat([gate.logits.sigmoid() for _, gate in gates(model)], 1))
        dense = counter.macs().dense
        macs.append(counter.macs().per_sample)
    return Evaluation(
        accuracy=100 * correct / len(loader.dataset),
        dense_macs=dense,
        mean_macs=torch.cat(macs).double().mean().item(),
        counts=statistics.counts() if probabilities else None,
        probabilities=torch.cat(probabilities).numpy() if probabilities else None,
    )


def train(
        name: str,
        loaders: Tuple[DataLoader, DataLoader],
        epochs: int,
        seed: int,
        **model_kwargs,
) -> Tuple[nn.Module, List[Evaluation]]:
    """Train a model and return it with its evaluations before training and after every epoch."""
    import timm
    import torch
    import torch.nn as nn
    from timm.optim import create_optimizer_v2
    from timm.scheduler import create_scheduler_v2
    from timm.task import ClassificationTask
    from tqdm import tqdm

    import timm_gated  # noqa: F401  (registers the gated models)
    torch.manual_seed(seed)
    train_loader, test_loader = loaders
    model = timm.create_model(name, in_chans=1, num_classes=10, **model_kwargs)
    task = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)
    optimizer = create_optimizer_v2(model, opt='sgd', lr=0.1, weight_decay=5e-4, filter_bias_and_bn=False)
    scheduler, _ = create_scheduler_v2(optimizer, sched='cosine', num_epochs=epochs, warmup_epochs=0)
    history = [evaluate(model, test_loader)]
    with tqdm(total=epochs * len(train_loader), desc=name, unit='step') as bar:
        for epoch in range(epochs):
            model.train()
            for images, labels in train_loader:
                result = task(images, labels)
                optimizer.zero_grad()
                result['loss'].backward()
                optimizer.step()
                bar.update()
            scheduler.step(epoch + 1)
            history.append(evaluate(model, test_loader))
            shown = {'acc': f'{history[-1].accuracy:.1f}'}
            if 'gate_density' in result:
                shown.update(
                    lam=f'{result["lam"]:.2f}', gamma=f'{result["gamma"]:.3f}', density=f'{result["gate_density"]:.2f}')
            bar.set_postfix(shown)
    return model, history


def table(results: Dict[str, Evaluation]) -> str:
    """Format the results."""
    rows = [('', 'accuracy', 'MACs per sample', 'share of MACs', 'always on / conditional / always off')]
    for name, result in results.items():
        counts = ' / '.join(map(str, result.counts)) if result.counts else 'no gates'
        rows.append((
            name, f'{result.accuracy:.1f} %', f'{result.mean_macs / 1e6:.2f} M',
            f'{100 * result.mean_macs / result.dense_macs:.1f} %', counts))
    return format_table(rows)


def plot(history: List[Evaluation], losses: GateLosses, path: Path) -> None:
    """Draw the distribution of the gates over training."""
    import numpy as np
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure
    epochs = np.arange(len(history))
    fig = Figure(figsize=(8, 8), layout='constrained')
    axes = fig.subplots(3, 1, sharex=True, height_ratios=(1, 2.2, 2))
    weights = np.array([losses.weights(max(epoch - 1, 0)) for epoch in epochs])
    for values, label in zip(weights.T, ('λ, batch shaping', 'γ, L0'), strict=True):
        top = max(values.max(), 1e-12)
        axes[0].plot(epochs, values / top, drawstyle='steps', label=f'{label} (up to {values.max():g})')
    axes[0].set_ylabel('share of maximum')
    axes[0].legend(frameon=False, loc='center right')
    axes[0].set_title('gated_resnet20 on handwritten digits: gates over training')

    bins = np.linspace(0, 1, 41)
    density = np.stack([np.histogram(entry.probabilities, bins, density=True)[0] for entry in history], axis=1)
    image = axes[1].imshow(
        density, origin='lower', aspect='auto', extent=(-0.5, len(history) - 0.5, 0, 1), cmap='magma',
        norm=LogNorm(vmin=0.03, vmax=density.max()))
    axes[1].set_ylabel('σ(logit) of gates × images')
    fig.colorbar(image, ax=axes[1], label='density', pad=0.01)

    counts = np.array([entry.counts for entry in history], dtype=float).T
    axes[2].stackplot(
        epochs, counts / counts.sum(0), labels=['always on', 'conditional', 'always off'],
        colors=['#31688e', '#35b779', '#bbbbbb'])
    axes[2].set(xlabel='epoch', ylabel='share of gates', ylim=(0, 1), xlim=(-0.5, len(history) - 0.5))
    axes[2].legend(loc='center', framealpha=0.9)
    fig.savefig(path, dpi=150)


def parse_args(argv: Optional[List[str]]) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument('--output', type=Path, default=Path('output/demo'), help='folder for the figure and the table')
    parser.add_argument('--epochs', type=int, default=30, help='training epochs per model (default: %(default)s)')
    parser.add_argument(
        '--gamma', type=float, default=0.01, help='weight of the L0 loss, summed over gates (default: %(default)s)')
    parser.add_argument('--batch-size', type=int, default=64)
    parser.add_argument('--seed', type=int, default=0)
    add_json_option(parser)
    args = parser.parse_args(argv)
    if args.epochs < 3:
        parser.error(f'--epochs must be at least 3 (batch shaping, then L0), got {args.epochs}.')
    return args


def run(args: argparse.Namespace) -> Dict[str, Dict[str, Any]]:
    loaders = digits(args.batch_size, args.seed)
    third = args.epochs / 3
    _, dense = train('cifar_resnet20', loaders, args.epochs, args.seed)
    model, gated = train(
        'gated_resnet20', loaders, args.epochs, args.seed,
        lam=0.75, lam_epochs=(0, third), gamma=args.gamma, gamma_epochs=(third, 2 * third), gamma_reduction='sum')

    results = {'dense ResNet-20': dense[-1], 'gated ResNet-20': gated[-1]}
    summary = table(results)
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.output) as scratch:
        plot(gated, model.gate_losses, Path(scratch) / 'gates.png')
        (Path(scratch) / 'table.txt').write_text(summary + '\n')
        for name in ('gates.png', 'table.txt'):
            os.replace(Path(scratch) / name, args.output / name)
    print(f'\n{summary}\n\nFigure: {args.output / "gates.png"}')
    return {
        name: {
            'accuracy': result.accuracy, 'dense_macs': result.dense_macs, 'mean_macs': result.mean_macs,
            'gates': result.counts and result.counts._asdict()}
        for name, result in results.items()}


def main(argv: Optional[List[str]] = None) -> int:
    return execute(run, parse_args(argv))


if __name__ == '__main__':
    sys.exit(main())
