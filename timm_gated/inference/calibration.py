"""Ranges of the maps of a program, observed on calibration images

Int8 needs a scale and a zero for each map. They come from a histogram of its values on some images.
"""
from functools import singledispatch
from typing import Any, Dict, Iterable, Iterator, Tuple

import torch
import torch.nn as nn

from .program import Program, check_images
from .sliced import SlicedRunner

__all__ = ['IMAGE', 'RANGES', 'Range', 'batch_images', 'calibration_images', 'observe_ranges']

RANGES = ('percentile', 'mse', 'max')  # ways to choose the range of a map

_BINS = 2048
_PERCENTILE = 0.9999
IMAGE = -1  # index of the operation that writes map 0


class Range:
    """Histogram of the values of a map, from which a scale and a zero are chosen, and the means of its channels.

    Values are counted by magnitude, negative and positive ones separately. The bins double in width whenever a value is
    beyond the last one.
    """

    def __init__(self) -> None:
        self.width = 0.  # of a bin
        self.counts = torch.zeros(2, _BINS, dtype=torch.float64)  # of negative and of positive values
        self.most = [0., 0.]
        self.num_images = 0
        self.sum_of_means: Any = 0

    @property
    def means(self) -> torch.Tensor:
        """Mean of each channel, in double precision."""
        return self.sum_of_means / self.num_images

    def add(self, values: torch.Tensor) -> None:
        """Count the values of a map.

        Args:
            values: Map of an image, [C, H, W], with finite values.
        """
        self.num_images += 1
        self.sum_of_means = self.sum_of_means + values.double().mean((1, 2))
        low, high = (float(value) for value in values.aminmax())
        largest = max(-low, high, 0.)
        self.most = [max(self.most[0], -low), max(self.most[1], high)]
        if largest == 0:
            return
        if self.width == 0:
            self.width = largest / _BINS
        while largest > self.width * _BINS:
            self.counts = torch.cat(
                [self.counts.view(2, -1, 2).sum(2), torch.zeros(2, _BINS // 2, dtype=torch.float64)], dim=1)
            self.width *= 2
        for index, side in enumerate((-values, values)):
            if self.most[index] > 0:
                # Zeros and values of the other sign are not counted: they do not decide about a range.
                # In float64: the end of the last bin may be beyond float32.
                self.counts[index] += torch.histc(side[side > 0].double(), _BINS, 0, self.width * _BINS)

    def choose(self, method: str) -> Tuple[float, int]:
        """Return a scale and a zero.

        Args:
            method: One of RANGES.
        """
        low, high = (self._limit(index, method) for index in range(2))
        if method == 'mse':
            low, high = self._least_squares(low, high)
        scale = max((low + high) / 255, 1e-12)
        zero = min(max(round(low / scale), 0), 255)
        # The rounded zero must not cut off one of the ends.
        return max(scale, high / (255 - zero) if zero < 255 else 0., low / zero if zero else 0.), zero

    def _limit(self, index: int, method: str) -> float:
        if method != 'percentile' or not self.counts[index].sum():
            return self.most[index]
        share = self.counts[index].cumsum(0) / self.counts[index].sum()
        return min(self.most[index], (int((share < _PERCENTILE).sum()) + 1) * self.width)

    def _least_squares(self, low: float, high: float) -> Tuple[float, float]:
        """Limits, in proportion, with the least squared error of rounding and clipping."""
        centres = (torch.arange(_BINS, dtype=torch.float64) + 0.5) * self.width
        errors = []
        shares = torch.linspace(0.3, 1., 71).tolist()
        for share in shares:
            step = share * (low + high) / 255
            rounding = self.counts.sum() * step ** 2 / 12
            clipped = sum(
                float((counts * (centres - share * most).clamp(min=0) ** 2).sum())
                for counts, most in zip(self.counts, (low, high), strict=True))
            errors.append(float(rounding) + clipped)
        best = shares[errors.index(min(errors))]
        return best * low, best * high


@singledispatch
def batch_images(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the images of a batch of calibration data, as the network gets them. Other packages may register theirs.

    Args:
        model: Network that is accelerated.
        batch: Batch of a loader. By default a tensor, or a tuple that begins with one.
    """
    return batch[0] if isinstance(batch, (tuple, list)) else batch


def calibration_images(calibration: Any, model: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the batches of a loader, at least one.

    Args:
        calibration: Tensor of images, or iterable of batches.
        model: Network that is accelerated.
    """
    is_empty = True
    for batch in [calibration] if isinstance(calibration, torch.Tensor) else calibration:
        images = batch_images(model, batch)
        if not isinstance(images, torch.Tensor) or images.shape[:1] != (0,):  # others are refused later
            is_empty = False
            yield images
    if is_empty:
        raise ValueError('the calibration data are empty: int8 needs some images, a few hundred for a good range.')


@torch.no_grad()
def observe_ranges(program: Program, images: Iterable[torch.Tensor]) -> Dict[int, Range]:
    """Return the ranges of the values of all maps, by the index of the operation that writes them; -1 is the image.

    Args:
        program: Program in float32.
        images: Batches of images.
    """
    ranges: Dict[int, Range] = {}
    runner = SlicedRunner(program)
    count = 0

    def observe(index: int, values: torch.Tensor) -> None:
        if not torch.isfinite(values).all():
            where = 'the image' if index == IMAGE else f'the output of operation {index} ' \
                f"{getattr(program.ops[index], 'name', '')}".rstrip()
            raise ValueError(f'calibration image {count} has values in {where} that are not finite.')
        ranges.setdefault(index, Range()).add(values[0])

    for batch in images:
        check_images(batch, program.in_channels)
        for image in batch.to('cpu', torch.float32):
            observe(IMAGE, image[None])
            runner.run_together(image[None], observe)
            count += 1
    return ranges
