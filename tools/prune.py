"""Which filters are dead, which always run, and what pruning saves; with --output, the pruned network

    python tools/prune.py --model gated_resnet20 --checkpoint gated.pth --data-dir data/cifar10
    python tools/prune.py --model gated_resnet20 --checkpoint gated.pth --data-dir data/cifar10 --output pruned
    python tools/prune.py --model gated_resnet20 --checkpoint gated.pth --data-dir data/cifar10 --output pets \\
        --classes cat dog --split train --crop-pct 0.8 --eval-split validation --epochs 3
    python tools/prune.py --mmseg-config gated-pspnet.py --checkpoint iter_600.pth --output pruned

Without a checkpoint, the pretrained weights are pruned, or those that an mmseg config loads.

Without --classes, filters go that hardly any image uses, and gates that hardly ever close. With --classes, the network
is specialised to these: a plain ResNet, fine-tuned for --epochs. The folder of --output is a timm model,
timm.create_model('local-dir:DIR', pretrained=True); of an mmseg config, a config and weights for mmseg's scripts.
"""
from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Iterable, Iterator, List, Optional, Sequence

from _options import add_data_options, add_model_options, add_segmentation_options, make_parser
from tqdm import tqdm

if TYPE_CHECKING:
    import torch
    import torch.nn as nn

    from timm_gated.pruning import Pruned


class Progress:
    """A loader with a progress bar for each pass over it."""

    def __init__(self, loader: Iterable[Any], name: str) -> None:
        self.loader = loader
        self.name = name

    def __iter__(self) -> Iterator[Any]:
        return iter(tqdm(self.loader, desc=self.name, unit='batch'))


def filters(pruned: Pruned, threshold: float) -> str:
    """What the filters of each gate module do, a line each."""
    import torch

    from timm_gated.analysis import GateCounts, gate_kinds
    lines = []
    for name, share in pruned.open_share.items():
        kinds = gate_kinds(share, threshold)
        counts = GateCounts(*torch.bincount(kinds, minlength=3).tolist())
        lines.append(
            f'{name}: {counts.always_off} dead{_listed(kinds == 2)}, '
            f'{counts.always_on} always on{_listed(kinds == 0)}, {counts.conditional} conditional')
    return '\n'.join(lines)


def _listed(chosen: torch.Tensor) -> str:
    """Indices, runs of them shortened."""
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
    """Labels of classes by their names."""
    for name in names:
        if name not in class_names:
            raise ValueError(
                f"there is no class '{name}'; the classes: {', '.join(class_names[:12])}"
                f'{f" … ({len(class_names)} in all)" if len(class_names) > 12 else ""}.')
    return [list(class_names).index(name) for name in names]


def training_loader(network: nn.Module, args: Namespace) -> Any:
    """The data of --split with timm's augmentation, for fine-tuning."""
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
    """Prune a timm model, and save it."""
    from timm_gated.analysis import check_gated, create_data, create_network, title
    from timm_gated.hub import save_pretrained
    from timm_gated.pruning import prune_static, specialize
    if not args.model:
        raise ValueError('give --model (a gated timm model) or --mmseg-config.')
    if args.epochs and not args.classes:
        raise ValueError('--epochs is of the fine-tuning to --classes; a network without them is only pruned.')
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
    """Prune the model of an mmseg config, and write the config and the weights that are left."""
    from mmseg_plugin import pruning  # these need the extra `mmseg`
    from mmseg_plugin.analysis import create_segmentation, load_config
    from mmseg_plugin.backbones import backbone_cfg
    from timm_gated.analysis import find_device, title
    if args.eval_split:
        raise ValueError('--eval-split is for timm models; the figures of a segmentor are of its test_dataloader.')
    if args.epochs:
        raise ValueError("--epochs is for timm models; train the config of --output by mmseg's tools/train.py instead.")
    model, data = create_segmentation(
        args.mmseg_config, args.checkpoint, args.cfg_options, find_device(args.device), args.untrained)
    if model.untrained:
        print(title(model, args.mmseg_config))
    if args.output:
        backbone_cfg(model.backbone)  # refuses, before the work, what cannot be saved
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
    parser.add_argument('--output', type=Path, metavar='DIR', help='folder for the pruned network, a new one')
    group = parser.add_argument_group('pruning')
    group.add_argument(
        '--threshold', type=float, default=0.99,
        help='share of images above which a gate counts as always off or on (default: %(default)s)')
    group.add_argument('--classes', nargs='+', metavar='NAME', help='specialise the network to these classes')
    group.add_argument('--epochs', type=int, default=0, metavar='N', help='of fine-tuning to them (default: 0)')
    group.add_argument('--lr', type=float, default=0.01, metavar='X', help='its learning rate (default: %(default)s)')
    add_model_options(parser)
    add_data_options(parser)
    group = parser.add_argument_group('more data options (--split is what gates are judged by, and fine-tuned on)')
    group.add_argument('--eval-split', metavar='SPLIT', help='split of the figures (default: that of --split)')
    group.add_argument('--eval-crop-pct', type=float, metavar='X', help="crop of --eval-split (default: the model's)")
    group.add_argument('--scale', nargs=2, type=float, default=(0.64, 1.), metavar='X', help='area of training crops')
    group.add_argument('--ratio', nargs=2, type=float, default=(0.75, 4 / 3), metavar='X', help='their aspect ratio')
    group.add_argument('--hflip', type=float, default=0.5, metavar='X', help='probability of mirroring')
    add_segmentation_options(parser)
    args = parser.parse_args(argv)
    if args.untrained and args.output:
        parser.error('--output is for trained networks: --untrained only shows what would be pruned.')
    return args


def main(argv: Optional[List[str]] = None) -> int:
    args = parse_args(argv)

    from timm_gated.analysis import check_threshold
    from timm_gated.utils import check_new
    try:
        check_threshold(args.threshold)
        if args.output:
            check_new(args.output)  # before the work, not after it
        pruned = prune_segmentor(args) if args.mmseg_config else prune_classifier(args)
    except ValueError as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    print(filters(pruned, args.threshold))
    print(pruned)
    if args.output:
        print(f'Pruned network: {args.output}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
