"""Segmentors that add gate losses to their own, and tell what each image cost

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)

Gates are found by walking the modules, so any backbone with gates will do, stock `TIMMBackbone` included.
"""
from typing import Any, Dict, List, Sequence

import torch
import torch.nn as nn
from mmseg.models.segmentors import CascadeEncoderDecoder, EncoderDecoder
from mmseg.registry import MODELS

from timm_gated import MacCounter
from timm_gated.layers import gate_density
from timm_gated.utils import full_precision, install

__all__ = ['GatedCascadeEncoderDecoder', 'GatedEncoderDecoder']


class _GatedSegmentor(nn.Module):
    """Mixin over mmseg's segmentors.

    Args:
        gate_losses: Configs of the gate losses (`mmseg_plugin.losses`).
        count_macs: Count the MACs of each image in inference, for `MACsMetric`: they are put into the metainfo of its
            data sample, as `macs` and `dense_macs`, decode heads included. A compiled segmentor predicts eagerly then.
        **kwargs: As for mmseg's segmentor.
    """

    def __init__(self, *args, gate_losses: Sequence[Dict[str, Any]] = (), count_macs: bool = True, **kwargs) -> None:
        install()
        super().__init__(*args, **kwargs)
        self.count_macs = count_macs
        self.gate_losses = nn.ModuleList(MODELS.build(cfg) for cfg in gate_losses)
        names = [loss.loss_name for loss in self.gate_losses]
        if len(set(names)) < len(names):
            raise ValueError(f'gate_losses must differ in loss_name, got {names}.')
        for loss in self.gate_losses:
            loss.attach(self)  # type: ignore[operator]

    def loss(self, inputs: torch.Tensor, data_samples: Any) -> Dict[str, torch.Tensor]:
        """As mmseg's, with the weighted gate losses, their weights and the density of open gates."""
        losses = super().loss(inputs, data_samples)  # type: ignore[misc]
        with full_precision(inputs):
            for loss in self.gate_losses:
                losses[loss.loss_name] = loss(self)
                # A product, as of new_tensor(weight) the compiler would make a constant, and compile the graph anew
                # whenever the weight moves. (The key has no 'loss' in it: mmengine adds up all that have.)
                weight: Any = loss.loss_weight
                losses[f'weight_{loss.loss_name}'.replace('loss_', '')] = weight * inputs.new_ones(())
        gather = self.training and any(loss.gather_gates for loss in self.gate_losses)
        losses.update(gate_density(self, gather))
        return losses

    def predict(self, inputs: torch.Tensor, data_samples: Any = None) -> List[Any]:
        """As mmseg's; each result knows its MACs."""
        if self.count_macs:
            return self._predict_counting(inputs, data_samples)
        return super().predict(inputs, data_samples)  # type: ignore[misc]

    @torch.compiler.disable  # of a compiled graph there is nothing to count
    def _predict_counting(self, inputs: torch.Tensor, data_samples: Any) -> List[Any]:
        with MacCounter(self, num_samples=len(inputs)) as counter:
            results = super().predict(inputs, data_samples)  # type: ignore[misc]
        macs = counter.macs()
        for result, used in zip(results, macs.per_sample.tolist(), strict=True):
            result.set_metainfo(dict(macs=used, dense_macs=macs.dense))
        return results


@MODELS.register_module()
class GatedEncoderDecoder(_GatedSegmentor, EncoderDecoder):
    """mmseg's EncoderDecoder with gate losses."""


@MODELS.register_module()
class GatedCascadeEncoderDecoder(_GatedSegmentor, CascadeEncoderDecoder):
    """mmseg's CascadeEncoderDecoder with gate losses."""
