"""MACs of accelerated networks, compared with hand arithmetic and with the masked network

`check` of `accelerated.py`, which most tests of accelerated networks use, compares MACs as well.
"""
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
import torch.nn as nn
from accelerated import backends, images
from nets import shuffle

from timm_gated import MacCounter, accelerate, count_macs, force_gates, gates
from timm_gated.analysis import record_classifier

SMALL = dict(layers=(1, 1, 1), channels=(4, 6, 8))


def small(name: str = 'gated_resnet20', **kwargs) -> nn.Module:
    torch.manual_seed(0)
    return shuffle(timm.create_model(name, **dict(SMALL, **kwargs))).eval()


@backends
def test_by_hand(backend, isa):
    model = small()
    num_open = {'layer1.0.gate1': 3, 'layer2.0.gate1': 0, 'layer3.0.gate1': 8}
    masks = {name: torch.arange(gate.num_gates) < num_open[name] for name, gate in gates(model)}
    with force_gates(model, masks):
        fast = accelerate(model, backend, isa)
    macs = count_macs(fast, images(2, 16, 16))
    stem, head = 9 * 3 * 4 * 256, 8 * 10
    per_filter = [9 * (4 + 4) * 256, 9 * (4 + 6) * 64, 9 * (6 + 8) * 16]
    overhead = 4 * 256 + 16 * (4 + 4) + 4 * 256 + 16 * (4 + 6) + 6 * 64 + 16 * (6 + 8)
    assert macs.dense == stem + 4 * per_filter[0] + 6 * per_filter[1] + 8 * per_filter[2] + head
    used = stem + 3 * per_filter[0] + 8 * per_filter[2] + head + overhead
    assert macs.per_sample.tolist() == [used] * 2 and macs.share == used / macs.dense
    parts = {'': used} if backend == 'native' else {'': used - head, 'head.1': head}  # the kernels run the classifier
    assert {name: part.per_sample.tolist() for name, part in macs.by_module.items()} == {
        name: [part] * 2 for name, part in parts.items()}
    assert not macs.uncounted


@backends
def test_skipped_blocks_by_hand(backend, isa):
    model = small('convnet_aig_resnet20', channels=(4, 4, 4))
    with force_gates(model, {'layer1.0.gate': [0], 'layer2.0.gate': [1], 'layer3.0.gate': [0]}):
        fast = accelerate(model, backend, isa)
    macs = count_macs(fast, images(1, 16, 16))
    stem, head = 9 * 3 * 4 * 256, 4 * 10
    convs = [2 * 9 * 16 * positions for positions in (256, 64, 16)]
    overhead = 4 * (256 + 256 + 64) + 3 * 16 * (4 + 2)
    assert macs.dense == stem + sum(convs) + head
    assert macs.per_sample.tolist() == [stem + convs[1] + head + overhead]


@backends
@pytest.mark.parametrize('name, kwargs', [
    ('gated_resnet18', dict(layers=(1, 1, 1, 1), channels=(8, 8, 16, 16))),
    ('gated_resnet50', dict(layers=(1, 1, 1, 1), channels=(8, 8, 16, 16), avg_down=True, stem_type='deep')),
    ('convnet_aig_resnet50', dict(layers=(1, 1, 1, 1), channels=(8, 8, 16, 16), output_stride=8)),
    ('gated_resnet20', dict(features_only=True, out_indices=(1, 2))),
    ('gated_resnet20', dict(num_classes=0)),
    ('gated_resnet20', dict(inner_channels={'layer1.0': [3]}, gated_channels={'layer1.0': [2]})),
    ('cifar_resnet20', {}),
])
def test_equal_to_the_masked_network(name, kwargs, backend, isa):
    model = small(name, **kwargs)
    fast = accelerate(model, backend, isa)
    for size in ((33, 40), (64, 17)):
        x = images(4, *size)
        x[1:] *= torch.tensor([0.2, 3., 10.])[:, None, None, None]
        expected = count_macs(model, x)
        for macs in (count_macs(fast, x), fast.run_with_macs(x)[1], fast.run_with_macs(x)[1]):
            assert macs.dense == expected.dense and macs.per_sample.tolist() == expected.per_sample.tolist()
            assert macs.share == expected.share
            assert torch.equal(sum(part.per_sample for part in macs.by_module.values()), macs.per_sample)
            assert sum(part.dense for part in macs.by_module.values()) == macs.dense
    if name.startswith('gated_'):
        assert len(set(expected.per_sample.tolist())) > 1  # decisions differ between images


