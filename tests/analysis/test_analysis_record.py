"""Gate records and measures, compared with arithmetic by hand"""
import numpy as np
import pytest
import timm
import torch
from scipy.stats import spearmanr
from small_analysis import CLASSES, make_batches, make_net, make_record

from timm_gated import Beta, MacCounter, batch_shaping_loss, count_macs, force_gates, gates
from timm_gated.analysis import (
    Outcome,
    Recorder,
    check_gated,
    class_similarity,
    difficulty,
    prior_distance,
    record_gates,
    specialised_gates,
    summary,
)
from timm_gated.analysis.measures import spread_over
from timm_gated.analysis.record import classification_outcome


@pytest.fixture(scope='module')
def net():
    return make_net()


@pytest.fixture(scope='module')
def batches():
    return make_batches()


@pytest.fixture(scope='module')
def record(net, batches):
    return make_record(net, batches)


@pytest.fixture(scope='module')
def whole(net, batches):
    """Images, labels, output and gate logits of all batches in one forward pass."""
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    with torch.no_grad():
        output = net(images)
    return images, labels, output, torch.cat([gate.logits for _, gate in gates(net)], 1)


def test_gates_of_all_images(record, whole):
    images, labels, _, logits = whole
    is_open = (logits > 0).double()
    assert record.num_samples == 64 and record.layers == {f'layer{i}.0.gate1': 8 for i in (1, 2, 3)}
    np.testing.assert_allclose(record.open_share, is_open.mean(0))
    for index in range(len(CLASSES)):
        chosen = labels == index
        assert record.class_counts[index] == chosen.sum()
        np.testing.assert_allclose(record.open_share_by_class[index], is_open[chosen].mean(0))
        assert record.of_class(index).tolist() == chosen.tolist()


def test_histograms_and_examples(record, whole):
    logits = whole[3].numpy()
    for gate in range(24):
        expected = np.histogram(1 / (1 + np.exp(-logits[:, gate].astype(float))), np.linspace(0, 1, 101))[0]
        assert np.abs(record.histogram[gate] - expected).sum() <= 2  # values at bin edges may fall into either bin
        best = np.argsort(-logits[:, gate], kind='stable')[:8]
        np.testing.assert_array_equal(record.examples[gate], np.where(logits[best, gate] > 0, best, -1))


def test_what_is_kept_of_each_image(net, record, whole):
    images, labels, output, _ = whole
    macs = count_macs(net, images)
    assert record.macs.tolist() == macs.per_sample.tolist() and record.dense_macs == macs.dense
    assert record.macs_share == pytest.approx(macs.share)
    assert record.label.tolist() == labels.tolist()
    assert record.prediction.tolist() == output.argmax(1).tolist()
    assert record.correct.tolist() == (output.argmax(1) == labels).float().tolist()
    np.testing.assert_allclose(record.confidence, output.softmax(1).amax(1), rtol=1e-5)
    assert record.labelled


def test_summary(net, record, whole):
    images, labels, output, logits = whole
    numbers = summary(record)
    with torch.no_grad(), MacCounter(net) as counter:
        net(images)
    assert numbers['top1'] == pytest.approx(100 * (output.argmax(1) == labels).double().mean())
    assert numbers['top5'] == pytest.approx(
        100 * (output.topk(5, 1).indices == labels[:, None]).any(1).double().mean())
    assert numbers['parameters_used'] == pytest.approx(counter.parameters().mean().item())
    assert numbers['parameters'] == sum(p.numel() for p in net.parameters())
    assert numbers['gate_density'] == pytest.approx((logits > 0).double().mean().item())
    assert numbers['num_gates'] == 24 == sum(numbers[kind] for kind in ('always_on', 'conditional', 'always_off'))
    assert sum(sum(counts) for counts in record.counts_by_layer().values()) == 24


def test_memory_is_24_bytes_per_image(net):
    """Only the columns grow with the number of images."""
    def sizes(num_batches):
        recorder = Recorder(net, CLASSES)
        for images, labels in make_batches(num_batches):
            with torch.no_grad(), recorder.batch():
                output = net(images)
            recorder.update(classification_outcome(output, labels, len(CLASSES)))
        columns = sum(len(column) * column.itemsize for column in recorder._columns.values())
        counters = recorder._histogram.nbytes + sum(part.nbytes for part in recorder._best)
        return columns / (16 * num_batches), counters
    few, many = sizes(2), sizes(20)
    assert many == few and few[0] == 24


