"""Models as folders and on the Hugging Face hub: a config, weights and a card, in the layout that timm reads

Once `timm_gated` is imported, `timm.create_model` makes these models by itself, from 'local-dir:FOLDER' and from
'hf-hub:OWNER/NAME'. Here is what timm does not do: folders that are written whole or not at all, a card with measured
figures, and downloads that are checked, by their checksums and by loading them, before they are there. Weights are
safetensors throughout; pickles are neither written nor fetched.
"""
import copy
import json
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Union

import timm
import torch
import torch.nn as nn
from huggingface_hub import CommitInfo, CommitOperationAdd, HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError, HTTPError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from timm.models import save_for_hf

from ..loss import Objective
from ..models import check_model_args, entry_points, list_gated_models, read_config, storable
from ..utils import check_new, explained, new_folder
from ..version import __version__
from .card import SOMEWHERE, model_card

__all__ = ['check_pretrained', 'pull_from_hub', 'push_to_hub', 'save_pretrained']

CONFIG_FILE, WEIGHTS_FILE, CARD_FILE = 'config.json', 'model.safetensors', 'README.md'


def save_pretrained(
        model: Any,
        directory: Union[str, Path],
        label_names: Optional[Sequence[str]] = None,
        card: Union[ModelCard, str, None] = None,
) -> Path:
    """Save a model as a folder, from which `timm.create_model('local-dir:…', pretrained=True)` makes it again.

    The folder is written whole or not at all. Options of the model are stored in the config, irregular widths too.

    Args:
        model: A model of this package.
        directory: The folder; it must not exist, or be empty.
        label_names: Names of the outputs, to be stored with them.
        card: The model's card, see `timm_gated.card.model_card`; by default one without measured figures.

    Example:
        >>> save_pretrained(pruned.model, 'pruned')
        >>> timm.create_model('local-dir:pruned', pretrained=True)
    """
    check_new(directory)
    if not hasattr(model, '_model_args') or not hasattr(model, 'num_classes'):
        raise ValueError(
            f'this {type(model).__name__} does not know how it was made, so it could not be made again. Only '
            f'classifiers made by timm.create_model can be saved.')
    config: Dict[str, Any] = {}
    if label_names is not None:
        if len(label_names) != model.num_classes:
            raise ValueError(f'the model has {model.num_classes} outputs, got {len(label_names)} names for them.')
        config['label_names'] = list(label_names)
    card = str(model_card(model) if card is None else card)
    if not all(tensor.is_contiguous() for tensor in model.state_dict().values()):  # channels last
        model = copy.deepcopy(model).to(memory_format=torch.contiguous_format)
    with new_folder(directory) as partial:
        save_for_hf(model, str(partial), model_config=config, safe_serialization=True)
        _tidy_config(partial / CONFIG_FILE)
        (partial / CARD_FILE).write_text(card, encoding='utf-8')
        (partial / WEIGHTS_FILE).chmod((partial / CONFIG_FILE).stat().st_mode)  # which safetensors closes to others
        _check_fit(partial, str(directory))
    return Path(directory)


def _tidy_config(path: Path) -> None:
    """Take out of a config what is not of the weights beside it: options of a training, and the tag they began with."""
    config = json.loads(path.read_text(encoding='utf-8'))
    config['model_args'] = storable(config['model_args'])
    config['pretrained_cfg'].pop('tag', None)
    path.write_text(json.dumps(config, indent=2), encoding='utf-8')


def check_pretrained(directory: Union[str, Path]) -> nn.Module:
    """Return the model of a folder if it is one of this package, and whole; otherwise raise a ValueError.

    Stricter than `timm.create_model`, under which gates may be absent from the weights, and stay fresh.

    Args:
        directory: The folder.
    """
    return _load(Path(directory), str(directory))


def _load(directory: Path, where: str) -> nn.Module:
    _check_fit(directory, where)
    model = _make(directory, where, pretrained=True)
    loaded, weights = model.state_dict(), load_file(directory / WEIGHTS_FILE)
    other = [key for key in weights if key in loaded and not _same(loaded[key], weights[key])]
    if other:
        raise ValueError(f'{where} has weights that timm does not load as they are: {_listed(other)}.')
    return model


