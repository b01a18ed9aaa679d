"""Gates of grouped convolutions: the forward pass of a block, its MACs by hand and by another way of counting"""
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from nets import images, shuffle
from strategies import decisions, examples

from timm_gated import GatedBottleneck, MacCounter, MacFormula, budget_loss, count_macs, force_gates, mac_formula
from timm_gated.layers.mac_rules import open_pairs


def make_block(groups: int = 4, width: int = 3, **kwargs) -> GatedBottleneck:
    """A block of 20 channels outside, and `groups` times `width` inside."""
    torch.manual_seed(0)
    block = GatedBottleneck(20, 5, cardinality=groups, base_width=width * 64 // 5 + 1, **kwargs)
    assert block.conv2.groups == groups and block.conv2.in_channels == groups * width
    return shuffle(block).eval()


def test_block_by_hand():
    block, x = make_block(), images(3, 20, 6, 5)
    out = block(x)
    mask1, mask2 = (gate.decision[:, :, None, None] for gate in (block.gate1, block.gate2))
    assert mask1.shape == mask2.shape == (3, 12, 1, 1)
    inner = torch.relu(block.bn1(block.conv1(x))) * mask1
    groups = [
        F.conv2d(inner[:, 3 * g:3 * g + 3], block.conv2.weight[3 * g:3 * g + 3], padding=1) for g in range(4)]
    inner = torch.relu(block.bn2(torch.cat(groups, dim=1))) * mask2
    torch.testing.assert_close(out, torch.relu(block.bn3(block.conv3(inner)) + x))


def test_macs_by_hand():
    block, x = make_block(groups=2, width=3), images(2, 20, 4, 5)
    masks = {
        'gate1': torch.tensor([[1, 1, 0, 0, 0, 1], [0, 0, 0, 1, 1, 1]]),
        'gate2': torch.tensor([[1, 0, 0, 1, 1, 1], [1, 1, 1, 0, 0, 0]])}
    with force_gates(block, masks):
        macs = count_macs(block, x)
    modules = macs.by_module
    assert modules['conv1'].per_sample.tolist() == [20 * 20 * 3, 20 * 20 * 3]
    # 2 inputs for 1 output and 1 input for 3 outputs; then no input for 3 outputs and 3 inputs for none
    assert modules['conv2'].per_sample.tolist() == [20 * 9 * (2 * 1 + 1 * 3), 0]
    assert modules['conv3'].per_sample.tolist() == [20 * 4 * 20, 20 * 3 * 20]
    assert modules['conv2'].dense == 20 * 9 * 2 * 3 * 3
    formula = mac_formula(block, (20, 4, 5))
    assert formula.used(masks).tolist() == macs.per_sample.tolist() and formula.dense == macs.dense
    assert formula.groups == {'conv2': 2}
    with force_gates(block, masks), MacCounter(block) as counter:
        block(x)
    unused = [20 * 3 + 9 * 13 + 20 * 2, 20 * 3 + 9 * 18 + 20 * 3]
    total = sum(parameter.numel() for parameter in block.parameters())
    assert counter.parameters().tolist() == pytest.approx([total - count for count in unused])


@examples(60)
@given(data=st.data(), groups=st.integers(1, 6), inputs=st.integers(1, 4), outputs=st.integers(1, 4))
def test_pairs_are_those_that_a_convolution_multiplies(data, groups, inputs, outputs):
    """A convolution with weights of one adds up its open inputs."""
    shares = [data.draw(st.sampled_from([n for n in range(1, c + 1) if c % n == 0]))
              for c in (groups * inputs, groups * outputs)]  # channels that one decision switches
    masks = [data.draw(decisions(3, groups * n // share)) for n, share in zip((inputs, outputs), shares, strict=True)]
    opened = [mask.repeat_interleave(share, 1) for mask, share in zip(masks, shares, strict=True)]
    weight = torch.ones(groups * outputs, inputs, 1, 1)
    multiplied = F.conv2d(opened[0][:, :, None, None], weight, groups=groups).flatten(1) * opened[1]
    for side, expected in (
            (masks, multiplied), (masks[:1], opened[0] * outputs), (masks[1:], opened[1] * inputs)):
        pairs, total = open_pairs(side, groups)
        unit = weight.numel() / total
        assert unit == int(unit) and pairs.dtype == masks[0].dtype
        assert (unit * pairs).tolist() == expected.sum(1).tolist()


@examples(20)
@given(data=st.data(), groups=st.sampled_from([1, 2, 4]), always=st.sampled_from([0, 2]))
def test_formula_is_what_the_counter_counts(data, groups, always):
    block = make_block(groups, width=4)
    block.gate1.num_ungated = always
    block.conv1 = nn.Conv2d(20, 4 * groups + always, 1)
    block.bn1 = nn.BatchNorm2d(4 * groups + always)
    block.conv2 = nn.Conv2d(4 * groups + always, 4 * groups, 3, padding=1, groups=2 if always else groups)
    block.eval()
    masks = {name: data.draw(decisions(3, 4 * groups)) for name in ('gate1', 'gate2')}
    with force_gates(block, masks):
        macs = count_macs(block, images(3, 20, 5, 3))
    assert mac_formula(block, (20, 5, 3)).used(masks).tolist() == macs.per_sample.tolist()
    assert (macs.per_sample.min() > 0) and macs.by_module['conv2'].per_sample.max() <= macs.by_module['conv2'].dense


def test_gradient_of_the_budget():
    formula = MacFormula(
        dense=100, fixed=10, switched={'a': (60, {'x': 0}), 'b': (30, {'x': 0, 'y': 2})}, groups={'b': 2})
    torch.manual_seed(0)
    x, y = (torch.rand(3, n, dtype=torch.float64, requires_grad=True) for n in (4, 6))
    assert torch.autograd.gradcheck(lambda x, y: budget_loss(formula.used({'x': x, 'y': y}), 100, 0.4), (x, y))
    first = formula.used({'x': torch.tensor([[1., 1., 0., 0.]]), 'y': torch.ones(1, 6)})
    # the second group has no input, and the first one has 2 inputs for its 4 outputs
    assert first.tolist() == [10 + 30 + 30 * (2 * 4) / (2 * 2 * 4)]
