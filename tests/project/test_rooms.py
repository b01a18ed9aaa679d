"""Layout of the package: lower rooms never import higher ones"""
import ast
from pathlib import Path
from typing import Iterator, Tuple

import pytest
from paths import ROOT

PACKAGE = ROOT / 'timm_gated'
ROOMS = ('utils', 'layers', 'loss', 'models', 'task', 'analysis', 'pruning', 'hub', 'inference')  # lower ones first
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for room in ROOMS for path in (PACKAGE / room).rglob('*.py'))


def imports(path: Path) -> Iterator[Tuple[ast.stmt, str]]:
    """Imports of this package anywhere in a module, with the names of the imported modules."""
    here = path.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding='utf-8'))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = here[:len(here) - node.level + 1] if node.level else ()
            module = '.'.join((*base, *filter(None, [node.module])))
            names = [f'{module}.{alias.name}' if module == PACKAGE.name else module for alias in node.names]
        else:
            continue
        for name in names:
            if name.split('.')[0] == PACKAGE.name:
                yield node, name


def test_every_module_is_in_a_room():
    outside = {path.name for path in PACKAGE.glob('*.py')}
    assert outside == {'__init__.py', '__main__.py', 'version.py'}
    assert {path.name for path in PACKAGE.iterdir() if (path / '__init__.py').exists()} == set(ROOMS)


@pytest.mark.parametrize('module', MODULES)
def test_lower_rooms_do_not_import_higher_ones(module):
    room = module.split('/')[0]
    for _, name in imports(PACKAGE / module):
        parts = name.split('.')
        assert parts[1:], f'{module} imports the top-level package'
        if parts[1] == 'version':
            continue
        assert ROOMS.index(parts[1]) <= ROOMS.index(room), f'{module} imports {name}, which is in a higher room'


@pytest.mark.parametrize('module', MODULES)
def test_imports_are_at_the_top_and_from_the_room(module):
    path = PACKAGE / module
    top = {
        ast.unparse(child)
        for node in ast.parse(path.read_text(encoding='utf-8')).body
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef))
        for child in ast.walk(node)}
    for node, name in imports(path):
        parts = name.split('.')
        assert ast.unparse(node) in top, f'{module} hides the import of {name} in a function'
        other_room = parts[1] in ROOMS and parts[1] != module.split('/')[0]
        assert not other_room or len(parts) == 2, f'{module} reaches into another room: {name}'
