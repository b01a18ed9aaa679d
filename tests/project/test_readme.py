"""Snippets of the README and of the pages in docs/ run, and their tables match the models, configs and measurements"""
import argparse
import functools
import importlib
import re
import shlex
from types import ModuleType

import pytest
import torch
from nets import GATED, VARIANTS, family
from paths import ROOT
from tool import load_tool

import timm_gated
from timm_gated.models.gated_resnet import FIRST

DOCS = ROOT / 'docs'
README = (ROOT / 'README.md').read_text()
MODEL_ZOO = (DOCS / 'model_zoo.md').read_text()
BASELINES = (DOCS / 'baselines.md').read_text()
METHODS = (ROOT / 'configs' / 'timm' / 'README.md').read_text()
ZOO, ALL_METHODS = (
    re.findall(r'^(\| `(\w+_resnet\w+)` \| \d.*)$', text, re.MULTILINE) for text in (MODEL_ZOO, METHODS))

# Each snippet of these pages stands alone. `make docs-test` runs the tutorials, whose blocks continue each other.
PAGES = [ROOT / 'README.md', *sorted(path for path in DOCS.rglob('*.md') if path.parent.name != 'tutorials')]
SNIPPETS = [
    (f'{path.relative_to(ROOT)}, python snippet {index}', code) for path in PAGES
    for index, code in enumerate(re.findall(r'```python\n(.*?)```', path.read_text(), re.DOTALL))]


def test_there_are_snippets():
    assert len(SNIPPETS) >= 8


