"""Checkpoints and configs of strangers: a thousand mutations of each are loaded whole, or refused with an error

Loading goes on in a process of its own (tests/hostile_worker.py), so that a crash, a hang or a huge allocation is seen,
and told with the number of its mutation: `mutate(kind, number, good)` in tests/mutations.py makes it again.
"""
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hostile_worker import FILES, NET
from hub_client import make
from mutations import mutate

from timm_gated import save_pretrained

COUNT = 1000

# What a mutation may come to, beside a whole model. Our own ways raise nothing but a ValueError, which names the file.
# timm itself reads a config before the model is asked for.
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
}


@pytest.fixture
def folder(tmp_path):
    return save_pretrained(make(**NET), tmp_path / 'model')


@pytest.mark.parametrize('kind', FILES)
def test_mutations(kind, folder, tmp_path):
    if kind == 'pickle':
        torch.save({'state_dict': make(**NET).state_dict(), 'epoch': 3}, folder / FILES[kind])
        (folder / FILES['safetensors']).unlink()
    report = tmp_path / 'report'
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name('hostile_worker.py'), kind, str(COUNT), report], cwd=folder,
        capture_output=True, text=True, timeout=3600, env=dict(os.environ, OMP_NUM_THREADS='1'))
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
        torch.save({'state_dict': make(**NET).state_dict()}, folder / FILES[kind])
    good = (folder / FILES[kind]).read_bytes()
    assert mutate(kind, 3, good) == mutate(kind, 3, good) and mutate(kind, 3, good) != mutate(kind, 4, good)
