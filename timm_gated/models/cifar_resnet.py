"""Dense ResNets for CIFAR

The ResNets of the paper with 6n + 2 layers for 32 x 32 images, such as `cifar_resnet20`. timm does not have them. They
are built from timm's blocks and have timm's interface.

Paper: Deep Residual Learning for Image Recognition (https://arxiv.org/abs/1512.03385)

Shortcuts are the paper's option A, without parameters.
"""
from fractions import Fraction
from typing import Any, Dict, List, Optional, Sequence, Tuple, Type, Union

import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import DropPath, LayerType, create_classifier, get_act_layer, get_device_dtype, get_norm_layer
from timm.models import checkpoint_seq, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models.resnet import BasicBlock

from ..layers import Channels, narrow_maps
from ..utils import check_number
from ._builder import build_model
from ._checkpoint import check_depth, checkpoint_filter_fn, rename_linear_head
from ._registry import weights_file

__all__ = ['CIFAR_DEPTHS', 'CifarResNet', 'cifar_cfg', 'cifar_layers']


class PadShortcut(nn.Module):
    """Option A shortcut: subsample the positions and pad the channels with zeros."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        before = (out_channels - in_channels) // 2
        self.padding = (0, 0, 0, 0, before, out_channels - in_channels - before)

    def extra_repr(self) -> str:
        return f'stride={self.stride}, padding={self.padding[4:]}'

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.pad(x[:, :, ::self.stride, ::self.stride], self.padding)


class CifarResNet(nn.Module):
    """ResNet for small images: a 3x3 stem and three stages at strides 1, 2, 4.

    Args:
        layers: Number of blocks in each stage.
        block: Class of the residual blocks.
        num_classes: Number of classification classes.
        in_chans: Number of input channels.
        output_stride: Output stride of the network. 1 and 2 replace strides by dilation; larger values have no effect.
        global_pool: Global pooling type.
        channels: Width of each stage.
        inner_width: Factor on the width of the blocks' inner maps.
        inner_channels: Widths of the blocks' inner maps after pruning (see `timm_gated.layers.narrow`).
        act_layer: Activation layer.
        norm_layer: Normalization layer.
        drop_rate: Dropout probability before the classifier.
        drop_path_rate: Stochastic depth rate.
        zero_init_last: Zero-init the last weight of each residual branch.
        block_args: Extra kwargs of the blocks.
    """

    def __init__(
            self,
            layers: Sequence[int],
            block: Type[BasicBlock] = BasicBlock,
            num_classes: int = 10,
            in_chans: int = 3,
            output_stride: int = 4,
            global_pool: str = 'avg',
            channels: Tuple[int, ...] = (16, 32, 64),
            inner_width: int = 1,
            inner_channels: Optional[Channels] = None,
            act_layer: LayerType = nn.ReLU,
            norm_layer: LayerType = nn.BatchNorm2d,
            drop_rate: float = 0.,
            drop_path_rate: float = 0.,
            zero_init_last: bool = False,
            block_args: Optional[Dict[str, Any]] = None,
            device=None,
            dtype=None,
    ) -> None:
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        if output_stride not in (1, 2, 4, 8, 16, 32):
            raise ValueError(f'output_stride must be 1, 2, 4, 8, 16 or 32, got {output_stride}.')
        check_number(inner_width, 'inner_width', minimum=1, integer=True)
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.drop_rate = drop_rate
        self.grad_checkpointing = False
        act, norm = get_act_layer(act_layer), get_norm_layer(norm_layer)

        self.conv1 = nn.Conv2d(in_chans, channels[0], 3, padding=1, bias=False, **dd)
        self.bn1 = norm(channels[0], **dd)
        self.act1 = act(inplace=True)
        self.feature_info: List[Dict[str, Any]] = [dict(num_chs=channels[0], reduction=1, module='act1')]

        block_kwargs = dict(
            # timm's blocks divide their inner width by this value
            reduce_first=Fraction(1, inner_width),
            act_layer=act,
            norm_layer=norm,
            **(block_args or {}),
        )
        inplanes, net_stride, dilation, prev_dilation = channels[0], 1, 1, 1
        last, index = max(sum(layers) - 1, 1), 0
        for stage, (planes, num_blocks) in enumerate(zip(channels, layers, strict=True)):
            stride = 1 if stage == 0 else 2
            if net_stride * stride > output_stride:
                dilation, stride = dilation * stride, 1
            net_stride *= stride

            blocks = []
            for _ in range(num_blocks):
                change = stride != 1 or inplanes != planes
                drop_prob = drop_path_rate * index / last
                blocks.append(block(
                    inplanes,
                    planes,
                    stride,
                    PadShortcut(inplanes, planes, stride) if change else None,
                    dilation=dilation,
                    first_dilation=prev_dilation,
                    drop_path=DropPath(drop_prob) if drop_prob > 0. else None,
                    **block_kwargs,
                    **dd,
                ))
                inplanes, stride, prev_dilation, index = planes, 1, dilation, index + 1
            name = f'layer{stage + 1}'
            self.add_module(name, nn.Sequential(*blocks))
            self.feature_info.append(dict(num_chs=planes, reduction=net_stride, module=name))
        self.stage_names = [info['module'] for info in self.feature_info[1:]]

        self.num_features = channels[-1]
        self._create_head(global_pool, **dd)
        narrow_maps(self, inner_channels)
        self.init_weights(zero_init_last=zero_init_last)

    @torch.jit.ignore
    def init_weights(self, zero_init_last: bool = False) -> None:
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode='fan_out', nonlinearity='relu')
            elif zero_init_last and hasattr(m, 'zero_init_last'):
                m.zero_init_last()  # type: ignore[operator]

    def _load_from_state_dict(self, state_dict, prefix, *args) -> None:
        check_depth(self, state_dict, prefix)
        rename_linear_head(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> Dict[str, str]:
        return dict(stem=r'^conv1|bn1', blocks=r'^layer(\d+)' if coarse else r'^layer(\d+)\.(\d+)')

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self, name_only: bool = False) -> Union[str, nn.Module]:
        return 'fc' if name_only else self.fc

    def reset_classifier(self, num_classes: int, global_pool: Optional[str] = None) -> None:
        """Reset the classifier head.

        Args:
            num_classes: Number of classes of the new classifier.
            global_pool: Global pooling type; the current one by default.
        """
        self.num_classes = num_classes
        if global_pool is None:
            global_pool = self.global_pool.pool_type
        self._create_head(global_pool, **get_device_dtype(self))
        self.global_pool.train(self.training)
        self.fc.train(self.training)

    def _create_head(self, global_pool: str, device=None, dtype=None) -> None:
        self.global_pool, self.fc = create_classifier(
            self.num_features, self.num_classes, pool_type=global_pool, device=device, dtype=dtype)
        self.head_hidden_size = self.num_features * self.global_pool.feat_mult()

    def forward_intermediates(
            self,
            x: torch.Tensor,
            indices: Optional[Union[int, List[int]]] = None,
            norm: bool = False,
            stop_early: bool = False,
            output_fmt: str = 'NCHW',
            intermediates_only: bool = False,
    ) -> Union[List[torch.Tensor], Tuple[torch.Tensor, List[torch.Tensor]]]:
        """Forward features that returns intermediates.

        Args:
            x: Input image tensor.
            indices: Take last n features if int, all if None, select matching indices if sequence.
            norm: Has no effect; there is no final norm.
            stop_early: Stop when the last desired intermediate is reached.
            output_fmt: Shape of intermediate feature outputs.
            intermediates_only: Only return intermediate features.
        """
        assert output_fmt == 'NCHW', 'Output shape must be NCHW.'
        take_indices, max_index = feature_take_indices(len(self.stage_names) + 1, indices)
        x = self.act1(self.bn1(self.conv1(x)))
        intermediates = [x] if 0 in take_indices else []
        for index, name in enumerate(self.stage_names[:max_index] if stop_early else self.stage_names, start=1):
            x = getattr(self, name)(x)
            if index in take_indices:
                intermediates.append(x)
        return intermediates if intermediates_only else (x, intermediates)

    def prune_intermediate_layers(
            self,
            indices: Union[int, List[int]] = 1,
            prune_norm: bool = False,
            prune_head: bool = True,
    ) -> List[int]:
        """Prune layers not required for specified intermediates."""
        take_indices, max_index = feature_take_indices(len(self.stage_names) + 1, indices)
        for name in self.stage_names[max_index:]:
            setattr(self, name, nn.Sequential())  # not nn.Identity, which `checkpoint_seq` cannot flatten
        prune_end = max_index < len(self.stage_names)
        if prune_end:
            self.num_features = self.feature_info[max_index]['num_chs']
        if prune_head or prune_end:
            self.reset_classifier(0, '')
        return take_indices

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.act1(self.bn1(self.conv1(x)))
        stages = [getattr(self, name) for name in self.stage_names]
        if self.grad_checkpointing and not torch.jit.is_scripting():
            return checkpoint_seq(stages, x, flatten=True)
        for stage in stages:
            x = stage(x)
        return x

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        x = self.global_pool(x)
        if self.drop_rate:
            x = F.dropout(x, p=float(self.drop_rate), training=self.training)
        return x if pre_logits else self.fc(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_head(self.forward_features(x))


def cifar_cfg(**kwargs) -> Dict[str, Any]:
    """Pretrained config of a ResNet for CIFAR-10."""
    return {
        'num_classes': 10, 'input_size': (3, 32, 32), 'pool_size': (8, 8),
        'crop_pct': 1.0, 'interpolation': 'bilinear',
        'mean': IMAGENET_DEFAULT_MEAN, 'std': IMAGENET_DEFAULT_STD,
        'first_conv': 'conv1', 'classifier': 'fc', 'license': 'apache-2.0',
        **kwargs
    }


CIFAR_DEPTHS = (20, 32, 38, 44, 56, 74, 110)

default_cfgs = generate_default_cfgs({
    # e40: trained for 40 epochs
    'cifar_resnet20.e40_c10': cifar_cfg(file=weights_file('cifar_resnet20.e40_c10'), paper_ids='arXiv:1512.03385'),
    'cifar_resnet32.e30_c10': cifar_cfg(file=weights_file('cifar_resnet32.e30_c10'), paper_ids='arXiv:1512.03385'),
    'cifar_resnet20.e28_c10': cifar_cfg(file=weights_file('cifar_resnet20.e28_c10'), paper_ids='arXiv:1512.03385'),
    'cifar_resnet20.e20_c10': cifar_cfg(file=weights_file('cifar_resnet20.e20_c10'), paper_ids='arXiv:1512.03385'),
    **{f'cifar_resnet{depth}.untrained': cifar_cfg(paper_ids='arXiv:1512.03385') for depth in CIFAR_DEPTHS},
})


def cifar_layers(depth: int) -> Tuple[int, int, int]:
    """Number of blocks per stage of a CIFAR ResNet with 6n + 2 layers."""
    assert depth % 6 == 2
    return ((depth - 2) // 6,) * 3


def _create_cifar_resnet(depth: int, pretrained: bool = False, **kwargs) -> CifarResNet:
    return build_model(
        CifarResNet,
        f'cifar_resnet{depth}',
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=(0, 1, 2, 3)),
        **dict(dict(layers=cifar_layers(depth)), **kwargs),
    )


@register_model
def cifar_resnet20(pretrained: bool = False, **kwargs) -> CifarResNet:
    """Constructs a dense CIFAR ResNet-20."""
    return _create_cifar_resnet(20, pretrained, **kwargs)


@register_model
def cifar_resnet32(pretrained: bool = False, **kwargs) -> CifarResNet:
    """Constructs a dense CIFAR ResNet-32."""
    return _create_cifar_resnet(32, pretrained, **kwargs)


@register_model
def cifar_resnet38(pretrained: bool = False, **kwargs) -> CifarResNet:
    """Constructs a dense CIFAR ResNet-38."""
    return _create_cifar_resnet(38, pretrained, **kwargs)


@register_model
def cifar_resnet44(pretrained: bool = False, **kwargs) -> CifarResNet:
    """Constructs a dense CIFAR ResNet-44."""
    return _create_cifar_resnet(44, pretrained, **kwargs)


@register_model
def cifar_resnet56(pretrained: bool = False, **kwargs) -> CifarResNet:
    """Constructs a dense CIFAR ResNet-56."""
    return _create_cifar_resnet(56, pretrained, **kwargs)


@register_model
def cifar_resnet74(pretrained: bool = False, **kwargs) -> CifarResNet:
    """Constructs a dense CIFAR ResNet-74."""
    return _create_cifar_resnet(74, pretrained, **kwargs)


@register_model
def cifar_resnet110(pretrained: bool = False, **kwargs) -> CifarResNet:
    """Constructs a dense CIFAR ResNet-110."""
    return _create_cifar_resnet(110, pretrained, **kwargs)
