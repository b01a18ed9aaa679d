"""The blocks of mmseg's gated ResNets as mmseg's own"""
import mmseg_plugin  # noqa: F401  (before anything of mmseg)

# isort: split
import pytest
import torch
import torch.nn as nn
from mmseg.models.backbones.resnet import Bottleneck
from mmseg.registry import MODELS
from nets import images, shuffle

from mmseg_plugin import GatedResNet, GatedResNetV1d, SlimResNet
from mmseg_plugin.backbones import GatedBasicBlock, GatedBottleneck, backbone_cfg
from timm_gated import force_gates

@pytest.mark.parametrize('depth', [18, 50])
@pytest.mark.parametrize('with_cp', [False, True])
def test_with_cp_is_what_was_asked(depth, with_cp):
    """And a block that is set to recompute afterwards does."""
    backbone = GatedResNet(depth, with_cp=with_cp)
    assert all(block.with_cp is with_cp for stage in backbone.res_layers for block in getattr(backbone, stage))
    block = backbone.layer1[1]
    block.with_cp = True
    runs = []
    block.conv1.register_forward_hook(lambda *args: runs.append(1))
    block(torch.randn(2, block.conv1.in_channels, 8, 8, requires_grad=True)).sum().backward()
    assert len(runs) == 2


@pytest.mark.parametrize('cls', [GatedResNet, SlimResNet])
def test_arguments_by_position(cls):
    """As mmseg's ResNet takes them."""
    backbone = cls(18, 4, 32, 16)
    assert backbone.depth == 18 and backbone.conv1.weight.shape[:2] == (32, 4) and backbone.feat_dim == 128
    again = MODELS.build(backbone_cfg(backbone))
    assert {k: v.shape for k, v in again.state_dict().items()} == {
        k: v.shape for k, v in backbone.state_dict().items()}
    assert GatedResNetV1d(18).deep_stem and GatedBasicBlock(16, 16, 2).conv1.stride == (2, 2)


def test_plugins_and_other_convolutions():
    """mmseg's own, with open gates; a gate switches what comes out of a plugin."""
    plugins = [
        dict(cfg=dict(type='ContextBlock', ratio=0.5, postfix=index), position=f'after_conv{index}')
        for index in (1, 2, 3)]
    torch.manual_seed(0)
    gated, dense = (
        cls(16, 4, plugins=plugins, dcn=dict(type='Conv2dAdaptivePadding')) for cls in (GatedBottleneck, Bottleneck))
    for name, parameter in shuffle(gated).named_parameters():
        if name.startswith('context_block'):
            nn.init.normal_(parameter)  # (at first, they add nothing)
    dense.load_state_dict({key: gated.state_dict()[key] for key in dense.state_dict()})
    gated.eval()
    dense.eval()
    x = images(3, 16, 8, 8)
    with torch.no_grad(), force_gates(gated, 'open'):
        torch.testing.assert_close(gated(x), dense(x))
    read = []
    for conv in (gated.conv2, gated.conv3):
        conv.register_forward_hook(lambda module, args, output: read.append(args[0]))
    with torch.no_grad():
        gated(x)
    for given, gate in zip(read, (gated.gate1, gated.gate2), strict=True):
        assert torch.equal((given != 0).flatten(2).any(2), gate.decision.bool())
        assert set(gate.decision.flatten().tolist()) == {0., 1.}
