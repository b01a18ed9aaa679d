"""Accelerated networks are saved, loaded and pickled without a change; files that are not valid are refused"""
import json
import pickle
import random
import resource
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Dict, List

import mmseg_plugin  # noqa: F401  (before mmseg)

# isort: split
import pytest
import torch
from accelerated import images
from effort import TIMES
from forked import CONTEXT
from hypothesis import assume, given
from int8_programs import int8_programs
from mutations import mutate
from programs import programs
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
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
from timm_gated.inference import Accelerated, serialize
from timm_gated.inference.native import NativeRunner
from timm_gated.inference.program import Int8LinearOp, OutputOp, Program, QuantizeOp
from timm_gated.inference.serialize import COLUMNS, Network, decode, encode, save_network
from timm_gated.inference.sliced import SlicedRunner

ZERO = COLUMNS.index('zero')

both = pytest.mark.parametrize('backend', ['native', 'torch'])


def as_list(output: Any) -> List[torch.Tensor]:
    return [output] if isinstance(output, torch.Tensor) else list(getattr(output, 'values', lambda: output)())


def assert_same(network: Accelerated, other: Accelerated, x: torch.Tensor) -> None:
    """Check that outputs, features and MACs of two networks are the same to the last bit."""
    assert network.backend == other.backend and str(network) == str(other)
    outputs, macs = zip(*(fast.run_with_macs(x) for fast in (network, other)), strict=True)
    features = [fast.forward_features(x) for fast in (network, other)]
    for ours, theirs in (outputs, features):
        assert type(ours) is type(theirs) and getattr(ours, 'keys', list)() == getattr(theirs, 'keys', list)()
        assert all(torch.equal(a, b) for a, b in zip(as_list(ours), as_list(theirs), strict=True))
    assert macs[0].dense == macs[1].dense and torch.equal(macs[0].per_sample, macs[1].per_sample)
    assert list(macs[0].by_module) == list(macs[1].by_module)


@pytest.mark.parametrize(
    'name, kwargs', NETWORKS, ids=lambda value: '-'.join(map(str, value)) if isinstance(value, dict) else None)
def test_round_trip(name, kwargs, tmp_path):
    model, x = make(name, **kwargs), images(2, 48, 40, kwargs.get('in_chans', 3))
    contents = set()
    for saving in ('native', 'torch'):
        accelerate(model, saving).save(tmp_path / 'model.tgn')
        contents.add((tmp_path / 'model.tgn').read_bytes())
        for loading in ('native', 'torch'):
            fast = load_accelerated(tmp_path / 'model.tgn', loading)
            assert_same(fast, accelerate(model, loading), x)
            fast.save(tmp_path / 'again.tgn')
            contents.add((tmp_path / 'again.tgn').read_bytes())
    assert len(contents) == 1  # a file depends on the network only


@both
def test_segmentor(tmp_path, backend):
    """The file of a backbone whose program includes the decode head is the complete segmentor."""
    model, x = segmentor(tmp_path), images(1, 64, 64)
    fast = accelerate(model, backend)
    expected = fast(x, mode='tensor')
    fast.backbone.save(tmp_path / 'model.tgn')
    loaded = load_accelerated(tmp_path / 'model.tgn', backend)
    assert_same(loaded, fast.backbone, x)
    assert torch.equal(loaded(x), expected)
    assert torch.equal(pickle.loads(pickle.dumps(fast))(x, mode='tensor'), expected)


def test_plan_names_the_same_layers(tmp_path):
    fast, x = accelerate(make(), 'native'), images(1, 32, 32)
    fast.save(tmp_path / 'model.tgn')
    plans = [network.plan(x, runs=1).layers for network in (fast, load_accelerated(tmp_path / 'model.tgn', 'native'))]
    assert [layer[:4] for layer in plans[0]] == [layer[:4] for layer in plans[1]]
    assert any(layer.name == 'fc' for layer in plans[0])


