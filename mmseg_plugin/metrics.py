"""What inference costs, as an mmengine metric"""
from typing import Any, Dict, List, Optional, Sequence

from mmengine.evaluator import BaseMetric
from mmseg.registry import METRICS

__all__ = ['MACsMetric']


@METRICS.register_module()
class MACsMetric(BaseMetric):
    """Average MACs of an image, absolute and as a share of the dense network, over the whole set.

    The counts travel with the data samples, from a gated segmentor; decode heads are included. Reported are `GMACs`,
    `dense_GMACs` and `MACs_share` in percent.

    Args:
        collect_device: Where the results of several processes are gathered.
        prefix: Prefix of the names.
    """

    def __init__(self, collect_device: str = 'cpu', prefix: Optional[str] = None) -> None:
        super().__init__(collect_device=collect_device, prefix=prefix)

    def process(self, data_batch: Any, data_samples: Sequence[Dict[str, Any]]) -> None:
        for sample in data_samples:
            if 'macs' not in sample:
                raise ValueError(
                    'MACsMetric found a data sample without `macs`. They come from a segmentor of type '
                    'GatedEncoderDecoder or GatedCascadeEncoderDecoder with count_macs=True.')
            self.results.append((sample['macs'], sample['dense_macs']))

    def compute_metrics(self, results: List[Any]) -> Dict[str, float]:
        used, dense = (sum(column) / len(results) for column in zip(*results, strict=True))
        return {
            'GMACs': round(used / 1e9, 3),
            'dense_GMACs': round(dense / 1e9, 3),
            'MACs_share': round(100 * used / dense, 2),
        }
