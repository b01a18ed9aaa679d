"""Blocks outside this package that use the protocol: examples/own_block.py, and one with a depthwise convolution"""
import importlib.util
import re

import pytest
import torch
import torch.nn as nn
from models import open_share
from nets import images, shuffle
from paths import ROOT
from timm.task import ClassificationTask

from timm_gated import (
    ChannelGate,
    GatePool,
    accelerate,
    count_macs,
    force_gates,
    gates,
    mac_formula,
    prune_static,
    save_pretrained,
    specialize,
)
from timm_gated.analysis import record_classifier, summary
from timm_gated.layers import apply_gate
from timm_gated.layers.gate_state import gate_masks
from timm_gated.pruning.filters import keep_used_filters

SPEC = importlib.util.spec_from_file_location('own_block', ROOT / 'examples' / 'own_block.py')
own_block = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(own_block)


class Inverted(nn.Module):
    """An inverted residual block. One gate switches the filters of three convolutions, one of them depthwise."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.expand = nn.Conv2d(channels, width, 1)
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.BatchNorm2d(width)
        self.project = nn.Conv2d(width, channels, 1)
        self.gate_pool = GatePool()
        self.gate = ChannelGate(channels, width)

    @property
    def gated_convs(self):
        return {
            'expand': (None, self.gate), 'depthwise': (self.gate, self.gate), 'project': (self.gate, None)}

    def forward(self, x):
        mask = self.gate(self.gate_pool(x))
        inner = apply_gate(torch.relu(self.norm(self.depthwise(self.expand(x)))), mask)
        return x + self.project(inner)


def network(block: type = own_block.GatedBlock) -> nn.Module:
    torch.manual_seed(0)
    return shuffle(own_block.Network(block)).eval()


def test_the_example_runs(capsys):
    own_block.main(epochs=1, count=200)
    printed = capsys.readouterr().out
    assert 'epoch 0: loss' in printed and 'gates: GateCounts' in printed and 'average MACs' in printed
    assert float(re.search(r'accelerated by \w+: difference (.*)', printed).group(1)) < 1e-4


def test_dense_weights():
    model, dense = network(), network(own_block.Block)
    model.load_state_dict(dense.state_dict())  # gates may be missing
    x = images(2, 1, 8, 8)
    with force_gates(model, 'open'):
        torch.testing.assert_close(model(x), dense(x))
    assert not torch.allclose(model(x), dense(x))


def test_training_step():
    model = network().train()
    task = ClassificationTask(model, nn.CrossEntropyLoss(), verbose=False)
    result = task(images(4, 1, 8, 8), torch.arange(4))
    result['loss'].backward()
    torch.testing.assert_close(result['budget_loss'], (result['macs_share'] - 0.5) ** 2)
    assert all(gate.fc2.bias.grad.any() for _, gate in gates(model))


@torch.no_grad()
def test_macs_by_hand():
    model, x = network(), images(3, 1, 8, 6)
    macs = count_macs(model, x)
    overhead = 3 * (16 * 48 + 16 * 16 + 16 * 32)
    opened = sum(gate.decision.sum(1) for _, gate in gates(model))
    assert macs.dense == 48 * (9 * 16 + 3 * (25 + 9) * 16 * 32) + 160
    assert macs.per_sample.tolist() == (48 * 9 * 16 + 160 + overhead + opened * 48 * (25 + 9) * 16).tolist()
    assert mac_formula(model, (1, 8, 6)).used(gate_masks(model)).tolist() == macs.per_sample.tolist()


@torch.no_grad()
def test_macs_of_a_depthwise_convolution_by_hand():
    block, x = shuffle(Inverted(4, 10)).eval(), images(3, 4, 5, 5)
    macs = count_macs(block, x)
    opened = block.gate.decision.sum(1)
    assert 0 < opened.sum() < 30
    assert macs.by_module['depthwise'].dense == 25 * 9 * 10
    assert macs.by_module['depthwise'].per_sample.tolist() == (25 * 9 * opened).tolist()
    assert macs.by_module['expand'].per_sample.tolist() == (25 * 4 * opened).tolist()
    assert mac_formula(block, (4, 5, 5)).used(gate_masks(block)).tolist() == macs.per_sample.tolist()


@torch.no_grad()
def test_pruning():
    model = network()
    for _, gate in gates(model):
        gate.fc2.weight.zero_()
        gate.fc2.bias.copy_(torch.arange(32) - 20.5)  # 11 of 32 are open
    loader = [(images(8, 1, 8, 8), torch.arange(8))]
    pruned = prune_static(model, loader)
    assert [block.conv1.out_channels for block in pruned.model.blocks] == [11] * 3 and not gates(pruned.model)
    torch.testing.assert_close(pruned.model(loader[0][0]), model(loader[0][0]))


@pytest.mark.parametrize('backend', ['auto', 'torch'])
@pytest.mark.parametrize('block', [own_block.Block, own_block.GatedBlock])
@torch.no_grad()
def test_acceleration(block, backend):
    model, x = network(block), images(5, 1, 8, 9)
    macs = count_macs(model, x)
    assert macs.share == 1 or 0 < macs.share < 0.95
    fast = accelerate(model, backend)
    torch.testing.assert_close(fast(x), model(x), atol=1e-4, rtol=1e-4)
    assert count_macs(fast, x).per_sample.tolist() == macs.per_sample.tolist()
    pruned = keep_used_filters(model, open_share(model, x), threshold=1.)
    torch.testing.assert_close(accelerate(pruned, backend)(x), model(x), atol=1e-4, rtol=1e-4)


def test_report(tmp_path):
    loader = [(images(8, 1, 8, 8), torch.arange(8))]
    record = record_classifier(network(), loader, class_names=[str(label) for label in range(10)])
    assert [name for name, _ in record.spans()] == [f'blocks.{index}.gate1' for index in range(3)]
    assert 0 < summary(record)['gate_density'] < 1


def test_what_needs_more_than_the_protocol(tmp_path):
    model, loader = network(), [(images(8, 1, 8, 8), torch.arange(8))]
    with pytest.raises(ValueError, match=r'Inverted\(\) cannot be accelerated'):
        accelerate(network(Inverted))
    with pytest.raises(ValueError, match='Block.* its forward pass is not known'):
        accelerate(network(type('Block', (own_block.GatedBlock,), {'forward': lambda self, x: x})))
    with pytest.raises(ValueError, match='was not created by timm.create_model'):
        save_pretrained(model, tmp_path / 'model')
    with pytest.raises(ValueError, match='no methods get_classifier and reset_classifier'):
        specialize(model, loader, [1, 2])
    model = network(Inverted)
    with pytest.raises(ValueError, match="'blocks.0.gate' is a ChannelGate in a Inverted; .*gate1 between conv1"):
        prune_static(model, loader)
    for block in model.blocks:  # names alone do not make a gate one of an inner map
        block.conv1, block.bn1, block.conv2, block.gate1 = block.expand, block.norm, block.depthwise, block.gate
        del block.gate
    with pytest.raises(ValueError, match='only inner maps gated by a ChannelGate can be pruned'):
        prune_static(model, loader)
