"""List the training configs of the package, or copy them with everything they inherit

    timm-gated configs
    timm-gated configs timm/cifar10/gated_resnet20.yaml --output configs
    timm-gated configs 'mmseg/*/gated-*' timm/imagenet --output configs

Configs of timm are for its train.py, configs of mmseg for mmseg's. A copy keeps its path, so that `_base_` of a config
of mmseg is found; configs that begin with `mmseg::` are those of mmsegmentation itself. Without --output, the configs
are listed.
"""
import argparse
import ast
import os
import sys
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Dict, List, Optional, Sequence, Set

from timm_gated_cli._options import add_json_option, execute, make_parser

FOLDER = Path(str(files('timm_gated_configs')))


def find_configs() -> List[str]:
    """Paths of all configs, without those that others only inherit."""
    paths = [*FOLDER.glob('timm/**/*.yaml'), *FOLDER.glob('mmseg/**/*.py')]
    return sorted(path.relative_to(FOLDER).as_posix() for path in paths if '_base_' not in path.parts)


def select(patterns: Sequence[str]) -> List[str]:
    """Select configs by path, pattern or folder; all of them without a pattern."""
    configs = find_configs()
    chosen: Set[str] = set()
    for pattern in patterns:
        folder = f'{pattern.rstrip("/")}/'
        found = [name for name in configs if fnmatchcase(name, pattern) or name.startswith(folder)]
        if not found:
            raise ValueError(f"no config matches '{pattern}'; `timm-gated configs` lists them.")
        chosen.update(found)
    return sorted(chosen) if patterns else configs


def bases(name: str) -> List[str]:
    """Configs of this package that a config inherits directly."""
    if not name.endswith('.py'):
        return []
    tree = ast.parse((FOLDER / name).read_text(encoding='utf-8'))
    values = [
        ast.literal_eval(node.value) for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == '_base_']
    own = [base for value in values for base in value if '::' not in base]
    return [Path(os.path.normpath(Path(name).parent / base)).as_posix() for base in own]


def with_bases(names: Sequence[str]) -> List[str]:
    """Configs and all that they inherit."""
    found: Dict[str, None] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        found[name] = None
        waiting += [base for base in bases(name) if base not in found]
    return sorted(found)


def copy(names: Sequence[str], output: Path, overwrite: bool) -> List[str]:
    """Copy configs and return the paths of the copies. Equal files are left alone; nothing is copied after an error."""
    contents = {output / name: (FOLDER / name).read_bytes() for name in names}
    for path, content in contents.items():
        if not overwrite and path.exists() and path.read_bytes() != content:
            raise ValueError(f'{path} exists and is different: choose another --output or use --overwrite.')
    for path, content in contents.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return [str(path) for path in contents]


def run(args: argparse.Namespace) -> List[str]:
    names = select(args.patterns)
    if args.output:
        names = copy(with_bases(names), args.output, args.overwrite)
    print('\n'.join(names))
    return names


def main(argv: Optional[List[str]] = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        'patterns', nargs='*', metavar='CONFIG', help='path, pattern or folder of configs (default: all)')
    parser.add_argument('--output', type=Path, metavar='DIR', help='folder to copy them to')
    parser.add_argument('--overwrite', action='store_true', help='replace files that are different')
    add_json_option(parser)
    return execute(run, parser.parse_args(argv))


if __name__ == '__main__':
    sys.exit(main())
