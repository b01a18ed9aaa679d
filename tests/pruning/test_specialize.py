"""Sub-networks for some classes: outputs, figures, fine-tuning and errors"""
import numpy as np
import pytest
import torch
from models import freeze_decisions, open_share
from small_analysis import CLASSES, make_batches, make_net
from timm.utils.model import freeze_batch_norm_2d

from timm_gated import CifarResNet, specialize
from timm_gated.pruning.prune import _ImagesOf


def test_specialized_network_equals_the_restricted_original():
    """If the decisions do not depend on the input."""
    model, batches = freeze_decisions(make_net()), make_batches()
    classes = [5, 1, 3]
    result = specialize(model, batches, classes)
    assert type(result.model) is CifarResNet and result.model.num_classes == 3
    x, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    with torch.no_grad():
        torch.testing.assert_close(result.model(x), model(x)[:, classes], atol=1e-5, rtol=1e-5)
    of_classes = torch.isin(labels, torch.tensor(classes))
    with torch.no_grad():
        predicted = torch.tensor(classes)[model(x[of_classes])[:, classes].argmax(1)]
    accuracy = 100 * (predicted == labels[of_classes]).double().mean().item()
    assert result.before.accuracy == pytest.approx(accuracy) and result.after.accuracy == pytest.approx(accuracy)
    assert result.after.parameters < result.before.parameters
    assert result.after.mean_macs == result.after.dense_macs  # no gates


def test_gates_are_observed_on_the_given_classes_only():
    model, batches = make_net(), make_batches(8)
    shares = {}
    for classes in ([0, 6], [2, 3]):
        shares[classes[0]] = specialize(model, batches, classes, threshold=0.9).open_share
    x, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    for first, classes in ((0, [0, 6]), (2, [2, 3])):
        expected = open_share(model, x[torch.isin(labels, torch.tensor(classes))])
        for name, share in expected.items():
            torch.testing.assert_close(shares[first][name], share)


def test_batches_of_some_classes():
    """All batches but the last have the loader's size, with each image once and in order."""
    batches = make_batches(5, size=16)
    x, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    for classes in ([4, 0], [0, 1, 2, 3, 4, 5, 6]):
        found = list(_ImagesOf(batches, classes))
        wanted = torch.isin(labels, torch.tensor(classes))
        assert all(len(part) == 16 for _, part in found[:-1]) and 0 < len(found[-1][1]) <= 16
        assert torch.equal(torch.cat([part for part, _ in found]), x[wanted])
        assert torch.equal(torch.tensor(classes)[torch.cat([part for _, part in found])], labels[wanted])


def test_fine_tuning_helps():
    torch.manual_seed(0)
    model, batches = make_net(), make_batches(8, size=32)
    untuned = specialize(model, batches, [0, 3, 6])
    tuned = specialize(model, batches, [0, 3, 6], epochs=6, lr=0.05)
    assert tuned.after.accuracy > max(untuned.after.accuracy, untuned.before.accuracy) + 5
    assert tuned.before == untuned.before and not tuned.model.training


@pytest.mark.parametrize('kwargs, message', [
    (dict(classes=[0, 7]), 'there is no class 7; the model has the classes 0 to 6'),
    (dict(classes=[0, 'dog']), "there is no class 'dog'"),
    (dict(classes=[2]), 'two or more different labels'),
    (dict(classes=[2, 2]), 'two or more different labels'),
    (dict(classes=[0, 1], threshold=0.5), r'threshold must be in \(0.5, 1\], got 0.5'),
    (dict(classes=[0, 1], threshold=1.5), r'threshold must be in \(0.5, 1\], got 1.5'),
    (dict(classes=[0, 1], epochs=-1), 'epochs must be a whole number >= 0, got -1'),
    (dict(classes=[0, 1], lr=0), 'lr must be a number > 0, got 0'),
])
def test_bad_options_of_specialize(kwargs, message):
    with pytest.raises(ValueError, match=message):
        specialize(make_net(), make_batches(), **kwargs)


def test_changes_to_the_network_are_kept():
    """Frozen layers, pooling and norms: the dense network has the same modules as the gated one."""
    model, batches = freeze_decisions(make_net()), make_batches()
    model.reset_classifier(len(CLASSES), global_pool='max')
    model.conv1.requires_grad_(False)
    model.bn1.eps = 0.1
    model.train()
    result = specialize(model, batches, [1, 4, 6], epochs=1)
    assert model.training and not result.model.training
    assert torch.equal(result.model.conv1.weight, model.conv1.weight) and not result.model.conv1.weight.requires_grad
    dense = specialize(model.eval(), batches, [1, 4, 6])
    x = batches[0][0]
    with torch.no_grad():
        torch.testing.assert_close(dense.model(x), model(x)[:, [1, 4, 6]], atol=1e-5, rtol=1e-5)


def test_frozen_norms():
    model = freeze_batch_norm_2d(freeze_decisions(make_net()))
    result = specialize(model, make_batches(), [0, 2])
    x = make_batches()[0][0]
    with torch.no_grad():
        torch.testing.assert_close(result.model(x), model(x)[:, [0, 2]], atol=1e-5, rtol=1e-5)


def test_a_compiled_network_and_numpy_labels():
    model, batches = freeze_decisions(make_net()), make_batches()
    compiled = torch.compile(model, backend='eager')
    assert specialize(compiled, batches, np.array([3, 1])).after == specialize(model, batches, [3, 1]).after


def test_bad_data():
    model, batches = make_net(), make_batches(classes=5)
    with pytest.raises(ValueError, match='can be read only once'):
        specialize(model, iter(batches), [0, 1])
    with pytest.raises(ValueError, match='no sample of class 6'):
        specialize(model, batches, [0, 6])
    with pytest.raises(ValueError, match='no sample of class 6'):
        specialize(model, make_batches(), [0, 6], eval_loader=batches)
    with pytest.raises(ValueError, match=r'no sample of the classes \[5, 6\]'):
        specialize(model, batches, [5, 6])
    with pytest.raises(ValueError, match=r'no sample of the classes \[5, 6\]'):
        specialize(model, make_batches(), [5, 6], train_loader=batches, epochs=1)
