"""Blocks of the gated ResNets against mmseg's own, and initialisation of gates with mmengine's `init_cfg`"""
import mmseg_plugin  # noqa: F401  (must precede imports of mmseg)

# isort: split
import pytest
import torch
import torch.nn as nn
from fvcore.nn import FlopCountAnalysis
from mmseg.models.backbones.resnet import Bottleneck
from mmseg.registry import MODELS
from nets import images, shuffle

from mmseg_plugin import GatedResNet, GatedResNetV1c, GatedResNetV1d, GatedResNeXt, SlimResNet
from mmseg_plugin.backbones import GatedBasicBlock, GatedBottleneck, backbone_cfg
from timm_gated import Gating, count_macs, force_gates

# Blocks


@pytest.mark.parametrize('depth', [18, 50])
@pytest.mark.parametrize('with_cp', [False, True])
def test_with_cp(depth, with_cp):
    """Blocks have the option, and may be changed to recompute later."""
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
    """Positional arguments are those of mmseg's ResNet."""
    backbone = cls(18, 4, 32, 16)
    assert backbone.depth == 18 and backbone.conv1.weight.shape[:2] == (32, 4) and backbone.feat_dim == 128
    again = MODELS.build(backbone_cfg(backbone))
    assert {k: v.shape for k, v in again.state_dict().items()} == {
        k: v.shape for k, v in backbone.state_dict().items()}
    assert GatedResNetV1d(18).deep_stem and GatedBasicBlock(16, 16, 2).conv1.stride == (2, 2)


def test_arguments_of_resnext():
    backbone = GatedResNeXt(8, 2, depth=50, base_channels=16, gated_maps=(2,))
    block = backbone.layer2[0]
    assert block.conv2.groups == 8 and block.conv2.in_channels == 32 and not hasattr(block, 'gate1')
    again = MODELS.build(backbone_cfg(backbone))
    assert type(again) is GatedResNeXt
    assert {k: v.shape for k, v in again.state_dict().items()} == {
        k: v.shape for k, v in backbone.state_dict().items()}


def test_macs_of_resnext():
    """A filter of conv2 reads the open inputs of its own group only."""
    torch.manual_seed(0)
    backbone, x = shuffle(GatedResNeXt(depth=50, groups=4, base_width=4, base_channels=16)), images(3, 3, 32, 32)
    macs = count_macs(backbone, x)
    dense = FlopCountAnalysis(MODELS.build(dict(type='ResNeXt', **backbone.resnet_args)), x)
    assert 3 * macs.dense == dense.unsupported_ops_warnings(False).by_operator()['conv']
    expected = sum(part.per_sample for name, part in macs.by_module.items() if not name.endswith('conv2'))
    for name, block in backbone.named_modules():
        if isinstance(block, GatedBottleneck):
            read, written = (gate.decision.unflatten(1, (4, -1)).sum(2) for gate in (block.gate1, block.gate2))
            positions = macs.by_module[f'{name}.conv2'].dense // block.conv2.weight.numel()
            expected = expected + (read * written).sum(1).long() * 9 * positions
    assert macs.per_sample.tolist() == expected.tolist() and len(set(expected.tolist())) == 3


def test_plugins_and_other_convolutions():
    """Open gates reproduce mmseg's block, and masks apply to the output of plugins."""
    plugins = [
        dict(cfg=dict(type='ContextBlock', ratio=0.5, postfix=index), position=f'after_conv{index}')
        for index in (1, 2, 3)]
    torch.manual_seed(0)
    gated, dense = (
        cls(16, 4, plugins=plugins, dcn=dict(type='Conv2dAdaptivePadding')) for cls in (GatedBottleneck, Bottleneck))
    for name, parameter in shuffle(gated).named_parameters():
        if name.startswith('context_block'):
            nn.init.normal_(parameter)  # freshly initialised plugins add nothing
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


# Initialisation


LINEAR = dict(type='Normal', mean=0.01, layer='Linear', bias=9.)
BOTH = [LINEAR, dict(type='Constant', val=7., bias=7., layer=['BatchNorm1d', '_BatchNorm'])]


def icnet(**kwargs):
    return dict(
        type='ICNet', in_channels=3, layer_channels=(128, 512), light_branch_middle_channels=4, psp_out_channels=8,
        out_channels=(4, 8, 8), backbone_cfg=dict(
            type='GatedResNetV1c', depth=18, gate_cfg=dict(bias=3.), dilations=(1, 1, 2, 4), strides=(1, 2, 1, 1)),
        **kwargs)


def segmentor(backbone, init_cfg=None):
    head = dict(
        type='FCNHead', in_channels=8, in_index=-1, channels=8, num_convs=0, concat_input=False, num_classes=5,
        loss_decode=dict(type='CrossEntropyLoss'))
    return MODELS.build(dict(type='EncoderDecoder', backbone=backbone, decode_head=head, init_cfg=init_cfg))


@pytest.mark.parametrize('backbone', [
    icnet(), icnet(init_cfg=BOTH),
    dict(type='GatedResNet', depth=18, init_cfg=BOTH, gate_cfg=dict(bias=3.)),
    dict(type='TimmGatedBackbone', model_name='gated_resnet20', init_cfg=BOTH, gate_bias=3.),
    dict(type='TimmGatedBackbone', model_name='gaternet_resnet20', init_cfg=BOTH, gater_bias=3.),
    dict(type='TIMMBackbone', model_name='skipnet_resnet38', gate='ff1', pretrained=False, init_cfg=BOTH),
], ids=['icnet', 'icnet-cfg', 'mmseg', 'timm', 'gaternet', 'skipnet'])
@pytest.mark.parametrize('init_cfg', [None, LINEAR, BOTH], ids=['none', 'linear', 'both'])
def test_gates_keep_their_initialisation(backbone, init_cfg):
    model = segmentor(backbone, init_cfg)
    own = {
        f'{name}.{key}' for name, module in model.named_modules() if isinstance(module, Gating)
        for key, _ in module.named_parameters()}
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    model.init_weights()
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert own and changed and not own & changed
    with torch.no_grad():  # `apply` still reaches the gates
        model.apply(lambda module: isinstance(module, nn.Linear) and module.bias.fill_(5.))
    assert all((layer.bias == 5).all() for _, layer in model.named_modules() if isinstance(layer, nn.Linear))


def test_gates_load_from_a_checkpoint(tmp_path):
    trained = shuffle(GatedResNetV1c(depth=18, dilations=(1, 1, 2, 4), strides=(1, 2, 1, 1)))
    torch.save(trained.state_dict(), tmp_path / 'trained.pth')
    model = segmentor(icnet())
    model.backbone.backbone.init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'trained.pth'))
    model.init_weights()
    own = model.backbone.backbone.state_dict()
    assert all(torch.equal(own[key], value) for key, value in trained.state_dict().items())
