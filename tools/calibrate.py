"""Set the average MACs of a trained gated network, without training, by shifting the thresholds of its gates

    timm-gated calibrate --model gated_resnet20.bas_c10 --data-dir data/cifar10 --split train --crop-pct 0.8 \\
        --share 0.6 --output calibrated
    timm-gated calibrate --model gated_resnet20.bas_c10 --data-dir data/cifar10 --split train --crop-pct 0.8 \\
        --eval-split validation --share 1 0.9 0.8 0.7 0.6 0.5 0.4 --results sweep.json
    timm-gated calibrate --mmseg-config gated-pspnet.py --checkpoint iter_600.pth --share 0.6 --output calibrated

Without a checkpoint, the pretrained weights are calibrated, or the weights that the mmseg config loads. The images are
spread evenly over --split; segmentors use their test_dataloader. --crop-pct 0.8 cuts the border that
`timm-gated prepare-cifar10` adds to training images.

--eval-split measures each calibrated network on a split, and --results writes the figures; `timm-gated tradeoff` draws
them. Load the folder of --output with timm.create_model('local-dir:DIR', pretrained=True); for an mmseg config, it
holds a config and weights for mmseg.
"""
from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Tuple

from timm_gated_cli._options import (
    Progress,
    add_data_options,
    add_json_option,
    add_model_options,
    add_segmentation_options,
    execute,
    format_table,
    make_parser,
    write_json,
)

if TYPE_CHECKING:
    import torch.nn as nn

    from timm_gated.pruning import Calibrated

Result = Dict[str, Any]


