"""Record of the gates of a model over a data set

One pass over the data fills a `GateRecord`, the source of all figures and measures. It keeps counters: how often each
gate was open, overall and per class, a histogram of its sigmoid(logit), and the few inputs with its highest logits. Per
input it keeps MACs, label, prediction and confidence (24 bytes), but not the decisions of single gates. A record of the
ImageNet validation set is about a megabyte larger than one of a few batches.

Works on every model whose gates follow the protocol of `timm_gated.gates`.
"""
from array import array
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import torch
import torch.nn as nn

from ..layers import MacCounter, gates
from ..loss import histograms
from .statistics import GateCounts, GateStatistics, gate_kinds

__all__ = [
    'GateRecord', 'Outcome', 'Recorder', 'check_gated', 'classification_outcome', 'classification_step',
    'record_classifier', 'record_gates', 'shorten',
]

BINS = 100  # histogram bins of sigmoid(logit)


def check_gated(model: nn.Module) -> nn.Module:
    """Return the model. Raise a ValueError if it has no gates."""
    if not gates(model):
        raise ValueError(
            f'this {type(model).__name__} has no gates. timm_gated.list_gated_models() lists the gated models.')
    return model


@dataclass
class Outcome:
    """Labels and predictions of a batch.

    Attributes:
        members: Class membership of each input, boolean [N, num_classes].
        correct: Correct share of each input, [N]: 0 or 1 for an image, in between for a label map.
        confidence: Probability of the prediction, averaged over a label map, [N].
        label: Class of each input, [N]; None for label maps.
        prediction: Predicted class of each input, [N]; None for label maps.
        correct_top5: Whether the class is in the top 5, boolean [N]; None if it does not apply.
    """
    members: torch.Tensor
    correct: torch.Tensor
    confidence: torch.Tensor
    label: Optional[torch.Tensor] = None
    prediction: Optional[torch.Tensor] = None
    correct_top5: Optional[torch.Tensor] = None