@examples(60)
@given(arguments=programs() | int8_programs())
def test_random_programs(arguments):
    try:
        program = Program(*arguments)
    except ValueError:
        assume(False)
    tensors = encode(Network(program))
    data = save_tensors({name: tensor.contiguous() for name, tensor in tensors.items()})
    again = decode(load_tensors(data)).program
    assert (again.in_channels, again.num_maps, again.num_gates) == arguments[:1] + arguments[2:]
    for op, expected in zip(again.ops, program.ops, strict=True):
        assert type(op) is type(expected)
        for name, value in vars(expected).items():
            same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: type(a) is type(b) and a == b
            assert same(getattr(op, name), value), (name, op)
    x = torch.randn(2, program.in_channels, 9, 7, generator=torch.Generator().manual_seed(0))
    is_int8 = any(isinstance(op, (QuantizeOp, Int8LinearOp)) for op in program.ops)
    for runner in (NativeRunner,) if is_int8 else (NativeRunner, SlicedRunner):
        try:
            maps = runner(program)(x)
        except (ValueError, MemoryError, RuntimeError):  # the images are too small for the program, or too large
            return
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(runner(again)(x), maps, strict=True))


@both
@pytest.mark.parametrize('name, kwargs', [('gated_resnet20', {}), ('convnet_aig_resnet18', SHALLOW)])
def test_files_of_version_1(name, kwargs, tmp_path, backend):
    fast, path = accelerate(make(name, **kwargs), backend), tmp_path / 'model.tgn'
    fast.save(path)
    path.write_bytes(file_of(version_1(load_tensors(path.read_bytes()))))
    assert_same(load_accelerated(path, backend), fast, images(2, 32, 32))


def run(fast: Any, x: torch.Tensor) -> Any:
    torch.set_num_threads(1)
    return fast(x)


@both
def test_in_another_process(backend):
    fast, x = accelerate(make(), backend), images(2, 32, 32)
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:
        assert torch.equal(pool.submit(run, fast, x).result(), fast(x))


def test_pickles_keep_the_head_that_runs_in_torch():
    fast, x = accelerate(make('gated_resnet18', **SHALLOW, global_pool='max'), 'native'), images(1)
    assert_same(pickle.loads(pickle.dumps(fast)), fast, x)


@both
def test_heads_that_run_in_torch_are_named(tmp_path, backend):
    fast = accelerate(make('gated_resnet18', **SHALLOW, global_pool='max'), backend)
    with pytest.raises(ValueError, match=r'its head runs in torch: .*pool_type=max'):
        fast.save(tmp_path / 'model.tgn')
    assert not list(tmp_path.iterdir())


def test_outputs_without_a_known_form_are_refused(tmp_path):
    with pytest.raises(ValueError, match='output of the network cannot be saved: <built-in function len>'):
        save_network(Network(Program(3, [OutputOp(0)]), len), tmp_path / 'model.tgn')


def test_weights_are_saved_in_float32(tmp_path):
    model = make().double()
    accelerate(model, 'torch').save(tmp_path / 'model.tgn')
    x = images(2, 32, 32)
    torch.testing.assert_close(
        load_accelerated(tmp_path / 'model.tgn')(x).double(), model(x.double()), atol=1e-4, rtol=1e-4)


def test_files_are_replaced_completely_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / 'model.tgn'
    fast = accelerate(make())
    fast.save(str(path))
    before = path.read_bytes()

    def fail(tensors, file, metadata):
        Path(file).write_bytes(b'half')
        raise OSError('no space')

    monkeypatch.setattr(serialize, 'save_file', fail)
    with pytest.raises(OSError, match='no space'):
        fast.save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_loaded_network_does_not_need_its_file(tmp_path):
    path, x = tmp_path / 'model.tgn', images(1, 32, 32)
    fast = accelerate(make(), 'torch')
    fast.save(path)
    loaded = load_accelerated(path, 'torch')
    path.write_bytes(b'')  # in place
    assert_same(loaded, fast, x)


@pytest.mark.parametrize('kwargs, message', [
    (dict(backend='cuda'), "one of auto, native, torch, got 'cuda'"),
    (dict(backend='torch', isa='avx2'), 'an option of the native backend'),
    (dict(backend='native', isa='sse9'), "no instruction set 'sse9'"),
])
def test_bad_options(kwargs, message, tmp_path):
    accelerate(make(**NET)).save(tmp_path / 'model.tgn')
    with pytest.raises(ValueError, match=message):
        load_accelerated(tmp_path / 'model.tgn', **kwargs)


# Files that are not valid


def saved(path: Path) -> bytes:
    accelerate(make(**NET)).save(path)
    return path.read_bytes()


def as_text(content: Any) -> torch.Tensor:
    return torch.tensor(list(json.dumps(content).encode()), dtype=torch.uint8)


def with_text(data: bytes, text: bytes) -> bytes:
    return file_of({**load_tensors(data), 'text': torch.tensor(list(text), dtype=torch.uint8)})