@backends
def test_output_and_macs_of_one_call(backend, isa):
    fast = accelerate(small(), backend, isa)
    for dtype in (torch.float32, torch.float64 if backend == 'native' else torch.float32):
        for _ in range(2):
            x = images().to(dtype)
            output, macs = fast.run_with_macs(x)
            assert torch.equal(output, fast(x)) and output.dtype == dtype
    empty, macs = fast.run_with_macs(images(0, 24, 24))
    assert empty.shape == (0, 10) and macs.per_sample.tolist() == []
    assert fast.run_with_macs(images(2, 24, 24))[1].dense == count_macs(fast, images(2, 24, 24)).dense > 0
    with pytest.raises(ValueError, match='must have the shape'):
        fast.run_with_macs(images(2)[0])


@backends
def test_within_another_module(backend, isa):
    model = nn.Sequential(small(num_classes=0), nn.Linear(8, 3)).eval()
    x = images(2, 16, 16)
    expected, macs = count_macs(model, x), count_macs(accelerate(model, backend, isa), x)
    assert macs.dense == expected.dense and torch.equal(macs.per_sample, expected.per_sample)
    assert list(macs.by_module) == ['0', '1']


def test_passes_add_up():
    fast = accelerate(small())
    x, y = images(4, 16, 16).split(2)
    with MacCounter(fast) as counter:
        fast(x)
        fast(y)
    expected = count_macs(fast, x), count_macs(fast, y)
    assert counter.macs().dense == 2 * expected[0].dense
    assert torch.equal(counter.macs().per_sample, expected[0].per_sample + expected[1].per_sample)


def test_windows_are_not_samples():
    fast = accelerate(small(num_classes=0))

    class Windows(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = fast

        def forward(self, x):
            return self.inner(torch.cat(x.split(8, dim=3)))

    x = images(1, 16, 16)
    assert count_macs(Windows(), x).per_sample.tolist() == [
        sum(count_macs(fast, half).per_sample.item() for half in x.split(8, dim=3))]
    with pytest.raises(ValueError, match='4 inputs in a batch of 2 images'):
        count_macs(Windows(), images(2, 16, 16))


@backends
def test_threads_that_share_a_network(backend, isa):
    model = small()
    fast = accelerate(model, backend, isa)
    batches = [scale * images(n, 16, 16) for n, scale in ((1, 1), (2, 5), (3, 0.2), (4, 2))]
    expected = [(fast(x), count_macs(model, x).per_sample.tolist()) for x in batches]
    assert len({macs for _, counts in expected for macs in counts}) > 1
    barrier = threading.Barrier(4)

    def run(x: torch.Tensor) -> list:
        barrier.wait()
        return [fast.run_with_macs(x) for _ in range(10)]

    with ThreadPoolExecutor(4) as pool:
        for (output, counts), found in zip(expected, pool.map(run, batches), strict=True):
            assert all(torch.equal(ours, output) and macs.per_sample.tolist() == counts for ours, macs in found)


def test_formulas_and_records_are_refused():
    fast = accelerate(small())
    with MacCounter(fast) as counter:
        fast(images(2, 16, 16))
    for method in (counter.formula, counter.parameters):
        with pytest.raises(ValueError, match='count the original network'):
            method()
    with pytest.raises(ValueError, match='count the original network'):
        record_classifier(fast, [(images(2, 16, 16), torch.zeros(2).long())], ['a'] * 10)
