"""Gate statistics over a data set"""
import pytest
import timm
import torch
import torch.nn as nn
from nets import shuffle

from timm_gated import GateCounts, GateStatistics, force_gates, gates


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return shuffle(timm.create_model('gated_resnet20', layers=(1, 1, 1), num_classes=4)).eval()


def run(net: nn.Module, statistics: GateStatistics, masks: dict) -> None:
    """Run one batch with masks [N, num_gates] for some gates and the others closed."""
    num_images = next(iter(masks.values())).shape[0]
    with force_gates(net, 'closed'), force_gates(net, masks):
        net(torch.zeros(num_images, 3, 2, 2))
    statistics.update(net)


def mask_open_for(counts: list, num_images: int) -> torch.Tensor:
    """Mask [N, gates] where gate i is open for the first counts[i] images."""
    return (torch.arange(num_images)[:, None] < torch.tensor(counts)).float()


def test_shares_and_density_by_hand(net):
    statistics = GateStatistics()
    run(net, statistics, {'layer1.0.gate1': mask_open_for([0] * 14 + [4, 2], 4)})
    run(net, statistics, {'layer1.0.gate1': mask_open_for([1] * 14 + [1, 0], 1)})
    assert statistics.num_samples == 5
    share = statistics.open_share()
    assert list(share) == [name for name, _ in gates(net)]
    assert share['layer1.0.gate1'].tolist() == pytest.approx([0.2] * 14 + [1., 0.4])
    assert not share['layer2.0.gate1'].any() and share['layer3.0.gate1'].shape == (64,)
    assert statistics.density() == pytest.approx((14 * 0.2 + 1.4) / (16 + 32 + 64))


@pytest.mark.parametrize('num_open, kind', [
    (0, 'always_off'), (1, 'always_off'), (2, 'conditional'), (100, 'conditional'), (198, 'conditional'),
    (199, 'always_on'), (200, 'always_on')])
def test_more_than_99_percent_is_always(net, num_open, kind):
    """198 of 200 images are exactly 99 %: conditional."""
    statistics = GateStatistics()
    run(net, statistics, {'layer1.0.gate1': mask_open_for([num_open] * 16, 200)})
    counts = statistics.counts()
    expected = dict(always_on=0, conditional=0, always_off=32 + 64)
    expected[kind] += 16
    assert counts._asdict() == expected


@pytest.mark.parametrize('num_images, num_open, kind', [
    (100, 99, 'conditional'), (100, 1, 'conditional'), (1000, 990, 'conditional'), (1000, 10, 'conditional'),
    (10000, 9900, 'conditional'), (10000, 100, 'conditional'), (1000, 991, 'always_on'), (1000, 9, 'always_off'),
    (300, 297, 'conditional'), (300, 3, 'conditional'), (700, 693, 'conditional'), (700, 7, 'conditional')])
def test_exactly_99_percent_is_conditional_on_both_sides(net, num_images, num_open, kind):
    statistics = GateStatistics()
    run(net, statistics, {'layer1.0.gate1': mask_open_for([num_open] * 16, num_images)})
    assert statistics.counts()._asdict()[kind] >= 16
    assert sum(statistics.counts()) == 112
    assert statistics.counts().always_off == 96 + 16 * (kind == 'always_off')


def test_counts_with_another_threshold(net):
    statistics = GateStatistics()
    run(net, statistics, {'layer1.0.gate1': mask_open_for([9, 1] * 8, 10)})
    assert statistics.counts() == GateCounts(0, 16, 96)
    assert statistics.counts(threshold=0.8) == GateCounts(8, 0, 104)


def test_threshold_one_requires_all_inputs(net):
    statistics = GateStatistics()
    run(net, statistics, {'layer1.0.gate1': mask_open_for([0, 1, 199, 200] * 4, 200)})
    assert statistics.counts() == GateCounts(8, 0, 104)
    assert statistics.counts(threshold=1.) == GateCounts(4, 8, 100)


@pytest.mark.parametrize('threshold', [0.5, 0.49, -1., 1.01])
def test_bad_thresholds_are_refused(net, threshold):
    statistics = GateStatistics()
    run(net, statistics, {'layer1.0.gate1': torch.ones(2, 16)})
    with pytest.raises(ValueError, match=rf'threshold must be in \(0.5, 1\], got {threshold}'):
        statistics.counts(threshold=threshold)


