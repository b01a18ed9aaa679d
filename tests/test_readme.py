"""The README is the truth: its snippets run, its zoo is what the models are, its paths exist"""
import re
from pathlib import Path

import pytest
import timm
import torch

from timm_gated import count_macs, gates

ROOT = Path(__file__).parents[1]
README = (ROOT / 'README.md').read_text()
SNIPPETS = re.findall(r'```python\n(.*?)```', README, re.DOTALL)
ZOO = re.findall(r'^\| `(gated_resnet\w+)` \| (.*) \|$', README, re.MULTILINE)


def test_there_are_snippets():
    assert len(SNIPPETS) >= 5


@pytest.mark.parametrize('index', range(len(SNIPPETS)))
def test_snippet_runs(index, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some write files
    torch.manual_seed(0)
    exec(compile(SNIPPETS[index], f'README.md, python snippet {index}', 'exec'), {})


def test_zoo_is_complete():
    assert sorted(name for name, _ in ZOO) == sorted(timm.list_models('gated_*'))


@pytest.mark.parametrize('name, row', ZOO)
def test_zoo_row(name, row):
    model = timm.create_model(name)
    input_size = model.pretrained_cfg['input_size']
    macs = count_macs(model, torch.zeros(1, *input_size))
    parameters = sum(p.numel() for p in model.parameters())
    gate_parameters = sum(p.numel() for _, gate in gates(model) for p in gate.parameters())
    overhead = sum(int(m.per_sample[0]) for m in macs.by_module.values() if m.dense == 0)
    expected = (
        f'{input_size[1]} | {parameters / 1e6:.3f} M | {(parameters - gate_parameters) / 1e6:.3f} M | '
        f'{macs.dense / 1e9:.3f} G | {100 * overhead / macs.dense:.3f} % | '
        f'{sum(gate.num_gates for _, gate in gates(model))}')
    assert row == expected


def expand(pattern: str) -> list:
    """Alternatives of a name with braces, as a shell expands them."""
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
