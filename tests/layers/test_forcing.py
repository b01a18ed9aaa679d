"""Names of the gates of a model, and forced gates"""
import math

import pytest
import timm
import torch
import torch.nn as nn
from nets import is_binary, shuffle

from timm_gated import force_gates, gates

# Names


@pytest.mark.parametrize('name, gates_in_block, layers', [
    ('gated_resnet18', ['gate1'], (2, 2, 2, 2)),
    ('gated_resnet50', ['gate1', 'gate2'], (3, 4, 6, 3)),
    ('gated_resnet20', ['gate1'], (3, 3, 3)),
])
def test_names_of_the_gates(name, gates_in_block, layers):
    model = timm.create_model(name)
    named = gates(model)
    assert [n for n, _ in named] == [
        f'layer{stage}.{block}.{gate}'
        for stage, num_blocks in enumerate(layers, start=1) for block in range(num_blocks) for gate in gates_in_block]
    for n, gate in named:
        assert gate is model.get_submodule(n)
        assert gate.fc2.bias is not None and isinstance(gate.bn, nn.BatchNorm1d)


def test_number_of_gates():
    assert sum(gate.num_gates for _, gate in gates(timm.create_model('gated_resnet34', device='meta'))) == 3776


def test_no_gates_in_a_dense_model():
    assert gates(timm.create_model('cifar_resnet20')) == []


# Forcing


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return shuffle(timm.create_model('gated_resnet20', layers=(1, 1, 1), num_classes=4))


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('word, value', [('open', 1.), ('closed', 0.)])
def test_force_all(net, x, word, value, training):
    net.train(training)
    with force_gates(net, word) as model:
        assert model is net
        net(x)
        assert all((gate.decision == value).all() for _, gate in gates(net))
        assert all(gate.logits.requires_grad for _, gate in gates(net))
    net(x)
    assert is_binary(torch.cat([gate.decision for _, gate in gates(net)], 1))


@pytest.mark.parametrize('convert', [
    torch.Tensor.float, torch.Tensor.bool, torch.Tensor.long, torch.Tensor.double, torch.Tensor.numpy,
    torch.Tensor.tolist], ids=lambda f: f.__name__)
@pytest.mark.parametrize('shape', [(32,), (1, 32), (3, 32)])
def test_force_masks(net, x, shape, convert):
    mask = torch.randint(2, shape, generator=torch.Generator().manual_seed(2))
    with force_gates(net, {'layer2.0.gate1': convert(mask)}):
        net(x)
    assert torch.equal(net.layer2[0].gate1.decision, mask.float().expand(3, 32))


def test_masks_switch_the_map(net, x):
    """A mask per image gives the same output as each image alone with its mask."""
    net.eval()
    masks = {name: torch.randint(2, (3, gate.num_gates)) for name, gate in gates(net)}
    with force_gates(net, masks):
        together = net(x)
    for n in range(3):
        with force_gates(net, {name: mask[n] for name, mask in masks.items()}):
            torch.testing.assert_close(net(x[n:n + 1]), together[n:n + 1])


def test_partial_mapping_leaves_the_other_gates_free(net, x):
    net.eval()
    net(x)
    free = net.layer1[0].gate1.decision
    with force_gates(net, {'layer2.0.gate1': torch.zeros(32)}):
        net(x)
        assert torch.equal(net.layer1[0].gate1.decision, free)
        assert not net.layer2[0].gate1.decision.any()
    with force_gates(net, {}):
        net(x)
        assert torch.equal(net.layer1[0].gate1.decision, free)


@pytest.mark.parametrize('masks, message', [
    ('half', "'open', 'closed'.*'half'"),
    (torch.ones(16), "'open', 'closed'.*Tensor"),
    (None, "'open', 'closed'.*NoneType"),
    ({'layer9.0.gate1': torch.ones(16)}, "no gate 'layer9.0.gate1'.*layer1.0.gate1, layer2.0.gate1, layer3.0.gate1"),
    ({'layer1.0.gate1': torch.ones(17)}, r"'layer1.0.gate1' has shape \(17,\).*\(16,\).*\(N, 16\)"),
    ({'layer1.0.gate1': torch.ones(2, 17)}, r'shape \(2, 17\)'),
    ({'layer1.0.gate1': torch.ones(16, 1)}, r'shape \(16, 1\)'),
    ({'layer1.0.gate1': torch.ones(2, 16, 1, 1)}, r'shape \(2, 16, 1, 1\)'),
    ({'layer1.0.gate1': 1}, r'shape \(\)'),
    ({'layer1.0.gate1': torch.full((16,), 0.5)}, "'layer1.0.gate1'.*0 and 1"),
    ({'layer1.0.gate1': torch.full((16,), 2)}, '0 and 1'),
    ({'layer1.0.gate1': torch.full((16,), -1)}, '0 and 1'),
    ({'layer1.0.gate1': torch.full((16,), math.nan)}, '0 and 1'),
    ({'layer1.0.gate1': torch.ones(16), 'layer2.0.gate1': torch.ones(31)}, "'layer2.0.gate1'"),
])
def test_bad_masks_are_refused_and_change_nothing(net, masks, message):
    with pytest.raises(ValueError, match=message):
        with force_gates(net, masks):
            pytest.fail('the context was entered')
    assert all(gate.forced is None for _, gate in gates(net))


@pytest.mark.parametrize('num_masks', [2, 4])
def test_masks_for_another_batch_are_refused_at_forward(net, x, num_masks):
    with force_gates(net, {'layer1.0.gate1': torch.ones(num_masks, 16)}):
        with pytest.raises(ValueError, match=f'masks for {num_masks} images.*batch has 3'):
            net(x)
    net(x)


def test_gates_are_free_again_after_an_exception(net):
    with pytest.raises(KeyError, match='anything'):
        with force_gates(net, 'closed'):
            raise KeyError('anything')
    assert all(gate.forced is None for _, gate in gates(net))


def test_nested_contexts(net, x):
    net.eval()

    def density() -> list:
        net(x)
        return [gate.decision.mean().item() for _, gate in gates(net)]

    free = density()
    with force_gates(net, 'closed'):
        assert density() == [0, 0, 0]
        with force_gates(net, {'layer2.0.gate1': torch.ones(32)}):
            assert density() == [0, 1, 0]
            with force_gates(net, 'open'):
                assert density() == [1, 1, 1]
            assert density() == [0, 1, 0]
        assert density() == [0, 0, 0]
    assert density() == free


def test_a_changed_mask_tensor_does_not_change_the_forcing(net, x):
    mask = torch.ones(16)
    with force_gates(net, {'layer1.0.gate1': mask}):
        mask.zero_()
        net(x)
    assert net.layer1[0].gate1.decision.all()


def test_forcing_is_no_part_of_the_state_dict(net):
    free = list(net.state_dict())
    with force_gates(net, 'open'):
        assert list(net.state_dict()) == free


def test_forcing_a_model_in_half_precision(x):
    net = shuffle(timm.create_model('gated_resnet20', layers=(1, 1, 1), dtype=torch.bfloat16)).eval()
    with force_gates(net, {'layer1.0.gate1': torch.arange(16) % 2}):
        assert net(x.bfloat16()).dtype == torch.bfloat16
    assert net.layer1[0].gate1.decision.tolist() == [[0., 1.] * 8] * 3


@pytest.mark.parametrize('masks', ['closed', {}])
def test_a_model_without_gates_cannot_be_forced(masks):
    model = timm.create_model('resnet18')
    with pytest.raises(ValueError, match='ResNet has no gates to force'), force_gates(model, masks):
        pass