@dataclass
class GateRecord:
    """Record of the gates of a model over a data set of N inputs and C classes.

    The gates of all modules are concatenated in the order of `layers`. A model without gates has none.

    Attributes:
        layers: Number of gates per gate module, by module name.
        class_names: Names of the classes.
        class_counts: Number of inputs per class, [C].
        open_share: Share of inputs for which each gate was open, [gates].
        open_share_by_class: `open_share` within each class, [C, gates]; NaN for a class that does not occur.
        histogram: Histogram of sigmoid(logit) per gate, over equal bins of [0, 1], [gates, bins].
        examples: Indices of the inputs with the highest logits per gate, among those that open it, highest first,
            [gates, examples]; padded with -1.
        macs: MACs of each input, [N].
        dense_macs: Mean MACs per input of the dense network; inputs may differ in size.
        parameters: Number of parameters of the model.
        parameters_used: Mean number of parameters used per input.
        correct: Correct share of each input, [N].
        confidence: Probability of each input's prediction, [N].
        label: Class of each input, [N]; -1 for label maps.
        prediction: Predicted class of each input, [N]; -1 for label maps.
        members: Class membership of each label map, packed by `numpy.packbits`, [N, ceil(C / 8)].
        top5: Top-5 accuracy as a share, or None.
        subset_of: Number of inputs of the whole data set if the record is of a subset, else None.
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
    subset_of: Optional[int] = None

    @property
    def num_samples(self) -> int:
        return len(self.macs)

    @property
    def labelled(self) -> bool:
        """Whether each input has one class, as opposed to a label map."""
        return bool((self.label >= 0).all())

    @property
    def macs_share(self) -> float:
        """Mean MACs per input, gates included, as a share of the dense network's."""
        return float(self.macs.mean() / self.dense_macs)

    def present_classes(self) -> List[int]:
        """Indices of the classes that occur."""
        return np.flatnonzero(self.class_counts).tolist()

    def of_class(self, index: int) -> np.ndarray:
        """Mask of the inputs of a class, [N]."""
        if self.labelled:
            return self.label == index
        return np.unpackbits(self.members[:, index // 8, None], axis=1)[:, index % 8].astype(bool)

    def class_index(self, name: str) -> int:
        """Index of a class by name. Raise a ValueError if the class does not occur."""
        if name not in self.class_names:
            raise ValueError(f"there is no class '{name}'; the classes: {shorten(self.class_names)}.")
        index = self.class_names.index(name)
        if not self.class_counts[index]:
            present = [self.class_names[i] for i in self.present_classes()]
            raise ValueError(f"the class '{name}' does not occur in the data; choose one of: {shorten(present)}.")
        return index

    def spans(self) -> Iterator[Tuple[str, slice]]:
        """Name and gate indices of each gate module."""
        start = 0
        for name, count in self.layers.items():
            yield name, slice(start, start + count)
            start += count

    def gate_name(self, index: int) -> str:
        """Name of a gate: module name, a slash and the index within the module."""
        for name, span in self.spans():
            if index < span.stop:
                return f'{name}/{index - span.start}'
        raise ValueError(f'there is no gate {index}; there are {len(self.open_share)}.')

    def gate_index(self, name: str) -> int:
        """Index of a gate by name, the inverse of `gate_name`."""
        layer, _, number = name.rpartition('/')
        for known, span in self.spans():
            if known == layer and number.isdecimal() and int(number) < span.stop - span.start:
                return span.start + int(number)
        raise ValueError(
            f"there is no gate '{name}'. Write a gate as MODULE/INDEX; the modules: {shorten(self.layers)}.")

    def kinds(self, threshold: float = 0.99) -> np.ndarray:
        """Kind of each gate as an index into `GateCounts`: 0 always on, 1 conditional, 2 always off."""
        return gate_kinds(torch.from_numpy(self.open_share), threshold).numpy()

    def counts(self, threshold: float = 0.99) -> GateCounts:
        """Number of gates of each kind."""
        return GateCounts.of(self.kinds(threshold))

    def counts_by_layer(self, threshold: float = 0.99) -> Dict[str, GateCounts]:
        """Number of gates of each kind per gate module."""
        kinds = self.kinds(threshold)
        return {name: GateCounts.of(kinds[span]) for name, span in self.spans()}


def shorten(names: Iterable[str], limit: int = 12) -> str:
    """First names of a list and its length, for error messages."""
    names = list(names)
    return ', '.join(names[:limit]) + (f' … ({len(names)} in all)' if len(names) > limit else '')


class Recorder:
    """Fills a `GateRecord` batch by batch.

    Args:
        model: Model in evaluation mode.
        class_names: Names of the classes.
        num_examples: Number of inputs to keep per gate.

    Examples:
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
        self._best: Any = None  # logits and indices of the examples, each [examples, gates]
        self._num_examples = num_examples
        self._num_samples = 0
        self._dense_macs = self._parameters_used = 0.
        self._top5: Optional[float] = 0.
        # Contiguous: keeping a small array per batch would fragment the memory.
        self._columns: Dict[str, Any] = {
            'macs': array('q'), 'correct': array('f'), 'confidence': array('f'), 'label': array('i'),
            'prediction': array('i'), 'members': array('B')}

    def batch(self) -> MacCounter:
        """Context manager to run the model on one batch in."""
        return self._counter

    @torch.no_grad()
    def update(self, outcome: Outcome) -> None:
        """Add the last batch."""
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
                f'input are not finite. Check that training was stable and the input is normalised as in training.')
        self._histogram = self._histogram + histograms(torch.sigmoid(logits), BINS)
        decisions = torch.cat([gate.decision for _, gate in self._gates], dim=1)  # type: ignore[misc]
        logits = logits.masked_fill(decisions == 0, -torch.inf)  # examples must open the gate
        indices = torch.arange(self._num_samples, self._num_samples + len(logits), device=logits.device)
        indices = indices[:, None].expand_as(logits)
        if self._best is not None:
            logits, indices = torch.cat((self._best[0], logits)), torch.cat((self._best[1], indices))
        values, order = logits.topk(min(self._num_examples, len(logits)), dim=0)
        self._best = values, indices.gather(0, order)

    def record(self) -> GateRecord:
        """Record of the batches so far."""
        if not self._num_samples:
            raise ValueError('the data set is empty. Check its path and split.')
        num_classes = len(self._class_names)
        open_share, by_class = np.zeros(0), np.zeros((num_classes, 0))
        examples, histogram = np.zeros((0, self._num_examples), dtype=np.int64), np.zeros((0, BINS), dtype=np.int64)
        if self._gates:
            open_share = torch.cat(list(self._statistics.open_share().values())).cpu().numpy()
            by_class = torch.cat(list(self._statistics.open_share_by_class().values()), dim=1).cpu().numpy()
            histogram = self._histogram.cpu().numpy()
            values, indices = (tensor.T.cpu() for tensor in self._best)
            examples = torch.where(values > -torch.inf, indices, -1).numpy()
        columns: Dict[str, Any] = {name: np.array(column) for name, column in self._columns.items()}
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
    """Outcome of a batch of a classifier.

    Args:
        output: Logits, [N, outputs].
        labels: Class of each image, [N].
        num_classes: Number of classes of the data, at most the number of outputs.
    """
    if not output.isfinite().all():
        raise ValueError(
            'the output of the model is not finite: the weights or the input hold NaN or infinity. Check that training '
            'was stable and that the input is normalised as in training.')
    if num_classes > output.shape[1]:
        raise ValueError(
            f'the data has {num_classes} classes, but the model has {output.shape[1]} outputs. Check --num-classes.')
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
        subset_of: Optional[int] = None,
) -> GateRecord:
    """Run a model over a data set and record its gates.

    Args:
        model: Model, put into evaluation mode. Without gates, the record has none.
        loader: Batches in the order of the data set.
        class_names: Names of the classes.
        step: Function that runs the model on a batch and returns the outcome.
        num_examples: Number of inputs to keep per gate.
        subset_of: Number of inputs of the whole data set if the loader has only some of them.
    """
    model.eval()
    recorder = Recorder(model, class_names, num_examples)
    for batch in loader:
        with recorder.batch():
            outcome = step(batch)
        recorder.update(outcome)
    return replace(recorder.record(), subset_of=subset_of)


def classification_step(
        model: nn.Module,
        num_classes: int,
        outputs: Optional[Sequence[int]] = None,
) -> Callable[[Any], Outcome]:
    """Create the step of a classifier for `record_gates`, on batches (images, labels).

    Args:
        model: Classifier.
        num_classes: Number of classes of the data; labels must be below it.
        outputs: Indices of the outputs to use, in the order of the labels; all by default.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device('cpu'))

    def step(batch: Any) -> Outcome:
        images, labels = (part.to(device) for part in batch)
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < num_classes:
            raise ValueError(
                f'labels must be in [0, {num_classes}), got {int(labels.min())} to {int(labels.max())}.')
        output = model(images)
        return classification_outcome(output if outputs is None else output[:, list(outputs)], labels, num_classes)
    return step


def record_classifier(model: nn.Module, loader: Iterable[Any], class_names: Sequence[str]) -> GateRecord:
    """Run a classifier over a data set and record its gates.

    Args:
        model: Classifier, put into evaluation mode.
        loader: Batches (images, labels) in the order of the data set.
        class_names: Names of the classes.
    """
    return record_gates(model, loader, class_names, classification_step(model, len(class_names)))
