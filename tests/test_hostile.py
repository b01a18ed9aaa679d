"""Checkpoints and configs of strangers: a thousand mutations of each are loaded whole, or refused with an error

Loading goes on in a process of its own (tests/hostile_worker.py), so that a crash, a hang or a huge allocation is seen,
and told with the number of its mutation: `mutate(kind, number, good)` in tests/mutations.py makes it again.
"""
import errno
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import timm
import torch
from hostile_worker import FILES, NET
from hub_client import make
from huggingface_hub.errors import HTTPError
from mutations import mutate

from timm_gated import check_pretrained, hub_config, save_pretrained
from timm_gated.files import explained

COUNT = 1000

# What a mutation may come to, beside a whole model. Our own ways raise nothing but a ValueError, which names the file.
# timm itself reads a config before the model is asked for; what timm and mmengine do with what a file holds is theirs.
OURS = {'ValueError'}
ERRORS = {
    ('config', 'by_check'): OURS,
    ('config', 'by_timm'): {
        *OURS, 'AssertionError', 'AttributeError', 'JSONDecodeError', 'KeyError', 'RecursionError', 'RuntimeError',
        'TypeError', 'UnicodeDecodeError'},
    ('safetensors', 'by_check'): OURS,
    ('safetensors', 'by_timm'): OURS,
    ('pickle', 'by_timm'): OURS,
    ('pickle', 'by_tools'): OURS,
    ('pickle', 'by_resume'): {*OURS, 'AttributeError', 'RuntimeError'},
    ('pickle', 'by_mmengine'): {*OURS, 'AttributeError', 'RuntimeError'},
    ('safetensors', 'by_mmengine'): {*OURS, 'RuntimeError'},
}


@pytest.fixture
def folder(tmp_path):
    return save_pretrained(make(**NET), tmp_path / 'model')


def use_pickle(folder):
    torch.save({'state_dict': make(**NET).state_dict(), 'epoch': 3}, folder / FILES['pickle'])
    (folder / FILES['safetensors']).unlink()


@pytest.mark.parametrize('kind', FILES)
def test_mutations(kind, folder, tmp_path):
    if kind == 'pickle':
        use_pickle(folder)
    report = tmp_path / 'report'
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name('hostile_worker.py'), kind, str(COUNT), report], cwd=folder,
        capture_output=True, text=True, env=dict(os.environ, OMP_NUM_THREADS='1'))
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    ended = signal.Signals(-done.returncode).name if done.returncode < 0 else done.returncode
    assert not done.returncode, f'{ended} at {lines[-1:]}: {done.stderr[-2000:]}'
    outcomes = list(zip(lines[::2], lines[1::2], strict=True))
    assert {index for (index, _, _), _ in outcomes} == set(range(COUNT))
    wrong = [
        (started, outcome) for started, outcome in outcomes
        if outcome != 'well-formed' and outcome.split(':')[0] not in ERRORS[kind, started[2]]]
    assert not wrong, wrong[:10]
    loaded = sum(outcome == 'well-formed' for _, outcome in outcomes) / len(outcomes)
    assert 0.01 < loaded < 0.5  # neither is everything refused, nor is there nothing to refuse


@pytest.mark.parametrize('kind', FILES)
def test_a_number_is_a_mutation(kind, folder):
    if kind == 'pickle':
        use_pickle(folder)
    good = (folder / FILES[kind]).read_bytes()
    assert mutate(kind, 3, good) == mutate(kind, 3, good) and mutate(kind, 3, good) != mutate(kind, 4, good)


# What the mutations come upon by chance


def create(folder, **changes):
    """The model of a folder whose config was changed, by stock timm."""
    config = json.loads((folder / 'config.json').read_text())
    config['model_args'].update(changes)
    (folder / 'config.json').write_text(json.dumps(config))
    return timm.create_model(f'local-dir:{folder}')


@pytest.mark.parametrize('changes', [
    dict(layers=[1, 1, 10**9]), dict(layers=[10**6, 1, 1]), dict(channels=[4, 8, 20_000]), dict(inner_width=10**8),
    dict(gate_hidden=10**9),
], ids=str)
def test_a_network_beyond_all_bounds(folder, changes):
    with pytest.raises(ValueError, match=f'local-dir:{folder} (asks for a network|.* allocate memory)'):
        create(folder, **changes)
    with pytest.raises(ValueError, match=f'^{folder} asks for a network of more than 1,000,000,000 param'):
        check_pretrained(folder)


def test_a_shaped_network_beyond_all_bounds(folder):
    options = {'network': 'resnet18', 'layers': [1, 1, 1, 10**9], 'features': {'layer1': 'normal'}}
    config = {'architecture': 'batch_shaped', 'model_args': options, 'pretrained_cfg': {}}
    (folder / 'config.json').write_text(json.dumps(config))
    for load in (lambda: create(folder), lambda: check_pretrained(folder)):
        with pytest.raises(ValueError, match='asks for a network of more than'):
            load()


def test_bounds_are_not_those_of_the_user(folder, monkeypatch):
    """Nor of another thread, nor of what is made later."""
    monkeypatch.setattr(hub_config, 'MOST_TENSORS', 100)

    def made(make_model, *args, **kwargs):
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(make_model, *args, **kwargs).result()

    with hub_config._bounded('folder'):
        assert made(timm.create_model, 'gated_resnet56')
        with pytest.raises(ValueError, match='folder asks for'):
            timm.create_model('gated_resnet56')
    assert create(folder) and timm.create_model('gated_resnet56')


def test_models_of_this_package_are_within_bounds():
    model = timm.create_model('gated_resnet152', device='meta')
    assert 4 * len(list(model.parameters())) < hub_config.MOST_TENSORS
    assert 10 * sum(parameter.numel() for parameter in model.parameters()) < hub_config.MOST_PARAMETERS


@pytest.mark.parametrize('text, message', [
    (' ' * 10**7 + '{}', r'too large for a config: 10,000,002 bytes'), ('[' * 60 + ']' * 60, 'nested too deeply'),
])
def test_a_config_beyond_all_bounds(folder, text, message):
    (folder / 'config.json').write_text(text)
    with pytest.raises(ValueError, match=message):
        check_pretrained(folder)


@pytest.mark.parametrize('error', [
    FileNotFoundError('x'), ConnectionError('x'), HTTPError('x'), torch.OutOfMemoryError('x'), ValueError('x')])
def test_errors_that_are_not_of_the_file(error):
    with pytest.raises(type(error), match='^x$'), explained('the file is not whole'):
        raise error


@pytest.mark.parametrize('error', [
    KeyError('x'), EOFError('x'), RuntimeError('x'), MemoryError('x'), OSError(errno.EINVAL, 'x'),
    UnicodeDecodeError('utf-8', b'x', 0, 1, 'x')])
def test_errors_that_are_explained(error):
    with pytest.raises(ValueError, match=rf'^the file is not whole: .*x.* \({type(error).__name__}\)$') as raised:
        with explained('the file is not whole'):
            raise error
    assert raised.value.__cause__ is error
