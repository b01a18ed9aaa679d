"""Checkpoints and configs of strangers: mutations of each are loaded whole, or refused with an error

Loading goes on in a process of its own (tests/hostile_worker.py), so that a crash, a hang or a huge allocation is seen,
and told with the number of its mutation: `mutate(kind, number, good)` in tests/mutations.py makes it again.
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
ERROR = tuple(  # names of Python's exceptions and of those of torch, safetensors, json and struct
    f'{name}:' for name in (*vars(builtins), 'UnpicklingError', 'SafetensorError', 'JSONDecodeError', 'error'))

# Our own ways raise nothing but a ValueError, which names the file. What timm and mmengine raise is theirs.
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
    assert 0.01 < loaded < 0.5  # neither is everything refused, nor is there nothing to refuse


@pytest.mark.parametrize('kind', FILES)
def test_a_number_is_a_mutation(kind, folder):
    if kind == 'pickle':
        use_pickle(folder)
    good = (folder / FILES[kind]).read_bytes()
    assert mutate(kind, 3, good) == mutate(kind, 3, good) and mutate(kind, 3, good) != mutate(kind, 4, good)


# Errors over a file say so


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
