"""The explorer's answers: what a network computes for an image, as plain data for its page"""
from __future__ import annotations

import base64
import io
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, TypeVar

from timm_gated_cli._options import Progress
from timm_gated_cli._speed import dense_counterpart, time_in_turns
from timm_gated_cli.prepare_cifar10 import CLASSES

if TYPE_CHECKING:
    import numpy as np
    import torch
    import torch.nn as nn

__all__ = ['Explorer', 'MAX_PIXELS', 'class_names', 'open_image']

FORMATS = ('JPEG', 'PNG', 'WEBP', 'GIF', 'BMP')  # decoded by Pillow itself, without other programs
MAX_PIXELS = 50_000_000
TOP = 5  # classes
NEIGHBOURS = 12
SAMPLES = 10
BINS = 40
ROUNDS = 7  # runs of each network that are timed

Answer = Dict[str, Any]
Result = TypeVar('Result')


def class_names(network: Any, args: Namespace) -> List[str]:
    """Names of the outputs, without a data set: from --class-map, the weights, or ImageNet; otherwise numbers."""
    from timm.data import ImageNetInfo
    cfg, count = network.pretrained_cfg, network.num_classes
    own_head = not args.checkpoint and not network.untrained and count == cfg['num_classes']
    if args.class_map:
        with open(args.class_map, encoding='utf-8') as file:
            names = file.read().split('\n')
        names = [name for name in names if name]
        if len(names) != count:
            raise ValueError(f'{args.class_map} has {len(names)} names, but the model has {count} outputs.')
        return names
    if own_head and cfg.get('label_names'):
        return list(cfg['label_names'])
    if own_head and cfg.get('file'):  # packaged weights, all for CIFAR-10
        return list(CLASSES)
    if count == 1000:
        info = ImageNetInfo()
        return [info.index_to_description(index).partition(',')[0] for index in range(count)]
    return [f'class {index}' for index in range(count)]


def open_image(content: bytes) -> Any:
    """Decode an uploaded image. Raise a ValueError in words if that is not possible."""
    from PIL import Image, ImageOps
    known = f'Supported: {", ".join(FORMATS)}.'
    try:
        image = Image.open(io.BytesIO(content), formats=FORMATS)  # reads only the header
        if image.width * image.height > MAX_PIXELS:
            raise ValueError(
                f'this image has {image.width} × {image.height} pixels; at most {MAX_PIXELS // 10 ** 6} million are '
                f'allowed. Scale it down first.')
        image.load()
        return ImageOps.exif_transpose(image)
    except Image.DecompressionBombError as error:
        raise ValueError(f'this image is too large: at most {MAX_PIXELS // 10 ** 6} million pixels.') from error
    except Image.UnidentifiedImageError as error:
        raise ValueError(f'this is not an image that can be read. {known}') from error
    except (OSError, SyntaxError) as error:
        raise ValueError(f'this image is damaged: {error}. {known}') from error


def encode_image(pixels: np.ndarray, size: int) -> bytes:
    """PNG of an image, scaled down to a size."""
    from PIL import Image
    image, buffer = Image.fromarray(pixels), io.BytesIO()
    image.thumbnail((size, size))
    image.save(buffer, format='PNG')
    return buffer.getvalue()