@pytest.mark.parametrize('name, code', SNIPPETS, ids=[name.split(',')[0] for name, _ in SNIPPETS])
def test_snippet_runs(name, code, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some snippets write files
    torch.manual_seed(0)
    exec(compile(code, name, 'exec'), {})


def test_guide_shows_the_block_of_the_example():
    example = (ROOT / 'examples' / 'own_block.py').read_text()
    blocks = example[example.index('class Block('):example.index('class Network(')].strip()
    assert blocks in (DOCS / 'tutorials' / 'gate_your_resnet.md').read_text()


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
    assert header in MODEL_ZOO and header in METHODS and row in METHODS and rule.count('---') == header.count('|') - 1
    assert model_table().main(['resnet34']) == 2 and "'resnet34'" in capsys.readouterr().err


def test_every_method_is_described():
    described = re.findall(r'^\| `(\w+)_resnet…` \|', METHODS, re.MULTILINE)
    assert sorted(described) == sorted({family(name) for name in GATED})
    assert all(f'| `{method}_resnet' in MODEL_ZOO + BASELINES for method in described)


def expand(pattern: str) -> list:
    """Expand braces as a shell does."""
    match = re.search(r'{(.*?)}', pattern)
    if not match:
        return [pattern]
    return [name for part in match.group(1).split(',') for name in expand(pattern.replace(match.group(), part, 1))]


def test_table_of_configs_is_complete():
    rows = re.findall(r'^\| (`(?:cifar10|imagenet)/.*?) \|', METHODS, re.MULTILINE)
    listed = [name for row in rows for pattern in re.findall('`(.*?)`', row) for name in expand(pattern)]
    configs = ROOT / 'configs' / 'timm'
    there = [str(path.relative_to(configs).with_suffix('')) for path in configs.glob('*/*.yaml')]
    assert sorted(listed) == sorted(there)


def test_variants_are_listed_by_family():
    table = MODEL_ZOO.partition('| family | `gated_…` |')[2].partition('\n\n')[0]
    listed = [name for pattern in re.findall('`(.*?)`', table) for name in expand(pattern)]
    assert sorted(f'gated_{name}' for name in listed) == sorted(
        {*VARIANTS, *(f'gated_{name}' for name in FIRST)} - {'gated_test_resnet'})


def test_readme_is_short():
    assert len(README.splitlines()) <= 180


def cells(row: str) -> list:
    return [cell.strip() for cell in row.strip('|').split('|')]


def test_trained_models_of_the_readme_are_in_the_zoo():
    zoo = {row[0]: row for row in map(cells, re.findall(r'^\| `\w+\.\w+` .*$', MODEL_ZOO, re.MULTILINE))}
    rows = [cells(row) for row in re.findall(r'^\| `\w+\.\w+`.*$', README, re.MULTILINE)]
    assert len(rows) >= 5 and {name.split(',')[0] for name, *_ in rows} <= zoo.keys()
    for name, top1, share in rows:
        _, measured_top1, _, measured_share, _ = zoo[name.split(',')[0]]
        assert (top1, share) == (measured_top1, measured_share), name


def test_speed_of_the_readme_is_that_of_the_benchmarks():
    """The rows of a network in the benchmarks: float32 runtimes, OpenVINO in int8, …, gated, gated in int8."""
    benchmarks = (DOCS / 'benchmarks.md').read_text().partition('## AVX-512')[2].partition('\n## ')[0]
    rows = [cells(row) for row in re.findall(r'^\| .*$', benchmarks, re.MULTILINE)][2:]
    short = [cells(row) for row in re.findall(r'^\| (?:ResNet|PSPNet).* threads? .*$', README, re.MULTILINE)]
    assert len(short) >= 4
    for name, kept, *figures in short:
        column = 3 if '1 thread' in name else 5
        start = next(i for i, row in enumerate(rows) if row[0].startswith(f'{name.split(",")[0]},'))
        gated = next(i for i in range(start, len(rows)) if rows[i][0].startswith('accelerated `gated'))
        dense = min(map(float, rows[start][column].split(' / ')))
        dense_int8, float32, int8 = (float(rows[i][column]) for i in (start + 1, gated, gated + 1))
        ratio = rows[gated][column + 1]
        measured = [dense, float32, float(ratio), dense_int8, int8, round(int8 / dense_int8, 2)]
        assert (rows[gated][1], measured) == (kept, [float(figure) for figure in figures]), name


def documents() -> list:
    folders = [DOCS, ROOT / 'configs', ROOT / 'experiments']
    return [*ROOT.glob('*.md'), *(path for folder in folders for path in sorted(folder.rglob('*.md')))]


COMMANDS = [
    command for path in documents()
    for block in re.findall(r'^```(?:bash|console)\n(.*?)^```$', path.read_text(), re.DOTALL | re.MULTILINE)
    for command in re.findall(r'^ *timm-gated .*', block.replace('\\\n', ''), re.MULTILINE)]


class Parsed(Exception):
    pass


@pytest.mark.parametrize('command', COMMANDS)
def test_command_parses(command, monkeypatch):
    """The options of every command in the documents exist."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse(self, args=None, namespace=None):
        options = parse_args(self, args, namespace)
        if self.prog != 'timm-gated':  # the parser of a command
            raise Parsed
        return options
    monkeypatch.setattr(argparse.ArgumentParser, 'parse_args', parse)
    monkeypatch.setattr('sys.argv', ['timm-gated'])  # restored after the test
    with pytest.raises(Parsed):
        importlib.import_module('timm_gated_cli.__main__').main(shlex.split(command, comments=True)[1:])


def headings(text: str) -> set:
    """Anchors of the headings, as on a repository's web page."""
    titles = re.findall(r'^#+ (.*)$', re.sub(r'```.*?```', '', text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r'[^\w\- ]', '', title.lower()).replace(' ', '-') for title in titles}


@pytest.mark.parametrize('path', documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links(path):
    """Files and headings that a document links to exist."""
    text = re.sub(r'```.*?```', '', path.read_text(), flags=re.DOTALL)
    for target, anchor in re.findall(r'\]\((?!https?:)([^)#]*)#?([^)]*)\)', text):
        file = path.parent / target if target else path
        assert file.exists(), target
        assert not anchor or anchor in headings(file.read_text()), f'{target}#{anchor}'


def test_every_page_is_in_the_navigation():
    config = (ROOT / 'mkdocs.yml').read_text()
    listed = set(re.findall(r': (\S+\.md)$', config, re.MULTILINE))
    assert {str(path.relative_to(DOCS)) for path in DOCS.rglob('*.md')} <= listed


def test_reference_lists_every_public_name():
    text = '\n'.join(path.read_text() for path in (DOCS / 'reference').glob('*.md'))
    listed = re.findall(r'^::: timm_gated\.(?:\S+\.)?(\w+)$', text, re.MULTILINE)
    assert len(listed) == len({*listed}) and {*timm_gated.__all__} - {'__version__'} <= {*listed}
    plugin = (ROOT / 'mmseg_plugin' / '__init__.py').read_text().partition('__all__ = [')[2]
    assert {*re.findall(r"'(\w+)'", plugin)} <= {*re.findall(r'^::: mmseg_plugin\.(\w+)$', text, re.MULTILINE)}