def test_names_of_gates(record):
    assert record.gate_name(0) == 'layer1.0.gate1/0' and record.gate_name(23) == 'layer3.0.gate1/7'
    assert [record.gate_index(record.gate_name(index)) for index in range(24)] == list(range(24))
    for wrong in ('layer1.0.gate1/8', 'layer1.0.gate1', 'layer9.0.gate1/0', 'layer1.0.gate1/x'):
        with pytest.raises(ValueError, match=f"no gate '{wrong}'.*MODULE/INDEX.*layer1.0.gate1"):
            record.gate_index(wrong)


def test_specialised_gates_by_hand(net):
    """Gate 3 of the second layer is open only for the two images of class 1, gate 5 only for one image."""
    images = torch.randn(20, 3, 8, 8)
    labels = torch.tensor([0] * 9 + [1] * 2 + [2] * 9)
    mask = torch.ones(20, 8)
    mask[:, 3] = (labels == 1).float()
    mask[:, 5] = torch.eye(20)[0]
    with force_gates(net, 'open'), force_gates(net, {'layer2.0.gate1': mask}):
        record = make_record(net, [(images, labels)], num_examples=2)
    gate, = specialised_gates(record, rare=0.1)
    assert gate.name == 'layer2.0.gate1/3' and gate.index == 11 and gate.open_share == pytest.approx(0.1)
    assert gate.classes == [('bee', 1.)] and sorted(gate.examples) == [9, 10]
    assert specialised_gates(record, rare=0.09) == []


def test_difficulty_by_hand(record):
    numbers = difficulty(record)
    right = record.correct == 1
    assert numbers.macs_right == pytest.approx(record.macs[right].mean())
    assert numbers.macs_wrong == pytest.approx(record.macs[~right].mean())
    assert numbers.macs_confidence == pytest.approx(spearmanr(record.macs, record.confidence).statistic)


def test_no_correlation_with_constant_macs(net, batches):
    with force_gates(net, 'open'):
        numbers = difficulty(make_record(net, batches))
    assert numbers.macs_confidence is None and numbers.macs_correct is None


def test_class_similarity_by_hand(record):
    similarity = class_similarity(record)
    patterns = record.open_share_by_class - record.open_share_by_class.mean(0)
    for i, first in enumerate(similarity.names):
        for j, second in enumerate(similarity.names):
            expected = np.corrcoef(patterns[CLASSES.index(first)], patterns[CLASSES.index(second)])[0, 1]
            assert similarity.correlation[i, j] == pytest.approx(expected)
    assert sorted(similarity.names) == CLASSES and -1 <= similarity.cophenetic <= 1
    confused, alike = [], []
    for i in range(len(CLASSES)):
        for j in range(i):
            pair = [CLASSES.index(similarity.names[k]) for k in (i, j)]
            confused.append(sum(
                (record.prediction[record.label == a] == b).mean() for a, b in (pair, pair[::-1])))
            alike.append(similarity.correlation[i, j])
    assert similarity.confusion == pytest.approx(spearmanr(confused, alike).statistic)


def test_groups_by_hand(record):
    similarity = class_similarity(record, {'a': ['ant', 'bee'], 'b': ['cow', 'dog']})
    position = {name: k for k, name in enumerate(similarity.names)}

    def mean(*pairs):
        return np.mean([similarity.correlation[position[a], position[b]] for a, b in pairs])
    assert similarity.within == pytest.approx(mean(('ant', 'bee'), ('cow', 'dog')))
    assert similarity.between == pytest.approx(mean(('ant', 'cow'), ('ant', 'dog'), ('bee', 'cow'), ('bee', 'dog')))


@pytest.mark.parametrize('groups, message', [
    ({'a': ['ant', 'owl']}, "no class 'owl'; the classes: ant, bee"),
    ({'a': ['ant', 'bee'], 'b': ['bee']}, "'bee' is in two groups, 'a' and 'b'"),
    ({'a': ['ant', 'bee']}, 'at least two groups'),
    ({'a': ['ant'], 'b': ['bee']}, 'one of them with at least two classes')])
def test_bad_groups(record, groups, message):
    with pytest.raises(ValueError, match=message):
        class_similarity(record, groups)


def test_distance_from_the_prior(record, whole):
    """Equals the batch-shaping loss of the data set, except for bins and i / (N + 1)."""
    prior = Beta()
    loss = batch_shaping_loss(whole[3].double().sigmoid(), prior, reduction='none')
    np.testing.assert_allclose(prior_distance(record, prior), loss.numpy(), atol=0.02)


