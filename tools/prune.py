"""List dead and always-on filters and the savings of pruning; with --output, save the pruned network

    timm-gated prune --model gated_resnet20 --checkpoint gated.pth --data-dir data/cifar10
    timm-gated prune --model gated_resnet20 --checkpoint gated.pth --data-dir data/cifar10 --output pruned
    timm-gated prune --model gated_resnet20 --checkpoint gated.pth --data-dir data/cifar10 --output pets \\
        --classes cat dog --split train --crop-pct 0.8 --eval-split validation --epochs 3
    timm-gated prune --mmseg-config gated-pspnet.py --checkpoint iter_600.pth --output pruned

Without a checkpoint, the pretrained weights are pruned, or the weights that the mmseg config loads.

Without --classes, pruning removes filters that are always off and gates that are always on. With --classes, the network
is specialised to these classes: a dense ResNet, fine-tuned for --epochs. Load the folder of --output with
timm.create_model('local-dir:DIR', pretrained=True); for an mmseg config, it holds a config and weights for mmseg.
"""
from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence

from timm_gated_cli._options import (
    Progress,
    add_data_options,
    add_json_option,
    add_model_options,
    add_segmentation_options,
    add_threshold_option,
    execute,
    make_parser,
)

if TYPE_CHECKING:
    import torch
    import torch.nn as nn

    from timm_gated.pruning import Pruned


def filters(pruned: Pruned, threshold: float) -> str:
    """List the filters of each gate module by kind, one line per module."""
    from timm_gated.analysis import GateCounts, gate_kinds
    lines = []
    for name, share in pruned.open_share.items():
        kinds = gate_kinds(share, threshold)
        counts = GateCounts.of(kinds)
        lines.append(
            f'{name}: {counts.always_off} dead{_listed(kinds == 2)}, '
            f'{counts.always_on} always on{_listed(kinds == 0)}, {counts.conditional} conditional')
    return '\n'.join(lines)


