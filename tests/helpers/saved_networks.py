"""Networks to save, and files that are changed"""
import random
from pathlib import Path
from typing import Any, Dict, List, Tuple
from unittest.mock import patch

import timm
import torch
import torch.nn as nn
from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmseg.registry import MODELS
from mmseg_small import write_config
from nets import shuffle
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from timm_gated import accelerate
from timm_gated.inference import Accelerated, mixed
from timm_gated.inference.program import (
    AdaptivePoolOp,
    BlurOp,
    ChannelConvOp,
    ConvOp,
    GateOp,
    OutputOp,
    Program,
    ScaleOp,
)
from timm_gated.inference.serialize import checksum

__all__ = [
    'NET', 'NETWORKS', 'SHALLOW', 'SMALL', 'change_integers', 'family_program', 'file_of', 'make', 'quantised',
    'segmentor', 'version_1',
]

SHALLOW = dict(layers=(1, 1, 1, 1))
SMALL = dict(SHALLOW, channels=(32, 64, 128, 256))
NETWORKS: List[Tuple[str, Dict[str, Any]]] = [
    ('gated_resnet18', SHALLOW), ('gated_resnet50', dict(SHALLOW, num_classes=0, in_chans=1)), ('dgnet_resnet18', {}),
    ('gated_resnet18', dict(SHALLOW, features_only=True)),
    ('gated_resnet18', dict(SHALLOW, features_only=True, feature_cls='dict', out_indices=(1, 3))),
    ('convnet_aig_resnet18', SHALLOW), ('convnet_aig_resnet20', {}), ('gated_resnet20', {}),
    ('gated_resnet20', dict(features_only=True)), ('cifar_resnet20', {}), ('resnet26d', SHALLOW),
    ('seresnext26d_32x4d', SMALL), ('ecaresnet26t', SMALL), ('resnetblur18', SMALL)]
NET = dict(model_name='gated_resnet20', layers=(1, 1, 1), num_classes=3)


def make(model_name: str = 'gated_resnet20', **kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    return shuffle(timm.create_model(model_name, **kwargs)).eval()


def quantised(model_name: str = 'gated_resnet20', **kwargs: Any) -> Accelerated:
    """A network whose layers are all in int8, whatever is faster."""
    model, channels = make(model_name, **kwargs), kwargs.get('in_chans', 3)
    generator = torch.Generator().manual_seed(1)
    with patch.object(mixed, '_MARGIN', 0.):
        return accelerate(model, precision='int8', calibration=torch.randn(4, channels, 48, 48, generator=generator))


def segmentor(folder: Path) -> nn.Module:
    config = Config.fromfile(write_config(folder))
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = shuffle(MODELS.build(config.model))
    model.eval()
    return model


def family_program() -> Program:
    """Gated groups, blur pooling and both kinds of attention, on images of 3 channels."""
    generator = torch.Generator().manual_seed(0)

    def weights(*shape: int) -> Tuple[torch.Tensor, torch.Tensor]:
        return torch.randn(*shape, generator=generator) / 4, torch.randn(shape[0], generator=generator)

    return Program(3, [
        GateOp(0, 0, *weights(4, 3), *weights(8, 4)), GateOp(0, 1, *weights(4, 3), *weights(12, 4)),
        ConvOp(0, 1, *weights(8, 3, 3, 3), padding=1, relu=True, gate_out=0),
        ConvOp(1, 2, *weights(12, 2, 3, 3), padding=1, relu=True, gate_in=0, gate_out=1, groups=4),
        BlurOp(2, 1, 3, 2, 1),
        ConvOp(1, 2, *weights(6, 12, 1, 1), gate_in=1),
        AdaptivePoolOp(2, 3, 1), ChannelConvOp(3, 4, torch.tensor([1., -1., 0.5])), ScaleOp(2, 4, 1, 2, True),
        AdaptivePoolOp(1, 3, 1), ConvOp(3, 4, *weights(6, 6, 1, 1)), ScaleOp(1, 4, 2, relu=True),
        OutputOp(2)], num_maps=5, num_gates=2)


def version_1(tensors: Dict[str, torch.Tensor]) -> Dict[str, torch.Tensor]:
    """Tensors of a file as version 1 of the format had them."""
    network = tensors['network'].clone()
    network[0] = 1
    return {**tensors, 'network': network, 'operations': tensors['operations'][:, :20].contiguous()}


def file_of(tensors: Dict[str, torch.Tensor]) -> bytes:
    return save_tensors(tensors, {'timm_gated': checksum(tensors)})


def change_integers(rng: random.Random, data: bytes) -> bytes:
    """Change some integers of the operations."""
    tensors = load_tensors(data)
    values = (*range(-2, 12), 64, 65, 255, 1000, 2**20, 2**20 + 1, 2**31, 2**32, 2**63 - 1, -2**63)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        table = tensors[rng.choice(('operations', 'operations', 'operations', 'network'))].view(-1)
        table[rng.randrange(len(table))] = rng.choice(values)
    return file_of(tensors)
