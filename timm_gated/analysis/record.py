"""What the gates of a model did over a data set

One pass over the data fills a `GateRecord`, from which all figures and numbers follow. It is made of counters: for each
gate, how often it was open, in all and within each class, and a histogram of its sigmoid(logit); and the few inputs
that moved it most. Of an input itself stay its MACs, label, prediction and confidence, 24 bytes; what single gates
decided for it is not kept. So ImageNet's validation set takes a megabyte more than a few batches.

Works on every model whose gates follow the protocol of `timm_gated.gates`.
"""
from array import array
from dataclasses import dataclass, field
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import torch
import torch.nn as nn

from ..layers import MacCounter, gates
from ..loss import histograms
from .statistics import GateCounts, GateStatistics, gate_kinds

__all__ = [
    'GateRecord', 'Outcome', 'Recorder', 'check_gated', 'classification_outcome', 'classification_step',
    'record_classifier', 'record_gates',
]

BINS = 100  # of the histogram of sigmoid(logit)


def check_gated(model: nn.Module) -> nn.Module:
    """Return a model that has gates; otherwise raise a ValueError."""
    if not gates(model):
        raise ValueError(
            f'this {type(model).__name__} has no gates, so there is nothing to see. Gated timm models are listed by '
            f'timm_gated.list_gated_models().')
    return model


@dataclass
class Outcome:
    """How a batch went.

    Attributes:
        members: Which classes each input belongs to, [N, num_classes] of booleans.
        correct: Share of each input that was right: 0 or 1 for an image, in between for a label map. [N]
        confidence: Probability that the model gave to its prediction, averaged over a label map. [N]
        label: Class of each input, [N]; None for label maps.
        prediction: Predicted class of each input, [N]; None for label maps.
        correct_top5: Whether the class was among the first five, [N]; None where that means nothing.
    """
    members: torch.Tensor
    correct: torch.Tensor
    confidence: torch.Tensor
    label: Optional[torch.Tensor] = None
    prediction: Optional[torch.Tensor] = None
    correct_top5: Optional[torch.Tensor] = None


