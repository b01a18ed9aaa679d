"""Inference cost as an mmengine metric"""
from typing import Any, Dict, List, Sequence

from mmengine.evaluator import BaseMetric
from mmseg.registry import METRICS

__all__ = ['MACsMetric']


@METRICS.register_module()
class MACsMetric(BaseMetric):
    """Average MACs per image over the dataset, absolute and relative to the dense network.

    Reports `GMACs`, `dense_GMACs` and `MACs_share` in percent, decode heads included. The segmentor counts them if its
    config has `count_macs=True`. Arguments are those of mmengine's BaseMetric.
    """

    def process(self, data_batch: Any, data_samples: Sequence[Dict[str, Any]]) -> None:
        for sample in data_samples:
            if 'macs' not in sample:
                raise ValueError(
                    'MACsMetric found a data sample without `macs`. Set model.count_macs=True in the config; the type '
                    'of the model must be GatedEncoderDecoder or GatedCascadeEncoderDecoder.')
            self.results.append((sample['macs'], sample['dense_macs']))

    def compute_metrics(self, results: List[Any]) -> Dict[str, float]:
        used, dense = (sum(column) / len(results) for column in zip(*results, strict=True))
        return {
            'GMACs': round(used / 1e9, 3),
            'dense_GMACs': round(dense / 1e9, 3),
            'MACs_share': round(100 * used / dense, 2),
        }
