"""Conversion of weights between timm's gated ResNets and mmseg's gated backbones

Blocks and gates have the same names in both. The deep stem is renamed, the classifier is dropped, and the prefixes of
the backbone in a segmentor and of the timm model in a backbone are removed.
"""
import re
from typing import Any, Dict, Mapping

__all__ = ['mmseg_to_timm', 'timm_to_mmseg']

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
