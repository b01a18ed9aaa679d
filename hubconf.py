"""The models of timm-gated for torch.hub, gated and dense

    torch.hub.load('.', 'gated_resnet20', source='local', pretrained=True)
    torch.hub.load('.', 'gated_resnet20', source='local', pretrained=True, pretrained_cfg='bas_c10')   # weights by tag

torch.hub treats every callable here as an entry point unless its name starts with an underscore.
"""
from functools import wraps as _wraps

import timm as _timm

import timm_gated as _timm_gated  # noqa: F401  (registers the models)
from timm_gated.models import entry_points as _entry_points

dependencies = ['torch', 'torchvision', 'timm', 'huggingface_hub', 'safetensors', 'yaml', 'numpy', 'tqdm']


def _creator(name, entry_point):
    @_wraps(entry_point)
    def create(pretrained=False, **kwargs):
        return _timm.create_model(name, pretrained=pretrained, **kwargs)
    return create


globals().update({_name: _creator(_name, _entry_point) for _name, _entry_point in _entry_points().items()})