def row(tensors: Dict[str, torch.Tensor], name: str) -> int:
    """First operation that has a column."""
    return int((tensors['operations'][:, COLUMNS.index(name)] >= 0).nonzero()[0, 0])


def set_column(name: str, value: int) -> Any:
    def change(tensors: Dict[str, torch.Tensor], text: Dict[str, Any]) -> None:
        tensors['operations'][row(tensors, name), COLUMNS.index(name)] = value
    return change


def set_network(index: int, value: int) -> Any:
    def change(tensors: Dict[str, torch.Tensor], text: Dict[str, Any]) -> None:
        tensors['network'][index] = value
    return change


@pytest.mark.parametrize('change, message', [
    (set_network(0, 3), r'the version of the format must be 1 or 2, got \[3\]'),
    (set_network(0, 1), r'operations must have the shape \[rows, 20\], got \(\d+, 23\)'),
    (set_network(1, 4), 'operation 0, ConvOp: source 0 has 4 channels, the weight has 3'),
    (set_network(2, 2**20 + 1), 'num_maps must be an integer between 1 and 1048576, got 1048577'),
    (set_network(3, -1), 'num_gates must be an integer between 0'),
    (set_network(4, 2), 'the last 2 operations are not a classifier'),
    (set_network(4, 10**6), 'operations are not a classifier'),
    (set_network(5, 4), 'the form of the output must be between 0 and 3, got 4'),
    (set_network(5, 3), 'the keys of 1 outputs'),
    (set_network(5, 0), 'a classifier needs features that are a single map'),
    (set_column('kind', 15), 'operation 0: kind must be between 0 and 14, got 15'),
    (set_column('source', -2**63), 'operation 0, ConvOp: source must be an integer between 0'),
    (set_column('source', 3), 'operation 0, ConvOp: source 3 is read before it is written'),
    (set_column('relu', 2), 'operation 0, ConvOp: options must be 0 or 1, got 2'),
    (set_column('macs', 2**62), 'macs must be an integer between 0'),
    (lambda tensors, text: tensors['operations'][0].__setitem__(-1, 5), "must be -1: {'factors': 5}"),
    (lambda tensors, text: tensors.update(operations=tensors['operations'][:, 1:].clone()), r'the shape \[rows, 23\]'),
    (lambda tensors, text: tensors.update(operations=tensors['operations'].int()), 'operations must be torch.int64'),
    (lambda tensors, text: tensors.update(network=torch.zeros(0, dtype=torch.int64)), r'must be 1 or 2, got \[\]'),
    (lambda tensors, text: tensors.update(network=tensors['network'][:5].clone()), 'must have 6 values, got 5'),
    (lambda tensors, text: tensors.pop('network'), 'network is missing'),
    (lambda tensors, text: tensors.pop('0.bias'), '0.bias is missing'),
    (lambda tensors, text: tensors.update({'0.bias': tensors['0.bias'].half()}), '0.bias must be torch.float32'),
    (lambda tensors, text: tensors.update({'0.weight': torch.ones(4)}), 'weight must have 4 dimensions'),
    (lambda tensors, text: tensors.update({'0.extra': torch.ones(4)}), "'0.extra' is not part of the network"),
    (lambda tensors, text: text.update(names=text['names'][1:]), 'one name per operation'),
    (lambda tensors, text: text.update(names=[1] * len(text['names'])), 'one name per operation'),
    (lambda tensors, text: text.update(keys=['a']), 'only a dict of outputs has keys'),
    (lambda tensors, text: text.update(keys=[[]]), 'keys of the outputs must be a list of strings'),
])
def test_wrong_content(change, message, tmp_path):
    path = tmp_path / 'model.tgn'
    data = saved(path)
    tensors = load_tensors(data)
    text = json.loads(bytes(tensors['text'].tolist()))
    change(tensors, text)
    path.write_bytes(file_of({**tensors, 'text': as_text(text)}))
    with pytest.raises(ValueError, match=message) as error:
        load_accelerated(path)
    assert str(error.value).startswith(f'{path} does not hold an accelerated network: ')


def set_value(name: str, value: float) -> Any:
    def change(tensors: Dict[str, torch.Tensor]) -> None:
        tensors[f'1.{name}'].view(-1)[0] = value  # of the first convolution
    return change


ZERO = COLUMNS.index('zero')


