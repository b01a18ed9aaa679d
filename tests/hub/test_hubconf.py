"""hubconf.py, loaded by torch.hub"""
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import timm
import torch
from paths import ROOT
from timm.models import is_model_pretrained

from timm_gated.models._registry import entry_points

TRAINED = [name for name in entry_points() if is_model_pretrained(name)]


def run(script: str, cwd: Path) -> dict:
    """Run a script in a process that can import the package only through torch.hub; returns its JSON output."""
    env = {k: v for k, v in os.environ.items() if k != 'PYTHONPATH'}
    env.update(OMP_NUM_THREADS='1', HF_HUB_OFFLINE='1')
    done = subprocess.run(
        [sys.executable, '-c', 'import json, sys, torch\n' + script], cwd=cwd, env=env, capture_output=True, text=True,
        timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


MODELS = [('gated_resnet20', dict(gate_bias=3.)), *((name, dict(pretrained=True)) for name in TRAINED)]
LOAD = """
loaded = []
for name, options in {models!r}:
    model = torch.hub.load({repository!r}, name, source='local', num_classes=5, **options).eval()
    loaded.append(dict(
        cls=type(model).__name__, shape=model(torch.zeros(1, 3, 32, 32)).shape, tag=model.pretrained_cfg['tag'],
        weight=model.layer1[0].conv1.weight.flatten()[:4].tolist()))
print(json.dumps(dict(package=sys.modules['timm_gated'].__file__, loaded=loaded)))
"""


@pytest.mark.parametrize('here', [True, False])
def test_load(here, tmp_path):
    repository, cwd = ('.', ROOT) if here else (str(ROOT), tmp_path)
    result = run(LOAD.format(repository=repository, models=MODELS), cwd)
    assert Path(result['package']).resolve().is_relative_to(ROOT)
    for (name, options), loaded in zip(MODELS, result['loaded'], strict=True):
        model = timm.create_model(name, num_classes=5, **options)
        assert loaded['cls'] == type(model).__name__ and loaded['shape'] == [1, 5]
        assert loaded['tag'] == model.pretrained_cfg['tag']
        if options.get('pretrained'):
            assert loaded['weight'] == pytest.approx(model.layer1[0].conv1.weight.flatten()[:4].tolist())


def test_list_and_help(tmp_path, monkeypatch):
    """For a downloaded repository."""
    monkeypatch.setattr('torch.hub.get_dir', lambda: str(tmp_path))
    (tmp_path / 'owner_name_main').symlink_to(ROOT)
    where = dict(skip_validation=True, trust_repo=True)
    names = torch.hub.list('owner/name:main', verbose=False, **where)
    texts = {name: torch.hub.help('owner/name:main', name, **where) for name in names}
    assert texts == {name: create.__doc__ for name, create in entry_points().items()}
    assert all(text.startswith('Constructs ') for text in texts.values())
    assert 'gated_resnet50' in texts and 'cifar_resnet20' in texts and 'slim_resnet18' in texts


def test_dependencies_are_those_of_the_package():
    requirements = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['dependencies']
    names = [re.match(r'[\w-]+', requirement).group() for requirement in requirements]
    names = ['yaml' if name == 'pyyaml' else name for name in names]  # torch.hub looks for modules
    assert f'dependencies = {names}' in (ROOT / 'hubconf.py').read_text()
