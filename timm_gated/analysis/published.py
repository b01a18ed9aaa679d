"""Published points for trade-off figures

Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)

ImageNet: Table 1, top-1 accuracy in percent and mean MACs per image on the validation set. Cityscapes: from the text,
IoU in percent and the share of PSPNet's MACs. Results that the paper only plots (CIFAR-10, other ImageNet points) are
not included.
"""
from typing import Dict, NamedTuple, Optional, Tuple

__all__ = ['PUBLISHED', 'Point']


class Point(NamedTuple):
    """One network in a trade-off figure.

    Attributes:
        name: Name of the network or run.
        series: Name of the series; its points are joined by a line.
        accuracy: Accuracy in percent.
        macs: Mean MACs per input, None if only the share is known.
        share: Mean MACs as a share of the dense network's.
        source: 'measured' or 'published'.
    """
    name: str
    series: str
    accuracy: float
    macs: Optional[float]
    share: float
    source: str


def _imagenet(name: str, series: str, accuracy: float, gmacs: float, dense_gmacs: float) -> Point:
    return Point(name, series, accuracy, 1e9 * gmacs, gmacs / dense_gmacs, 'published')


def _cityscapes(name: str, series: str, accuracy: float, share: float) -> Point:
    return Point(name, series, accuracy, None, share, 'published')


PUBLISHED: Dict[str, Tuple[Point, ...]] = {
    'imagenet': (
        _imagenet('ResNet-18', 'dense ResNet', 69.7, 1.81, 1.81),
        _imagenet('ResNet-34', 'dense ResNet', 73.3, 3.66, 3.66),
        _imagenet('ResNet-50', 'dense ResNet', 76.1, 4.09, 4.09),
        _imagenet('ConvNet-AIG-34', 'ConvNet-AIG-34', 72.2, 2.73, 3.66),
        _imagenet('ConvNet-AIG-34', 'ConvNet-AIG-34', 73.2, 3.52, 3.66),
        _imagenet('ConvNet-AIG-50', 'ConvNet-AIG-50', 75.7, 3.09, 4.09),
        _imagenet('ResNet34-BAS', 'ResNet34-BAS', 72.8, 1.67, 3.66),
        _imagenet('ResNet34-BAS', 'ResNet34-BAS', 74.0, 2.92, 3.66),
        _imagenet('ResNet50-BAS', 'ResNet50-BAS', 75.7, 2.07, 4.09),
    ),
    'cityscapes': (
        _cityscapes('PSPNet', 'PSPNet from scratch', 70.6, 1.),
        _cityscapes('gated PSPNet, λ 0.2', 'PSPNet from scratch', 71.9, 0.763),
        _cityscapes('PSPNet', 'PSPNet pretrained', 73.9, 1.),
        _cityscapes('gated PSPNet, λ 0.2', 'PSPNet pretrained', 74.4, 0.765),
        _cityscapes('gated PSPNet, λ 0.05', 'PSPNet pretrained', 74.7, 0.95),
    ),
}
