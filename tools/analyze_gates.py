"""Look into the gates of a model: one pass over a data set, then a report

    python tools/analyze_gates.py --model gated_resnet20 --checkpoint model_best.pth.tar \\
        --data-dir data/cifar10 --output report
    python tools/analyze_gates.py --mmseg-config configs/mmseg/pspnet/NAME.py --checkpoint iter_600.pth --output report

Without a checkpoint, the pretrained weights of the model are analysed, or those that an mmseg config loads.

The report has index.html, which opens from disk and shows everything; every figure as PNG and SVG; gates.json and
gates.parquet with the numbers of the gates, samples.parquet with those of each image. It appears whole or not at all.

For the paper's comparison of batch shaping with L0 alone, analyse the model trained by L0 alone first and give its
report to --compare of the other. For the gates over training, train with the model option snapshot_dir=FOLDER and give
that folder to --snapshots. In segmentation, an image belongs to every class that its label map shows.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Dict, Iterable, List, Optional, Sequence, Tuple

from _options import add_data_options, add_model_options, add_segmentation_options, make_parser

if TYPE_CHECKING:
    import torch.nn as nn

    from timm_gated.analysis import FetchImage, GateRecord, ReportOptions


def parse_groups(items: Iterable[str]) -> Dict[str, List[str]]:
    """Groups of classes, each written NAME=CLASS,CLASS,…"""
    groups = {}
    for item in items:
        name, separator, members = item.partition('=')
        if not separator or not name or not members:
            raise ValueError(f"a group is written NAME=CLASS,CLASS,…, got '{item}'.")
        groups[name] = members.split(',')
    return groups


def check_names(options: ReportOptions, class_names: Sequence[str], model: nn.Module) -> None:
    """Refuse classes and gates that do not exist, before the work."""
    from timm_gated import gates
    wanted = [*(options.classes or ()), *(name for members in (options.groups or {}).values() for name in members)]
    known_gates = [f'{name}/{index}' for name, gate in gates(model) for index in range(gate.num_gates)]
    for kind, names, known in (('class', wanted, class_names), ('gate', options.gates or (), known_gates)):
        for name in names:
            if name not in known:
                raise ValueError(f"there is no {kind} '{name}' among {', '.join(known[:8])} … ({len(known)} in all).")


def parse_args(argv: Optional[List[str]]) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument('--output', type=Path, required=True, metavar='DIR', help='folder of the report, a new one')
    parser.add_argument('--overwrite', action='store_true', help='replace an older report')
    parser.add_argument('--checkpoint', default='', metavar='FILE', help='weights of the model')
    add_model_options(parser)
    add_data_options(parser)
    add_segmentation_options(parser)
    group = parser.add_argument_group('report')
    group.add_argument('--name', help='of the model, for titles (default: the name of model or config)')
    group.add_argument(
        '--classes', nargs='*', metavar='CLASS',
        help='classes to lay over the firing histograms (default: two that are alike and one that is not)')
    group.add_argument(
        '--groups', nargs='*', default=[], metavar='NAME=CLASS,CLASS',
        help='groups of classes, to compare similarity within and between them')
    group.add_argument(
        '--gates', nargs='*', metavar='MODULE/INDEX',
        help='gates to draw against the prior and over training (default: four far apart)')
    group.add_argument('--compare', nargs='*', default=[], metavar='REPORT', help='reports to draw beside this one')
    group.add_argument('--snapshots', metavar='DIR', help='snapshots of the training (model option snapshot_dir)')
    group.add_argument(
        '--threshold', type=float, default=0.99,
        help='share of images above which a gate counts as always on or off (default: %(default)s, the paper)')
    group.add_argument(
        '--rare', type=float, default=0.1,
        help='share of images for which a specialised gate is open, at most (default: %(default)s)')
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> Tuple[GateRecord, FetchImage, ReportOptions]:
    """One pass over the data."""
    from tqdm import tqdm

    from timm_gated.analysis import (
        ReportOptions,
        check_gated,
        check_threshold,
        create_data,
        create_network,
        find_device,
        load_distribution,
        record_gates,
        title,
    )
    from timm_gated.loss import gate_prior, load_snapshots
    options = ReportOptions(
        checkpoint=args.checkpoint, classes=args.classes, gates=args.gates, groups=parse_groups(args.groups),
        threshold=check_threshold(args.threshold), rare=args.rare,
        compare={name: layers for path in args.compare for name, layers in load_distribution(path).items()},
        snapshots=load_snapshots(args.snapshots) if args.snapshots else None)
    if args.mmseg_config:
        from mmseg_plugin.analysis import create_segmentation  # needs the extra `mmseg`
        model, data = create_segmentation(
            args.mmseg_config, args.checkpoint, args.cfg_options, find_device(args.device), args.untrained)
        options.model, options.data = Path(args.mmseg_config).stem, 'test_dataloader'
        options.name = title(model, options.model, args.name)
    else:
        if not args.model:
            raise ValueError('give --model (a gated timm model) or --mmseg-config.')
        model = create_network(args.model, args.checkpoint, args)
        data = create_data(check_gated(model), args)
        options.model, options.data = args.model, f'{args.data_dir or args.dataset}, {args.split}'
        options.name = title(model, options.model, args.name)
    check_names(options, data.class_names, check_gated(model))
    if options.name in options.compare:
        raise ValueError(f"a report to compare with is also called '{options.name}': give this one a --name.")
    options.prior = gate_prior(model)
    batches = tqdm(data.loader, desc=options.name, unit='batch')
    record = record_gates(model, batches, data.class_names, data.step)
    return record, data.fetch_image, options


def main(argv: Optional[List[str]] = None) -> int:
    args = parse_args(argv)

    from timm_gated.analysis import check_target, write_report
    try:
        check_target(args.output, args.overwrite)  # before the work, not after it
        record, fetch_image, options = run(args)
        write_report(args.output, record, fetch_image, options, args.overwrite)
    except ValueError as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    print(f'Report: {args.output / "index.html"}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