class Explorer:
    """A network and, optionally, the gates of a data set.

    All methods but `run` may be called from `run` only: it calls them in one thread, one after another. Answers do not
    mix, although gates keep the decisions of the last image, and timings do not disturb each other.

    Args:
        args: Parsed command line.
    """

    def __init__(self, args: Namespace) -> None:
        from timm_gated.analysis import (
            Preprocessing,
            check_gated,
            create_data,
            create_network,
            record_decisions,
            title,
        )
        self.network: Any = check_gated(create_network(args.model, args.checkpoint, args))
        own_name = f'{args.model}, {Path(args.checkpoint).name}' if args.checkpoint else ''
        self.title = title(self.network, args.model, own_name)
        self.preprocessing = Preprocessing(self.network, args)
        self._data: Any = None
        if args.data_dir or args.dataset:
            data = create_data(self.network, args, args.limit)
            self.class_names = data.class_names
            self.data_name = f'{Path(args.data_dir or args.dataset).name}, {args.split}'
            self._data, self._fetch_pixels = data.loader.dataset, data.fetch_image
            self._known = record_decisions(
                self.network, Progress(data.loader, self.title), self.class_names, data.step)
        else:
            self.class_names = class_names(self.network, args)
        self._sides: Dict[str, nn.Module] = {}
        self._why_no_speed = self._prepare_speed(args)
        self._worker = ThreadPoolExecutor(1)

    def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """Call a function in the thread of the network, and wait for its result."""
        return self._worker.submit(function, *args).result()

    def _prepare_speed(self, args: Namespace) -> str:
        """Accelerate the network and its dense counterpart. Return why that is not possible, or an empty string."""
        from timm_gated import accelerate
        if not args.accelerate:
            return 'Speed is not measured (--no-accelerate).'
        if args.device != 'cpu':
            return f'Speed is measured on the CPU only; start with --device cpu, not {args.device}.'
        try:
            self._sides = {'accelerated': accelerate(self.network)}
            dense = dense_counterpart(self.network)
            if dense is not None:
                self._sides['dense'] = accelerate(dense)
            self._sides['eager'] = self.network
        except (ValueError, RuntimeError) as error:
            return f'This network cannot be accelerated: {error}'
        return ''

    def describe(self) -> Answer:
        """Describe the network and the data set."""
        import numpy as np

        from timm_gated import gates
        height, width = self.preprocessing.config['input_size'][1:]
        answer: Answer = {
            'title': self.title, 'untrained': self.network.untrained, 'num_classes': len(self.class_names),
            'classes': self.class_names[:20], 'input': [width, height], 'speed': self._why_no_speed,
            'layers': [{'name': name, 'gates': gate.num_gates} for name, gate in gates(self.network)], 'data': None}
        if self._data is None:
            return answer
        record = self._known.record
        counts, edges = np.histogram(record.macs, BINS)
        order = np.argsort(record.macs, kind='stable')
        spread = np.linspace(0, len(order) - 1, min(SAMPLES, len(order))).round().astype(int)
        answer['data'] = {
            'name': self.data_name, 'images': record.num_samples, 'mean_macs': float(record.macs.mean()),
            'share': record.macs_share, 'top1': float(record.correct.mean()), 'counts': counts.tolist(),
            'edges': edges.tolist(), 'samples': [self._entry(int(index)) for index in order[spread]],
            'open_share': record.open_share.round(3).tolist()}
        return answer

    def _entry(self, index: int) -> Answer:
        """Describe an image of the data set."""
        record = self._known.record
        return {
            'index': index, 'label': self.class_names[record.label[index]],
            'prediction': self.class_names[record.prediction[index]], 'macs': int(record.macs[index])}

    def upload(self, content: bytes) -> torch.Tensor:
        """Preprocess an uploaded image."""
        return self.preprocessing(open_image(content))

    def data_image(self, index: int) -> torch.Tensor:
        """Image of the data set, as the network gets it."""
        self._check_index(index)
        return self._data[index][0]

    def thumbnail(self, index: int) -> bytes:
        """PNG of an image of the data set."""
        self._check_index(index)
        return encode_image(self._fetch_pixels(index), 128)

    def _check_index(self, index: int) -> None:
        count = 0 if self._data is None else len(self._data)
        if not 0 <= index < count:
            raise ValueError(f'there is no image {index} in the data set; it has {count} images.')

    def explore(self, image: torch.Tensor, index: Optional[int] = None) -> Answer:
        """Predict the class of an image and describe its gates.

        Args:
            image: Image as the network gets it.
            index: Index of the image in the data set; None for any other image.
        """
        from timm_gated.analysis import image_gates
        found = image_gates(self.network, image)
        best = found.probabilities.argsort()[::-1][:TOP]
        seen = base64.b64encode(encode_image(self.preprocessing.pixels(image), 256)).decode('ascii')
        answer: Answer = {
            'seen': f'data:image/png;base64,{seen}', 'macs': found.macs, 'dense_macs': found.dense_macs,
            'top': [{'name': self.class_names[k], 'probability': float(found.probabilities[k])} for k in best],
            'layers': [''.join('01'[value] for value in is_open.tolist()) for is_open in found.is_open.values()]}
        if self._data is not None:
            indices, different = self._known.nearest(found.decisions, NEIGHBOURS + 1)
            answer['share_below'] = self._known.share_below(found.macs)
            answer['label'] = None if index is None else self._entry(index)['label']
            answer['neighbours'] = [
                {**self._entry(int(other)), 'different': int(count)}
                for other, count in zip(indices, different, strict=True) if other != index][:NEIGHBOURS]
        return answer

    def speed(self, image: torch.Tensor) -> Answer:
        """Time the network on an image, accelerated and not, and its dense counterpart."""
        import torch

        from timm_gated.inference import Accelerated
        if self._why_no_speed:
            raise ValueError(self._why_no_speed)
        times = time_in_turns(self._sides, [image] * ROUNDS)
        fast = next(module for module in self._sides['accelerated'].modules() if isinstance(module, Accelerated))
        return {
            'milliseconds': times, 'rounds': ROUNDS, 'threads': torch.get_num_threads(), 'backend': fast.backend,
            'isa': getattr(fast.runner, 'isa', None)}
