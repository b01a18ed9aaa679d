"""Every tutorial and the notebook run from top to bottom

`make docs-test` runs these tests; `make test` does not, since they train networks for minutes. The Python blocks of
a tutorial share one namespace, its bash blocks one folder that has the repository's `configs`, `examples` and C
sources. Other blocks, such as `console`, are not run.
"""
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
import torch
from paths import ROOT

TUTORIALS = sorted((ROOT / 'docs' / 'tutorials').glob('*.md'))
NOTEBOOKS = sorted((ROOT / 'notebooks').glob('*.ipynb'))


def blocks(text: str) -> List[Tuple[str, str]]:
    """Languages and contents of the fenced blocks that run."""
    return re.findall(r'^```(python|bash)\n(.*?)^```$', text, re.DOTALL | re.MULTILINE)


def cells(path: Path) -> List[Tuple[str, str]]:
    notebook = json.loads(path.read_text())
    return [('python', ''.join(cell['source'])) for cell in notebook['cells'] if cell['cell_type'] == 'code']


def run(parts: List[Tuple[str, str]], name: str) -> None:
    """Run blocks in the current folder."""
    namespace: Dict[str, Any] = {'__name__': '__main__'}
    env = dict(os.environ, PATH=f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}')
    for index, (language, code) in enumerate(parts):
        if language == 'python':
            exec(compile(code, f'{name}, block {index}', 'exec'), namespace)
        else:
            done = subprocess.run(['bash', '-euo', 'pipefail', '-c', code], env=env, capture_output=True, text=True)
            assert done.returncode == 0, f'{name}, block {index}:\n{code}\n{done.stdout[-3000:]}{done.stderr[-3000:]}'


@pytest.fixture(autouse=True)
def clone(tmp_path, monkeypatch) -> None:
    """Work in a folder that looks like a clone of the repository."""
    for name in ('configs', 'examples', 'timm_gated'):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


@pytest.mark.parametrize('path', TUTORIALS, ids=lambda path: path.stem)
def test_tutorial(path):
    run(blocks(path.read_text()), path.name)


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook(path):
    run(cells(path), path.name)


def test_there_are_tutorials():
    assert len(TUTORIALS) >= 8 and NOTEBOOKS and all(blocks(path.read_text()) for path in TUTORIALS)
