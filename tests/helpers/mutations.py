"""Mutations of valid files: random damage and malicious changes

Each function makes one mutation from a random number generator, so that a seed determines a mutation.
"""
import io
import json
import os
import pickle
import pickletools
import random
import struct
import zipfile
from typing import Any, Callable, Dict, Iterator, List, Tuple

import torch

from timm_gated.models._config import _REFUSED

__all__ = ['MARKER', 'Call', 'mutate']

MARKER = 'executed'  # folder that malicious code creates in the working directory when it is executed

NUMBERS: Tuple[Any, ...] = (
    0, 1, -1, 2, 7, 1000, 10**5, 10**9, 10**12, 2**31, 2**63 - 1, 2**63, -2**63, 10**30, 10**400, 0.5, 1e-320, 1e308,
    float('nan'), float('inf'), -float('inf'), True, False)
TEXTS = (
    '', 'x', 'avg', '1e9', '\x00', '\ud800', 'x' * 10**5, '/etc/passwd', '../../config.json', '__class__', 'os.system',
    'torch.nn.Linear', 'timm.models.resnet18', '{0.__class__}', '%s%n', 'hf-hub:me/other', 'local-dir:/',
    'file:///etc/passwd', 'http://127.0.0.1:9/x.pth', f"__import__('os').mkdir('{MARKER}')")


# Any bytes