def some_images(loader: Any, count: int) -> Any:
    """Loader of a number of images, spread evenly over the data set of another loader."""
    from torch.utils.data import DataLoader, Subset
    total = len(loader.dataset)
    count = min(count, total)
    chosen = Subset(loader.dataset, [index * total // count for index in range(count)])
    return DataLoader(chosen, loader.batch_size, num_workers=loader.num_workers)


def figures(calibrated: Calibrated) -> Result:
    """Figures of a calibration."""
    return {
        'target': calibrated.target, 'calibrated_share': calibrated.share, 'share_before': calibrated.before,
        'possible_shares': list(calibrated.possible), 'dense_macs': calibrated.dense_macs,
        'calibrated_on': calibrated.num_samples, 'num_passes': calibrated.num_passes}


def evaluate(network: nn.Module, calibrated: Calibrated, name: str, args: Namespace) -> Result:
    """Measure a calibrated network on --eval-split."""
    from timm_gated.analysis import create_data, record_gates, summary
    options = Namespace(**{**vars(args), 'split': args.eval_split, 'crop_pct': args.eval_crop_pct})
    data = create_data(calibrated.model, options)
    batches = Progress(data.loader, f'{calibrated.target:.1%}, evaluation')
    record = record_gates(calibrated.model, batches, data.class_names, data.step)
    return {
        'name': name, 'model': name, 'checkpoint': args.checkpoint, 'untrained': network.untrained,
        'data': f'{args.data_dir}, {args.eval_split}', **summary(record), **figures(calibrated)}


def calibrate_classifier(args: Namespace) -> List[Result]:
    """Calibrate a timm model for each share, and evaluate or save it."""
    from timm_gated.analysis import check_gated, create_data, create_network, title
    from timm_gated.hub import save_pretrained
    from timm_gated.pruning import calibrate
    if not args.model:
        raise ValueError('give --model (a gated timm model) or --mmseg-config.')
    network = create_network(args.model, args.checkpoint, args)
    data = create_data(check_gated(network), args)
    images = some_images(data.loader, args.images)
    results = []
    for share in args.share:
        calibrated = calibrate(network, Progress(images, f'{share:.1%}'), share, args.by, args.tolerance)
        print(calibrated)
        if args.eval_split:
            name = f'{title(network, args.model, args.name or Path(args.checkpoint).stem)}, by {args.by}'
            results.append(evaluate(network, calibrated, name, args))
        else:
            results.append(figures(calibrated))
        if args.output:
            save_pretrained(calibrated.model, args.output, data.class_names)
    return results


def calibrate_segmentor(args: Namespace) -> List[Result]:
    """Calibrate the model of an mmseg config and save its config and weights."""
    from mmseg_plugin import pruning  # needs the extra `mmseg`
    from mmseg_plugin.analysis import create_segmentation, load_config
    from mmseg_plugin.backbones import backbone_cfg
    from timm_gated.analysis import find_device
    if args.eval_split:
        raise ValueError("--eval-split is for timm models; test the config of --output with mmseg's tools/test.py.")
    model, data = create_segmentation(
        args.mmseg_config, args.checkpoint, args.cfg_options, find_device(args.device), args.untrained)
    if args.output:
        backbone_cfg(model.backbone)  # fail early if it cannot be saved
    images = some_images(data.loader, args.images)
    images.collate_fn = data.loader.collate_fn
    results = []
    for share in args.share:
        calibrated = pruning.calibrate(model, Progress(images, f'{share:.1%}'), share, args.by, args.tolerance)
        print(calibrated)
        results.append(figures(calibrated))
        if args.output:
            pruning.save(calibrated.model, load_config(args.mmseg_config, args.cfg_options), args.output)
    return results


def table(results: List[Result]) -> str:
    """Format the results, one per line."""
    rows: List[Tuple[str, ...]] = [('target', 'share', 'MACs per sample', 'top-1', 'open gates', 'passes')]
    rows += [(
        f'{result["target"]:.1%}', f'{result["macs_share"]:.1%}', f'{result["mean_macs"] / 1e6:.2f} M',
        f'{result["top1"]:.2f}', f'{result["gate_density"]:.1%}', str(result['num_passes'])) for result in results]
    return format_table(rows)


def parse_args(argv: Optional[List[str]]) -> Namespace:
    parser = make_parser(__doc__)
    parser.add_argument('--checkpoint', default='', metavar='FILE', help='weights of the model')
    parser.add_argument('--output', type=Path, metavar='DIR', help='new folder for the calibrated network')
    parser.add_argument('--results', type=Path, metavar='FILE', help='JSON file for the figures of --eval-split')
    parser.add_argument('--name', default='', help='name of the network in the figures (default: model or checkpoint)')
    add_json_option(parser)
    group = parser.add_argument_group('calibration')
    group.add_argument(
        '--share', nargs='+', type=float, default=[0.6], metavar='X',
        help="average MACs as a share of the dense network's; several make a sweep (default: 0.6)")
    group.add_argument(
        '--by', choices=('cost', 'global'), default='cost',
        help='shift of a threshold: by what a filter costs, or the same for all (default: %(default)s)')
    group.add_argument(
        '--tolerance', type=float, default=0.002, metavar='X',
        help='largest difference between --share and the measured share (default: %(default)s)')
    group.add_argument(
        '--images', type=int, default=2000, metavar='N', help='number of images to calibrate on (default: %(default)s)')
    add_model_options(parser)
    add_data_options(parser)
    group = parser.add_argument_group('more data options (--split is used for the calibration)')
    group.add_argument('--eval-split', metavar='SPLIT', help='split of the evaluation (default: no evaluation)')
    group.add_argument('--eval-crop-pct', type=float, metavar='X', help="crop of --eval-split (default: the model's)")
    add_segmentation_options(parser)
    args = parser.parse_args(argv)
    if args.untrained and args.output:
        parser.error('--output needs a trained network: do not combine it with --untrained.')
    if args.output and len(args.share) > 1:
        parser.error(f'--output needs a single --share, got {len(args.share)}.')
    if args.results and not args.eval_split:
        parser.error('--results needs --eval-split.')
    if args.images < 1:
        parser.error(f'--images must be at least 1, got {args.images}.')
    return args


def run(args: Namespace) -> Dict[str, List[Result]]:
    from timm_gated.utils import check_new
    if args.output:
        check_new(args.output)  # fail early
    results = calibrate_segmentor(args) if args.mmseg_config else calibrate_classifier(args)
    if args.eval_split:
        print(table(results))
    if args.results:
        write_json(args.results, {'results': results})
    if args.output:
        print(f'Calibrated network: {args.output}')
    return {'results': results}


def main(argv: Optional[List[str]] = None) -> int:
    return execute(run, parse_args(argv))


if __name__ == '__main__':
    sys.exit(main())
