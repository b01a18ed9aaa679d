"""Declared dependencies match the lock, the oldest versions and the hooks; timm_gated works without the extras"""
import re
import subprocess
import sys
import tomllib

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from paths import ROOT

PROJECT = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']

SCRIPT = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('mmseg', 'mmengine', 'mmcv', 'matplotlib', 'pyarrow', 'scipy'):
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)

sys.meta_path.insert(0, Refuse())
import timm
import torch
from timm.optim import create_optimizer_v2
from timm.task import ClassificationTask
import timm_gated
from timm_gated.analysis import create_data, create_network, record_classifier, summary  # of `timm-gated evaluate`

torch.manual_seed(0)
model = timm.create_model('gated_resnet20', layers=(1, 1, 1), lam=0.1, gamma=0.1, gamma_epochs='fixed')
optimizer = create_optimizer_v2(model, 'sgd', lr=0.1)
before = {name: parameter.clone() for name, parameter in model.named_parameters()}
images, labels = torch.randn(4, 3, 32, 32), torch.arange(4)
result = ClassificationTask(model, torch.nn.CrossEntropyLoss())(images, labels)
result['loss'].backward()
optimizer.step()
assert {'batch_shaping_loss', 'l0_loss'} <= set(result)
changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
assert {'conv1.weight', 'layer1.0.gate1.fc2.weight', 'fc.weight'} <= changed

model.eval()
expected = model(images)
torch.testing.assert_close(timm_gated.accelerate(model)(images), expected, atol=1e-4, rtol=1e-4)
assert 0 < timm_gated.count_macs(model, images).share < 1.1
record = record_classifier(model, [(images, labels % 10)], [str(i) for i in range(10)])
assert 0 < summary(record)['macs_share'] < 1.1
timm_gated.save_pretrained(model, 'saved')
torch.testing.assert_close(timm.create_model('local-dir:saved', pretrained=True).eval()(images), expected)

try:
    import mmseg_plugin
except ModuleNotFoundError as error:
    print(error)
"""


def test_without_extras(tmp_path):
    done = subprocess.run(
        [sys.executable, '-c', SCRIPT], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search("No module named 'mm(seg|engine|cv)", done.stdout), done.stdout


def lock() -> dict:
    _, *lines = (ROOT / 'constraints.txt').read_text().splitlines()
    return {canonicalize_name(name): version for name, version in (line.split('==') for line in lines)}


def test_lock_has_a_version_for_every_requirement():
    pins = lock()
    extras = PROJECT['optional-dependencies']
    required = [Requirement(text) for texts in (PROJECT['dependencies'], *extras.values()) for text in texts]
    required = [requirement for requirement in required if requirement.name != PROJECT['name']]
    assert len(required) > 30
    for requirement in required:
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement
    assert {'pip', 'setuptools'} <= set(pins)
    assert not any(name.startswith(('nvidia', 'cuda', 'triton')) for name in pins)  # left to torch


def test_all_includes_every_extra():
    (everything,) = PROJECT['optional-dependencies']['all']
    assert Requirement(everything).extras == PROJECT['optional-dependencies'].keys() - {'all'}


def test_ruff_of_the_hooks_is_that_of_the_lock():
    hooks = yaml.safe_load((ROOT / '.pre-commit-config.yaml').read_text())
    revisions = {hook['id']: repo['rev'] for repo in hooks['repos'] for hook in repo['hooks']}
    assert revisions['ruff-check'] == f'v{lock()["ruff"]}'


def test_oldest_versions_are_the_lower_bounds():
    pins = re.findall(r'^([\w-]+)==([\d.]+)$', (ROOT / 'tests' / 'oldest.txt').read_text(), re.MULTILINE)
    bounds = [match.groups() for text in PROJECT['dependencies'] if (match := re.match(r'([\w-]+)>=([\d.]+)', text))]
    assert len(bounds) >= 4 and sorted(bounds) == sorted(pins)
    oldest = re.search(r'^\| oldest: (.*?) \|', (ROOT / 'docs' / 'reliability.md').read_text(), re.MULTILINE).group(1)
    assert sorted(f'{name} {version}' for name, version in pins) == sorted(oldest.split(', '))
