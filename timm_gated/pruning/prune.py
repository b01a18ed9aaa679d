"""Smaller networks from trained gates: static pruning, and sub-networks for some classes

`prune_static` removes filters that hardly any input uses and gates that hardly ever close. `specialize` removes all
gates and the filters that the given classes do not use, as the conclusion of the gating paper proposes.

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)
"""
import math
import operator
from dataclasses import dataclass
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, SupportsIndex, Tuple

import torch
import torch.nn as nn

from ..analysis import GateCounts, GateRecord, Outcome, check_gated, check_threshold, classification_step, record_gates
from ..utils import check_number, evaluation_mode, unwrap
from .filters import blocks_of_gates, keep_used_filters

__all__ = ['check_classes', 'check_repeatable', 'Figures', 'prune_static', 'prune_with', 'Pruned', 'specialize']

RunBatch = Callable[[nn.Module, Any], Outcome]


@dataclass
class Figures:
    """Cost and accuracy of a network on a data set.

    Attributes:
        parameters: Number of parameters.
        dense_macs: MACs per input with all filters and without gates.
        mean_macs: Mean MACs per input as executed, including the gates.
        accuracy: Share of correctly classified inputs or pixels, in percent.
    """
    parameters: int
    dense_macs: float
    mean_macs: float
    accuracy: float

    @classmethod
    def of(cls, record: GateRecord) -> 'Figures':
        """Figures of a recorded pass over a data set."""
        accuracy = 100 * record.correct.mean(dtype='float64')
        return cls(record.parameters, record.dense_macs, float(record.macs.mean()), float(accuracy))


@dataclass
class Pruned:
    """Pruned network and its figures. `print` shows them as a table.

    Attributes:
        model: Pruned network.
        gates: Numbers of gates of the original that were always on, conditional and always off.
        open_share: Share of inputs for which each gate of the original was open, by name of the gate module.
        before: Figures of the original.
        after: Figures of the pruned network on the same data.
    """
    model: nn.Module
    gates: GateCounts
    open_share: Dict[str, torch.Tensor]
    before: Figures
    after: Figures

    def __str__(self) -> str:
        def row(name: str, before: float, after: float, text: str) -> str:
            change = f'{after / before - 1:+.1%}' if before else ''
            return f'{name:<16}{text.format(before):>14}{text.format(after):>14}{change:>10}'

        before, after = self.before, self.after
        accuracy = (f'{before.accuracy:.2f} %', f'{after.accuracy:.2f} %', f'{after.accuracy - before.accuracy:+.2f}')
        return '\n'.join((
            f'{"":<16}{"before":>14}{"after":>14}{"change":>10}',
            row('parameters', before.parameters / 1e6, after.parameters / 1e6, '{:.3f} M'),
            row('dense MACs', before.dense_macs / 1e6, after.dense_macs / 1e6, '{:.2f} M'),
            row('average MACs', before.mean_macs / 1e6, after.mean_macs / 1e6, '{:.2f} M'),
            '{:<16}{:>14}{:>14}{:>10}'.format('accuracy', *accuracy),
            f'gates of the original: {self.gates.always_on} always on, {self.gates.conditional} conditional, '
            f'{self.gates.always_off} always off'))


def prune_static(
        model: nn.Module,
        loader: Iterable[Any],
        threshold: float = 0.99,
        eval_loader: Optional[Iterable[Any]] = None,
) -> Pruned:
    """Remove the filters whose gate is almost always off, and the gates that are almost always on.

    The output is unchanged for every input whose removed filters were off and whose removed gates were on. The result
    is a smaller network of the same family, or a dense one if no gate is left. The groups of a grouped convolution keep
    equally many filters: those of the largest group. The model itself is not changed.

    Args:
        model: Gated classifier.
        loader: Batches of (images, labels) on which the gates are observed.
        threshold: Share of the data above which a gate counts as always off or always on, in (0.5, 1]. A threshold of 1
            removes only gates that never changed.
        eval_loader: Batches of (images, labels) to measure the figures on, `loader` by default.

    Examples:
        >>> pruned = prune_static(model, loader)
        >>> print(pruned)
        >>> save_pretrained(pruned.model, 'pruned')
    """
    model = _check_classifier(model)
    class_names = [str(label) for label in range(model.num_classes)]  # type: ignore[arg-type]

    def classify(network: nn.Module, batch: Any) -> Outcome:
        return classification_step(network, len(class_names))(batch)

    return prune_with(model, classify, class_names, loader, threshold, eval_loader=eval_loader)


