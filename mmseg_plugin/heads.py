"""Decode heads of accelerated segmentors

`timm_gated.accelerate` compiles a segmentor's backbone and its decode head into one program if the head is mmseg's
`PSPHead` or `FCNHead` with plain convolutions. Other heads stay in torch.
"""
import copy
from typing import Any, Iterable, List, Optional, Tuple, Union

import torch.nn as nn
from mmcv.cnn import ConvModule
from mmseg.models.decode_heads import FCNHead, PSPHead
from mmseg.models.decode_heads.decode_head import BaseDecodeHead
from mmseg.models.segmentors import EncoderDecoder

from timm_gated.inference import (
    AdaptivePoolOp,
    Compiler,
    ConcatOp,
    Trunk,
    accelerated_parts,
    compile_module,
    complete_trunk,
    find_trunk,
    first_map,
    is_plain_conv,
    sequence,
)

__all__: list = []

_default_parts = accelerated_parts.dispatch(nn.Module)


@sequence.register
def _(module: ConvModule) -> Optional[Iterable[nn.Module]]:
    if module.order != ('conv', 'norm', 'act') or module.with_explicit_padding or module.with_spectral_norm:
        return None
    layers = [module.conv]
    if module.with_norm:
        layers.append(module.norm)
    if module.with_activation:
        layers.append(module.activate)
    return layers


@compile_module.register
def _(head: PSPHead, compiler: Compiler) -> None:
    compiler.keep_maps()
    features = compiler.current
    pyramid = [features]
    for pooling, conv in head.psp_modules:
        compiler.current = features
        compiler.ops.append(AdaptivePoolOp(features, compiler.advance(), pooling.output_size))
        compiler.add(conv)
        compiler.flush()
        pyramid.append(compiler.current)
    compiler.ops.append(ConcatOp(tuple(pyramid), compiler.advance(), head.align_corners))
    compiler.add(head.bottleneck)
    compiler.add(head.conv_seg)


@compile_module.register
def _(head: FCNHead, compiler: Compiler) -> None:
    compiler.keep_maps()
    features = compiler.current
    compiler.add(head.convs)
    compiler.flush()
    if head.concat_input:
        compiler.ops.append(ConcatOp((features, compiler.current), compiler.advance()))
        compiler.add(head.conv_cat)
    compiler.add(head.conv_seg)


@complete_trunk.register
def _(model: EncoderDecoder) -> Optional[Trunk]:
    backbone = find_trunk(model.backbone)
    if backbone is None or not _runs_in_order(model) or not _is_supported(model.decode_head):
        return None
    modules = _up_to_output(backbone.modules, model.decode_head.in_index)
    return Trunk([*((module, False) for module in modules), (model.decode_head, True)], first_map)


@accelerated_parts.register
def _(model: EncoderDecoder) -> List[Tuple[nn.Module, Union[Trunk, nn.Module]]]:
    trunk = complete_trunk(model)
    if trunk is None:
        return _default_parts(model)
    return [(model.backbone, trunk), (model.decode_head, _without_layers(model.decode_head))]


def _runs_in_order(model: EncoderDecoder) -> bool:
    """Whether a segmentor runs its backbone, then its decode head, as mmseg's does."""
    methods = ('extract_feat', 'encode_decode', '_forward')
    return not model.with_neck and all(
        getattr(type(model), name) is getattr(EncoderDecoder, name) for name in methods)


def _is_supported(head: nn.Module) -> bool:
    cls = next((cls for cls in (PSPHead, FCNHead) if isinstance(head, cls)), None)
    methods = ('forward', '_forward_feature', 'cls_seg', 'predict')
    if cls is None or any(getattr(type(head), name) is not getattr(cls, name) for name in methods):
        return False
    if head.input_transform is not None or not isinstance(head.in_index, int):
        return False
    if cls is FCNHead:
        convs = [*(() if isinstance(head.convs, nn.Identity) else head.convs), head.conv_seg]
        convs += [head.conv_cat] if head.concat_input else []
    else:
        if not all(isinstance(pooling.output_size, int) for pooling, _ in head.psp_modules):
            return False
        convs = [*(conv for _, conv in head.psp_modules), head.bottleneck, head.conv_seg]
    return all(is_plain_conv(conv) for conv in convs)


def _up_to_output(modules: Iterable[Tuple[nn.Module, bool]], index: int) -> List[nn.Module]:
    """The modules of a backbone that the output with this index needs."""
    modules = list(modules)
    outputs = [position for position, (_, is_output) in enumerate(modules) if is_output]
    return [module for module, _ in modules[:outputs[index] + 1]]


def _without_layers(head: BaseDecodeHead) -> BaseDecodeHead:
    """A copy of a decode head that takes its logits as input."""
    head = copy.copy(head)
    head._modules, head._parameters, head._buffers = {}, {}, {}
    head.forward = _return_input
    return head


def _return_input(logits: Any) -> Any:
    return logits