def test_spread_over():
    assert spread_over(np.array([5., 1., 3., 4., 2.]), 3) == [1, 2, 0]
    assert spread_over(np.array([1.]), 4) == [0]


# Errors


def test_a_dense_model_has_a_record_without_gates(batches):
    dense = timm.create_model('cifar_resnet20', layers=(1, 1, 1), channels=(8, 8, 8), num_classes=len(CLASSES))
    numbers = summary(make_record(dense, batches))
    assert numbers['num_gates'] == 0 and numbers['gate_density'] is None and numbers['always_on'] is None
    assert numbers['macs_share'] == 1 and numbers['parameters_used'] == numbers['parameters']
    with pytest.raises(ValueError, match='CifarResNet has no gates.*list_gated_models'):
        check_gated(dense)


def test_empty_data(net):
    with pytest.raises(ValueError, match='data set is empty'):
        make_record(net, [])


def test_a_class_that_does_not_occur(net):
    record = make_record(net, make_batches(classes=6))
    assert record.class_counts[6] == 0 and np.isnan(record.open_share_by_class[6]).all()
    assert record.present_classes() == list(range(6))
    assert 'gnu' not in class_similarity(record).names
    with pytest.raises(ValueError, match="'gnu' does not occur in the data; choose one of: ant, bee"):
        record.class_index('gnu')


@pytest.mark.parametrize('count', [1, 2])
def test_too_few_classes(net, count):
    record = make_record(net, make_batches(classes=count))
    with pytest.raises(ValueError, match=rf'at least three classes, but the data has {count}: ant'):
        class_similarity(record)


def test_gates_that_fire_equally(net, batches):
    with force_gates(net, 'open'):
        record = make_record(net, batches)
    with pytest.raises(ValueError, match='fire equally for every class'):
        class_similarity(record)


def test_label_maps_that_all_show_the_same_classes(net):
    def step(images):
        net(images)
        return Outcome(torch.ones(7, 7).bool(), correct=torch.rand(7), confidence=torch.rand(7))
    record = record_gates(net, [torch.randn(7, 3, 8, 8), torch.randn(7, 3, 8, 8)], CLASSES, step)
    with pytest.raises(ValueError, match='all label maps show the same classes'):
        class_similarity(record)


def test_nan_in_the_output(net, batches):
    images, labels = batches[1]
    broken = images.clone()
    broken[5] = float('nan')
    with pytest.raises(ValueError, match='output of the model is not finite.*normalised'):
        make_record(net, [batches[0], (broken, labels)])


def test_nan_in_a_gate(batches):
    """A NaN logit closes the gate, so the output may be finite."""
    net = make_net()
    with torch.no_grad():
        net.layer2[0].gate1.fc2.bias[3] = float('nan')
    with pytest.raises(ValueError, match=r"gate 'layer2.0.gate1' is NaN for input 0.*normalised"):
        make_record(net, batches)


def test_labels_that_do_not_fit(net, batches):
    images, labels = batches[0]
    with pytest.raises(ValueError, match=r'labels must be in \[0, 7\), got 7 to 7'):
        make_record(net, [(images, torch.full_like(labels, 7))])
    small = make_net(num_classes=3)
    with pytest.raises(ValueError, match='7 classes, but the model has 3 outputs'):
        make_record(small, batches)


def test_inputs_of_several_classes():
    net = make_net()
    members = torch.zeros(3, 7).bool()
    members[0, [0, 6]] = members[1, 6] = True

    def step(images):
        net(images)
        return Outcome(members, correct=torch.tensor([0.5, 0.75, 1.]), confidence=torch.full((3,), 0.5))
    record = record_gates(net, [torch.randn(3, 3, 8, 8)], CLASSES, step)
    assert not record.labelled and record.class_counts.tolist() == [1, 0, 0, 0, 0, 0, 2]
    assert record.of_class(6).tolist() == [True, True, False] and not record.of_class(3).any()
    is_open = torch.cat([gate.decision for _, gate in gates(net)], 1)
    np.testing.assert_allclose(record.open_share_by_class[6], is_open[:2].mean(0))
    numbers = summary(record)
    assert numbers['pixel_accuracy'] == 75 and numbers['top5'] is None and 'top1' not in numbers
    assert difficulty(record).macs_right == record.macs[2]  # above the median
