"""Draw accuracy against mean MACs of several runs

    timm-gated tradeoff runs/evaluation.json --output tradeoff
    timm-gated tradeoff runs/* --published imagenet --output tradeoff

Reads results of `timm-gated evaluate --output` and reports of `timm-gated analyze`, as files or folders, and writes
tradeoff.png and tradeoff.svg. Measured points are filled; --published adds the paper's points, hollow. Models without
gates count as dense. A line joins the runs of one model, or of one --series:

    timm-gated tradeoff runs/evaluation.json --series 'batch shaping=bas_*' 'L0 alone=l0_*'
"""
import argparse
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Tuple

from timm_gated_cli._options import add_json_option, execute, make_parser

ACCURACY = {'imagenet': 'top-1', 'cityscapes': 'IoU'}  # by key of timm_gated.analysis.PUBLISHED


def split_series(text: str) -> Tuple[str, str]:
    name, equals, pattern = text.partition('=')
    if not name or not pattern:
        raise argparse.ArgumentTypeError(f"must be NAME=PATTERN, as in 'L0 alone=l0_*', got '{text}'.")
    return name, pattern


def parse_args(argv: Optional[List[str]]) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument('results', nargs='*', type=Path, help='result files or folders with one')
    parser.add_argument(
        '--output', type=Path, default=Path('tradeoff'), metavar='STEM', help='figure path without suffix')
    parser.add_argument('--published', choices=sorted(ACCURACY), help="add the paper's points on this data set")
    parser.add_argument(
        '--x', choices=('macs', 'share'), default='macs', help='x axis (default: macs)')
    parser.add_argument(
        '--series', nargs='+', default=[], type=split_series, metavar='NAME=PATTERN', help='series, by run name')
    parser.add_argument('--only', nargs='+', default=[], metavar='PATTERN', help='runs to draw (default: all)')
    add_json_option(parser)
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> List[Dict[str, Any]]:
    from timm_gated.analysis import PUBLISHED, group_points, load_points, trade_off_figure
    from timm_gated.utils import new_file
    points = load_points(args.results) if args.results or not args.published else []
    points = group_points(points, dict(args.series), args.only)
    points += PUBLISHED.get(args.published, ())
    figure = trade_off_figure(points, args.x, ACCURACY.get(args.published, 'top-1'))
    for point in points:
        macs = '-' if point.macs is None else f'{point.macs / 1e6:.1f} M'
        print(f'{point.source:9}  {point.accuracy:5.2f} %  {macs:>10}  {point.share:6.1%}  {point.name}')
    args.output.parent.mkdir(parents=True, exist_ok=True)
    for suffix in ('.png', '.svg'):
        path = args.output.with_name(args.output.name + suffix)
        with new_file(path) as partial:
            figure.savefig(partial, format=suffix[1:], dpi=160)
        print(f'Figure: {path}')
    return [point._asdict() for point in points]


def main(argv: Optional[List[str]] = None) -> int:
    return execute(run, parse_args(argv))


if __name__ == '__main__':
    sys.exit(main())
