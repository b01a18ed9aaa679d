"""Gates of one image beside those of a data set"""
import numpy as np
import pytest
import torch
from small_analysis import CLASSES, make_batches, make_net, make_record

from timm_gated import count_macs, force_gates, gates
from timm_gated.analysis import classification_step, image_gates, record_decisions


@pytest.fixture(scope='module')
def net():
    return make_net()


@pytest.fixture(scope='module')
def batches():
    return make_batches()


@pytest.fixture(scope='module')
def known(net, batches):
    return record_decisions(net, batches, CLASSES, classification_step(net, len(CLASSES)))


def test_an_image(net, batches):
    images, _ = batches[0]
    found = image_gates(net, images[3])
    output = net(images[3:4])
    np.testing.assert_allclose(found.probabilities, output.softmax(1)[0].detach(), rtol=1e-5)
    assert list(found.is_open) == [name for name, _ in gates(net)]
    for name, gate in gates(net):
        np.testing.assert_array_equal(found.is_open[name], gate.decision[0].numpy().astype(bool))
    macs = count_macs(net, images[3:4])
    assert found.macs == macs.per_sample[0] and found.dense_macs == macs.dense


def test_an_image_with_forced_gates(net, batches):
    with force_gates(net, 'closed'):
        assert not image_gates(net, batches[0][0][0]).decisions.any()


def test_decisions_of_a_data_set(net, batches, known):
    images = torch.cat([images for images, _ in batches])
    for index in (0, 17, 63):
        np.testing.assert_array_equal(known.decisions[index], image_gates(net, images[index]).decisions)
    np.testing.assert_allclose(known.decisions.mean(0), known.record.open_share)
    np.testing.assert_array_equal(known.record.macs, make_record(net, batches).macs)


def test_nearest_by_hand(known):
    gates_of_17 = known.decisions[17]
    indices, different = known.nearest(gates_of_17, 5)
    assert 17 in indices[different == 0] and list(different) == sorted(different)
    by_hand = sorted(sum(a != b for a, b in zip(row, gates_of_17, strict=True)) for row in known.decisions)
    assert list(different) == by_hand[:5] and by_hand[-1] > by_hand[0]
    assert len(known.nearest(gates_of_17, 1000)[0]) == known.record.num_samples


def test_share_below(known):
    macs = known.record.macs
    assert known.share_below(macs.min()) == 0 and known.share_below(macs.max() + 1) == 1
    assert known.share_below(int(np.sort(macs)[16])) <= 16 / len(macs)
