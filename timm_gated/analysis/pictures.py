"""Pictures of a model card: gates per layer, and accuracy against MACs

They are drawn from results, as `summary` and tools/evaluate.py give them, without the data set.
"""
import io
from typing import Any, Mapping, Sequence

from matplotlib.figure import Figure
from PIL import Image

from .figures import gate_distribution_figure
from .statistics import GateCounts
from .tradeoff import measured_point, trade_off_figure

__all__ = ['gates_picture', 'trade_off_picture']


def gates_picture(name: str, layers: Mapping[str, Mapping[str, int]]) -> bytes:
    """Draw the numbers of always-on, conditional and always-off gates per layer, as PNG.

    Args:
        name: Title of the picture.
        layers: Gate counts per layer, from `summary`.
    """
    return _png(gate_distribution_figure({name: {layer: GateCounts(**counts) for layer, counts in layers.items()}}))


def trade_off_picture(result: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> bytes:
    """Draw the accuracy of a model against its MACs, beside other results, as PNG.

    Args:
        result: Result of the model.
        others: Results of other models on the same data.
    """
    own = measured_point(result)._replace(series=result['name'])
    return _png(trade_off_figure([own, *map(measured_point, others)]))


def _png(figure: Figure) -> bytes:
    """PNG with a palette, a third of the size."""
    buffer, small = io.BytesIO(), io.BytesIO()
    figure.savefig(buffer, format='png', dpi=160)
    Image.open(buffer).convert('RGB').quantize(64).save(small, format='png', optimize=True)
    return small.getvalue()