@dataclass
class GateRecord:
    """What the gates of a model did over a data set of N inputs, C classes.

    Gates of all modules stand side by side, in the order of `layers`; a model without gates has none.

    Attributes:
        layers: Number of gates of each gate module, by its name.
        class_names: Names of the classes.
        class_counts: Inputs of each class, [C].
        open_share: Share of the inputs for which each gate was open, [gates].
        open_share_by_class: The same within each class, [C, gates]; NaN where a class never occurred.
        histogram: Of each gate's sigmoid(logit) over equal bins of [0, 1], [gates, bins].
        examples: Of the inputs for which each gate was open, those with the highest logits, best first, [gates,
            examples]; -1 where there are no more.
        macs: MACs of each input, [N].
        dense_macs: MACs of an input in the plain network, on average: inputs may differ in size.
        parameters: Parameters of the model.
        parameters_used: Parameters that an input used, on average.
        correct: Share of each input that was right, [N].
        confidence: Probability of each input's prediction, [N].
        label: Class of each input, [N]; -1 for label maps.
        prediction: Predicted class of each input, [N]; -1 for label maps.
        members: For label maps, the classes of each input, packed by `numpy.packbits`, [N, ceil(C / 8)].
        top5: Share of the inputs whose class was among the first five, or None.
    """
    layers: Dict[str, int]
    class_names: List[str]
    class_counts: np.ndarray
    open_share: np.ndarray
    open_share_by_class: np.ndarray
    histogram: np.ndarray
    examples: np.ndarray
    macs: np.ndarray
    dense_macs: float
    parameters: int
    parameters_used: float
    correct: np.ndarray
    confidence: np.ndarray
    label: np.ndarray
    prediction: np.ndarray
    members: np.ndarray = field(repr=False)
    top5: Optional[float] = None

    @property
    def num_samples(self) -> int:
        return len(self.macs)

    @property
    def labelled(self) -> bool:
        """Whether an input is of one class, as opposed to label maps."""
        return bool((self.label >= 0).all())

    @property
    def macs_share(self) -> float:
        """Mean MACs of an input, gates included, over those of the plain network."""
        return float(self.macs.mean() / self.dense_macs)

    def present_classes(self) -> List[int]:
        """Classes that occur."""
        return np.flatnonzero(self.class_counts).tolist()

    def of_class(self, index: int) -> np.ndarray:
        """Which inputs belong to a class, [N] of booleans."""
        if self.labelled:
            return self.label == index
        return np.unpackbits(self.members[:, index // 8, None], axis=1)[:, index % 8].astype(bool)

    def class_index(self, name: str) -> int:
        """Index of a class that occurs, by its name."""
        if name not in self.class_names:
            raise ValueError(f"there is no class '{name}'; the classes: {_shorten(self.class_names)}.")
        index = self.class_names.index(name)
        if not self.class_counts[index]:
            present = [self.class_names[i] for i in self.present_classes()]
            raise ValueError(f"the class '{name}' never occurs in this data; choose among: {_shorten(present)}.")
        return index

    def spans(self) -> Iterator[Tuple[str, slice]]:
        """Where the gates of each gate module are."""
        start = 0
        for name, count in self.layers.items():
            yield name, slice(start, start + count)
            start += count

    def gate_name(self, index: int) -> str:
        """Name of a gate: its module's name, a slash and its index there."""
        for name, span in self.spans():
            if index < span.stop:
                return f'{name}/{index - span.start}'
        raise ValueError(f'there is no gate {index}; there are {len(self.open_share)}.')

    def gate_index(self, name: str) -> int:
        """Index of a gate by its name, the inverse of `gate_name`."""
        layer, _, number = name.rpartition('/')
        for known, span in self.spans():
            if known == layer and number.isdecimal() and int(number) < span.stop - span.start:
                return span.start + int(number)
        raise ValueError(
            f"there is no gate '{name}'. A gate is written MODULE/INDEX, the modules being {_shorten(self.layers)}.")

    def kinds(self, threshold: float = 0.99) -> np.ndarray:
        """What each gate does, as an index into `GateCounts`: 0 always on, 1 conditional, 2 always off."""
        return gate_kinds(torch.from_numpy(self.open_share), threshold).numpy()

    def counts(self, threshold: float = 0.99) -> GateCounts:
        """How many gates are always on, conditional and always off."""
        return GateCounts(*np.bincount(self.kinds(threshold), minlength=len(GateCounts._fields)).tolist())

    def counts_by_layer(self, threshold: float = 0.99) -> Dict[str, GateCounts]:
        """How many gates of each module are always on, conditional and always off."""
        kinds = self.kinds(threshold)
        return {
            name: GateCounts(*np.bincount(kinds[span], minlength=len(GateCounts._fields)).tolist())
            for name, span in self.spans()}


def _shorten(names: Iterable[str], limit: int = 12) -> str:
    names = list(names)
    return ', '.join(names[:limit]) + (f' … ({len(names)} in all)' if len(names) > limit else '')


class Recorder:
    """Fills a `GateRecord`, batch by batch.

    Args:
        model: The model, in evaluation mode.
        class_names: Names of the classes.
        num_examples: How many inputs to remember for each gate.

    Example:
        >>> recorder = Recorder(model, class_names)
        >>> for images, labels in loader:
        >>>     with recorder.batch():
        >>>         output = model(images)
        >>>     recorder.update(outcome_of(output, labels))
        >>> record = recorder.record()
    """

    def __init__(self, model: nn.Module, class_names: Sequence[str], num_examples: int = 8) -> None:
        self._model = model
        self._gates = gates(model)
        self._counter = MacCounter(model)
        self._class_names = list(class_names)
        self._statistics = GateStatistics(len(self._class_names))
        self._class_counts = np.zeros(len(self._class_names), dtype=np.int64)
        self._histogram: Any = 0
        self._best: Any = None  # logits of the examples and their indices, each [examples, gates]
        self._num_examples = num_examples
        self._num_samples = 0
        self._dense_macs = self._parameters_used = 0.
        self._top5: Optional[float] = 0.
        # Contiguous: a small array for every batch, kept, would pin the memory of all that was freed around it.
        self._columns: Dict[str, Any] = {
            'macs': array('q'), 'correct': array('f'), 'confidence': array('f'), 'label': array('i'),
            'prediction': array('i'), 'members': array('B')}

    def batch(self) -> MacCounter:
        """Context in which to run the model on one batch."""
        return self._counter

    @torch.no_grad()
    def update(self, outcome: Outcome) -> None:
        """Take in the last batch."""
        macs = self._counter.macs()
        num_samples = len(outcome.members)
        if self._gates:
            self._statistics.update(self._model, outcome.members)
            self._update_gates()
        self._num_samples += num_samples
        self._dense_macs += macs.dense * num_samples
        self._parameters_used += self._counter.parameters().sum().item()
        if outcome.correct_top5 is None:
            self._top5 = None
        elif self._top5 is not None:
            self._top5 += outcome.correct_top5.sum().item()
        members = outcome.members.cpu().numpy()
        self._class_counts += members.sum(0)
        none = torch.full((num_samples,), -1)
        for name, column in (
                ('macs', macs.per_sample.cpu().numpy()),
                ('correct', outcome.correct.float().cpu().numpy()),
                ('confidence', outcome.confidence.float().cpu().numpy()),
                ('label', (none if outcome.label is None else outcome.label).int().cpu().numpy()),
                ('prediction', (none if outcome.prediction is None else outcome.prediction).int().cpu().numpy()),
                ('members', np.packbits(members[:, :0 if outcome.label is not None else None], axis=1)),
        ):
            self._columns[name].frombytes(column.tobytes())

    def _update_gates(self) -> None:
        logits = torch.cat([gate.logits.float() for _, gate in self._gates], dim=1)  # type: ignore[union-attr]
        if logits.isnan().any():
            sample, index = logits.isnan().nonzero()[0].tolist()
            names = [name for name, gate in self._gates for _ in range(gate.num_gates)]
            raise ValueError(
                f"a logit of gate '{names[index]}' is NaN for input {self._num_samples + sample}: the weights or the "
                f'input are not finite. Was the training stable, and is the input normalised as in training?')
        self._histogram = self._histogram + histograms(torch.sigmoid(logits), BINS)
        decisions = torch.cat([gate.decision for _, gate in self._gates], dim=1)  # type: ignore[misc]
        logits = logits.masked_fill(decisions == 0, -torch.inf)  # examples are inputs for which the gate was open
        indices = torch.arange(self._num_samples, self._num_samples + len(logits), device=logits.device)
        indices = indices[:, None].expand_as(logits)
        if self._best is not None:
            logits, indices = torch.cat((self._best[0], logits)), torch.cat((self._best[1], indices))
        values, order = logits.topk(min(self._num_examples, len(logits)), dim=0)
        self._best = values, indices.gather(0, order)

    def record(self) -> GateRecord:
        """What was seen so far."""
        if not self._num_samples:
            raise ValueError('the data set is empty: no input was seen. Is the path right, and the split?')
        num_classes = len(self._class_names)
        open_share, by_class = np.zeros(0), np.zeros((num_classes, 0))
        examples, histogram = np.zeros((0, self._num_examples), dtype=np.int64), np.zeros((0, BINS), dtype=np.int64)
        if self._gates:
            open_share = torch.cat(list(self._statistics.open_share().values())).cpu().numpy()
            by_class = torch.cat(list(self._statistics.open_share_by_class().values()), dim=1).cpu().numpy()
            histogram = self._histogram.cpu().numpy()
            values, indices = (tensor.T.cpu() for tensor in self._best)
            examples = torch.where(values > -torch.inf, indices, -1).numpy()
        columns = {name: np.array(column) for name, column in self._columns.items()}
        columns['members'] = columns['members'].reshape(self._num_samples, -1)
        return GateRecord(
            layers={name: gate.num_gates for name, gate in self._gates},
            class_names=self._class_names,
            class_counts=self._class_counts,
            open_share=open_share,
            open_share_by_class=by_class,
            histogram=histogram,
            examples=examples,
            dense_macs=self._dense_macs / self._num_samples,
            parameters=sum(parameter.numel() for parameter in self._model.parameters()),
            parameters_used=self._parameters_used / self._num_samples,
            top5=None if self._top5 is None else self._top5 / self._num_samples,
            **columns,
        )


def classification_outcome(output: torch.Tensor, labels: torch.Tensor, num_classes: int) -> Outcome:
    """How a batch of a classifier went.

    Args:
        output: Logits, [N, outputs].
        labels: Class of each image, [N].
        num_classes: Number of classes of the data, at most that of the outputs.
    """
    if not output.isfinite().all():
        raise ValueError(
            'the output of the model is not finite (NaN or infinity): the weights or the input are broken. Was the '
            'training stable, and is the input normalised as in training?')
    if num_classes > output.shape[1]:
        raise ValueError(
            f'the data has {num_classes} classes, but the model has {output.shape[1]} outputs. Is --num-classes right?')
    confidence, prediction = torch.softmax(output.float(), dim=1).max(dim=1)
    in_top5 = None
    if output.shape[1] > 5:
        in_top5 = (output.topk(5, dim=1).indices == labels[:, None]).any(dim=1)
    return Outcome(
        members=nn.functional.one_hot(labels, num_classes).bool(),
        correct=prediction == labels,
        confidence=confidence,
        label=labels,
        prediction=prediction,
        correct_top5=in_top5,
    )


@torch.inference_mode()
def record_gates(
        model: nn.Module,
        loader: Iterable[Any],
        class_names: Sequence[str],
        step: Callable[[Any], Outcome],
        num_examples: int = 8,
) -> GateRecord:
    """Run a model over a data set and record what its gates do.

    Args:
        model: The model; it is put into evaluation mode. One without gates gives a record without gates.
        loader: Yields batches, in the order of the data set.
        class_names: Names of the classes.
        step: Runs the model on a batch and tells how it went.
        num_examples: How many inputs to remember for each gate.
    """
    model.eval()
    recorder = Recorder(model, class_names, num_examples)
    for batch in loader:
        with recorder.batch():
            outcome = step(batch)
        recorder.update(outcome)
    return recorder.record()


def classification_step(
        model: nn.Module,
        num_classes: int,
        outputs: Optional[Sequence[int]] = None,
) -> Callable[[Any], Outcome]:
    """Step of a classifier for `record_gates`, over batches (images, labels).

    Args:
        model: The model.
        num_classes: Number of classes of the data; every label must be below it.
        outputs: Outputs of the model to choose among, as labels number them; all by default.
    """
    device = next(model.parameters()).device

    def step(batch: Any) -> Outcome:
        images, labels = (part.to(device) for part in batch)
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
            raise ValueError(
                f'a label is {int(labels.min())} or {int(labels.max())}, but there are {num_classes} classes.')
        output = model(images)
        return classification_outcome(output if outputs is None else output[:, list(outputs)], labels, num_classes)
    return step


def record_classifier(model: nn.Module, loader: Iterable[Any], class_names: Sequence[str]) -> GateRecord:
    """Run a classifier over a data set and record what its gates do.

    Args:
        model: The model; it is put into evaluation mode.
        loader: Yields (images, labels), in the order of the data set.
        class_names: Names of the classes.
    """
    return record_gates(model, loader, class_names, classification_step(model, len(class_names)))
