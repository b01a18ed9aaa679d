"""Snippets of the README and of the guides in docs/ run, and the tables match the models and configs"""
import functools
import re
from types import ModuleType
from typing import Any, Dict, List

import pytest
import torch
from nets import GATED, VARIANTS, family
from paths import ROOT
from tool import load_tool

from timm_gated.models.gated_resnet import FIRST

README = (ROOT / 'README.md').read_text()
GUIDES = sorted((ROOT / 'docs').glob('*.md'))
METHODS = (ROOT / 'configs' / 'timm' / 'README.md').read_text()
ZOO, ALL_METHODS = (re.findall(r'^(\| `(\w+_resnet\w+)` \| \d.*)$', text, re.MULTILINE) for text in (README, METHODS))


def snippets(text: str) -> List[str]:
    return re.findall(r'```python\n(.*?)```', text, re.DOTALL)


def run(code: str, name: str, namespace: Dict[str, Any]) -> None:
    exec(compile(code, name, 'exec'), namespace)


SNIPPETS = snippets(README)


def test_there_are_snippets():
    assert len(SNIPPETS) >= 5 and GUIDES


@pytest.mark.parametrize('index', range(len(SNIPPETS)))
def test_snippet_runs(index, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some snippets write files
    torch.manual_seed(0)
    run(SNIPPETS[index], f'README.md, python snippet {index}', {})


@pytest.mark.parametrize('path', GUIDES, ids=lambda path: path.stem)
def test_guide_runs(path, tmp_path, monkeypatch):
    """The snippets of a guide continue each other."""
    monkeypatch.chdir(tmp_path)
    namespace: Dict[str, Any] = {'__name__': path.stem}
    for index, code in enumerate(snippets(path.read_text())):
        run(code, f'{path.name}, python snippet {index}', namespace)


def test_guide_shows_the_block_of_the_example():
    example = (ROOT / 'examples' / 'own_block.py').read_text()
    blocks = example[example.index('class Block('):example.index('class Network(')].strip()
    assert blocks in (ROOT / 'docs' / 'gate_your_resnet.md').read_text()


def test_zoo_is_complete():
    assert {name for _, name in ZOO} - {*VARIANTS} == {name for name in GATED if family(name) == 'gated'}
    assert {name for _, name in ALL_METHODS} - {*VARIANTS} == {*GATED}


@functools.cache
def model_table() -> ModuleType:
    return load_tool('model_table')


@pytest.mark.parametrize('row, name', sorted({*ZOO, *ALL_METHODS}), ids=lambda value: value if '|' not in value else '')
def test_zoo_row(row, name):
    assert row == model_table().row(name)


def test_a_row_by_hand():
    """The paper has 21.91 M parameters and 3.66 G MACs for ResNet-34."""
    row = '| `gated_resnet34` | 224 | 21.916 M | 21.798 M | 3.664 G | 0.046 % | 3776 |'
    assert model_table().row('gated_resnet34') == row


def test_tool_of_the_table(capsys):
    assert model_table().main(['convnet_aig_resnet2*']) == 0
    header, rule, row = capsys.readouterr().out.splitlines()
    assert header in README and header in METHODS and row in METHODS and rule.count('---') == header.count('|') - 1
    assert model_table().main(['resnet34']) == 2 and "'resnet34'" in capsys.readouterr().err


def test_every_method_is_described():
    described = re.findall(r'^\| `(\w+)_resnet…` \|', METHODS, re.MULTILINE)
    assert sorted(described) == sorted({family(name) for name in GATED})
    assert all(f'| `{method}_resnet' in README for method in described)


def expand(pattern: str) -> list:
    """Expand braces as a shell does."""
    match = re.search(r'{(.*?)}', pattern)
    if not match:
        return [pattern]
    return [name for part in match.group(1).split(',') for name in expand(pattern.replace(match.group(), part, 1))]


def test_table_of_configs_is_complete():
    rows = re.findall(r'^\| (`(?:cifar10|imagenet)/.*?) \|', README, re.MULTILINE)
    listed = [name for row in rows for pattern in re.findall('`(.*?)`', row) for name in expand(pattern)]
    configs = ROOT / 'configs' / 'timm'
    there = [str(path.relative_to(configs).with_suffix('')) for path in configs.glob('*/*.yaml')]
    assert sorted(listed) == sorted(there)


def test_variants_are_listed_by_family():
    table = README.partition('| family | `gated_…` |')[2].partition('\n\n')[0]
    listed = [name for pattern in re.findall('`(.*?)`', table) for name in expand(pattern)]
    assert sorted(f'gated_{name}' for name in listed) == sorted(
        {*VARIANTS, *(f'gated_{name}' for name in FIRST)} - {'gated_test_resnet'})
