"""Keys and shapes of the state dicts of all models equal those of version 0.1, so its checkpoints load"""
import gzip
import json

import pytest
import timm
import torch
from mmseg.registry import MODELS
from paths import ROOT

import mmseg_plugin  # noqa: F401  (registers the backbones)

RECORDED = json.loads(gzip.decompress((ROOT / 'tests' / 'data' / 'state_dict_keys.json.gz').read_bytes()))


@pytest.mark.parametrize('name', RECORDED)
def test_state_dict_keys(name):
    with torch.device('meta'):
        if name.startswith('mmseg.'):
            backbone, _, depth = name.removeprefix('mmseg.').rpartition('-')
            model = MODELS.build(dict(type=backbone, depth=int(depth)))
        else:
            model = timm.create_model(name)
    assert {key: list(tensor.shape) for key, tensor in model.state_dict().items()} == RECORDED[name]
