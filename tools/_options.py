"""Options that several tools have

Tools parse their command line first and import torch and timm then, in the functions that need them: --help and a
mistyped option answer at once. So nothing of these is imported here either.
"""
import argparse
import ast
from typing import Any

__all__ = ['add_data_options', 'add_model_options', 'add_segmentation_options', 'make_parser']


class KeyValues(argparse.Action):
    """KEY=VALUE …, each value a Python literal or else a text, as timm's scripts read them."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None) -> None:
        parsed = {}
        for item in values:
            key, separator, value = item.partition('=')
            if not separator or not key:
                parser.error(f"{option} takes KEY=VALUE, got '{item}'.")
            try:
                parsed[key] = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                parsed[key] = value
        setattr(namespace, self.dest, parsed)


def make_parser(description: str) -> argparse.ArgumentParser:
    """A parser whose help is the docstring of the tool, with its examples, and the options."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_model_options(parser: argparse.ArgumentParser, untrained: bool = True) -> None:
    """Options of timm's scripts that make a model; `--checkpoint` is each tool's own.

    Args:
        parser: The parser to add them to.
        untrained: Add `--untrained`.
    """
    group = parser.add_argument_group('model (as in timm)')
    group.add_argument(
        '--model', metavar='NAME', help='a timm model; timm_gated.list_gated_models() lists the gated ones')
    group.add_argument(
        '--pretrained', action='store_true',
        help="start from the model's pretrained weights (default: if there is no checkpoint)")
    if untrained:
        group.add_argument('--untrained', action='store_true', help='allow random weights; the results say so')
    group.add_argument('--num-classes', type=int, metavar='N', help='outputs of the model (default: its own)')
    group.add_argument('--in-chans', type=int, metavar='N', help='input channels (default: 3)')
    group.add_argument(
        '--model-kwargs', nargs='*', default={}, action=KeyValues, metavar='KEY=VALUE',
        help='more options of the model')
    group.add_argument('--use-ema', action='store_true', help="take the checkpoint's EMA weights, if it has them")
    group.add_argument('--device', default='', help='where to run (default: cuda if there is one, else cpu)')


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Options of timm's scripts that make a data set and its loader."""
    group = parser.add_argument_group('data (as in timm)')
    group.add_argument('--data-dir', metavar='DIR', help='folder of the data; SPLIT in it has a folder for each class')
    group.add_argument('--dataset', default='', metavar='NAME', help='kind of data set (default: image folder)')
    group.add_argument('--split', default='validation', help='split of the data (default: %(default)s)')
    group.add_argument(
        '--class-map', default='', metavar='FILE',
        help='text file of class names, one a line, in the order of the outputs; needed if a class has no folder')
    group.add_argument('--batch-size', '-b', type=int, default=256, metavar='N', help='default: %(default)s')
    group.add_argument('--workers', '-j', type=int, default=2, metavar='N', help='loaders (default: %(default)s)')
    group.add_argument('--img-size', type=int, metavar='N', help="size of the images (default: the model's)")
    group.add_argument(
        '--input-size', nargs=3, type=int, metavar='N', help='the same as channels, height and width')
    group.add_argument('--crop-pct', type=float, metavar='X', help="share of the image to keep (default: the model's)")
    group.add_argument('--mean', nargs='+', type=float, metavar='X', help="mean of the pixels (default: the model's)")
    group.add_argument('--std', nargs='+', type=float, metavar='X', help="their deviation (default: the model's)")
    group.add_argument('--interpolation', default='', help="of resizing (default: the model's)")


def add_segmentation_options(parser: argparse.ArgumentParser) -> None:
    """Options of a segmentor, in place of a model and data of timm."""
    group = parser.add_argument_group('segmentation (in place of model and data)')
    group.add_argument('--mmseg-config', metavar='FILE', help='an mmseg config: its model and its test_dataloader')
    group.add_argument(
        '--cfg-options', nargs='+', default=[], metavar='KEY=VALUE', help='settings of the config to override')
