"""Trunks: the modules of a network that run on feature maps, in their order

`trunk` says for each class of network what runs in which order. It replaces `forward`, so networks and blocks that
override a forward pass are refused, unless `register_forward` declares that they compute the same.
"""
from dataclasses import dataclass
from functools import partial, singledispatch
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import torch
import torch.nn as nn
from timm.models._features import FeatureDictNet, FeatureGetterNet, FeatureHookNet, FeatureListNet
from timm.models.resnet import BasicBlock, Bottleneck, ResNet

from ..layers import GatedBasicBlock, GatedBottleneck
from ..models import AigBasicBlock, AigBottleneck, CarryNet, CarryStage, CifarResNet
from .layer_ops import unsupported

__all__ = ['Trunk', 'as_dict', 'complete_trunk', 'find_trunk', 'first_map', 'is_known', 'register_forward', 'trunk']

# Forward methods that the compiler reproduces. Classes that override them are refused.
_known_forwards: Set[Any] = {
    nn.Sequential.forward, CarryStage.forward, BasicBlock.forward, Bottleneck.forward, GatedBasicBlock.forward,
    GatedBasicBlock.forward_masked, GatedBottleneck.forward, GatedBottleneck.forward_masked,
    AigBasicBlock.forward, AigBottleneck.forward,
    ResNet.forward, ResNet.forward_features, ResNet.forward_head, CifarResNet.forward, CifarResNet.forward_features,
    CifarResNet.forward_head, CarryNet.forward_features, FeatureDictNet.forward, FeatureListNet.forward,
    FeatureDictNet._collect}


def register_forward(cls: Any) -> None:
    """Declare that a network or residual block of another package has the forward pass of timm's.

    Args:
        cls: Class of the network or block. A network also needs a `trunk`. A block needs timm's child names: `conv1`,
            `bn1`, …, `downsample`.
    """
    _known_forwards.add(cls.forward)


def is_known(module: nn.Module) -> bool:
    """Whether the forward pass of a module is one that the compiler reproduces."""
    methods = ('forward', 'forward_masked', 'forward_features', 'forward_head', '_collect')
    return all(getattr(type(module), name) in _known_forwards for name in methods if hasattr(type(module), name))


@dataclass
class Trunk:
    """The part of a network that runs on feature maps.

    Attributes:
        modules: Modules in execution order, each with a flag that says whether its output is returned.
        assemble: Function from the list of returned maps to the result of the network. A network can be saved if it is
            `list`, `tuple`, `first_map` or a `partial` of `as_dict`.
        head: Module that is applied to the result.
    """
    modules: Sequence[Tuple[nn.Module, bool]]
    assemble: Callable[[List[torch.Tensor]], Any] = list
    head: Optional[nn.Module] = None


@singledispatch
def trunk(model: nn.Module) -> Optional[Trunk]:
    """Return the trunk of a network, or None if its class is not registered. Other packages may register theirs."""
    return None


def find_trunk(model: nn.Module) -> Optional[Trunk]:
    """Return the `trunk` of a network after checking that the network does not override the forward pass."""
    parts = trunk(model)
    if parts is not None and not is_known(model):
        raise unsupported(model, ' because it overrides the forward pass')
    return parts


@singledispatch
def complete_trunk(model: nn.Module) -> Optional[Trunk]:
    """Return a trunk that has the output of the whole model, or None. Other packages may register theirs.

    It differs from `find_trunk` for models that contain a network, such as segmentors.
    """
    return find_trunk(model)


def first_map(maps: List[torch.Tensor]) -> torch.Tensor:
    """The output of a network with one output."""
    return maps[0]


def as_dict(keys: Sequence[Any], maps: List[torch.Tensor]) -> Dict[Any, torch.Tensor]:
    """The output of a network with named outputs."""
    return dict(zip(keys, maps, strict=True))


def _classifier(model: Any, modules: List[Any]) -> Trunk:
    head = nn.Sequential(model.global_pool, model.fc)
    return Trunk([(module, module is modules[-1]) for module in modules], first_map, head)


@trunk.register
def _(model: ResNet) -> Trunk:
    stages = [model.layer1, model.layer2, model.layer3, model.layer4]
    return _classifier(model, [model.conv1, model.bn1, model.act1, model.maxpool, *stages])


@trunk.register
def _(model: CifarResNet) -> Trunk:
    stages = [getattr(model, name) for name in model.stage_names]
    return _classifier(model, [model.conv1, model.bn1, model.act1, *stages])


@trunk.register
def _(model: FeatureDictNet) -> Trunk:
    modules = [(module, name in model.return_layers) for name, module in model.items()]
    keys = [model.return_layers[name] for name in model if name in model.return_layers]
    if isinstance(model, FeatureListNet):
        return Trunk(modules)
    return Trunk(modules, partial(as_dict, keys))


@trunk.register(FeatureGetterNet)
@trunk.register(FeatureHookNet)
def _(model: nn.Module) -> Trunk:
    network = getattr(model, 'model', None)
    if isinstance(network, CarryNet):
        raise unsupported(network)
    raise ValueError(
        f"{type(model).__name__} cannot be accelerated; create the model with "
        f"feature_cls='list'.")
