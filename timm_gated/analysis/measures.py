"""Measures of gates. Each is a pure function of a `GateRecord`.

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)

The paper shows by example that rare gates belong to few classes, that similar classes use similar filters and that hard
images cost more. This module measures each of these. Clusters and rank correlations need SciPy (extra `analysis`).
"""
import copy
from dataclasses import dataclass
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch

from ..loss import Prior
from .record import GateRecord
from .statistics import GateCounts

__all__ = [
    'ClassSimilarity', 'Difficulty', 'SpecialisedGate', 'class_similarity', 'difficulty', 'prior_cdf', 'prior_distance',
    'specialised_gates', 'spread_over', 'summary',
]


def summary(record: GateRecord, threshold: float = 0.99) -> Dict[str, Any]:
    """Summarise accuracy, MACs, parameters and gates. Values that do not apply are None.

    Args:
        record: Record of a pass over a data set.
        threshold: Share of inputs above which a gate counts as always on or always off.
    """
    gated = bool(record.layers)
    return {
        'num_samples': record.num_samples,
        'top1' if record.labelled else 'pixel_accuracy': 100 * float(record.correct.mean(dtype=np.float64)),
        'top5': None if record.top5 is None else 100 * record.top5,
        'mean_macs': float(record.macs.mean()),
        'dense_macs': record.dense_macs,
        'macs_share': record.macs_share,
        'parameters': record.parameters,
        'parameters_used': record.parameters_used,
        'num_gates': len(record.open_share),
        'gate_density': float(record.open_share.mean()) if gated else None,
        'threshold': threshold if gated else None,
        **(record.counts(threshold)._asdict() if gated else dict.fromkeys(GateCounts._fields)),
    }


@dataclass
class SpecialisedGate:
    """A gate that fires rarely.

    Attributes:
        index: Index of the gate in the record.
        name: Module name, a slash and the index within the module.
        open_share: Share of inputs for which the gate was open.
        classes: Classes that open the gate most often, as (name, share of the class's inputs).
        examples: Indices of the inputs with the highest logits, among those that open the gate.
    """
    index: int
    name: str
    open_share: float
    classes: List[Tuple[str, float]]
    examples: List[int]


def specialised_gates(
        record: GateRecord,
        count: int = 6,
        rare: float = 0.1,
        num_classes: int = 4,
) -> List[SpecialisedGate]:
    """Find rarely open gates: the rarest of each layer, then the rarest of these, as in the paper's figure.

    A gate must be open for at least as many inputs as the record keeps examples.

    Args:
        record: Record of a pass over a data set.
        count: Maximum number of gates, returned in the order of the network.
        rare: Maximum share of inputs for which a gate may be open.
        num_classes: Maximum number of classes to name per gate.
    """
    fires = record.open_share * record.num_samples
    fits = (record.open_share <= rare) & (fires > record.examples.shape[1] - 0.5)  # 0.5: rounding of the product
    rarest = []
    for _, span in record.spans():
        candidates = span.start + np.flatnonzero(fits[span])
        if len(candidates):
            rarest.append(candidates[record.open_share[candidates].argmin()])
    found = []
    for index in sorted(sorted(rarest, key=lambda gate: record.open_share[gate])[:count]):
        by_class = np.nan_to_num(record.open_share_by_class[:, index])
        triggers = [k for k in np.argsort(-by_class, kind='stable')[:num_classes] if by_class[k] > 0]
        found.append(SpecialisedGate(
            index=int(index),
            name=record.gate_name(index),
            open_share=float(record.open_share[index]),
            classes=[(record.class_names[k], float(by_class[k])) for k in triggers],
            examples=[int(i) for i in record.examples[index] if i >= 0],
        ))
    return found


@dataclass
class Difficulty:
    """Relation of MACs to difficulty. Correlations are Spearman's, None if one side is constant.

    Attributes:
        macs_right: Mean MACs of correct inputs (for label maps: the more accurate half), None if there are none.
        macs_wrong: Mean MACs of the other inputs, None if there are none.
        macs_confidence: Correlation of MACs and confidence over inputs.
        macs_correct: Correlation of MACs and correctness over inputs.
    """
    macs_right: Optional[float]
    macs_wrong: Optional[float]
    macs_confidence: Optional[float]
    macs_correct: Optional[float]


def right_inputs(record: GateRecord) -> np.ndarray:
    """Mask of correct inputs, [N]; for label maps, of the half with the higher accuracy."""
    return record.correct > 0.5 if record.labelled else record.correct > np.median(record.correct)


def _spearman(x: np.ndarray, y: np.ndarray) -> Optional[float]:
    if len(x) < 3 or (x == x[0]).all() or (y == y[0]).all():
        return None
    from scipy.stats import spearmanr
    return float(spearmanr(x, y).statistic)


def difficulty(record: GateRecord) -> Difficulty:
    """Compare the MACs of inputs with their correctness and confidence."""
    right = right_inputs(record)
    macs_right, macs_wrong = (
        float(record.macs[chosen].mean()) if chosen.any() else None for chosen in (right, ~right))
    return Difficulty(
        macs_right, macs_wrong, _spearman(record.macs, record.confidence), _spearman(record.macs, record.correct))