def _listed(chosen: torch.Tensor) -> str:
    """Indices in parentheses, with consecutive ones as ranges."""
    indices = chosen.nonzero()[:, 0].tolist()
    runs: List[List[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    texts = [str(run[0]) if len(run) == 1 else f'{run[0]}-{run[-1]}' for run in runs]
    return f' ({", ".join(texts)})' if texts else ''


def labels_of(names: Sequence[str], class_names: Sequence[str]) -> List[int]:
    """Labels of classes by name."""
    from timm_gated.analysis.record import shorten
    for name in names:
        if name not in class_names:
            raise ValueError(f"there is no class '{name}'; the classes: {shorten(class_names)}.")
    return [list(class_names).index(name) for name in names]


def training_loader(network: nn.Module, args: Namespace) -> Any:
    """Create the loader of --split with timm's augmentation, for fine-tuning."""
    import torch
    from timm.data import create_dataset, create_loader, resolve_data_config
    config = resolve_data_config(vars(args), model=network)
    dataset = create_dataset(
        args.dataset, root=args.data_dir, split=args.split, class_map=args.class_map,
        input_img_mode='L' if config['input_size'][0] == 1 else 'RGB')
    return create_loader(
        dataset, config['input_size'], args.batch_size, is_training=True, scale=args.scale, ratio=args.ratio,
        hflip=args.hflip, color_jitter=0., interpolation=config['interpolation'], mean=config['mean'],
        std=config['std'], num_workers=args.workers, persistent_workers=False, use_prefetcher=False,
        device=torch.device('cpu'))


def prune_classifier(args: Namespace) -> Pruned:
    """Prune a timm model and save it."""
    from timm_gated.analysis import check_gated, create_data, create_network, title
    from timm_gated.hub import save_pretrained
    from timm_gated.pruning import prune_static, specialize
    if not args.model:
        raise ValueError('give --model (a gated timm model) or --mmseg-config.')
    if args.epochs and not args.classes:
        raise ValueError('--epochs needs --classes: without classes, there is no fine-tuning.')
    network = create_network(args.model, args.checkpoint, args)
    data = create_data(check_gated(network), args)
    if network.untrained:
        print(title(network, args.model))
    judged = Progress(data.loader, 'gates')
    evaluated = None
    if args.eval_split:
        options = Namespace(**{**vars(args), 'split': args.eval_split, 'crop_pct': args.eval_crop_pct})
        evaluated = Progress(create_data(network, options).loader, 'figures')
    if args.classes:
        labels = labels_of(args.classes, data.class_names)
        train = Progress(training_loader(network, args), 'fine-tuning') if args.epochs else None
        pruned = specialize(network, judged, labels, args.threshold, evaluated, train, args.epochs, args.lr)
    else:
        pruned = prune_static(network, judged, args.threshold, evaluated)
    if args.output:
        save_pretrained(pruned.model, args.output, args.classes or data.class_names)
    return pruned


def prune_segmentor(args: Namespace) -> Pruned:
    """Prune the model of an mmseg config and save its config and weights."""
    from mmseg_plugin import pruning  # needs the extra `mmseg`
    from mmseg_plugin.analysis import create_segmentation, load_config
    from mmseg_plugin.backbones import backbone_cfg
    from timm_gated.analysis import find_device, title
    if args.eval_split:
        raise ValueError('--eval-split is for timm models; a segmentor is evaluated on its test_dataloader.')
    if args.epochs:
        raise ValueError("--epochs is for timm models; train the config of --output with mmseg's tools/train.py.")
    model, data = create_segmentation(
        args.mmseg_config, args.checkpoint, args.cfg_options, find_device(args.device), args.untrained)
    if model.untrained:
        print(title(model, args.mmseg_config))
    if args.output:
        backbone_cfg(model.backbone)  # fail early if it cannot be saved
    judged, labels = Progress(data.loader, 'images'), None
    if args.classes:
        labels = labels_of(args.classes, data.class_names)
        pruned = pruning.specialize(model, judged, labels, args.threshold)
    else:
        pruned = pruning.prune_static(model, judged, args.threshold)
    if args.output:
        pruning.save(pruned.model, load_config(args.mmseg_config, args.cfg_options), args.output, labels)
    return pruned


def parse_args(argv: Optional[List[str]]) -> Namespace:
    parser = make_parser(__doc__)
    parser.add_argument('--checkpoint', default='', metavar='FILE', help='weights of the model')
    parser.add_argument('--output', type=Path, metavar='DIR', help='new folder for the pruned network')
    add_json_option(parser)
    group = parser.add_argument_group('pruning')
    add_threshold_option(group)
    group.add_argument('--classes', nargs='+', metavar='NAME', help='classes to specialise the network to')
    group.add_argument('--epochs', type=int, default=0, metavar='N', help='epochs of fine-tuning (default: 0)')
    group.add_argument('--lr', type=float, default=0.01, metavar='X', help='learning rate (default: %(default)s)')
    add_model_options(parser)
    add_data_options(parser)
    group = parser.add_argument_group('more data options (--split is used for gate statistics and fine-tuning)')
    group.add_argument('--eval-split', metavar='SPLIT', help='split of the evaluation (default: --split)')
    group.add_argument('--eval-crop-pct', type=float, metavar='X', help="crop of --eval-split (default: the model's)")
    group.add_argument('--scale', nargs=2, type=float, default=(0.64, 1.), metavar='X', help='area of training crops')
    group.add_argument('--ratio', nargs=2, type=float, default=(0.75, 4 / 3), metavar='X', help='aspect ratio of crops')
    group.add_argument('--hflip', type=float, default=0.5, metavar='X', help='probability of horizontal flips')
    add_segmentation_options(parser)
    args = parser.parse_args(argv)
    if args.untrained and args.output:
        parser.error('--output needs a trained network: do not combine it with --untrained.')
    return args


def run(args: Namespace) -> Dict[str, Any]:
    from timm_gated.analysis import check_threshold, gate_kinds
    from timm_gated.utils import check_new
    check_threshold(args.threshold)
    if args.output:
        check_new(args.output)  # fail early
    pruned = prune_segmentor(args) if args.mmseg_config else prune_classifier(args)
    print(filters(pruned, args.threshold))
    print(pruned)
    if args.output:
        print(f'Pruned network: {args.output}')
    kinds = {name: gate_kinds(share, args.threshold) for name, share in pruned.open_share.items()}
    return {
        'before': asdict(pruned.before), 'after': asdict(pruned.after), 'gates': pruned.gates._asdict(),
        'always_on': {name: (kind == 0).nonzero()[:, 0].tolist() for name, kind in kinds.items()},
        'always_off': {name: (kind == 2).nonzero()[:, 0].tolist() for name, kind in kinds.items()}}


def main(argv: Optional[List[str]] = None) -> int:
    return execute(run, parse_args(argv))


if __name__ == '__main__':
    sys.exit(main())
