"""Conversion of weights between networks, timm's gated ResNets and mmseg's gated backbones

Blocks and gates have the same names in both. The deep stem is renamed, the classifier is dropped, and the prefixes of
the backbone in a segmentor and of the timm model in a backbone are removed.
"""
import re
from typing import Any, Dict, Mapping

import torch.nn as nn

__all__ = ['mmseg_to_timm', 'take_backbone', 'timm_to_mmseg']

StateDict = Dict[str, Any]


def timm_to_mmseg(state_dict: Mapping[str, Any]) -> StateDict:
    """Convert the state dict of a timm ResNet, gated or dense, to that of an mmseg backbone.

    Args:
        state_dict: State dict of a timm model.
    """
    deep_stem = any(key.startswith('conv1.0.') for key in state_dict)
    out = {}
    for key, value in state_dict.items():
        if key.startswith(('fc.', 'gate_losses.')):
            continue
        if deep_stem:
            key = re.sub(r'^bn1\.', 'stem.7.', re.sub(r'^conv1\.', 'stem.', key))
        out[key] = value
    return out


def mmseg_to_timm(state_dict: Mapping[str, Any]) -> StateDict:
    """Convert the state dict of an mmseg backbone or segmentor to that of a timm ResNet without classifier.

    Args:
        state_dict: State dict of a backbone or segmentor.
    """
    for prefix in ('backbone.', 'timm_model.', 'model.'):  # 'model.' is of timm's FeatureGetterNet
        if any(key.startswith(prefix) for key in state_dict):
            state_dict = {key[len(prefix):]: v for key, v in state_dict.items() if key.startswith(prefix)}
    return {re.sub(r'^stem\.', 'conv1.', re.sub(r'^stem\.7\.', 'bn1.', key)): v for key, v in state_dict.items()}


def take_backbone(backbone: nn.Module, state_dict: StateDict, prefix: str = '') -> None:
    """Reduce the state dict of a segmentor or classifier of OpenMMLab to its backbone, in place.

    A state dict of the backbone alone is not changed. One without any weights of the backbone raises a `ValueError`.

    Args:
        backbone: Backbone that the state dict is loaded into.
        state_dict: State dict.
        prefix: Prefix of the backbone's keys in the state dict, as in the model that it is loaded into.
    """
    given = [key for key in state_dict if key.startswith(prefix)]
    inner = f'{prefix}backbone.'
    if any(key.startswith(inner) for key in given):
        weights = {key: state_dict.pop(key) for key in given}
        state_dict.update({
            prefix + key[len(inner):]: value for key, value in weights.items() if key.startswith(inner)})
    elif given and not any(prefix + name in state_dict for name in backbone.state_dict()):
        raise ValueError(
            f'the checkpoint has no weights for a {type(backbone).__name__}: its parameters are called '
            f'{", ".join(given[:3])}, … instead of {", ".join(list(backbone.state_dict())[:3])}, ….')
