"""Saved networks in the C library, without Python: outputs, threads, errors, damaged files, the example"""
import ctypes
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, List, Tuple

import mmseg_plugin  # noqa: F401  (before mmseg)

# isort: split
import numpy as np
import pytest
import torch
from c_library import CSRC, EMULATOR, OPTIMIZED, SANITIZED, SOURCES, build, numbered_images, output_of
from effort import TIMES
from hypothesis import assume, given
from int8_programs import int8_programs
from int8_reference import run_reference
from mutations import mutate
from paths import ROOT
from programs import programs
from safetensors.torch import load as load_tensors
from saved_networks import (
    NET,
    NETWORKS,
    SHALLOW,
    change_integers,
    file_of,
    make,
    quantised,
    save_kind,
    segmentor,
    version_1,
)
from strategies import examples

from timm_gated import accelerate, load_accelerated
from timm_gated.inference import Accelerated
from timm_gated.inference import native as native_module
from timm_gated.inference.program import ConvOp, OutputOp, Program
from timm_gated.inference.serialize import Network, save_network
from timm_gated.inference.sliced import SlicedRunner

ISAS = ('portable',) if EMULATOR else native_module.instruction_sets()
INT8_ISAS = ('portable',) if EMULATOR else native_module.instruction_sets('int8')
DRIVER = ROOT / 'tests' / 'inference' / 'run_model.c'


@pytest.fixture(scope='session')
def run_model(tmp_path_factory):
    return build(tmp_path_factory.mktemp('c') / 'run_model', [DRIVER, *SOURCES], SANITIZED)


def run(program: Path, paths: List[Path], isa: str = '', threads: int = 1, count: int = 2, size: Any = (48, 40),
        callers: int = 1) -> List[str]:
    lines = output_of(program, isa, threads, count, *size, callers, *paths)
    assert len(lines) == len(paths)
    return lines


def outputs(path: Path) -> torch.Tensor:
    """All outputs, flat."""
    return torch.from_numpy(np.fromfile(f'{path}.out', np.float32))


def expected_outputs(fast: Accelerated, x: torch.Tensor) -> torch.Tensor:
    return torch.cat([value.flatten() for value in fast.runner(x)])


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    scale = expected.nan_to_num().abs().max().clamp(min=1)
    torch.testing.assert_close(actual / scale, expected / scale, atol=3e-5, rtol=0, equal_nan=True)


@pytest.mark.parametrize('isa', ISAS)
def test_networks(isa, run_model, tmp_path):
    """Classifiers, backbones and a segmentor; one and two threads."""
    checked = 0
    networks = [accelerate(make(name, **kwargs)) for name, kwargs in NETWORKS]
    for index, fast in enumerate([*networks, accelerate(segmentor(tmp_path), 'native').backbone]):
        path = tmp_path / f'{index}.tgn'
        fast.save(path)
        channels = load_tensors(path.read_bytes())['network'][1]
        expected = expected_outputs(load_accelerated(path, 'native'), numbered_images(2, channels, 48, 40))
        for threads in (1, 2):
            assert run(run_model, [path], isa, threads) == ['ok']
            assert_close(outputs(path), expected)
            checked += 1
    assert checked == 2 * (len(NETWORKS) + 1)


@examples(40)
@given(arguments=programs())
def test_random_programs(run_model, arguments):
    try:
        program = Program(*arguments)
    except ValueError:
        assume(False)
    with TemporaryDirectory() as folder:
        path = Path(folder) / 'model.tgn'
        save_network(Network(program), path)
        line, = run(run_model, [path], size=(9, 7))
        try:
            maps = SlicedRunner(program)(numbered_images(2, program.in_channels, 9, 7))
        except (ValueError, MemoryError, RuntimeError):  # the images are too small for the program, or too large
            return
        assert line == 'ok' or 'large' in line or 'memory' in line, line
        if line == 'ok':
            assert_close(outputs(path), torch.cat([value.flatten() for value in maps]))


@pytest.mark.parametrize('name, kwargs', [
    ('gated_resnet50', dict(SHALLOW, in_chans=1)), ('convnet_aig_resnet20', {}), ('resnet26d', SHALLOW),
    ('gated_resnet18', dict(SHALLOW, features_only=True))], ids=str)
