"""Pruned blocks with grouped convolutions and anti-aliasing, for random groups, widths and decisions"""
import torch
import torch.nn as nn
from hypothesis import given
from hypothesis import strategies as st
from nets import images, shuffle
from strategies import decisions, examples
from timm.layers import BlurPool2d

from timm_gated import GatedBottleneck, gates
from timm_gated.pruning.filters import keep_used_filters

OFF, SOMETIMES, ON = 0., 0.5, 1.  # shares of the data


@examples(80)
@torch.no_grad()
@given(
    data=st.data(), groups=st.integers(1, 4), width=st.integers(1, 4), stride=st.sampled_from([1, 2]),
    aa_layer=st.sampled_from([None, BlurPool2d, nn.AvgPool2d]), keep_gates=st.booleans())
def test_outputs_where_removed_filters_are_off(data, groups, width, stride, aa_layer, keep_gates):
    torch.manual_seed(0)
    block = GatedBottleneck(
        12, 16, stride, nn.Conv2d(12, 64, 1, stride), cardinality=groups, base_width=4 * width, aa_layer=aa_layer)
    model = nn.Sequential(shuffle(block)).eval()
    shares = {}
    for name, gate in gates(model):
        kinds = st.lists(st.sampled_from([OFF, SOMETIMES, ON]), min_size=groups * width, max_size=groups * width)
        shares[name] = torch.tensor(data.draw(kinds))
        opened = shares[name] > OFF
        if keep_gates:  # otherwise filters that are on at times always run
            opened &= (shares[name] == ON) | data.draw(decisions(groups * width)).bool()
        gate.fc2.weight.zero_()
        gate.fc2.bias.copy_(2 * opened.float() - 1)  # the decision for these images
    x = images(2, 12, 6, 4)
    pruned = keep_used_filters(model, shares, threshold=1., keep_gates=keep_gates)
    torch.testing.assert_close(pruned(x), model(x), atol=1e-5, rtol=1e-4)

    small = pruned[0]
    for index in (1, 2):
        share = shares[f'0.gate{index}'].view(groups, width)
        kept = max(int((share > OFF).sum(1).max()), 1)
        assert getattr(small, f'conv{index}').out_channels == kept * groups
        gate = getattr(small, f'gate{index}')
        assert (gate is None) == (not keep_gates or not (share == SOMETIMES).any())
        if gate is not None:
            assert gate.num_gates + gate.num_ungated == kept * groups
            assert gate.num_gates == (int((share == SOMETIMES).sum()) if groups == 1 else kept * groups)
    assert small.conv2.groups == groups
