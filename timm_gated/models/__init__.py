"""Gated networks and their dense counterparts, as timm models

One module per family or method. Importing this package registers them.
"""
from . import (
    batch_shaped,  # noqa: F401
    dgnet,  # noqa: F401
    slim_resnet,  # noqa: F401
)
from ._carry import CarryNet, CarryStage
from ._checkpoint import check_depth, check_incoming, checkpoint_filter_fn, rename_linear_head
from ._config import check_model_args, read_config, storable
from ._gated_net import GatedNet
from ._registry import check_model_name, check_weights, entry_points, list_gated_models, list_weights, near_models
from .cifar_resnet import CifarResNet, PadShortcut
from .convnet_aig import AigBasicBlock, AigBottleneck, AigGate, TargetRate, target_rate_loss
from .fbs import Suppression
from .gate_model import gate
from .gated_cifar_resnet import GatedCifarResNet
from .gated_resnet import GatedResNet
from .gaternet import GateSparsity
from .skipnet import Skipping, reinforce_loss

__all__ = [
    'AigBasicBlock',
    'AigBottleneck',
    'AigGate',
    'CarryNet',
    'CarryStage',
    'CifarResNet',
    'GateSparsity',
    'GatedCifarResNet',
    'GatedNet',
    'GatedResNet',
    'PadShortcut',
    'Skipping',
    'Suppression',
    'TargetRate',
    'check_depth',
    'check_incoming',
    'check_model_args',
    'check_model_name',
    'check_weights',
    'checkpoint_filter_fn',
    'entry_points',
    'gate',
    'list_gated_models',
    'list_weights',
    'near_models',
    'read_config',
    'reinforce_loss',
    'rename_linear_head',
    'storable',
    'target_rate_loss',
]