def test_free_gates_over_batches_of_different_sizes(net):
    torch.manual_seed(1)
    images = torch.randn(7, 3, 16, 16)
    whole, parts = GateStatistics(), GateStatistics()
    net(images)
    whole.update(net)
    for batch in images.split(3):
        net(batch)
        parts.update(net)
    assert parts.num_samples == whole.num_samples == 7
    assert parts.density() == whole.density() and 0 < whole.density() < 1
    assert all(torch.equal(share, whole.open_share()[name]) for name, share in parts.open_share().items())
    assert parts.counts() == whole.counts()


def test_statistics_in_training_count_the_samples(net):
    statistics = GateStatistics()
    net.train()(torch.randn(8, 3, 16, 16))
    statistics.update(net)
    expected = torch.cat([gate.decision.mean(0) for _, gate in gates(net)])
    assert statistics.density() == pytest.approx(expected.mean().item())


def test_memory_does_not_grow_with_the_data(net):
    statistics = GateStatistics()
    for _ in range(3):
        net(torch.randn(2, 3, 16, 16))
        statistics.update(net)
    assert sum(share.numel() for share in statistics.open_share().values()) == 112


def test_update_before_a_forward_pass_is_refused():
    with pytest.raises(RuntimeError, match=r"'layer1.0.gate1' has no decision yet: run the model"):
        GateStatistics().update(timm.create_model('gated_resnet20'))


@pytest.mark.parametrize('read', [GateStatistics.counts, GateStatistics.density])
def test_reading_before_an_update_is_refused(read):
    with pytest.raises((RuntimeError, ValueError), match='update'):
        read(GateStatistics())


# By class


def test_shares_by_class_by_hand(net):
    """Four images: two of class 0, one of classes 0 and 2, one of class 2; class 1 does not occur."""
    members = torch.tensor([[1, 0, 0], [1, 0, 0], [1, 0, 1], [0, 0, 1]]).bool()
    statistics = GateStatistics(num_classes=3)
    with force_gates(net, 'closed'), force_gates(net, {'layer1.0.gate1': mask_open_for([0] * 14 + [4, 2], 4)}):
        net(torch.zeros(4, 3, 2, 2))
    statistics.update(net, members)
    assert statistics.samples_by_class.tolist() == [3, 0, 2]
    share = statistics.open_share_by_class()['layer1.0.gate1']
    assert share[0].tolist() == pytest.approx([0.] * 14 + [1., 2 / 3])
    assert share[1].isnan().all()
    assert share[2].tolist() == [0.] * 14 + [1., 0.]
    assert statistics.open_share()['layer1.0.gate1'].tolist() == [0.] * 14 + [1., 0.5]


def test_classes_add_up_over_batches_and_processes(net):
    statistics = GateStatistics(num_classes=2)
    for label in (0, 1, 1):
        net(torch.randn(2, 3, 16, 16))
        statistics.update(net, torch.eye(2).bool()[[label, 1]])
    assert statistics.samples_by_class.tolist() == [1, 5]
    before = statistics.open_share_by_class()
    statistics.reduce(lambda count: count.mul_(2))  # like two equal processes
    assert statistics.samples_by_class.tolist() == [2, 10] and statistics.num_samples == 12
    assert all(torch.equal(share, before[name]) for name, share in statistics.open_share_by_class().items())


def test_repeated_images_do_not_count(net):
    images, members = torch.randn(3, 3, 16, 16), torch.eye(3).bool()
    whole, parts = GateStatistics(num_classes=3), GateStatistics(num_classes=3)
    net(images)
    whole.update(net, members)
    for batch in ([0, 1], [2, 0], [1, 2]):
        net(images[batch])
        parts.update(net, members[batch], num_samples=3 - parts.num_samples)
    assert parts.num_samples == 3 and torch.equal(parts.samples_by_class, whole.samples_by_class)
    assert all(torch.equal(share, whole.open_share()[name]) for name, share in parts.open_share().items())


def test_one_collective_adds_up_all_counts(net):
    statistics, seen = GateStatistics(num_classes=2), []
    net(torch.randn(2, 3, 16, 16))
    statistics.update(net, torch.eye(2).bool())
    statistics.reduce(seen.append)
    assert len(seen) == 1 and seen[0].numel() == 1 + 2 + 3 * (16 + 32 + 64)


def test_classes_must_fit(net):
    net(torch.randn(2, 3, 16, 16))
    with pytest.raises(ValueError, match='members is required with num_classes=3'):
        GateStatistics(num_classes=3).update(net)
    with pytest.raises(ValueError, match=r'shape \[N, 3\], got \[2, 4\]'):
        GateStatistics(num_classes=3).update(net, torch.zeros(2, 4).bool())
    with pytest.raises(RuntimeError, match='by class yet'):
        GateStatistics(num_classes=3).open_share_by_class()
