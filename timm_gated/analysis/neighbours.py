"""Gates of one image beside those of a data set

`image_gates` runs one image. `record_decisions` keeps the decisions of every gate for every image, which a `GateRecord`
does not: one byte per gate and image, so use it on a few thousand images. Two images are similar if most gates decide
the same for both (Hamming distance).
"""
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterable, List, Sequence, Tuple

import numpy as np
import torch
import torch.nn as nn

from ..layers import MacCounter, gates
from .record import GateRecord, Outcome, record_gates

__all__ = ['DecisionRecord', 'ImageGates', 'image_gates', 'record_decisions']


@dataclass
class ImageGates:
    """What a network computed for one image.

    Attributes:
        probabilities: Probability of each class, [C].
        is_open: Whether each gate was open, by module name, boolean [num_gates].
        macs: MACs of the image.
        dense_macs: MACs of the dense network for an image of this size.
    """
    probabilities: np.ndarray
    is_open: Dict[str, np.ndarray]
    macs: int
    dense_macs: int

    @property
    def decisions(self) -> np.ndarray:
        """Decisions of all gates, concatenated in the order of the modules, [gates]."""
        return np.concatenate(list(self.is_open.values()))


@torch.inference_mode()
def image_gates(model: nn.Module, image: torch.Tensor) -> ImageGates:
    """Run a classifier on one image. Calls on the same model must not overlap: gates keep their last decision.

    Args:
        model: Classifier with gates, in evaluation mode.
        image: Image as the model gets it, [C, H, W].
    """
    device = next(model.parameters()).device
    with MacCounter(model) as counter:
        output = model(image[None].to(device))
    macs = counter.macs()
    return ImageGates(
        probabilities=torch.softmax(output[0].float(), dim=0).cpu().numpy(),
        is_open={name: gate.decision[0].bool().cpu().numpy() for name, gate in gates(model)},  # type: ignore[index]
        macs=int(macs.per_sample[0]),
        dense_macs=macs.dense,
    )


@dataclass
class DecisionRecord:
    """Record of a data set with the decisions of every gate for every image.

    Attributes:
        record: Record of the gates.
        decisions: Whether each gate was open, boolean [N, gates], in the order of `record.layers`.
    """
    record: GateRecord
    decisions: np.ndarray

    def nearest(self, decisions: np.ndarray, count: int) -> Tuple[np.ndarray, np.ndarray]:
        """Find the images with the most similar gates.

        Args:
            decisions: Decisions of all gates for one image, boolean [gates].
            count: Number of images to find.

        Returns:
            Indices of the images, most similar first, and the numbers of gates that decide differently.
        """
        different = (self.decisions != decisions).sum(axis=1)
        order = np.argsort(different, kind='stable')[:count]
        return order, different[order]

    def share_below(self, macs: int) -> float:
        """Share of the images that take fewer MACs."""
        return float((self.record.macs < macs).mean())


def record_decisions(
        model: nn.Module,
        loader: Iterable[Any],
        class_names: Sequence[str],
        step: Callable[[Any], Outcome],
) -> DecisionRecord:
    """Run a model over a data set and record the decisions of its gates.

    Args:
        model: Model with gates, put into evaluation mode.
        loader: Batches in the order of the data set.
        class_names: Names of the classes.
        step: Function that runs the model on a batch and returns the outcome.

    Example:
        >>> known = record_decisions(model, data.loader, data.class_names, data.step)
        >>> indices, different = known.nearest(image_gates(model, image).decisions, count=12)
    """
    rows: List[np.ndarray] = []

    def keep(batch: Any) -> Outcome:
        outcome = step(batch)
        decisions = torch.cat([gate.decision for _, gate in gates(model)], dim=1)  # type: ignore[misc]
        rows.append(decisions.bool().cpu().numpy())
        return outcome

    record = record_gates(model, loader, class_names, keep)
    return DecisionRecord(record, np.concatenate(rows))