def _same(loaded: torch.Tensor, stored: torch.Tensor) -> bool:
    return torch.equal(loaded.nan_to_num(), stored.to(loaded.dtype).nan_to_num())


def _check_fit(directory: Path, where: str) -> None:
    """Check a folder without loading its weights: is the config one of ours, and are the weights of its model?"""
    path = f'{where}/{CONFIG_FILE}'
    config = read_config(directory / CONFIG_FILE, path)
    name = config.get('architecture', '')
    if name not in entry_points() and name not in list_gated_models():  # (a method of one's own counts)
        raise ValueError(
            f'{path} is of {name[:80]!r}, which is not a model of this package. timm_gated.list_gated_models() lists '
            f'them; those of timm need none of this.')
    check_model_args(config.get('model_args', {}), path)
    if not (directory / WEIGHTS_FILE).is_file():
        there = sorted(other.name for other in directory.iterdir() if other.name not in (CONFIG_FILE, CARD_FILE))
        raise ValueError(
            f'{where} holds no {WEIGHTS_FILE}{f", but {_listed(there)}" if there else ""}. Pickled weights are not '
            f'read: load them where you trust them, and save the model by timm_gated.save_pretrained.')
    try:
        with safe_open(directory / WEIGHTS_FILE, 'pt') as file:
            theirs = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118  (no dict)
    except SafetensorError as error:
        raise ValueError(f'{where}/{WEIGHTS_FILE} is not whole: {error}. Fetch or save it again.') from error
    # A model without memory tells its shapes, however large the config wants it to be.
    model = _make(directory, where, device='meta')
    ours = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    trained = tuple(f'{n}.' for n, m in model.named_modules() if isinstance(m, Objective))  # of no use for evaluation
    missing = [k for k in ours if k not in theirs and not k.startswith(trained) and not k.endswith('_tracked')]
    unexpected = [k for k in theirs if k not in ours and not k.startswith(trained)]
    shapes = [f'{k} {v} instead of {ours[k]}' for k, v in theirs.items() if k in ours and v != ours[k]]
    parts = [
        f'{what}: {_listed(names)}'
        for what, names in (('missing', missing), ('unexpected', unexpected), ('other shapes', shapes)) if names]
    if parts:
        raise ValueError(f"the weights in {where} are not those of its config, a '{name}'; {'; '.join(parts)}.")


def _make(directory: Path, where: str, **kwargs: Any) -> nn.Module:
    origin, problem = f'local-dir:{directory}', f'{where} does not make a model'
    try:
        with explained(problem):
            return timm.create_model(origin, **kwargs)
    except ValueError as error:
        message = str(error).replace(origin, where)  # (the folder may be a temporary one)
        raise ValueError(message if where in message else f'{problem}: {message}') from error


def _listed(names: Sequence[str]) -> str:
    return f'{", ".join(names[:3])}{f" … ({len(names)} in all)" if len(names) > 3 else ""}'


def push_to_hub(
        model: Union[nn.Module, str, Path],
        repo_id: str,
        label_names: Optional[Sequence[str]] = None,
        card: Union[ModelCard, str, None] = None,
        private: bool = False,
        revision: Optional[str] = None,
        create_pr: bool = False,
        commit_message: str = 'Add model',
        token: Optional[str] = None,
) -> CommitInfo:
    """Put a model on the hub, in one commit; the repository is made if it is not there.

    Args:
        model: A model, or the folder of one, which has to pass `check_pretrained`.
        repo_id: The repository, OWNER/NAME.
        label_names: Of a model, as for `save_pretrained`.
        card: Likewise.
        private: Whether a repository that is made is private.
        revision: Branch to commit to; by default the main one.
        create_pr: Open a pull request instead.
        commit_message: Of the commit.
        token: To write with; by default that of `hf auth login`.

    Example:
        >>> push_to_hub(model, 'me/gated_resnet20-cifar10', card=model_card(model, summary(record)))
        >>> timm.create_model('hf-hub:me/gated_resnet20-cifar10', pretrained=True)
    """
    if isinstance(model, (str, Path)):
        if label_names is not None or card is not None:
            raise ValueError(f'label_names and card are of a model; the folder {model} has its own.')
        check_pretrained(model)
        return _push(Path(model), repo_id, private, revision, create_pr, commit_message, token)
    with tempfile.TemporaryDirectory() as temporary:
        folder = save_pretrained(model, Path(temporary) / 'model', label_names, card)
        return _push(folder, repo_id, private, revision, create_pr, commit_message, token)


