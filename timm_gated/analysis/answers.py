"""Answers of a report: sentences computed from the data, each with the figures behind it

Each function answers one question. The words for the size of a rank correlation are defined once, in `DEGREES`.
"""
from typing import Any, Mapping, Optional, Sequence

import numpy as np

from ..loss import Prior, Snapshots
from .figures import short_layers
from .measures import ClassSimilarity, Difficulty, prior_distance
from .record import GateRecord
from .sample_figures import amount
from .statistics import GateCounts

__all__ = [
    'comparative', 'conditional_answer', 'difficulty_answer', 'extremes_answer', 'firing_answer', 'images',
    'macs_answer', 'overview', 'percent', 'prior_answer', 'signed', 'similarity_answer', 'specialised_answer',
    'training_answer',
]

# Lower bounds of absolute rank correlations, Cohen's conventions (1988), and words. Weaker ones are no relation.
DEGREES = ((0.5, 'clearly '), (0.3, ''), (0.1, 'a little '))


def comparative(rank: Optional[float], count: int) -> str:
    """Describe a rank correlation as '[a little |clearly ]more' or 'less', or '' if there is no relation.

    Args:
        rank: Rank correlation, None if it is undefined.
        count: Number of pairs of values. A correlation within two standard errors of zero is no relation.
    """
    if rank is None or abs(rank) < 2 / count ** 0.5:
        return ''
    words = [word for bound, word in DEGREES if abs(rank) >= bound]
    return f'{words[0]}{"more" if rank > 0 else "less"}' if words else ''


def percent(share: float, digits: int = 0) -> str:
    return f'{100 * share:.{digits}f} %'


def signed(value: Optional[float]) -> str:
    return 'undefined' if value is None else f'{value:.2f}'.replace('-', '−')


def images(result: Mapping[str, Any]) -> str:
    """Number of images of a result, and of how many they are a subset."""
    if result['subset_of']:
        return f'{result["num_samples"]:,} of {result["subset_of"]:,} images, spread evenly over the data set'
    return f'{result["num_samples"]:,} images'


def overview(result: Mapping[str, Any], hardness: str, dense: Optional[Mapping[str, Any]] = None) -> str:
    """Summarise a report: accuracy, MACs, conditional gates and the cost of hard images.

    Args:
        result: Name of the network and its `summary`.
        hardness: Answer about hard images.
        dense: Name of a dense network and its `summary` on the same images.
    """
    key, kind = ('top1', 'top-1 accuracy') if 'top1' in result else ('pixel_accuracy', 'pixel accuracy')
    accuracy = f'{result["name"]} has a {kind} of {result[key]:.2f} % on {images(result)}'
    costs = {result['dense_macs']: 'the same network without gates'}
    if dense is not None:
        points = result[key] - dense[key]
        accuracy += f', {abs(points):.2f} points {"more" if points > 0 else "less"} than {dense["name"]} without gates'
        costs[dense['mean_macs']] = dense['name']
    shares = ' and '.join(
        f'{percent(result["mean_macs"] / macs, 1)} of those of {name}' for macs, name in costs.items())
    kinds = GateCounts(*(result[kind] for kind in GateCounts._fields))
    return (
        f'{accuracy}. An image takes {amount(result["mean_macs"])} MACs on average, {shares}. '
        f'{kinds.conditional:,} of {sum(kinds):,} gates ({percent(kinds.conditional / sum(kinds))}) are conditional, '
        f'that is, open for some images only; {kinds.always_on:,} are always on and {kinds.always_off:,} always off. '
        f'{hardness}')


def conditional_answer(distributions: Mapping[str, Mapping[str, GateCounts]]) -> str:
    """Share of conditional gates and the layers with the most and the fewest, for each model.

    Args:
        distributions: Gate counts per layer, by model name; the first model is that of the report.
    """
    (name, layers), *others = distributions.items()
    shares = [counts.conditional / sum(counts) for counts in layers.values()]
    total = np.sum(list(layers.values()), axis=0)
    text = f'{total[1]:,} of {total.sum():,} gates ({percent(total[1] / total.sum())}) are conditional'
    titles, most, fewest = short_layers(list(layers)), int(np.argmax(shares)), int(np.argmin(shares))
    if shares[most] > shares[fewest]:
        text += (
            f', most in {titles[most]} ({percent(shares[most])}), fewest in {titles[fewest]} '
            f'({percent(shares[fewest])})')
    for other, counts in others:
        total = np.sum(list(counts.values()), axis=0)
        text += f'; of {other}, {percent(total[1] / total.sum())}'
    return f'{text}.'