def test_int8_networks(name, kwargs, run_model, tmp_path):
    """The same bits as in Python, on every instruction set and with one and two threads."""
    fast, path = quantised(name, **kwargs), tmp_path / 'model.tgn'
    fast.save(path)
    expected = expected_outputs(fast, numbered_images(2, kwargs.get('in_chans', 3), 48, 40))
    for isa in INT8_ISAS:
        for threads in (1, 2):
            assert run(run_model, [path], isa, threads) == ['ok']
            assert torch.equal(outputs(path), expected), (isa, threads)


@examples(30)
@given(arguments=int8_programs())
def test_random_int8_programs(run_model, arguments):
    try:
        program = Program(*arguments)
    except ValueError:
        assume(False)
    with TemporaryDirectory() as folder:
        path = Path(folder) / 'model.tgn'
        save_network(Network(program), path)
        line, = run(run_model, [path], size=(9, 7))
        assert line == 'ok' or re.search('small|large|memory', line), line
        if line == 'ok':
            expected = run_reference(program, numbered_images(2, program.in_channels, 9, 7))
            if expected.exact:
                assert torch.equal(outputs(path), torch.cat([value.flatten() for value in expected.outputs]))


def mutations(data: bytes, count: int) -> List[Tuple[bool, bytes]]:
    """Damaged files, and hostile ones: other programs with a correct checksum."""
    return [
        (False, mutate('safetensors', index, data)[1]) if index % 2 else
        (True, change_integers(random.Random(index), data)) for index in range(count)]


def test_files_of_version_1(run_model, tmp_path):
    paths = [tmp_path / 'new.tgn', tmp_path / 'old.tgn']
    accelerate(make(**NET)).save(paths[0])
    paths[1].write_bytes(file_of(version_1(load_tensors(paths[0].read_bytes()))))
    assert run(run_model, paths, size=(8, 8)) == ['ok', 'ok']
    assert torch.equal(*map(outputs, paths))


@pytest.mark.parametrize('network, count', [('classifier', 1000), ('int8', 1000), ('family', 400)])
def test_mutations(run_model, network, count, tmp_path):
    """Damaged files are an error, or the same network. Hostile files are an error, or some network."""
    path = tmp_path / 'model.tgn'
    save_kind(network, path)
    assert run(run_model, [path], size=(8, 8)) == ['ok']
    expected = outputs(path)
    outcomes: Counter = Counter()
    for start in range(0, count * TIMES, 100):
        changed = mutations(path.read_bytes(), start + 100)[start:]
        paths = [tmp_path / str(index) for index in range(100)]
        for other, (_, data) in zip(paths, changed, strict=True):
            other.write_bytes(data)
        for other, (is_hostile, _), line in zip(paths, changed, run(run_model, paths, size=(8, 8)), strict=True):
            if line.startswith('error: '):
                outcomes['refused'] += 1
            else:
                same = torch.equal(outputs(other), expected)
                assert line == 'ok' and (same or is_hostile), line
                outcomes['same' if same else 'other'] += 1
    assert outcomes['refused'] > 0.6 * count * TIMES and outcomes['same'] and outcomes['other'], outcomes


REWRITE = """
import sys, time
data = open(sys.argv[1], 'rb').read()
while True:
    open(sys.argv[1], 'wb').write(data)
    time.sleep(0.001)
"""


def test_files_that_change_while_they_are_read(run_model, tmp_path):
    path, outcomes = tmp_path / 'model.tgn', set()
    accelerate(make(**NET)).save(path)
    with subprocess.Popen([sys.executable, '-c', REWRITE, path]) as writer:
        for _ in range(40):
            outcomes.update(line.split(':')[0] for line in run(run_model, [path] * 20, size=(8, 8)))
        writer.kill()
    assert outcomes == {'ok', 'error'}


@pytest.mark.parametrize('dilation', [1, 63, 64])
@pytest.mark.parametrize('size', [(2**26, 1), (1, 2**26), (2**20, 64), (2**13, 2**13)])
def test_plans_of_the_largest_images(dilation, size, run_model, tmp_path):
    """No offset overflows. Without images, a network is planned but not run."""
    conv = ConvOp(0, 1, torch.ones(1, 1, 3, 3), torch.ones(1), 1, dilation, dilation)
    save_network(Network(Program(1, [conv, OutputOp(1)], 2)), tmp_path / 'model.tgn')
    assert run(run_model, [tmp_path / 'model.tgn'], count=0, size=size) == ['ok']


