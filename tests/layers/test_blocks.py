"""Gated residual blocks"""
import pytest
import torch
import torch.nn as nn
from nets import is_binary, shuffle

from timm_gated import GatedBasicBlock, GatedBottleneck, force_gates, gates
from timm_gated.layers.gate import apply_gate


def make_block(kind: str, inplanes: int = 16, planes: int = 8, stride: int = 1, **kwargs) -> nn.Module:
    """A small gated block, with a downsample layer where needed."""
    torch.manual_seed(0)
    block = {'basic': GatedBasicBlock, 'bottleneck': GatedBottleneck}[kind]
    out_channels = planes * block.expansion
    downsample = None
    if stride != 1 or inplanes != out_channels:
        downsample = nn.Sequential(nn.Conv2d(inplanes, out_channels, 1, stride, bias=False))
    return block(inplanes, planes, stride, downsample, **kwargs)


@pytest.mark.parametrize('kind, stride', [('basic', 1), ('basic', 2), ('bottleneck', 1), ('bottleneck', 2)])
def test_gate_reads_the_pooled_input_of_its_block(kind, stride):
    block = shuffle(make_block(kind, stride=stride)).eval()
    x = torch.randn(4, 16, 7, 5)
    block(x)
    for name, gate in gates(block):
        logits = gate.logits
        gate(x.mean((2, 3)))
        torch.testing.assert_close(logits, gate.logits)
        assert gate.fc1.in_features == 16 and gate.num_gates == 8, name


def test_apply_gate_switches_channels():
    x, mask = torch.randn(2, 3, 4, 5), torch.tensor([[1., 0., 1.], [0., 0., 1.]])
    out = apply_gate(x, mask)
    for n in range(2):
        for c in range(3):
            assert torch.equal(out[n, c], x[n, c] if mask[n, c] else torch.zeros(4, 5))
    assert apply_gate(x.bfloat16(), mask).dtype == torch.bfloat16


@pytest.mark.parametrize('kind, stride', [('basic', 1), ('basic', 2), ('bottleneck', 1), ('bottleneck', 2)])
def test_closed_block_is_its_shortcut(kind, stride):
    planes = 16 if kind == 'basic' else 4
    block = make_block(kind, planes=planes, stride=stride).eval()  # fresh norms map zero to zero
    x = torch.randn(3, 16, 8, 8)
    with force_gates(block, 'closed'), torch.no_grad():
        out = block(x)
    shortcut = x if stride == 1 else block.downsample(x)
    assert torch.equal(out, torch.relu(shortcut))
    with force_gates(block, 'open'), torch.no_grad():
        assert not torch.allclose(block(x), out)


@pytest.mark.parametrize('kind', ['basic', 'bottleneck'])
def test_block_by_hand(kind):
    block = shuffle(make_block(kind, planes=4 if kind == 'bottleneck' else 16)).eval()
    x = torch.randn(3, 16, 6, 6)
    out = block(x)
    masks = [gate.decision[:, :, None, None] for _, gate in gates(block)]
    assert all(is_binary(mask) for mask in masks)
    inner = torch.relu(block.bn1(block.conv1(x))) * masks[0]
    if kind == 'basic':
        inner = block.bn2(block.conv2(inner))
    else:
        inner = block.bn3(block.conv3(torch.relu(block.bn2(block.conv2(inner))) * masks[1]))
    torch.testing.assert_close(out, torch.relu(inner + x))


@pytest.mark.parametrize('kind', ['basic', 'bottleneck'])
def test_closed_filters_get_no_gradient(kind):
    block = shuffle(make_block(kind, planes=4 if kind == 'bottleneck' else 16)).train()
    num_filters = block.conv1.out_channels
    masks = {name: torch.arange(num_filters) % 2 for name, _ in gates(block)}
    with force_gates(block, masks):
        block(torch.randn(4, 16, 6, 6)).pow(2).sum().backward()
    inner = [(block.conv1, block.bn1), (block.conv2, block.bn2)][:len(masks)]
    for conv, bn in inner:
        for grad in (conv.weight.grad, bn.weight.grad, bn.bias.grad):
            per_filter = grad.flatten(1).abs().sum(1) if grad.ndim > 1 else grad.abs()
            assert not per_filter[0::2].any(), 'closed'
            assert per_filter[1::2].all(), 'open'


@pytest.mark.parametrize('kind', ['basic', 'bottleneck'])
def test_mask_is_applied_after_the_relu(kind):
    """Before the ReLU, a closed gate would get no gradient, since that of a ReLU at zero is zero."""
    block = make_block(kind, planes=4 if kind == 'bottleneck' else 16).train()
    out = block(torch.randn(32, 16, 6, 6))
    kept = [gate.logits for _, gate in gates(block)]
    for logits in kept:
        logits.retain_grad()
    out.pow(2).sum().backward()
    for (_, gate), logits in zip(gates(block), kept, strict=True):
        closed = gate.decision == 0
        assert closed.any()
        assert logits.grad[closed].ne(0).float().mean() > 0.9


@pytest.mark.parametrize('gated_maps', [(1,), (2,), (1, 2), [2, 1]])
def test_gated_maps_of_a_bottleneck(gated_maps):
    block = make_block('bottleneck', gated_maps=gated_maps)
    assert [name for name, _ in gates(block)] == [f'gate{i}' for i in sorted(gated_maps)]
    assert block(torch.randn(2, 16, 6, 6)).shape == (2, 32, 6, 6)


@pytest.mark.parametrize('gated_maps', [(), (-1,), (4,), (1, 1), 'both'])
def test_other_gated_maps_are_refused(gated_maps):
    with pytest.raises(ValueError, match=r'gated_maps .* one or more of \(0, 1, 2, 3\), got'):
        make_block('bottleneck', gated_maps=gated_maps)