def _push(
        folder: Path,
        repo_id: str,
        private: bool,
        revision: Optional[str],
        create_pr: bool,
        commit_message: str,
        token: Optional[str],
) -> CommitInfo:
    api = _api(token)
    with _clear_errors(repo_id, 'write to'):
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        files: List[CommitOperationAdd] = [
            CommitOperationAdd(name, folder / name) for name in (CONFIG_FILE, WEIGHTS_FILE)]
        if (folder / CARD_FILE).is_file():
            card = (folder / CARD_FILE).read_text(encoding='utf-8').replace(f'hf-hub:{SOMEWHERE}', f'hf-hub:{repo_id}')
            files.append(CommitOperationAdd(CARD_FILE, card.encode()))
        return api.create_commit(
            repo_id, files, commit_message=commit_message, revision=revision, create_pr=create_pr)


def pull_from_hub(
        repo_id: str,
        directory: Union[str, Path],
        revision: Optional[str] = None,
        token: Optional[str] = None,
) -> Path:
    """Fetch a model from the hub as a folder, for `timm.create_model('local-dir:…', pretrained=True)`.

    Config, weights and card are fetched, and nothing else. The folder is there once the checksums agree with the hub's
    (what was damaged is fetched once more) and the model has passed `check_pretrained`; otherwise it is not there.

    Args:
        repo_id: The repository, OWNER/NAME.
        directory: The folder; it must not exist, or be empty.
        revision: Branch, tag or commit; by default the main branch.
        token: To read with; by default that of `hf auth login`, if any.

    Example:
        >>> pull_from_hub('me/gated_resnet20-cifar10', 'folder')
    """
    api = _api(token)
    with new_folder(directory) as partial:
        with _clear_errors(repo_id, 'read'):
            commit = api.model_info(repo_id, revision=revision).sha
            for again in (False, True):  # what the client has in its cache, it does not fetch unless it must
                api.snapshot_download(
                    repo_id, revision=commit, local_dir=partial, allow_patterns=[CONFIG_FILE, WEIGHTS_FILE, CARD_FILE],
                    force_download=again)
                damaged = api.verify_repo_checksums(repo_id, revision=commit, local_dir=partial).mismatches
                if not damaged:
                    break
        if damaged:
            names = _listed([mismatch['path'] for mismatch in damaged])
            raise ValueError(f'the download of {repo_id} was damaged twice: {names} is not as on the hub. Try again.')
        shutil.rmtree(partial / '.cache', ignore_errors=True)  # the client's own notes
        _load(partial, repo_id)
    return Path(directory)


def _api(token: Optional[str]) -> HfApi:
    return HfApi(token=token, library_name='timm_gated', library_version=__version__)


@contextmanager
def _clear_errors(repo_id: str, what: str) -> Iterator[None]:
    try:
        yield
    except HfHubHTTPError as error:
        if error.response.status_code not in (401, 403):
            raise
        raise PermissionError(
            f'you may not {what} {repo_id}: {error}\nLog in with `hf auth login`, or give a token that may.') from error
    except (HTTPError, RuntimeError) as error:  # (the client's error over an upload is a RuntimeError)
        reason = error.__cause__ or error
        raise ConnectionError(f'the connection to the hub failed over {repo_id}: {reason}. Try again.') from error