def specialize(
        model: nn.Module,
        loader: Iterable[Any],
        classes: Sequence[int],
        threshold: float = 0.99,
        eval_loader: Optional[Iterable[Any]] = None,
        train_loader: Optional[Iterable[Any]] = None,
        epochs: int = 0,
        lr: float = 0.01,
) -> Pruned:
    """Extract a dense, smaller ResNet for some of the classes, with one output per class.

    Filters whose gate is almost always off for these classes are removed, and the other filters always run. The head
    keeps the outputs of these classes. A few epochs of fine-tuning adapt the network to filters that were conditional
    before. The figures are measured on images of these classes; those of the original restrict its prediction to these
    classes. The model itself is not changed.

    Args:
        model: Gated classifier.
        loader: Batches of (images, labels) of all classes, on which the gates are observed.
        classes: Labels of the classes, in the order of the outputs.
        threshold: Share of the data above which a gate counts as always off, in (0.5, 1].
        eval_loader: Batches to measure the figures on, `loader` by default.
        train_loader: Batches to fine-tune on, `loader` by default.
        epochs: Number of epochs of fine-tuning by SGD, with a cosine schedule per epoch.
        lr: Initial learning rate of the fine-tuning.
    """
    model = _check_classifier(model)
    classes = check_classes(classes, model.num_classes)  # type: ignore[arg-type]
    _check_head(model, classes)
    check_number(epochs, 'epochs', minimum=0, integer=True)
    check_number(lr, 'lr', above=0)
    names = [str(label) for label in classes]

    def of_classes(source: Iterable[Any]) -> '_ImagesOf':
        check_repeatable(source)
        return _ImagesOf(source, classes)

    def adapt(network: nn.Module) -> nn.Module:
        _cut_head(network, classes)
        if epochs:
            _fine_tune(network, of_classes(loader if train_loader is None else train_loader), epochs, lr)
        return network

    def classify(network: nn.Module, batch: Any) -> Outcome:
        return classification_step(network, len(classes), outputs=classes if network is model else None)(batch)

    return prune_with(
        model, classify, names, of_classes(loader), threshold, keep_gates=False, adapt=adapt,
        eval_loader=None if eval_loader is None else of_classes(eval_loader))


def prune_with(
        model: nn.Module,
        step: RunBatch,
        class_names: Sequence[str],
        loader: Iterable[Any],
        threshold: float = 0.99,
        keep_gates: bool = True,
        adapt: Callable[[nn.Module], nn.Module] = lambda network: network,
        eval_loader: Optional[Iterable[Any]] = None,
) -> Pruned:
    """Prune any network with channel gates on any data. Used by `prune_static` and `specialize`.

    Args:
        model: Network to prune.
        step: Function that runs a network on a batch and returns the outcome.
        class_names: Names of the classes in the outcome.
        loader: Batches on which the gates are observed.
        threshold: Share of the data above which a gate counts as always off or always on.
        keep_gates: Keep conditional gates. Otherwise their filters always run.
        adapt: Function applied to the pruned network, for example fine-tuning.
        eval_loader: Batches to measure the figures on, `loader` by default.
    """
    model = unwrap(model)
    check_threshold(threshold)
    check_gated(model)
    blocks_of_gates(model)  # raises an error early if the network cannot be pruned
    eval_loader = loader if eval_loader is None else eval_loader
    for source in (loader, eval_loader):
        check_repeatable(source)

    def record(network: nn.Module, source: Iterable[Any]) -> GateRecord:
        return record_gates(network, source, class_names, lambda batch: step(network, batch))

    with evaluation_mode(model):
        seen = record(model, loader)
        before = seen if eval_loader is loader else record(model, eval_loader)
    for name, counts in zip(class_names, zip(seen.class_counts, before.class_counts, strict=True), strict=True):
        if not keep_gates and not all(counts):
            raise ValueError(f'the data has no sample of class {name}, so its filters cannot be determined.')
    shares = {name: torch.from_numpy(seen.open_share[span]) for name, span in seen.spans()}
    pruned = adapt(keep_used_filters(model, shares, threshold, keep_gates))
    pruned.eval()
    return Pruned(
        model=pruned,
        gates=seen.counts(threshold),
        open_share=shares,
        before=Figures.of(before),
        after=Figures.of(record(pruned, eval_loader)),
    )



