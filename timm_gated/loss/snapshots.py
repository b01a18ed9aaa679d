"""Distributions of single gates, recorded once per epoch of a training

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)

The paper's Figure 1b follows four gates over a training: batch shaping makes them conditional, and the L0 loss later
opens them, closes them or leaves them conditional. Which gates do so is known only at the end, so a few dozen are
recorded, spread over the network. A snapshot holds a histogram of each gate's sigmoid(logit), without noise, over all
training images of an epoch: a few kilobytes.

Each epoch is one file, written atomically. A resumed training continues in the same folder, and a repeated epoch
replaces its file.
"""
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Optional, Union

import numpy as np
import torch
import torch.nn as nn

from ..layers import LastPass, gates
from ..utils import check_number, new_file

__all__ = ['GateSnapshots', 'Snapshots', 'histograms', 'load_snapshots']

_logger = logging.getLogger(__name__)


def histograms(values: torch.Tensor, bins: int) -> torch.Tensor:
    """Histogram of each column, with equal bins over [0, 1].

    Args:
        values: Values in [0, 1], [N, columns].
        bins: Number of bins.

    Returns:
        Counts, [columns, bins], int64.
    """
    columns = values.shape[1]
    index = (values * bins).long().clamp_(0, bins - 1) + bins * torch.arange(columns, device=values.device)
    counts = torch.zeros(columns * bins, dtype=torch.int64, device=values.device)
    return counts.scatter_add_(0, index.flatten(), torch.ones_like(index.flatten())).view(columns, bins)


class GateSnapshots:
    """Records the distribution of some gates over each epoch of a training.

    Args:
        folder: Folder for the files, one per epoch; created at the first step.
        num_gates: Number of gates to record, spread evenly over all gates.
        bins: Number of histogram bins.
    """

    def __init__(self, folder: Union[str, Path], num_gates: int = 64, bins: int = 50) -> None:
        if not isinstance(folder, (str, Path)) or not str(folder):
            raise ValueError(f'the folder of gate snapshots must be a path, got {folder!r}.')
        self.folder = Path(folder)
        self.num_gates = check_number(num_gates, 'number of gates in snapshots', minimum=1, integer=True)
        self.bins = check_number(bins, 'bins of snapshots', minimum=2, integer=True)
        self.epoch = -1
        self._names: List[str] = []
        self._weights: Dict[str, float] = {}
        self._counts: Optional[torch.Tensor] = None  # histograms of the current epoch
        self._written = True

    @torch.no_grad()
    def update(self, model: Union[nn.Module, LastPass], epoch: int, **weights: float) -> None:
        """Add the gates of the model's last forward pass.

        Args:
            model: A model with gates, or its `LastPass`.
            epoch: The current epoch. When it changes, the previous one is written.
            **weights: Weights of the losses in this epoch, stored with it.
        """
        if epoch != self.epoch or self._counts is None:
            self.write()
            self.folder.mkdir(parents=True, exist_ok=True)  # fail early if this is impossible
            self.epoch, self._counts = epoch, None
        named_gates = gates(model)
        names = [f'{name}/{index}' for name, gate in named_gates for index in range(gate.num_gates)]
        chosen = np.unique(np.linspace(0, len(names) - 1, min(self.num_gates, len(names))).round().astype(int))
        logits = torch.cat([gate.logits for _, gate in named_gates], dim=1)  # type: ignore[misc]
        counts = histograms(torch.sigmoid(logits[:, torch.from_numpy(chosen).to(logits.device)]), self.bins)
        self._names = [names[index] for index in chosen]
        self._weights = weights
        self._counts = counts if self._counts is None else self._counts + counts
        self._written = False

    def write(self) -> None:
        """Write the current epoch so far. With several processes, only the first one writes, its own images."""
        distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self._written or (distributed and torch.distributed.get_rank()):
            return
        assert self._counts is not None
        path = self.folder / f'epoch_{self.epoch:04d}.npz'
        try:
            with new_file(path) as partial:
                np.savez_compressed(
                    partial, names=np.array(self._names), counts=self._counts.cpu().numpy(), epoch=np.array(self.epoch),
                    weight_names=np.array(list(self._weights), dtype=np.str_),
                    weights=np.array(list(self._weights.values()), dtype=np.float64))
        except OSError as error:  # a full disk must not stop a long training
            _logger.warning(f'The gate snapshot {path} could not be written: {error}.')
        self._written = True

    def __getstate__(self) -> Dict[str, Any]:
        # A copy of the model, such as the EMA model, has no records.
        return {**self.__dict__, '_counts': None, '_written': True}


@dataclass
class Snapshots:
    """Distributions of gates over a training.

    Attributes:
        names: Names of the gates: module name, slash, index.
        epochs: Epochs recorded, [E], increasing.
        counts: Histograms of sigmoid(logit) over [0, 1], [E, gates, bins].
        weights: Weights of the losses by name, [E] each.
    """
    names: List[str]
    epochs: np.ndarray
    counts: np.ndarray
    weights: Dict[str, np.ndarray]

    def mean(self) -> np.ndarray:
        """Mean of sigmoid(logit), [E, gates]."""
        bins = self.counts.shape[-1]
        centres = (np.arange(bins) + 0.5) / bins
        return (self.counts * centres).sum(-1) / self.counts.sum(-1)


def load_snapshots(folder: Union[str, Path]) -> Snapshots:
    """Load the files of `GateSnapshots`.

    Args:
        folder: Folder with the snapshots of a training.
    """
    files = sorted(Path(folder).glob('epoch_*.npz'), key=lambda path: int(path.stem.split('_')[1]))
    if not files:
        problem = '' if Path(folder).is_dir() else ', which does not exist'
        raise ValueError(
            f'no gate snapshots (epoch_*.npz) in {folder}{problem}. To write them, train with the model option '
            f"snapshot_dir: `train.py … --model-kwargs snapshot_dir='{folder}'`.")
    entries = []
    for path in files:
        with np.load(path, allow_pickle=False) as data:
            entries.append({name: data[name] for name in data.files})
        if entries[-1]['counts'].shape != entries[0]['counts'].shape or (
                entries[-1]['names'].tolist() != entries[0]['names'].tolist()):
            raise ValueError(
                f'{path.name} and {files[0].name} in {folder} have different gates, so two trainings wrote there. Use '
                f'a separate snapshot_dir for each training.')
    return Snapshots(
        names=entries[0]['names'].tolist(),
        epochs=np.array([int(entry['epoch']) for entry in entries]),
        counts=np.stack([entry['counts'] for entry in entries]),
        weights={
            str(name): np.array([entry['weights'][index] for entry in entries])
            for index, name in enumerate(entries[0]['weight_names'])},
    )
