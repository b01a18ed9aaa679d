"""Schedules of the gate losses"""
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from timm_gated import linear_anneal, linear_warmup
from timm_gated.loss.schedules import check_epochs

SCHEDULES = [linear_anneal, linear_warmup]
epochs = st.floats(0, 1000)
spans = st.tuples(epochs, epochs).map(sorted)
values = st.floats(0, 10)


@pytest.mark.parametrize('epoch, expected', [
    (0, 0.75), (1, 0.7425), (25, 0.5625), (50, 0.375), (75, 0.1875), (99, 0.0075), (100, 0.), (101, 0.), (499, 0.)])
def test_lambda_of_the_papers_cifar10_run(epoch, expected):
    assert linear_anneal(epoch, 0.75, 0, 100) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize('epoch, expected', [
    (0, 0.), (99, 0.), (100, 0.), (101, 0.001), (150, 0.05), (200, 0.1), (299, 0.199), (300, 0.2), (499, 0.2)])
def test_gamma_of_the_papers_cifar10_run(epoch, expected):
    assert linear_warmup(epoch, 0.2, 100, 300) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize('epoch, lam, gamma', [
    (0, 0.75, 0.), (10, 0.375, 0.), (20, 0., 0.), (30, 0., 0.), (45, 0., 0.2), (60, 0., 0.4), (149, 0., 0.4)])
def test_weights_of_the_papers_imagenet_run(epoch, lam, gamma):
    assert linear_anneal(epoch, 0.75, 0, 20) == pytest.approx(lam)
    assert linear_warmup(epoch, 0.4, 30, 60) == pytest.approx(gamma)


def test_fractions_of_an_epoch():
    assert linear_anneal(0.5, 1., 0, 2) == 0.75
    assert linear_warmup(1.5, 1., 1, 2) == 0.5


def test_delayed_anneal_holds_its_value_before_the_start():
    assert [linear_anneal(epoch, 2., 2, 4) for epoch in range(6)] == [2., 2., 2., 1., 0., 0.]


@pytest.mark.parametrize('at', [0, 3, 2.5])
def test_a_schedule_of_no_length_is_a_step(at):
    assert linear_anneal(at, 0.75, at, at) == 0.
    assert linear_warmup(at, 0.75, at, at) == 0.75
    assert linear_anneal(at - 1e-6, 0.75, at, at) == 0.75
    assert linear_warmup(at - 1e-6, 0.75, at, at) == 0.
    assert linear_anneal(at + 1e-6, 0.75, at, at) == 0.
    assert linear_warmup(at + 1e-6, 0.75, at, at) == 0.75


@pytest.mark.parametrize('schedule', SCHEDULES)
@pytest.mark.parametrize('start, end', [(math.nan, 1), (0, math.nan), ('0', 1), (0, None)])
def test_epochs_that_are_no_numbers_are_refused(schedule, start, end):
    with pytest.raises(ValueError, match='of epochs must be a number, got'):
        schedule(0, 1., start, end)


@pytest.mark.parametrize('schedule', SCHEDULES)
@pytest.mark.parametrize('start, end', [(2, 1), (-1, 3), (-2, -1)])
def test_impossible_epochs_are_refused(schedule, start, end):
    with pytest.raises(ValueError, match=f'0 <= start <= end, got start {start} and end {end}'):
        schedule(0, 1., start, end)


@pytest.mark.parametrize('bad', [(1,), (1, 2, 3), (), 'always', '01', 100, None])
def test_what_is_no_pair_is_refused_by_name(bad):
    with pytest.raises(ValueError, match=r"lam_epochs must be 'fixed' or a pair \(start, end\), got") as error:
        check_epochs(bad, 'lam_epochs')
    assert repr(bad) in str(error.value)


def test_checked_epochs_are_a_tuple_or_fixed():
    assert check_epochs([0, 2.5]) == (0, 2.5)
    assert isinstance(check_epochs([0, 2.5]), tuple)
    assert check_epochs('fixed') == 'fixed'


@given(epoch=epochs, later=epochs, value=values, span=spans)
def test_monotonic(epoch, later, value, span):
    assume(epoch <= later)
    assert linear_anneal(epoch, value, *span) >= linear_anneal(later, value, *span)
    assert linear_warmup(epoch, value, *span) <= linear_warmup(later, value, *span)


@given(epoch=epochs, value=values, span=spans)
def test_between_zero_and_the_value_and_complementary(epoch, value, span):
    anneal, warmup = linear_anneal(epoch, value, *span), linear_warmup(epoch, value, *span)
    assert 0 <= anneal <= value and 0 <= warmup <= value
    assert anneal + warmup == pytest.approx(value)


@given(value=values, span=spans)
def test_exact_at_the_ends(value, span):
    start, end = span
    assert linear_anneal(end, value, start, end) == 0 and linear_warmup(end, value, start, end) == value
    if start < end:
        assert linear_anneal(start, value, start, end) == value and linear_warmup(start, value, start, end) == 0


@given(epoch=epochs, value=values, span=spans)
def test_linear_in_the_value(epoch, value, span):
    for schedule in SCHEDULES:
        assert schedule(epoch, 2 * value, *span) == pytest.approx(2 * schedule(epoch, value, *span))