@dataclass
class ClassSimilarity:
    """Similarity of classes in the filters they use.

    Attributes:
        names: Names of the classes that occur, in the order of the clustering.
        correlation: Correlation of the firing patterns of classes, in that order, [C, C]. A firing pattern is the share
            of the class's inputs for which each gate was open, minus the mean over classes.
        linkage: SciPy linkage matrix (average linkage of 1 - correlation).
        cophenetic: Cophenetic correlation of the clustering.
        confusion: Spearman correlation, over pairs of classes, of their correlation with their confusion rate. Positive
            if classes that look alike use similar filters. None for label maps and if no classes are confused.
        within: Mean correlation of two classes of the same group, None without groups.
        between: Mean correlation of two classes of different groups, None without groups.
    """
    names: List[str]
    correlation: np.ndarray
    linkage: np.ndarray
    cophenetic: float
    confusion: Optional[float]
    within: Optional[float] = None
    between: Optional[float] = None


def class_similarity(record: GateRecord, groups: Optional[Mapping[str, Sequence[str]]] = None) -> ClassSimilarity:
    """Compare classes by their firing patterns.

    Args:
        record: Record of a pass over a data set.
        groups: Class names by group name, such as animals and vehicles. Other classes are in no group.
    """
    present = record.present_classes()
    if len(present) < 3:
        raise ValueError(
            f'class similarity needs at least three classes, but the data has {len(present)}: '
            f'{", ".join(record.class_names[k] for k in present)}.')
    patterns = record.open_share_by_class[present]
    patterns = patterns - patterns.mean(0)
    if np.abs(patterns).max(axis=1).min() < 1e-12:  # equal up to rounding
        raise ValueError(
            'the gates fire equally for every class, so classes cannot be compared. This happens if all gates are '
            'always on or off, or if all label maps show the same classes.')
    from scipy.cluster import hierarchy
    from scipy.spatial.distance import squareform
    correlation = np.corrcoef(patterns)
    distances = squareform(1 - correlation, checks=False).clip(min=0)
    linkage = hierarchy.linkage(distances, 'average', optimal_ordering=True)
    order = hierarchy.leaves_list(linkage)
    correlation, present = correlation[np.ix_(order, order)], [present[k] for k in order]
    similarity = ClassSimilarity(
        names=[record.class_names[k] for k in present],
        correlation=correlation,
        linkage=linkage,
        cophenetic=float(hierarchy.cophenet(linkage, distances)[0]),
        confusion=_similarity_of_confused(record, present, correlation),
    )
    if groups:
        similarity.within, similarity.between = _group_means(record, similarity, groups)
    return similarity


def _similarity_of_confused(record: GateRecord, present: List[int], correlation: np.ndarray) -> Optional[float]:
    if not record.labelled:
        return None
    position = np.full(int(max(record.prediction.max(), record.label.max())) + 1, -1)
    position[present] = np.arange(len(present))
    label, prediction = position[record.label], position[record.prediction]
    known = prediction >= 0
    table = np.zeros_like(correlation)
    np.add.at(table, (label[known], prediction[known]), 1)
    table /= record.class_counts[present][:, None]
    pairs = np.triu_indices(len(present), 1)
    return _spearman((table + table.T)[pairs], correlation[pairs])


def _group_means(
        record: GateRecord,
        similarity: ClassSimilarity,
        groups: Mapping[str, Sequence[str]],
) -> Tuple[float, float]:
    group_of: Dict[str, str] = {}
    for group, members in groups.items():
        for name in members:
            record.class_index(name)  # raises for unknown and absent classes
            if name in group_of:
                raise ValueError(f"the class '{name}' is in two groups, '{group_of[name]}' and '{group}'.")
            group_of[name] = group
    same: List[float] = []
    different: List[float] = []
    for i, first in enumerate(similarity.names):
        for j, second in enumerate(similarity.names[:i]):
            if first in group_of and second in group_of:
                pairs = same if group_of[first] == group_of[second] else different
                pairs.append(similarity.correlation[i, j])
    if not same or not different:
        raise ValueError(
            f'groups must hold at least two groups, one of them with at least two classes, got {dict(groups)}.')
    return float(np.mean(same)), float(np.mean(different))


def prior_cdf(prior: Prior, num_gates: int, points: np.ndarray) -> np.ndarray:
    """CDF of the prior per gate, [points, gates]. A prior may have parameters per gate.

    Args:
        prior: Prior of the batch-shaping loss.
        num_gates: Number of gates.
        points: Points in [0, 1] to evaluate the CDF at.
    """
    x = torch.from_numpy(points).float()[:, None].expand(-1, num_gates)
    with torch.no_grad():
        return copy.deepcopy(prior).cpu().cdf(x).numpy()  # a copy: the prior of the model stays on its device


def prior_distance(record: GateRecord, prior: Prior) -> np.ndarray:
    """Distance of each gate's distribution over the data set from the prior, [gates].

    This is the batch-shaping loss (Cramér-von-Mises distance) of the data set, up to the bin width of the histogram.

    Args:
        record: Record of a pass over a data set.
        prior: Prior of the batch-shaping loss.
    """
    num_gates, bins = record.histogram.shape
    weight = record.histogram / record.num_samples
    empirical = weight.cumsum(1) - weight / 2  # at the bin centres
    prior_values = prior_cdf(prior, num_gates, (np.arange(bins) + 0.5) / bins).T
    return (weight * (empirical - prior_values) ** 2).sum(1)


def spread_over(values: np.ndarray, count: int) -> List[int]:
    """Indices of the smallest and the largest value and of evenly spaced ranks in between.

    Args:
        values: Values to rank.
        count: Maximum number of indices.
    """
    order = np.argsort(values, kind='stable')
    return order[np.unique(np.linspace(0, len(order) - 1, min(count, len(order))).round().astype(int))].tolist()
