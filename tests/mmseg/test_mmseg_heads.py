"""Accelerated segmentors run their decode heads natively where they can, and have the outputs of the originals"""
from typing import Any, Dict

import mmseg_plugin  # noqa: F401  (before mmseg)

# isort: split
import pytest
import torch
import torch.nn as nn
from mmengine.config import ConfigDict
from mmengine.registry import DefaultScope
from mmseg.models.decode_heads import PSPHead
from mmseg.registry import MODELS
from nets import shuffle

from timm_gated import accelerate, count_macs, gates
from timm_gated.inference import Accelerated

NORM = dict(type='BN')
BACKBONE = dict(
    type='GatedResNetV1c', depth=18, base_channels=8, stem_channels=8, out_indices=(0, 1, 2, 3), dilations=(1, 1, 2, 4),
    strides=(1, 2, 1, 1), norm_cfg=NORM, contract_dilation=True)
HEAD = dict(
    in_channels=64, in_index=3, channels=12, num_classes=5, norm_cfg=NORM, align_corners=False,
    loss_decode=dict(type='CrossEntropyLoss'))
PSP = dict(HEAD, type='PSPHead', pool_scales=(1, 2, 3, 6))


def build(head: Dict[str, Any], **kwargs: Any) -> Any:
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmseg'):
        cfg = dict(type='GatedEncoderDecoder', backbone=BACKBONE, decode_head=head, test_cfg=ConfigDict(mode='whole'))
        return shuffle(MODELS.build(dict(cfg, **kwargs))).eval()


def logits(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.inference(images, [dict(img_shape=images.shape[2:], ori_shape=images.shape[2:])] * len(images))


def check(model: nn.Module, backend: str, images: torch.Tensor) -> nn.Module:
    fast = accelerate(model, backend)
    expected = logits(model, images)
    torch.testing.assert_close(
        logits(fast, images), expected, atol=1e-4 * expected.abs().max().item(), rtol=0)
    macs, fast_macs = count_macs(model, images), count_macs(fast, images)
    if model.decode_head.in_index in (-1, 3, [0, 1, 2, 3]):
        assert fast_macs.dense == macs.dense and torch.equal(fast_macs.per_sample, macs.per_sample)
    elif model.decode_head.input_transform is None:  # stages that nothing reads are not run
        assert fast_macs.dense < macs.dense
    assert isinstance(fast.backbone, Accelerated)
    return fast


@pytest.mark.parametrize('backend', ['native', 'torch'])
@pytest.mark.parametrize('head', [
    PSP,
    dict(PSP, align_corners=True, pool_scales=(1, 5)),
    dict(PSP, in_index=2, in_channels=32, norm_cfg=None),
    dict(PSP, in_index=-1),
    dict(HEAD, type='FCNHead'),
    dict(HEAD, type='FCNHead', num_convs=1, concat_input=False, dilation=3),
    dict(HEAD, type='FCNHead', num_convs=3, kernel_size=1, in_index=1, in_channels=16),
    dict(HEAD, type='FCNHead', num_convs=0, channels=64, concat_input=False),
], ids=['psp', 'psp_aligned', 'psp_stage3', 'psp_last', 'fcn', 'fcn_dilated', 'fcn_stage2', 'fcn_without_convs'])
@pytest.mark.parametrize('size', [(65, 97), (40, 24)])
def test_heads_run_with_the_backbone(head, backend, size):
    model = build(head)
    fast = check(model, backend, torch.randn(2, 3, *size))
    assert not list(fast.decode_head.parameters())
    assert list(model.decode_head.parameters()), 'the original keeps its layers'


class OtherPSPHead(PSPHead):
    def forward(self, inputs):
        return super().forward(inputs) + 1


@pytest.mark.parametrize('change', [
    dict(decode_head=dict(PSP, norm_cfg=dict(type='GN', num_groups=2))),
    dict(decode_head=dict(PSP, act_cfg=dict(type='GELU'))),
    dict(decode_head=dict(PSP, in_index=[2, 3], in_channels=[32, 64], input_transform='resize_concat')),
    dict(decode_head=dict(PSP, type=OtherPSPHead)),
    dict(decode_head=dict(HEAD, type='ISAHead', isa_channels=8, down_factor=(2, 2))),
    dict(decode_head=dict(
        HEAD, type='DepthwiseSeparableASPPHead', dilations=(1, 3, 6), c1_in_channels=8, c1_channels=4)),
    dict(decode_head=dict(
        HEAD, type='UPerHead', in_channels=[8, 16, 32, 64], in_index=[0, 1, 2, 3], pool_scales=(1, 2, 3, 6))),
    dict(neck=dict(type='FPN', in_channels=[8, 16, 32, 64], out_channels=64, num_outs=4)),
], ids=['norm', 'activation', 'several_inputs', 'subclass', 'other_head', 'deeplabv3plus', 'upernet', 'neck'])
def test_other_heads_stay_in_torch(change):
    model = build(PSP, **change)
    fast = check(model, 'native', torch.randn(2, 3, 64, 64))
    assert list(fast.decode_head.parameters())


def test_crops():
    model = build(PSP, test_cfg=ConfigDict(mode='slide', crop_size=(32, 40), stride=(24, 24)))
    images = torch.randn(1, 3, 56, 64)
    expected = logits(model, images)
    torch.testing.assert_close(
        logits(accelerate(model), images), expected, atol=1e-4 * expected.abs().max().item(), rtol=0)


def test_plan_names_the_layers_of_the_head():
    model = build(PSP)
    image = torch.randn(1, 3, 64, 64)
    plan = accelerate(model).backbone.plan(image, runs=1)
    names = [layer.name for layer in plan.layers if layer.name]
    assert {'backbone.layer4.1.conv2', 'decode_head.bottleneck.conv', 'decode_head.conv_seg'} <= set(names)
    assert {name for name, _ in gates(model)} <= set(names)
    assert plan.macs == count_macs(model, image).per_sample.item()
