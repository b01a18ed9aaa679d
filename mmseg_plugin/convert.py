"""Weights across frameworks: timm's gated ResNets and mmseg's gated backbones

Blocks and gates have the same names in both. What differs is the name of a deep stem, the classifier, which a backbone
does not have, and the prefixes that a segmentor gives its backbone, and a timm model in a backbone has.
"""
import re
from typing import Any, Dict, Mapping

__all__ = ['mmseg_to_timm', 'timm_to_mmseg']

StateDict = Dict[str, Any]


def timm_to_mmseg(state_dict: Mapping[str, Any]) -> StateDict:
    """State dict of an mmseg backbone from one of a timm ResNet, gated or dense.

    Args:
        state_dict: Of a timm model.
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
    """State dict of a timm ResNet, without its classifier, from one of an mmseg backbone or segmentor.

    Args:
        state_dict: Of a backbone, or of a whole segmentor.
    """
    for prefix in ('backbone.', 'timm_model.', 'model.'):  # (the last of timm's getter of features)
        if any(key.startswith(prefix) for key in state_dict):
            state_dict = {key[len(prefix):]: v for key, v in state_dict.items() if key.startswith(prefix)}
    return {re.sub(r'^stem\.', 'conv1.', re.sub(r'^stem\.7\.', 'bn1.', key)): v for key, v in state_dict.items()}
