"""Save models as folders, write their model cards, push them to and pull them from the Hugging Face hub

    timm-gated hub save --model gated_resnet20 --checkpoint runs/bas/model_best.pth.tar --output bas \\
        --evaluation runs/evaluation.json --dataset-id uoft-cs/cifar10 --dataset-split test
    timm-gated hub card bas --evaluation runs/evaluation.json --result bas
    timm-gated hub push bas me/gated_resnet20-cifar10
    timm-gated hub pull me/gated_resnet20-cifar10 again

`save` writes a checkpoint or, without one, the pretrained weights to a folder with config.json, model.safetensors and
the model card README.md. The card shows the figures of --evaluation, a file of `timm-gated evaluate`, if given. `card`
rewrites the card of a folder. `push` needs `hf auth login`. `pull` verifies the checksums of the hub and loads the
model once. After importing timm_gated, load models with timm.create_model('local-dir:DIR', pretrained=True) or
timm.create_model('hf-hub:OWNER/NAME', pretrained=True). See `timm-gated hub save --help` for the
options of `save`, and so on.
"""
from __future__ import annotations

import argparse
import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Union

from timm_gated_cli._options import add_model_options, execute, make_parser

if TYPE_CHECKING:
    import torch.nn as nn
    from huggingface_hub import ModelCard


def read_figures(path: Optional[Path], result: str) -> Optional[Dict[str, Any]]:
    """Read one result from a file of `timm-gated evaluate`.

    Args:
        path: JSON file; None for no figures.
        result: Name of the result; required if there are several.
    """
    if path is None:
        return None
    try:
        results = {entry['name']: entry for entry in json.loads(path.read_text(encoding='utf-8'))['results']}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f'{path} is not a file that `timm-gated evaluate` wrote: {error!r}.') from error
    if not result and len(results) == 1:
        result = next(iter(results))
    if result not in results:
        raise ValueError(f"--result must be one of {', '.join(results)} (in {path}), got '{result}'.")
    if results[result].get('untrained'):
        raise ValueError(f"the figures of '{result}' in {path} are those of an untrained network.")
    return results[result]


def read_training(args: Namespace) -> Union[str, Dict[str, Any]]:
    """Read the training command, or the settings in --training-args or in args.yaml next to the checkpoint."""
    if args.training:
        return args.training
    path = args.training_args
    if path is None:
        path = Path(getattr(args, 'checkpoint', '')).with_name('args.yaml') if getattr(args, 'checkpoint', '') else None
        if path is None or not path.is_file():
            return ''
    import yaml

    from timm_gated.hub import training_settings
    try:
        settings = yaml.safe_load(path.read_text(encoding='utf-8'))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(f'the training settings cannot be read from {path}: {error}') from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must hold settings like args.yaml of timm's train.py, got {settings!r}.")
    return training_settings(settings)


def make_card(model: nn.Module, args: Namespace) -> ModelCard:
    from timm_gated.hub import model_card
    figures = read_figures(args.evaluation, args.result)
    return model_card(
        model, figures, args.dataset_id, args.dataset_split, read_training(args), args.license, args.tag)


def save(args: Namespace) -> str:
    from timm_gated.analysis import create_network
    from timm_gated.hub import save_pretrained
    from timm_gated.utils import check_new
    check_new(args.output)
    if not args.model:
        raise ValueError('give --model, the model of the checkpoint.')
    model = create_network(args.model, args.checkpoint, args)
    names = args.class_map.read_text(encoding='utf-8').split('\n') if args.class_map else None
    save_pretrained(model, args.output, names and [name for name in names if name], make_card(model, args))
    return f'Saved: {args.output}'


def card(args: Namespace) -> str:
    from timm_gated.hub import CARD_FILE, check_pretrained
    from timm_gated.models import check_model_name
    from timm_gated.utils import new_file
    check_model_name(f'local-dir:{args.folder}')
    text = str(make_card(check_pretrained(args.folder), args))
    with new_file(args.folder / CARD_FILE) as partial:
        partial.write_text(text, encoding='utf-8')
    return f'Card: {args.folder / CARD_FILE}'


def push(args: Namespace) -> str:
    from timm_gated.hub import push_to_hub
    from timm_gated.models import check_model_name
    check_model_name(f'local-dir:{args.folder}')
    commit = push_to_hub(
        args.folder, args.repository, private=args.private, revision=args.revision, create_pr=args.create_pr,
        commit_message=args.message)
    return f'Pushed: {commit.pr_url or commit.commit_url}'


def pull(args: Namespace) -> str:
    from timm_gated.hub import pull_from_hub
    return f'Pulled: {pull_from_hub(args.repository, args.folder, args.revision)}'


def add_card_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group('card')
    group.add_argument('--evaluation', type=Path, metavar='FILE', help='JSON file of `timm-gated evaluate --output`')
    group.add_argument('--result', default='', metavar='NAME', help='name of the result in it (default: the only one)')
    group.add_argument('--dataset-id', default='', metavar='ID', help='hub ID of the data set')
    group.add_argument('--dataset-split', default='', metavar='SPLIT', help='split of the data set on the hub')
    group.add_argument('--training', default='', metavar='COMMAND', help='training command')
    group.add_argument(
        '--training-args', type=Path, metavar='FILE',
        help="training settings of timm's train.py (default: args.yaml next to the checkpoint, if any)")
    group.add_argument('--tag', default='', help='tag of the weights, if timm_gated includes them')
    group.add_argument('--license', default='', help="licence of the weights (default: that of the model's config)")


def parse_args(argv: Optional[List[str]]) -> Namespace:
    parser = make_parser(__doc__)
    commands = parser.add_subparsers(required=True, metavar='{save,card,push,pull}')

    command = commands.add_parser('save', help='save a checkpoint or the pretrained weights as a folder')
    command.add_argument('--checkpoint', default='', metavar='FILE', help='weights of the model')
    command.add_argument('--output', type=Path, required=True, metavar='DIR', help='new folder for the model')
    command.add_argument('--class-map', type=Path, metavar='FILE', help='text file with one class name per line')
    add_card_options(command)
    add_model_options(command, untrained=False)
    command.set_defaults(run=save)

    command = commands.add_parser('card', help='rewrite the model card of a folder')
    command.add_argument('folder', type=Path, help='folder of the model')
    add_card_options(command)
    command.set_defaults(run=card)

    command = commands.add_parser('push', help='upload a folder to the hub')
    command.add_argument('folder', type=Path, help='folder of the model')
    command.add_argument('repository', help='OWNER/NAME, created if it does not exist')
    command.add_argument('--private', action='store_true', help='create a private repository')
    command.add_argument('--revision', metavar='BRANCH', help='branch to commit to (default: the main one)')
    command.add_argument('--create-pr', action='store_true', help='open a pull request')
    command.add_argument('--message', default='Add model', help='commit message (default: %(default)s)')
    command.set_defaults(run=push)

    command = commands.add_parser('pull', help='download a model from the hub')
    command.add_argument('repository', help='OWNER/NAME')
    command.add_argument('folder', type=Path, help='new folder for the model')
    command.add_argument('--revision', metavar='REV', help='branch, tag or commit (default: the main branch)')
    command.set_defaults(run=pull)
    return parser.parse_args(argv)


def main(argv: Optional[List[str]] = None) -> int:
    return execute(lambda args: print(args.run(args)), parse_args(argv))


if __name__ == '__main__':
    sys.exit(main())
