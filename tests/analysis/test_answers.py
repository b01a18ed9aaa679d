"""Answers of a report, on numbers by hand"""
import numpy as np
import pytest
from small_analysis import make_batches, make_net, make_record

from timm_gated import GateCounts
from timm_gated.analysis import class_similarity, difficulty, summary
from timm_gated.analysis.answers import (
    comparative,
    conditional_answer,
    difficulty_answer,
    extremes_answer,
    firing_answer,
    macs_answer,
    overview,
    similarity_answer,
    specialised_answer,
)


@pytest.fixture
def record():
    """Record whose columns a test may change."""
    return make_record(make_net(), make_batches())


@pytest.mark.parametrize('rank, count, words', [
    (0.09, 10000, ''), (0.1, 10000, 'a little more'), (-0.29, 10000, 'a little less'), (0.3, 10000, 'more'),
    (-0.5, 10000, 'clearly less'), (1., 10000, 'clearly more'), (None, 10000, ''),
    (0.3, 40, ''), (0.32, 40, 'more'),  # two standard errors are 0.316
])
def test_words_for_correlations(rank, count, words):
    assert comparative(rank, count) == words


def test_do_hard_images_cost_more(record):
    record.confidence, record.correct = np.linspace(0.1, 0.9, 64), np.arange(64) >= 32
    record.macs = np.linspace(3e6, 2e6, 64)
    assert difficulty_answer(record, difficulty(record)) == (
        'Hard images cost clearly more: MACs and confidence have a rank correlation of −1.00, and wrongly classified '
        'images take 2.75 M MACs on average, correctly classified ones 2.25 M.')
    record.macs = np.resize([2e6, 3e6], 64)
    assert difficulty_answer(record, difficulty(record)).startswith('Hard images do not cost more: ')
    record.macs[:] = 2e6
    assert difficulty_answer(record, difficulty(record)).startswith('It cannot be said whether hard images cost more')


def test_overview(record):
    result = {
        **summary(record), 'name': 'mine', 'top1': 87.2, 'num_samples': 1000, 'subset_of': 10000, 'mean_macs': 3e6,
        'dense_macs': 4e6, 'num_gates': 8, 'always_on': 1, 'conditional': 6, 'always_off': 1}
    start = 'mine has a top-1 accuracy of 87.20 % on 1,000 of 10,000 images, spread evenly over the data set'
    end = '6 of 8 gates (75 %) are conditional, that is, open for some images only; 1 are always on and 1 always off. !'
    macs = 'An image takes 3.00 M MACs on average, 75.0 % of those of the same network without gates'
    assert overview(result, '!') == f'{start}. {macs}. {end}'
    dense = {**result, 'name': 'd', 'top1': 88.3, 'mean_macs': 4e6}
    assert overview(result, '!', dense) == (
        f'{start}, 1.10 points less than d without gates. {macs.replace("the same network without gates", "d")}. {end}')
    other = {**dense, 'mean_macs': 6e6}
    assert f'{macs} and 50.0 % of those of d. ' in overview(result, '!', other)


def test_gates_by_layer():
    layers = {'layer1.0.gate1': GateCounts(1, 1, 2), 'layer2.0.gate1': GateCounts(1, 3, 0)}
    assert conditional_answer({'mine': layers, 'L0': {'x': GateCounts(3, 1, 0)}}) == (
        '4 of 8 gates (50 %) are conditional, most in layer2 (75 %), fewest in layer1 (25 %); of L0, 25 %.')
    assert conditional_answer({'mine': {'x': GateCounts(3, 1, 0)}}) == '1 of 4 gates (25 %) are conditional.'


def test_gates_and_macs(record):
    record.open_share = np.array([0., 0.05, 0.1, 0.4, 0.8, 0.9, 0.95, 1.])
    assert firing_answer(record) == (
        'Half of the gates are open for at least 60 % of the images; 50 % of them are open for fewer than half of the '
        'images.')
    assert specialised_answer(record, 0.1) == '2 of 8 gates are open for some images, but for at most 10 % of them.'
    assert specialised_answer(record, 0.05).startswith('1 of 8 gates is open')
    record.macs = np.full(64, 2e6)
    record.macs[:2] = 1e6, 4e6
    record.label = np.arange(64) % 7
    assert extremes_answer(record) == (
        'The least expensive image (ant) takes 1.00 M MACs, the most expensive one (bee) 4.00 M, 4.00 times as many.')
    assert macs_answer(record).endswith('; the mean of a class ranges from 1.90 M (ant) to 2.22 M (bee).')


def test_similar_classes(record):
    similarity = class_similarity(record)
    similarity.confusion = 0.62
    text = similarity_answer(similarity)
    assert text.startswith(
        'Classes that are confused more often use clearly more similar gates (rank correlation over pairs of classes '
        '0.62). The most similar classes are ')
    best = (similarity.correlation - 3 * np.eye(7)).max()
    assert f'(correlation of firing patterns {best:.2f}).'.replace('-', '−') in text
    similarity.confusion = -0.05
    assert 'often do not use more similar gates (rank correlation over pairs of classes −0.05' in similarity_answer(
        similarity)
