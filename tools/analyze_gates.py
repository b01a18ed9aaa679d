"""Analyse the gates of a model over a data set and write a report

    timm-gated analyze --model gated_resnet20 --checkpoint model_best.pth.tar \\
        --data-dir data/cifar10 --output report
    timm-gated analyze --mmseg-config configs/mmseg/pspnet/NAME.py --checkpoint iter_600.pth --output report

Without a checkpoint, the pretrained weights of the model are analysed, or the weights that the mmseg config loads.

The report consists of index.html, a self-contained page; every figure as PNG and SVG; gates.json and gates.parquet with
the data of the gates; and samples.parquet with the data of each image. It is written only when complete.

To compare batch shaping with L0 alone, as in the paper, analyse the L0 model first and pass its report to --compare. To
draw gates over training, train with the model option snapshot_dir=DIR and pass that folder to --snapshots. In
segmentation, an image belongs to every class in its label map.
"""
from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Dict, Iterable, List, Optional, Sequence, Tuple

from timm_gated_cli._options import (
    Progress,
    add_data_options,
    add_model_options,
    add_segmentation_options,
    add_threshold_option,
    execute,
    make_parser,
)

if TYPE_CHECKING:
    import torch.nn as nn

    from timm_gated.analysis import FetchImage, GateRecord, ReportOptions


def parse_groups(items: Iterable[str]) -> Dict[str, List[str]]:
    """Parse groups of classes, NAME=CLASS,CLASS,…"""
    groups = {}
    for item in items:
        name, separator, members = item.partition('=')
        if not separator or not name or not members:
            raise ValueError(f"--groups must be NAME=CLASS,CLASS,…, got '{item}'.")
        groups[name] = members.split(',')
    return groups


def check_names(options: ReportOptions, class_names: Sequence[str], model: nn.Module) -> None:
    """Raise a ValueError for classes and gates that do not exist."""
    from timm_gated import gates
    from timm_gated.analysis.record import shorten
    wanted = [*(options.classes or ()), *(name for members in (options.groups or {}).values() for name in members)]
    known_gates = [f'{name}/{index}' for name, gate in gates(model) for index in range(gate.num_gates)]
    for kind, names, known in (('class', wanted, class_names), ('gate', options.gates or (), known_gates)):
        for name in names:
            if name not in known:
                raise ValueError(f"there is no {kind} '{name}' among {shorten(known)}.")


def parse_args(argv: Optional[List[str]]) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument('--output', type=Path, required=True, metavar='DIR', help='new folder for the report')
    parser.add_argument('--overwrite', action='store_true', help='replace an existing report')
    parser.add_argument('--checkpoint', default='', metavar='FILE', help='weights of the model')
    add_model_options(parser)
    add_data_options(parser)
    add_segmentation_options(parser)
    group = parser.add_argument_group('report')
    group.add_argument('--name', help='name for titles (default: the name of the model or config)')
    group.add_argument(
        '--classes', nargs='*', metavar='CLASS',
        help='classes to draw on the firing histograms (default: two similar ones and a dissimilar one)')
    group.add_argument(
        '--groups', nargs='*', default=[], metavar='NAME=CLASS,CLASS',
        help='groups of classes to compare similarity within and between')
    group.add_argument(
        '--gates', nargs='*', metavar='MODULE/INDEX',
        help='gates to draw with the prior and over training (default: four)')
    group.add_argument('--compare', nargs='*', default=[], metavar='REPORT', help='reports to compare with')
    group.add_argument('--snapshots', metavar='DIR', help='snapshots of the training run (model option snapshot_dir)')
    add_threshold_option(group)
    group.add_argument(
        '--rare', type=float, default=0.1,
        help='maximum share of images for which a specialised gate is open (default: %(default)s)')
    return parser.parse_args(argv)


def record(args: argparse.Namespace) -> Tuple[GateRecord, FetchImage, ReportOptions]:
    """Record the gates over the data set."""
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
        raise ValueError(f"a report of --compare is also called '{options.name}': choose another --name.")
    options.prior = gate_prior(model)
    batches = tqdm(data.loader, desc=options.name, unit='batch')
    return record_gates(model, batches, data.class_names, data.step), data.fetch_image, options


def run(args: argparse.Namespace) -> None:
    from timm_gated.analysis import check_target, write_report
    check_target(args.output, args.overwrite)  # fail early
    gates, fetch_image, options = record(args)
    write_report(
        args.output, gates, fetch_image, options, args.overwrite,
        progress=lambda figures: Progress(figures, 'figures', unit='figure'))
    print(f'Report: {args.output / "index.html"}')


def main(argv: Optional[List[str]] = None) -> int:
    return execute(run, parse_args(argv))


if __name__ == '__main__':
    sys.exit(main())
