"""Segmentors with gate losses and per-image MAC counts

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)

Gates are collected from the module tree, so any backbone with gates works, including mmseg's `TIMMBackbone`.
"""
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Sequence

import torch
import torch.nn as nn
from mmseg.models.segmentors import CascadeEncoderDecoder, EncoderDecoder
from mmseg.registry import MODELS

from timm_gated import MacCounter
from timm_gated.layers import gate_density
from timm_gated.loss import Step
from timm_gated.utils import full_precision, install

__all__ = ['GatedCascadeEncoderDecoder', 'GatedEncoderDecoder']


class _GatedSegmentor(nn.Module):
    """Mixin over mmseg's segmentors.

    Args:
        gate_losses: Configs of the gate losses (`mmseg_plugin.losses`).
        count_macs: Whether `predict` counts the MACs of each image, as `MACsMetric` requires. They include the decode
            heads and are stored as `macs` and `dense_macs` in the metainfo of the data sample. A compiled segmentor
            then predicts eagerly.
        **kwargs: Arguments of mmseg's segmentor.
    """

    def __init__(self, *args, gate_losses: Sequence[Dict[str, Any]] = (), count_macs: bool = False, **kwargs) -> None:
        install()
        super().__init__(*args, **kwargs)
        self.count_macs = count_macs
        self.gate_losses = nn.ModuleList(MODELS.build(cfg) for cfg in gate_losses)
        names = [loss.loss_name for loss in self.gate_losses]
        if len(set(names)) < len(names):
            raise ValueError(f'gate_losses must differ in loss_name, got {names}.')
        for loss in self.gate_losses:
            loss.attach(self)  # type: ignore[operator]

    def init_weights(self) -> None:
        """Initialise as mmseg does. Weights of the segmentor replace those of its parts, which are then not read."""
        if _is_pretrained(self):
            for module in self.modules():
                if module is not self and _is_pretrained(module):
                    module.init_cfg = None  # type: ignore[assignment]
        super().init_weights()  # type: ignore[misc]

    def loss(self, inputs: torch.Tensor, data_samples: Any) -> Dict[str, torch.Tensor]:
        """Compute mmseg's losses and the weighted gate losses; log their weights and the density of open gates."""
        with self._decode_logits() as logits:
            losses = super().loss(inputs, data_samples)  # type: ignore[misc]
        output: Any = logits[-1] if logits else None
        step = Step(inputs, output, data_samples)
        with full_precision(inputs):
            for loss in self.gate_losses:
                losses[loss.loss_name] = loss(self, step)
                losses.update(loss.stats())  # type: ignore[operator]
                # A product: new_tensor(weight) would be a constant of the compiled graph, which would be recompiled
                # whenever the weight changes. The key must not contain 'loss': mmengine sums all keys that do.
                weight: Any = loss.loss_weight
                losses[f'weight_{loss.loss_name}'.replace('loss_', '')] = weight * inputs.new_ones(())
        gather = self.training and any(loss.gather_gates for loss in self.gate_losses)
        losses.update(gate_density(self, gather))
        return losses

    @contextmanager
    def _decode_logits(self) -> Iterator[List[torch.Tensor]]:
        """Collect the logits that the last decode head computes in this context, if a gate loss needs them."""
        collected: List[torch.Tensor] = []
        if not any(loss.needs_logits for loss in self.gate_losses):
            yield collected
            return
        heads: Any = self.decode_head
        head: Any = heads[-1] if isinstance(heads, nn.ModuleList) else heads
        # Heads call their own `forward` as a method, which runs no hooks; all end in this layer.
        handle = head.conv_seg.register_forward_hook(lambda _layer, _inputs, logits: collected.append(logits))
        try:
            yield collected
        finally:
            handle.remove()

    def predict(self, inputs: torch.Tensor, data_samples: Any = None) -> List[Any]:
        """Predict as mmseg does, and count the MACs of each image if `count_macs` is set."""
        if self.count_macs:
            return self._predict_counting(inputs, data_samples)
        return super().predict(inputs, data_samples)  # type: ignore[misc]

    @torch.compiler.disable  # operators inside a compiled graph cannot be counted
    def _predict_counting(self, inputs: torch.Tensor, data_samples: Any) -> List[Any]:
        with MacCounter(self, num_samples=len(inputs)) as counter:
            results = super().predict(inputs, data_samples)  # type: ignore[misc]
        macs = counter.macs()
        for result, used in zip(results, macs.per_sample.tolist(), strict=True):
            result.set_metainfo(dict(macs=used, dense_macs=macs.dense))
        return results


def _is_pretrained(module: Any) -> bool:
    """Whether the `init_cfg` of a module names a checkpoint."""
    given = getattr(module, 'init_cfg', None) or []
    return any(cfg['type'] == 'Pretrained' for cfg in (given if isinstance(given, list) else [given]))


@MODELS.register_module()
class GatedEncoderDecoder(_GatedSegmentor, EncoderDecoder):
    """mmseg's EncoderDecoder with gate losses."""


@MODELS.register_module()
class GatedCascadeEncoderDecoder(_GatedSegmentor, CascadeEncoderDecoder):
    """mmseg's CascadeEncoderDecoder with gate losses."""