def firing_answer(record: GateRecord) -> str:
    """Quantiles of the share of images for which a gate is open."""
    share = record.open_share
    return (
        f'Half of the gates are open for at least {percent(float(np.median(share)))} of the images; '
        f'{percent(float((share < 0.5).mean()))} of them are open for fewer than half of the images.')


def specialised_answer(record: GateRecord, rare: float) -> str:
    """Number of gates that are open for few images."""
    few = int(((record.open_share > 0) & (record.open_share <= rare)).sum())
    are = 'is' if few == 1 else 'are'
    return (
        f'{few:,} of {len(record.open_share):,} gates {are} open for some images, but for at most {percent(rare)} of '
        f'them.')


def extremes_answer(record: GateRecord) -> str:
    """MACs of the least and the most expensive image."""
    least, most = int(record.macs.argmin()), int(record.macs.argmax())
    name = [f' ({record.class_names[record.label[i]]})' if record.labelled else '' for i in (least, most)]
    return (
        f'The least expensive image{name[0]} takes {amount(record.macs[least])} MACs, the most expensive one{name[1]} '
        f'{amount(record.macs[most])}, {record.macs[most] / record.macs[least]:.2f} times as many.')


def macs_answer(record: GateRecord) -> str:
    """Spread of MACs between images and between classes."""
    present = record.present_classes()
    means = [float(record.macs[record.of_class(index)].mean()) for index in present]
    text = f'The MACs of an image deviate by {percent(float(record.macs.std() / record.macs.mean()), 1)} from the mean'
    if len(present) > 1:
        least, most = int(np.argmin(means)), int(np.argmax(means))
        text += (
            f'; the mean of a class ranges from {amount(means[least])} ({record.class_names[present[least]]}) to '
            f'{amount(means[most])} ({record.class_names[present[most]]})')
    return f'{text}.'


def difficulty_answer(record: GateRecord, numbers: Difficulty) -> str:
    """Whether hard images cost more: those of which the network is less confident.

    Args:
        record: Record of a pass over a data set.
        numbers: Its `difficulty`.
    """
    rank = numbers.macs_confidence
    if rank is None:
        return 'It cannot be said whether hard images cost more: the MACs, or the confidence, of all images are equal.'
    words = comparative(-rank, record.num_samples)
    text = f'Hard images {f"cost {words}" if words else "do not cost more"}: '
    text += f'MACs and confidence have a rank correlation of {signed(rank)}'
    if numbers.macs_right is not None and numbers.macs_wrong is not None:
        right, wrong = ('correctly', 'wrongly') if record.labelled else ('more accurately', 'less accurately')
        text += (
            f', and {wrong} classified images take {amount(numbers.macs_wrong)} MACs on average, {right} classified '
            f'ones {amount(numbers.macs_right)}')
    return f'{text}.'


def similarity_answer(similarity: ClassSimilarity) -> str:
    """Whether classes that are confused use similar gates, and the most similar classes."""
    names, count = similarity.names, len(similarity.names)
    pairs = np.triu_indices(count, 1)
    best = int(similarity.correlation[pairs].argmax())
    text = ''
    if similarity.confusion is not None:
        words = comparative(similarity.confusion, len(pairs[0]))
        effect = f'use {words} similar gates' if words else 'do not use more similar gates'
        text = (
            f'Classes that are confused more often {effect} (rank correlation over pairs of classes '
            f'{signed(similarity.confusion)}). ')
    return text + (
        f'The most similar classes are {names[pairs[0][best]]} and {names[pairs[1][best]]} (correlation of firing '
        f'patterns {signed(float(similarity.correlation[pairs][best]))}).')


def prior_answer(record: GateRecord, prior: Prior) -> str:
    """Distance of gates from the prior."""
    distance = prior_distance(record, prior)
    return (
        f'The mean distance of a gate from {type(prior).__name__}({prior.extra_repr()}) is {distance.mean():.3f}, that '
        f'of the closest gate {distance.min():.3f}, that of the farthest {distance.max():.3f}.')


def training_answer(snapshots: Snapshots) -> str:
    """Mean of the recorded gates in the first and the last epoch."""
    means: Sequence[float] = snapshots.mean().mean(1).tolist()
    return (
        f'The mean of σ(logit) over the {len(snapshots.names)} recorded gates was {means[0]:.2f} in epoch '
        f'{snapshots.epochs[0]} and {means[-1]:.2f} in epoch {snapshots.epochs[-1]}.')
