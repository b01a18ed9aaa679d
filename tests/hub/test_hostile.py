"""Untrusted checkpoints and configs: each mutation is either loaded correctly or refused with an error

Files are loaded in another process (tests/helpers/hostile_worker.py), so that crashes, hangs and huge allocations are
detected. `mutate(kind, number, good)` in tests/helpers/mutations.py reproduces a mutation by its number.
"""
import builtins
import errno
import json

import pytest
import torch
from effort import TIMES
from forked import run_script
from hostile_worker import FILES, NET
from hub_client import make
from huggingface_hub.errors import HTTPError
from mutations import mutate
from paths import HELPERS

from timm_gated import save_pretrained
from timm_gated.utils.files import explained

COUNT = 200 * TIMES
ERROR = tuple(  # exceptions of Python, torch, safetensors, json and struct
    f'{name}:' for name in (*vars(builtins), 'UnpicklingError', 'SafetensorError', 'JSONDecodeError', 'error'))

# Functions of this package raise only a ValueError. timm and mmengine may raise any error.
OURS = ('by_check',)


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
    done = run_script(HELPERS / 'hostile_worker.py', kind, COUNT, report, cwd=folder)
    lines = [json.loads(line) for line in report.read_text().splitlines()]
    assert not done.returncode, f'ended with {done.returncode} at {lines[-1:]}: {done.output[-2000:]}'
    outcomes = list(zip(lines[::2], lines[1::2], strict=True))
    assert {index for (index, _, _), _ in outcomes} == set(range(COUNT))
    wrong = [
        (started, outcome) for started, outcome in outcomes
        if outcome != 'well-formed' and not outcome.startswith('ValueError:' if started[2] in OURS else ERROR)]
    assert not wrong, wrong[:10]
    loaded = sum(outcome == 'well-formed' for _, outcome in outcomes) / len(outcomes)
    assert 0.01 < loaded < 0.5  # some mutations are harmless, most are not


@pytest.mark.parametrize('kind', FILES)
def test_mutations_are_reproducible(kind, folder):
    if kind == 'pickle':
        use_pickle(folder)
    good = (folder / FILES[kind]).read_bytes()
    assert mutate(kind, 3, good) == mutate(kind, 3, good) and mutate(kind, 3, good) != mutate(kind, 4, good)


# Errors while a file is loaded


@pytest.mark.parametrize('error', [
    FileNotFoundError('x'), ConnectionError('x'), HTTPError('x'), torch.OutOfMemoryError('x'), ValueError('x')])
def test_errors_that_are_not_explained(error):
    with pytest.raises(type(error), match='^x$'), explained('the file is damaged'):
        raise error


@pytest.mark.parametrize('error', [
    KeyError('x'), EOFError('x'), RuntimeError('x'), MemoryError('x'), OSError(errno.EINVAL, 'x'),
    UnicodeDecodeError('utf-8', b'x', 0, 1, 'x')])
def test_errors_that_are_explained(error):
    with pytest.raises(ValueError, match=rf'^the file is damaged: .*x.* \({type(error).__name__}\)$') as raised:
        with explained('the file is damaged'):
            raise error
    assert raised.value.__cause__ is error