def flip(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    limit = min(rng.choice((64, 4096, len(data))), len(data))  # headers are often at the start
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        changed[rng.randrange(limit)] = rng.randrange(256)
    return bytes(changed)


def truncate(rng: random.Random, data: bytes) -> bytes:
    return data[:rng.choice((rng.randrange(16), rng.randrange(len(data)), len(data) - rng.randrange(1, 16)))]


def splice(rng: random.Random, data: bytes) -> bytes:
    """Insert a piece of the file at another place, or overwrite that place with it."""
    start, at = rng.randrange(len(data)), rng.randrange(len(data))
    piece = data[start:start + rng.choice((0, 1, 8, 100, 5000))]
    return data[:at] + piece + data[at + rng.choice((0, len(piece), rng.randrange(200))):]


# JSON values


# Large sizes are excluded: timm builds any network that a config describes.
SMALL_NUMBERS = tuple(number for number in NUMBERS if type(number) is not int or number <= 1000)


def hostile_value(rng: random.Random, numbers: Tuple[Any, ...] = SMALL_NUMBERS) -> Any:
    kind = rng.randrange(8)
    if kind < 3:
        return rng.choice(numbers)
    if kind < 5:
        return rng.choice(TEXTS)
    if kind == 5:
        return [rng.choice(numbers) for _ in range(rng.choice((0, 1, 2, 3, 4, 1000)))]
    if kind == 6:
        return {rng.choice(TEXTS): rng.choice(numbers + TEXTS)}
    return rng.choice((None, [None], {}, nested(10), nested(500)))


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {'a': value}
    return value


def places(value: Any) -> Iterator[Tuple[Any, Any]]:
    """Yield every container in a value with each of its keys or indices."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def change_one(rng: random.Random, value: Any, numbers: Tuple[Any, ...] = SMALL_NUMBERS) -> None:
    """Replace, rename or remove an item at any depth. In place."""
    container, key = rng.choice(list(places(value)))
    how = rng.randrange(4)
    if how < 2 or isinstance(container, list):
        container[key] = hostile_value(rng, numbers)
    elif how == 2:
        container[rng.choice(TEXTS)] = container.pop(key)
    else:
        del container[key]


# config.json


SIZES = ('layers', 'channels', 'inner_width', 'in_chans', 'gate_hidden')
ENTRIES = (
    'architecture', 'url', 'file', 'state_dict', 'hf_hub_id', 'hf_hub_filename', 'source', 'custom_load', 'first_conv',
    'classifier', 'label_offset', 'num_classes', 'input_size', 'fixed_input_size', 'labels', 'label_names', 'license',
    'tag')
OPTIONS = (
    *SIZES, *sorted(_REFUSED), 'num_classes', 'features_only', 'device', 'block', 'recipe', 'act_layer', 'norm_layer',
    'output_stride', 'drop_rate', 'drop_path_rate',
    'zero_init_last', 'block_args', 'inner_channels', 'gated_channels', 'budget', 'budget_weight', 'lam', 'lam_epochs',
    'gamma', 'prior', 'prior_end', 'gate_bias', 'gate_temperature', 'gated_maps', 'gate_before_act', 'noise_epochs',
    'from_dense', 'network', 'features')
NAMES = (
    'gated_resnet32', 'gated_resnet152', 'cifar_resnet20', 'slim_resnet18', 'gaternet_resnet20', 'skipnet_resnet38',
    'fbs_resnet20', 'convnet_aig_resnet20', 'dgnet_resnet18', 'batch_shaped', 'resnet18', 'no_such_model',
    'gated_resnet20.bas_c10', 'hf-hub:me/other')


def change_config(rng: random.Random, config: Any) -> None:
    for _ in range(rng.choice((1, 1, 2))):
        change_one(rng, config)


def set_options(rng: random.Random, config: Any) -> None:
    for _ in range(rng.choice((1, 1, 2, 3))):
        config['model_args'][rng.choice(OPTIONS)] = hostile_value(rng)


def set_entries(rng: random.Random, config: Any) -> None:
    rng.choice((config, config['pretrained_cfg']))[rng.choice(ENTRIES)] = hostile_value(rng)


def set_name(rng: random.Random, config: Any) -> None:
    config['architecture'] = rng.choice(NAMES)
    config['model_args'].update(rng.choice((
        {}, {'gater': rng.choice(NAMES)}, {'gater_args': {rng.choice(OPTIONS): hostile_value(rng)}},
        {'network': rng.choice((*NAMES, 'vit_giant_patch14_dinov2')),
         'features': {'layer1': rng.choice(('normal', *TEXTS))}},
        {'network': 'vit_tiny_patch16_224', 'depth': rng.choice(SMALL_NUMBERS), 'features': {'blocks.0': 'normal'}})))


def config_text(rng: random.Random, data: bytes) -> bytes:
    """Text that `json.dumps` would not write."""
    text = data.decode()
    numbers = ('NaN', '-Infinity', '1e999', '9' * 5000, '1' * 4000, '0x10', '010', '"10')
    return rng.choice((
        lambda: text.replace('10', rng.choice(numbers), 1),
        lambda: text.replace('[', '[' * rng.choice((2, 10**5)), 1),
        lambda: text.replace('{', '{"model_args": {"layers": [1, 1, 1000000000]}, ', 1),  # a duplicate key
        lambda: rng.choice((' ', '\ufeff', '//', '\x00', '[]', 'null', '"x"', '3')) + rng.choice((text, '')),
        lambda: text.replace('"', '\\', 1), lambda: text + text, lambda: text.replace('_', rng.choice('-. ‿'), 3),
    ))().encode('utf-8')


def mutate_config(rng: random.Random, data: bytes) -> Tuple[str, bytes]:
    how = rng.choice((
        flip, truncate, splice, config_text, change_config, change_config, set_options, set_options, set_entries,
        set_name))
    if how in (flip, truncate, splice, config_text):
        return how.__name__, how(rng, data)
    config = json.loads(data)
    how(rng, config)
    return how.__name__, json.dumps(config).encode()


# safetensors: length of the header, JSON header, tensor data


def mutate_safetensors(rng: random.Random, data: bytes) -> Tuple[str, bytes]:
    size = struct.unpack('<Q', data[:8])[0]
    how = rng.choice((flip, truncate, splice, change_size, change_header, change_header, change_tensor, change_tensor))
    if how in (flip, truncate, splice):
        return how.__name__, how(rng, data)
    if how is change_size:
        return 'change_size', struct.pack('<Q', change_size(rng, size)) + data[8:]
    header = json.loads(data[8:8 + size])
    how(rng, header)
    text = json.dumps(header).encode()
    return how.__name__, struct.pack('<Q', len(text)) + text + data[8 + size:]


def change_size(rng: random.Random, size: int) -> int:
    sizes = (0, 1, 2, size - 1, size + 1, size * 2, 10**8, 2**31, 2**63, 2**64 - 1, 2**64 - 8)
    return rng.choice((*sizes, rng.randrange(2**64)))


def change_header(rng: random.Random, header: Dict[str, Any]) -> None:
    for _ in range(rng.choice((1, 1, 3))):
        change_one(rng, header, NUMBERS)


def change_tensor(rng: random.Random, header: Dict[str, Any]) -> None:
    """Change the type, shape or offsets of a tensor, or rename it."""
    names = [name for name in header if name != '__metadata__']
    name, other = rng.choice(names), rng.choice(names)
    entry = header[name]
    begin, end = entry['data_offsets']
    how = rng.randrange(5)
    if how == 0:
        fitting, others = ('I32', 'U32'), ('F64', 'F16', 'BF16', 'I64', 'U8', 'BOOL', 'F8_E4M3', 'C64', 'F4', 'x')
        entry['dtype'] = rng.choice(rng.choice((fitting, others)))
    elif how == 1:
        shape = entry['shape']
        entry['shape'] = rng.choice((shape[::-1], [1, *shape], [], [-1], [2**32, 2**32], [0, *shape]))
    elif how == 2:
        entry['data_offsets'] = rng.choice((
            [end, begin], [begin, begin], [0, 2**63], [2**64 - 4, 2**64], [-4, 0], [begin + 1, end + 1]))
    elif how == 3:
        header[name], header[other] = header[other], header[name]
    else:
        header[rng.choice((f'{name}x', *TEXTS))] = header.pop(name)


# torch.save: a zip file with a pickle, `data.pkl`, and one file per tensor


class Call:
    """Object whose pickle calls a function when it is loaded."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def calls(rng: random.Random) -> Call:
    """Call that loading must not execute, or with invalid arguments."""
    size, tensor = rng.choice(NUMBERS), torch.ones(4)
    storage, rebuild = tensor.storage(), torch._utils
    return rng.choice((
        Call(os.mkdir, MARKER), Call(os.system, f'mkdir {MARKER}'), Call(eval, TEXTS[-1]), Call(exec, TEXTS[-1]),
        Call(open, MARKER, 'w'), Call(getattr, dict, 'clear'), Call(torch.load, MARKER), Call(torch.jit.load, MARKER),
        Call(torch.hub.load, 'me/other', 'x'), Call(torch.zeros, size), Call(bytearray, size), Call(set, size),
        Call(rebuild._rebuild_tensor_v2, storage, 0, (size,), (1,), False, {}),
        Call(rebuild._rebuild_tensor_v2, storage, 0, (size,), (0,), False, {}),
        Call(rebuild._rebuild_tensor_v2, storage, size, (2,), (size,), False, {}),
        Call(rebuild._rebuild_parameter, tensor, size, {}),
        Call(rebuild._rebuild_sparse_tensor, torch.sparse_coo, (torch.tensor([[7, 1]]), tensor[:2], (size,), False)),
        Call(rebuild._rebuild_meta_tensor_no_storage, torch.float32, (2, size), (1, 1), False),
        Call(rebuild._rebuild_qtensor, storage, 0, (size,), (1,), (torch.per_tensor_affine, 0.1, 0), False, {}),
    ))


def pickled_by_torch(rng: random.Random, data: bytes) -> bytes:
    """Replace or add an item of the checkpoint."""
    checkpoint: Any = torch.load(io.BytesIO(data), weights_only=True)
    state_dict = checkpoint['state_dict']
    name = rng.choice(list(state_dict))
    item = rng.choice((calls, calls, calls, odd_object))(rng)
    where = rng.randrange(5)
    if where == 0:
        checkpoint = item
    elif where == 1:
        checkpoint[rng.choice(('state_dict', 'state_dict_ema', 'model', 'more'))] = item
    elif where == 2:
        state_dict[rng.choice(('more', 3, None, (), 'layer1.0.x'))] = item
    else:
        state_dict[name] = item
    file = io.BytesIO()
    torch.save(
        checkpoint, file, pickle_protocol=rng.choice((2, 2, 3, 4, 5)),
        _use_new_zipfile_serialization=rng.random() < 0.8)
    return file.getvalue()


def odd_object(rng: random.Random) -> Any:
    return rng.choice((
        rng.choice(NUMBERS), rng.choice(TEXTS), nested(50), [], {}, None, torch.float32, torch.Size([1]), torch.ones(3),
        torch.ones(4, 4, 3, 3, dtype=torch.complex64), torch.ones(4).to_sparse(), torch.ones(4, device='meta'),
        torch.ones(1).expand(10**12), torch.ones(4, dtype=torch.float8_e4m3fn), torch.nn.Linear(2, 2),
        torch.nn.Parameter(torch.ones(4))))


def plain_pickle(rng: random.Random, data: bytes) -> bytes:
    try:
        return pickle.dumps({'state_dict': calls(rng)}, protocol=rng.randrange(6))
    except Exception:  # some of the calls can only be pickled by torch
        return pickle.dumps(Call(os.mkdir, MARKER))


def entries(data: bytes) -> List[Tuple[str, bytes]]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return [(name, archive.read(name)) for name in archive.namelist()]


def archived(files: List[Tuple[str, bytes]], compression: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, 'w', compression) as archive:
        for name, content in files:
            archive.writestr(zipfile.ZipInfo(name), content, compression)
    return file.getvalue()


def rezip(rng: random.Random, data: bytes) -> bytes:
    """Remove, duplicate, rename, resize, reorder or compress files of the archive."""
    files = entries(data)
    index = rng.randrange(len(files))
    name, content = files[index]
    how = rng.randrange(6)
    if how == 0:
        del files[index]
    elif how == 1:
        files.insert(rng.randrange(len(files)), (name, content[::-1]))
    elif how == 2:
        files[index] = rng.choice(('../../' + MARKER, '/' + MARKER, name * 200, '', name.split('/')[-1])), content
    elif how == 3:
        files[index] = name, rng.choice((content * 2, content[:len(content) // 2], b'', bytes(10**6)))
    elif how == 4:
        rng.shuffle(files)
        more = rng.choice(('byteorder', '.format_version', 'constants.pkl', 'code/x.py'))
        files.append((f'{name.split("/")[0]}/{more}', content))
    return archived(files, rng.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)) if how != 5 else zipfile.ZIP_BZIP2)


def change_pickle(rng: random.Random, data: bytes) -> bytes:
    """Damage the pickle in the archive, or change a number, string, class or function in it."""
    files = entries(data)
    index = next(i for i, (name, _) in enumerate(files) if name.endswith('/data.pkl'))
    name, content = files[index]
    how = rng.choice((flip, truncate, splice, change_opcode, change_opcode, change_opcode, change_opcode))
    files[index] = name, how(rng, content)
    return archived(files)


GLOBALS = (
    'os\nsystem', 'posix\nsystem', 'builtins\neval', '__builtin__\ngetattr', 'builtins\nbytearray', 'torch\nload',
    'torch.hub\nload', 'torch\nDoubleStorage', 'torch\nQInt8Storage', 'torch.storage\nUntypedStorage',
    'torch._utils\n_rebuild_parameter', 'torch._utils\n_rebuild_sparse_tensor', 'torch._utils\n_rebuild_qtensor',
    'torch._utils\n_rebuild_wrapper_subclass', 'torch._tensor\n_rebuild_from_type_v2', 'torch\nTensor', 'torch\nSize',
    'collections\nCounter', 'argparse\nNamespace', 'x\nx')


def change_opcode(rng: random.Random, content: bytes) -> bytes:
    operations = list(pickletools.genops(content))
    kind = rng.choice((int, int, int, str, 'GLOBAL'))
    chosen = [
        index for index, (opcode, argument, _) in enumerate(operations)
        if (opcode.name == 'GLOBAL' if kind == 'GLOBAL' else type(argument) is kind and opcode.name in (
            'BININT', 'BININT1', 'BININT2', 'LONG1', 'BINUNICODE'))]
    index = rng.choice(chosen)
    start, end = operations[index][2], operations[index + 1][2]
    if kind == 'GLOBAL':
        other = b'c' + rng.choice(GLOBALS).encode() + b'\n'
    else:
        texts = (*TEXTS, '0', '999', 'cuda', 'meta', '../0')
        value = rng.choice([number for number in NUMBERS if type(number) is int] if kind is int else texts)
        other = pickle.dumps(value, protocol=2)[2:-1]  # without PROTO and STOP
    return content[:start] + other + content[end:]


def mutate_pickle(rng: random.Random, data: bytes) -> Tuple[str, bytes]:
    how = rng.choice((
        flip, truncate, splice, rezip, rezip, change_pickle, change_pickle, change_pickle, pickled_by_torch,
        pickled_by_torch, pickled_by_torch, plain_pickle))
    return how.__name__, how(rng, data)


_KINDS: Dict[str, Callable[[random.Random, bytes], Tuple[str, bytes]]] = {
    'config': mutate_config, 'safetensors': mutate_safetensors, 'pickle': mutate_pickle}


def mutate(kind: str, index: int, data: bytes) -> Tuple[str, bytes]:
    """Mutate a file; returns the name of the mutation and the mutated file.

    Args:
        kind: Kind of the file: 'config', 'safetensors' or 'pickle'.
        index: Number of the mutation, used as seed.
        data: Content of the valid file.
    """
    return _KINDS[kind](random.Random(f'{kind} {index}'), data)
