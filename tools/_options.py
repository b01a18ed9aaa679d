"""Options, output and exit codes shared by the commands

Commands import torch and timm only in the functions that need them, after parsing the command line, so that --help and
errors in options are immediate. This module imports neither.
"""
import argparse
import ast
import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Sequence

from tqdm import tqdm

__all__ = [
    'CheckFailed', 'Progress', 'add_data_options', 'add_json_option', 'add_model_options', 'add_segmentation_options',
    'add_threshold_option', 'execute', 'format_table', 'make_parser', 'write_json',
]


class CheckFailed(Exception):
    """A command ran, and its check has a negative result."""


class KeyValues(argparse.Action):
    """Parses KEY=VALUE …, where a value is a Python literal or a string, as in timm's scripts."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option: Any = None) -> None:
        parsed = {}
        for item in values:
            key, separator, value = item.partition('=')
            if not separator or not key:
                parser.error(f"{option} must be KEY=VALUE, got '{item}'.")
            try:
                parsed[key] = ast.literal_eval(value)
            except (ValueError, SyntaxError):
                parsed[key] = value
        setattr(namespace, self.dest, parsed)


class Progress:
    """Loader with a progress bar per pass.

    Args:
        loader: Batches.
        name: Name of the bar.
        unit: Name of a batch.
        leave: Whether the bar stays after the pass.
    """

    def __init__(self, loader: Iterable[Any], name: str, unit: str = 'batch', leave: bool = True) -> None:
        self.loader = loader
        self.name = name
        self.unit = unit
        self.leave = leave

    def __iter__(self) -> Iterator[Any]:
        return iter(tqdm(self.loader, desc=self.name, unit=self.unit, leave=self.leave))


def make_parser(description: str) -> argparse.ArgumentParser:
    """Create a parser with the docstring of the command as its description."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def execute(run: Callable[[argparse.Namespace], Any], args: argparse.Namespace) -> int:
    """Run a command and return its exit code: 0, 1 if its check failed, or 2 if its input is wrong.

    With `--json`, the result is printed to stdout, and the text of the command to stderr.

    Args:
        run: Function that prints a text and returns a result.
        args: Parsed command line.
    """
    as_json = getattr(args, 'json', False)
    try:
        with redirect_stdout(sys.stderr if as_json else sys.stdout):
            result = run(args)
    except (CheckFailed, ValueError, OSError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 1 if isinstance(error, CheckFailed) else 2
    if as_json:
        print(_to_json(result))
    return 0


def add_json_option(parser: argparse._ActionsContainer) -> None:
    """Add the option that prints results as JSON; `execute` implements it."""
    parser.add_argument('--json', action='store_true', help='print the results as JSON, and the text to stderr')


def write_json(path: Path, result: Any) -> None:
    """Write a result to a file, completely or not at all."""
    from timm_gated.utils import new_file
    path.parent.mkdir(parents=True, exist_ok=True)
    with new_file(path) as partial:
        partial.write_text(f'{_to_json(result)}\n', encoding='utf-8')
    print(f'Results: {path}')


def _to_json(result: Any) -> str:
    return json.dumps(result, indent=1, allow_nan=False)


def add_model_options(parser: argparse.ArgumentParser, untrained: bool = True) -> None:
    """Add the model options of timm's scripts, without `--checkpoint`.

    Args:
        parser: Parser to add the options to.
        untrained: Whether to add `--untrained`.
    """
    group = parser.add_argument_group('model (as in timm)')
    group.add_argument(
        '--model', metavar='NAME', help='timm model; timm_gated.list_gated_models() lists the gated ones')
    group.add_argument(
        '--pretrained', action='store_true',
        help='load the pretrained weights of the model (default: if there is no checkpoint)')
    if untrained:
        group.add_argument('--untrained', action='store_true', help='allow random weights; the output says so')
    group.add_argument('--num-classes', type=int, metavar='N', help='number of outputs (default: that of the model)')
    group.add_argument('--in-chans', type=int, metavar='N', help='number of input channels (default: 3)')
    group.add_argument(
        '--model-kwargs', nargs='*', default={}, action=KeyValues, metavar='KEY=VALUE',
        help='additional arguments of the model')
    group.add_argument('--use-ema', action='store_true', help='load the EMA weights of the checkpoint, if any')
    group.add_argument('--device', default='', help='device (default: cuda if available, else cpu)')


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """Add the data options of timm's scripts."""
    group = parser.add_argument_group('data (as in timm)')
    group.add_argument('--data-dir', metavar='DIR', help='folder of the data, with SPLIT/CLASS/IMAGE')
    group.add_argument('--dataset', default='', metavar='NAME', help='type of data set (default: image folder)')
    group.add_argument('--split', default='validation', help='split of the data set (default: %(default)s)')
    group.add_argument(
        '--class-map', default='', metavar='FILE',
        help='text file with one class name per line, in the order of the outputs; required if a class has no folder')
    group.add_argument('--batch-size', '-b', type=int, default=256, metavar='N', help='default: %(default)s')
    group.add_argument('--workers', '-j', type=int, default=2, metavar='N', help='data workers (default: %(default)s)')
    group.add_argument('--img-size', type=int, metavar='N', help="image size (default: the model's)")
    group.add_argument(
        '--input-size', nargs=3, type=int, metavar='N', help='input size as channels, height and width')
    group.add_argument('--crop-pct', type=float, metavar='X', help="centre crop fraction (default: the model's)")
    group.add_argument('--mean', nargs='+', type=float, metavar='X', help="pixel mean (default: the model's)")
    group.add_argument('--std', nargs='+', type=float, metavar='X', help="pixel deviation (default: the model's)")
    group.add_argument('--interpolation', default='', help="interpolation of resizing (default: the model's)")


def add_segmentation_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a segmentor, which replace model and data options."""
    group = parser.add_argument_group('segmentation (instead of model and data)')
    group.add_argument('--mmseg-config', metavar='FILE', help='mmseg config with the model and the test_dataloader')
    group.add_argument(
        '--cfg-options', nargs='+', default=[], metavar='KEY=VALUE', help='config settings to override')


def add_threshold_option(parser: argparse._ActionsContainer) -> None:
    """Add the threshold of always-on and always-off gates."""
    parser.add_argument(
        '--threshold', type=float, default=0.99, metavar='X',
        help='share of images above which a gate counts as always on or off (default: %(default)s, as in the paper)')


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Align the cells of a table, with a rule below the first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ['  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return '\n'.join([lines[0], '  '.join('-' * width for width in widths), *lines[1:]])