def check_repeatable(loader: Any) -> None:
    """Raise a ValueError for data that can be read only once."""
    if isinstance(loader, Iterator):
        raise ValueError(
            f'the data is read more than once, and a {type(loader).__name__} can be read only once: pass a loader.')


def check_classes(classes: Any, num_classes: int) -> List[int]:
    """Return two or more different labels as a list of integers; raise a ValueError for anything else."""
    labels = list(classes) if isinstance(classes, Iterable) and not isinstance(classes, str) else []
    if len(labels) < 2 or len(set(labels)) < len(labels):
        raise ValueError(f'classes must be a list of two or more different labels, got {classes!r}.')
    for label in labels:
        if not isinstance(label, SupportsIndex) or not 0 <= operator.index(label) < num_classes:
            raise ValueError(f'there is no class {label!r}; the model has the classes 0 to {num_classes - 1}.')
    return [operator.index(label) for label in labels]


def _check_classifier(model: nn.Module) -> nn.Module:
    model = unwrap(model)
    if not getattr(model, 'num_classes', 0):
        raise ValueError(f'this {type(model).__name__} has no classes: pruning needs a classifier to measure accuracy.')
    return model


def _check_head(model: Any, classes: Sequence[int]) -> nn.Linear:
    if not hasattr(model, 'get_classifier') or not hasattr(model, 'reset_classifier'):
        raise ValueError(
            f'this {type(model).__name__} has no methods get_classifier and reset_classifier, as models of timm have, '
            f'to select {len(classes)} classes. prune_static keeps the head.')
    head = model.get_classifier()
    if not isinstance(head, nn.Linear):
        raise ValueError(f'the head must be a linear layer to select {len(classes)} classes, got {head}.')
    return head


class _ImagesOf:
    """Images of some classes, in batches of the loader's size. Labels are indices into these classes."""

    def __init__(self, loader: Iterable[Any], classes: Sequence[int]) -> None:
        self.loader = loader
        self.classes = torch.tensor(classes)

    def __iter__(self) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
        rest: List[torch.Tensor] = []
        size, empty = 0, True
        for images, labels in self.loader:
            size = size or len(labels)
            matches = labels[:, None] == self.classes.to(labels.device)
            wanted = matches.any(1)
            found = [images[wanted], matches[wanted].int().argmax(1)]
            rest = [torch.cat(parts) for parts in zip(rest, found, strict=True)] if rest else found
            # Batches of varying size would fragment the memory.
            while len(rest[1]) >= size:
                yield rest[0][:size], rest[1][:size]
                rest = [part[size:] for part in rest]
                empty = False
        if rest and len(rest[1]):
            yield rest[0], rest[1]
        elif empty:
            raise ValueError(f'the data has no sample of the classes {self.classes.tolist()}.')


def _cut_head(model: Any, classes: Sequence[int]) -> None:
    """Keep only the outputs of some classes. In place."""
    head = _check_head(model, classes)
    model.reset_classifier(len(classes))
    with torch.no_grad():
        for name, parameter in model.get_classifier().named_parameters():
            parameter.copy_(getattr(head, name)[list(classes)])


def _fine_tune(model: nn.Module, loader: Iterable[Any], epochs: int, lr: float) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    device = next(model.parameters()).device
    model.train()
    steps = 0
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group['lr'] = lr * (1 + math.cos(math.pi * epoch / epochs)) / 2
        for images, labels in loader:
            if len(labels) == 1:
                continue  # one image has no batch statistics
            loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
    if not steps:
        raise ValueError('fine-tuning needs batches of two or more samples of the classes, but the data has none.')
    model.eval()