@pytest.mark.parametrize('change, message', [
    (set_value('weight', 64), 'Int8ConvOp: weight must be between -63 and 63'),
    (set_value('bias', 2**30 + 1), 'Int8ConvOp: bias must be between'),
    (set_value('multiplier', 1.5), 'Int8ConvOp: multiplier must be between 0 and 1'),
    (set_value('scale', -1.), r'scale must be one positive value, got \[-1.0\]'),
    (lambda tensors: tensors.update({'0.scale': torch.ones(2)}), 'scale must be one positive value'),
    (lambda tensors: tensors.update({'1.bias': tensors['1.bias'].float()}), '1.bias must be torch.int32'),
    (lambda tensors: tensors.update({'1.ratio': torch.ones(16)}), "'1.ratio' is not part of the network"),
    (lambda tensors: tensors.pop('1.multiplier'), '1.multiplier is missing'),
    (lambda tensors: tensors['operations'][0].__setitem__(ZERO, 256), 'zero must be an integer between 0 and 255'),
    (lambda tensors: tensors['operations'][1].__setitem__(ZERO, -1), 'zero must be an integer between 0 and 255'),
])
def test_wrong_content_of_int8_files(change, message, tmp_path):
    path = tmp_path / 'model.tgn'
    quantised(**NET).save(path)
    tensors = load_tensors(path.read_bytes())
    change(tensors)
    path.write_bytes(file_of(tensors))
    with pytest.raises(ValueError, match=message):
        load_accelerated(path)


@pytest.mark.parametrize('content, message', [
    (lambda data: b'', 'does not hold'),
    (lambda data: data[:-1], 'does not hold.*(incomplete|Incomplete|covered|SafetensorError)'),
    (lambda data: pickle.dumps(print), 'does not hold'),
    (lambda data: save_tensors({'weight': torch.ones(2)}), 'was not saved by `save`'),
    (lambda data: save_tensors(load_tensors(data), {'timm_gated': 'x' * 100}), "checksum is [0-9a-f]{8}, not 'x{80}'"),
    (lambda data: data[:-1] + bytes([data[-1] ^ 1]), 'it is damaged: the checksum is'),
    (lambda data: with_text(data, b'['), 'the names of its layers are not JSON'),
    (lambda data: with_text(data, b'\xff'), 'the names of its layers are not JSON'),
    (lambda data: with_text(data, b'[' * 10**5), 'RecursionError'),
    (lambda data: with_text(data, b'3'), 'one name per operation'),
])
def test_other_files(content, message, tmp_path):
    path = tmp_path / 'model.tgn'
    path.write_bytes(content(saved(path)))
    with pytest.raises(ValueError, match=message) as error:
        load_accelerated(path)
    assert str(error.value).startswith(str(path))


def test_files_that_cannot_be_opened(tmp_path):
    for path, error in ((tmp_path / 'none.tgn', FileNotFoundError), (tmp_path, IsADirectoryError)):
        with pytest.raises(error):
            load_accelerated(path)


def load_mutations(path: str, count: int, backends: List[str]) -> Counter:
    """Load mutations of a file and run those that load. In a process of its own, with little memory."""
    torch.set_num_threads(1)
    data, x = Path(path).read_bytes(), images(1, 8, 8)
    same = as_list(load_accelerated(path, 'native')(x))
    in_use = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**30, resource.RLIM_INFINITY))
    outcomes: Counter = Counter()
    for index in range(count):
        rng = random.Random(index)
        changed = change_integers(rng, data) if index % 2 else mutate('safetensors', index, data)[1]
        Path(path).write_bytes(changed)
        try:
            loaded = [load_accelerated(path, backend) for backend in backends]
        except ValueError as error:
            assert str(error).startswith(path), error
            outcomes['refused'] += 1
            continue
        for fast in loaded:
            try:
                output = as_list(fast(x))
                is_same = len(output) == len(same) and all(map(torch.equal, output, same))
                outcomes['same' if is_same else 'other'] += 1
            except (ValueError, MemoryError, RuntimeError):  # an image too small, or maps too large
                outcomes['does not run'] += 1
    return outcomes


@pytest.mark.parametrize(
    'network, backends', [('classifier', ['native', 'torch']), ('int8', ['native']), ('family', ['native', 'torch'])])
def test_mutations(network, backends, tmp_path):
    path, count = tmp_path / 'model.tgn', 240 * TIMES
    save_kind(network, path)
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as pool:
        outcomes = pool.submit(load_mutations, str(path), count, backends).result()
    # Most mutations are damage, some are harmless. Half of them are programs with a correct checksum.
    assert 0.5 * count < outcomes['refused'] < count, outcomes
    assert outcomes['same'] > 0, outcomes