@pytest.mark.skipif(bool(EMULATOR), reason='sanitizers do not run in an emulator')
@pytest.mark.parametrize('precision', ['float32', 'int8'])
def test_callers(precision, tmp_path):
    """Threads that share a model, under ThreadSanitizer."""
    flags = ('-O1', '-g', '-fsanitize=thread', '-DCACHE_BYTES=65536')
    program = build(tmp_path / 'run_model', [DRIVER, *SOURCES], flags)
    (quantised(**NET) if precision == 'int8' else accelerate(make(**NET))).save(tmp_path / 'model.tgn')
    assert run(program, [tmp_path / 'model.tgn'], threads=2, size=(24, 20), callers=7) == ['ok']


@pytest.mark.parametrize('content, message', [
    (None, 'No such file or directory'),
    (lambda data: b'', 'it is damaged: 0 bytes'),
    (lambda data: data[:1000], 'it is damaged: 1000 bytes with a header of'),
    (lambda data: data[:-8], r'a tensor of \d+ bytes is at'),
    (lambda data: data + bytes(8), r'its tensors have \d+ bytes, but it holds'),
    (lambda data: data[:-1] + bytes([data[-1] ^ 1]), 'it is damaged: the checksum is [0-9a-f]{8}'),
    (lambda data: data.replace(b'__metadata__', b'__metadati__'), 'its header is malformed'),
    (lambda data: data.replace(b'timm_gated', b'timm_gatad'), 'it was not saved by `save`'),
    (lambda data: data.replace(b'"0.bias"', b'"0.bia\x1b"'), 'its header is malformed'),
    (lambda data: data.replace(b'"0.bias"', b'"0.bia\\\x1b'), 'its header is malformed'),
    (lambda data: data.replace(b'"F32"', b'"F64"', 1), 'a tensor is of type F64'),
    (lambda data: file_of({**load_tensors(data), 'more': torch.ones(1)}), "'more' is not part of the network"),
    (lambda data: file_of({
        name: value for name, value in load_tensors(data).items() if name != '0.bias'}), '0.bias is missing'),
])
def test_errors(content, message, tmp_path):
    path = tmp_path / 'model.tgn'
    accelerate(make(**NET)).save(path)
    if content is None:
        path = tmp_path / 'none'
    else:
        path.write_bytes(content(path.read_bytes()))
    library = ctypes.CDLL(native_module._get()._name)
    library.tg_load.restype, library.tg_error.restype = ctypes.c_void_p, ctypes.c_char_p
    assert library.tg_load(str(path).encode(), None) is None
    error = library.tg_error().decode()
    assert error.startswith(f'{path} cannot be loaded: ')
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(error)


def compare(program: Path) -> Tuple[int, List[int]]:
    """Exit code of examples/compare.py, and on how many of ten images C and Python agree, in float32 and in int8."""
    command = [sys.executable, ROOT / 'examples' / 'compare.py', program, '--runs', '0']
    done = subprocess.run(command, capture_output=True, text=True)
    agreed = re.findall(r'C and Python agree on (\d+) of 10 real images', done.stdout)
    assert agreed, done.stderr
    return done.returncode, [int(count) for count in agreed]


def test_example(tmp_path):
    """The example and Python agree on the five classes with the largest logits, and on these."""
    program = build(tmp_path / 'classify', [ROOT / 'examples' / 'classify.c', *SOURCES], OPTIMIZED)
    if EMULATOR:
        script = tmp_path / 'emulated'
        script.write_text(f'#!/bin/sh\nexec {" ".join(EMULATOR)} {program} "$@"\n')
        script.chmod(0o755)
        program = script
    assert compare(program) == (0, [10, 10])
    wrong = tmp_path / 'wrong'
    wrong.write_text(f'#!/bin/sh\n{program} "$@" | sed "s/  [0-9]* /  11 /"\n')
    wrong.chmod(0o755)
    assert compare(wrong) == (1, [0, 0])


def test_public_header(tmp_path):
    """Strict C11; the example stays short."""
    source = tmp_path / 'main.c'
    source.write_text('#include "timm_gated.h"\nint main(void) { return tg_version() == TG_VERSION ? 0 : 1; }\n')
    assert output_of(build(tmp_path / 'main', [source, *SOURCES], ('-O0',))) == []
    build(tmp_path / 'header.o', [source], ('-std=c11', '-pedantic', '-c'))
    assert len((ROOT / 'examples' / 'classify.c').read_text().splitlines()) < 150
    assert f'#define TG_VERSION {native_module._VERSION}\n' in (CSRC / 'timm_gated.h').read_text()
