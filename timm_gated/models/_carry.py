"""Networks whose blocks pass a second value along with the feature map

SkipNet's recurrent gates pass on the state of their LSTM, and GaterNet's blocks the logits of later gates. This value,
the carry, is an argument and not a module attribute, so that a network can run in several threads and blocks can be
recomputed in backward. A block has a method `step(x, carry)`, which returns its output and the next carry.
"""
from typing import Any, Collection, List, Optional, Tuple, Union

import torch
import torch.nn as nn
from timm.models._features import feature_take_indices
from torch.utils.checkpoint import checkpoint

from ._gated_net import GatedNet

__all__ = ['CarryNet', 'CarryStage']


class CarryStage(nn.Sequential):
    """Stage of blocks with a carry. Child names are those of `nn.Sequential`."""

    def forward(self, x: Any, carry: Any = None, recompute: bool = False) -> Tuple[torch.Tensor, Any]:
        """Run the blocks; returns the map and the carry for the next stage.

        Args:
            x: Feature map, or the pair that the previous stage returned: timm's feature extraction passes it unchanged.
            carry: Carry of the previous stage.
            recompute: Recompute the blocks in backward.
        """
        if isinstance(x, tuple):
            x, carry = x
        for block in self:
            step: Any = block.step
            x, carry = checkpoint(step, x, carry, use_reentrant=False) if recompute else step(x, carry)
        return x, carry


class CarryNet(GatedNet):
    """Mixin over a ResNet of gated blocks with a `step` method.

    Args:
        *args: Arguments of the gated network.
        **kwargs: Keyword arguments of the gated network.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        for name in self._stage_names():
            setattr(self, name, CarryStage(*getattr(self, name)))

    def begin(self, images: torch.Tensor) -> Any:
        """Carry of the first block."""
        return None

    def _stage_names(self) -> List[str]:
        feature_info: Any = self.feature_info
        return [info['module'] for info in feature_info[1:]]  # without the stem

    def _run(self, x: torch.Tensor, take: Collection[int], last: int) -> Tuple[torch.Tensor, List[torch.Tensor]]:
        """Run the network up to stage `last`, counted from 1; returns its output and the features to take."""
        net: Any = self
        carry = self.begin(x)
        x = net.act1(net.bn1(net.conv1(x)))
        features = [x] if 0 in take else []
        if hasattr(self, 'maxpool'):  # not in CIFAR networks
            x = net.maxpool(x)
        for index, name in enumerate(self._stage_names()[:last], start=1):
            stage = getattr(self, name)
            if isinstance(stage, CarryStage):  # `prune_intermediate_layers` replaces unused stages
                x, carry = stage(x, carry, net.grad_checkpointing)
            if index in take:
                features.append(x)
        return x, features

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, (), len(self._stage_names()))[0]

    def forward_intermediates(
            self,
            x: torch.Tensor,
            indices: Optional[Union[int, List[int]]] = None,
            norm: bool = False,
            stop_early: bool = False,
            output_fmt: str = 'NCHW',
            intermediates_only: bool = False,
    ) -> Union[List[torch.Tensor], Tuple[torch.Tensor, List[torch.Tensor]]]:
        """Forward features that returns intermediates. Arguments as in timm's ResNet."""
        assert output_fmt == 'NCHW', 'Output shape must be NCHW.'
        num_stages = len(self._stage_names())
        take, last = feature_take_indices(num_stages + 1, indices)
        x, features = self._run(x, take, last if stop_early else num_stages)
        return features if intermediates_only else (x, features)
