"""Gated timm models as mmsegmentation backbones

mmseg's `TIMMBackbone` for the models of this package that mmseg has no ResNet for: the CIFAR family and the baselines
of channel gating. Unlike `TIMMBackbone` it takes weights from `init_cfg` only, as mmseg's own backbones do, so nothing
is downloaded unless the config asks for it:

    dict(type='TimmGatedBackbone', model_name='gated_resnet20',
         init_cfg=dict(type='Pretrained', checkpoint='timm-gated://gated_resnet20.bas_c10'))
"""
from typing import Any, Dict, Optional, Sequence

from mmseg.models.backbones import TIMMBackbone
from mmseg.registry import MODELS
from timm.models import parse_model_name, split_model_name_tag
from timm.models._features import FeatureGetterNet

from timm_gated.models import check_incoming, check_model_name, checkpoint_filter_fn
from timm_gated.utils import install

from .convert import mmseg_to_timm

__all__ = ['TimmGatedBackbone']


@MODELS.register_module()
class TimmGatedBackbone(TIMMBackbone):
    """Feature extractor from a timm model.

    The objective of the timm model is not used: gates are trained with the `gate_losses` of the segmentor.

    Args:
        model_name: Name of the model without a tag, or `local-dir:FOLDER` or `hf-hub:OWNER/NAME` to use the options
            stored there.
        out_indices: Indices of the features to return, as in timm (0 is the stem); all by default.
        output_stride: Stride of the last feature; the model's own by default. CIFAR models are dilated for 1 and 2,
            ImageNet models for 8 and 16.
        in_channels: Number of image channels.
        init_cfg: Source of the weights; checkpoints of complete timm models are accepted.
        **kwargs: Options of the model, such as `gate_bias`.
    """

    def __init__(
            self,
            model_name: str,
            out_indices: Optional[Sequence[int]] = None,
            output_stride: Optional[int] = None,
            in_channels: int = 3,
            init_cfg: Any = None,
            **kwargs,
    ) -> None:
        install()
        _check_name(model_name)
        for option in ('pretrained', 'checkpoint_path'):
            if kwargs.pop(option, None):
                raise ValueError(
                    f"TimmGatedBackbone takes weights from init_cfg=dict(type='Pretrained', checkpoint=…) only, got "
                    f'the option {option}. If the segmentor passes it on, set pretrained=None there.')
        super().__init__(
            model_name,
            features_only=True,
            pretrained=False,
            in_channels=in_channels,
            init_cfg=init_cfg,
            out_indices=out_indices,
            output_stride=output_stride,
            **kwargs,
        )

    def _load_from_state_dict(self, state_dict: Dict[str, Any], prefix: str, *args) -> None:
        network, inner = self.timm_model, f'{prefix}timm_model.'
        if isinstance(network, FeatureGetterNet):
            network, inner = network.model, f'{inner}model.'
        incoming = [key for key in state_dict if key.startswith(prefix)]
        if incoming and not any(key.startswith(inner) for key in incoming):
            # Weights of a timm model or of an mmseg backbone may include a classifier and stages that are not used.
            weights = mmseg_to_timm({key[len(prefix):]: state_dict.pop(key) for key in incoming})
            parts = tuple(f'{name}.' for name, child in network.named_children() if child.state_dict())
            weights = checkpoint_filter_fn({k: v for k, v in weights.items() if k.startswith(parts)}, network)
            state_dict.update({inner + key: value for key, value in weights.items()})
        check_incoming(network, state_dict, inner, ValueError)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _check_name(model_name: str) -> None:
    source, _ = parse_model_name(model_name)
    model, tag = (model_name, '') if source else split_model_name_tag(model_name)
    check_model_name(model)
    if tag:
        raise ValueError(
            f"model_name must have no tag, got '{model_name}': weights come from init_cfg=dict(type='Pretrained', "
            f"checkpoint='timm-gated://{model_name}').")
