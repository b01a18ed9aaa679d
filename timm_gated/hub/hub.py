"""Save models as folders and share them on the Hugging Face hub, in the layout that timm reads

A folder has a config, weights and a card. `timm.create_model` loads it from 'local-dir:FOLDER' or 'hf-hub:OWNER/NAME'
once `timm_gated` is imported. This module adds to timm: folders are written completely or not at all, cards have
measured figures, and downloads are verified by their checksums and by loading them. Weights are always safetensors;
pickles are neither written nor downloaded.
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
from ..utils import check_new, explained, new_file, new_folder
from ..version import __version__
from .card import PICTURES, SOMEWHERE, model_card

__all__ = ['check_pretrained', 'pull_from_hub', 'push_to_hub', 'save_pretrained', 'write_card']

CONFIG_FILE, WEIGHTS_FILE, CARD_FILE = 'config.json', 'model.safetensors', 'README.md'


def save_pretrained(
        model: Any,
        directory: Union[str, Path],
        label_names: Optional[Sequence[str]] = None,
        card: Union[ModelCard, str, None] = None,
) -> Path:
    """Save a model as a folder for `timm.create_model('local-dir:…', pretrained=True)`.

    The folder is written completely or not at all. The config stores the options of the model, including the widths of
    a pruned network.

    Args:
        model: Model of this package.
        directory: Folder to write. It must be empty or not exist.
        label_names: Names of the outputs.
        card: Model card (see `timm_gated.model_card`), by default one without measured figures.

    Examples:
        >>> save_pretrained(pruned.model, 'pruned')
        >>> timm.create_model('local-dir:pruned', pretrained=True)
    """
    check_new(directory)
    if not hasattr(model, '_model_args') or not hasattr(model, 'num_classes'):
        raise ValueError(
            f'this {type(model).__name__} was not created by timm.create_model, so it could not be rebuilt. Only '
            f'classifiers created by timm.create_model can be saved.')
    config: Dict[str, Any] = {}
    if label_names is not None:
        if len(label_names) != model.num_classes:
            raise ValueError(f'the model has {model.num_classes} outputs, got {len(label_names)} names for them.')
        config['label_names'] = list(label_names)
    card = model_card(model) if card is None else card
    if not all(tensor.is_contiguous() for tensor in model.state_dict().values()):  # channels last
        model = copy.deepcopy(model).to(memory_format=torch.contiguous_format)
    with new_folder(directory) as partial:
        save_for_hf(model, str(partial), model_config=config, safe_serialization=True)
        _tidy_config(partial / CONFIG_FILE)
        write_card(partial, card)
        # safetensors makes the file readable only by its owner
        (partial / WEIGHTS_FILE).chmod((partial / CONFIG_FILE).stat().st_mode)
        _check_fit(partial, str(directory))
    return Path(directory)


def write_card(directory: Union[str, Path], card: Union[ModelCard, str]) -> None:
    """Write a card and its pictures into a folder, each file completely or not at all.

    Pictures of a former card are removed.

    Args:
        directory: Folder of the model.
        card: Model card.
    """
    pictures: Dict[str, bytes] = getattr(card, 'pictures', {})
    for name, picture in pictures.items():
        with new_file(Path(directory) / name) as partial:
            partial.write_bytes(picture)
    with new_file(Path(directory) / CARD_FILE) as partial:
        partial.write_text(str(card), encoding='utf-8')
    for name in set(PICTURES) - pictures.keys():
        (Path(directory) / name).unlink(missing_ok=True)


def _tidy_config(path: Path) -> None:
    """Remove options of the training, and the tag of the initial weights, from a config."""
    config = json.loads(path.read_text(encoding='utf-8'))
    config['model_args'] = storable(config['model_args'])
    config['pretrained_cfg'].pop('tag', None)
    path.write_text(json.dumps(config, indent=2), encoding='utf-8')


def check_pretrained(directory: Union[str, Path]) -> nn.Module:
    """Load a model of this package from a folder; raise a ValueError if the folder is incomplete or does not fit.

    Unlike `timm.create_model`, this does not accept weights without gates.

    Args:
        directory: Folder of the model.
    """
    return _load(Path(directory), str(directory))


def _load(directory: Path, where: str) -> nn.Module:
    _check_fit(directory, where)
    model = _create(directory, where, pretrained=True)
    loaded, weights = model.state_dict(), load_file(directory / WEIGHTS_FILE)
    other = [key for key in weights if key in loaded and not _same(loaded[key], weights[key])]
    if other:
        raise ValueError(f'{where} has weights that timm does not load as they are: {_listed(other)}.')
    return model


def _same(loaded: torch.Tensor, stored: torch.Tensor) -> bool:
    return torch.equal(loaded.nan_to_num(), stored.to(loaded.dtype).nan_to_num())


def _check_fit(directory: Path, where: str) -> None:
    """Check that a config is of this package and that the names and shapes of the weights fit it."""
    path = f'{where}/{CONFIG_FILE}'
    config = read_config(directory / CONFIG_FILE, path)
    name = config.get('architecture', '')
    if name not in entry_points() and name not in list_gated_models():  # gated models of other packages are accepted
        raise ValueError(
            f'{path} is of {name[:80]!r}, which is not a model of this package. timm_gated.list_gated_models() lists '
            f"the gated models; use timm's own functions for models of timm.")
    check_model_args(config.get('model_args', {}), path)
    if not (directory / WEIGHTS_FILE).is_file():
        expected = (CONFIG_FILE, CARD_FILE, *PICTURES)
        there = sorted(other.name for other in directory.iterdir() if other.name not in expected)
        raise ValueError(
            f'{where} holds no {WEIGHTS_FILE}{f", but {_listed(there)}" if there else ""}. Pickled weights are not '
            f'read: if you trust them, load them yourself and save the model with timm_gated.save_pretrained.')
    try:
        with safe_open(directory / WEIGHTS_FILE, 'pt') as file:
            theirs = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118  (no dict)
    except SafetensorError as error:
        raise ValueError(
            f'{where}/{WEIGHTS_FILE} is not complete: {error}. Download or save it again.') from error
    # The meta device allocates no memory, regardless of the sizes in the config.
    model = _create(directory, where, device='meta')
    ours = {key: tuple(value.shape) for key, value in model.state_dict().items()}
    objectives = tuple(f'{n}.' for n, m in model.named_modules() if isinstance(m, Objective))  # only used in training
    missing = [k for k in ours if k not in theirs and not k.startswith(objectives) and not k.endswith('_tracked')]
    unexpected = [k for k in theirs if k not in ours and not k.startswith(objectives)]
    shapes = [f'{k} {v} instead of {ours[k]}' for k, v in theirs.items() if k in ours and v != ours[k]]
    parts = [
        f'{what}: {_listed(names)}'
        for what, names in (('missing', missing), ('unexpected', unexpected), ('other shapes', shapes)) if names]
    if parts:
        raise ValueError(f"the weights in {where} are not those of its config, a '{name}'; {'; '.join(parts)}.")


def _create(directory: Path, where: str, **kwargs: Any) -> nn.Module:
    origin, problem = f'local-dir:{directory}', f'{where} does not make a model'
    try:
        with explained(problem):
            return timm.create_model(origin, **kwargs)
    except ValueError as error:
        message = str(error).replace(origin, where)  # the folder may be a temporary one
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
    """Push a model to the hub in one commit. Creates the repository if it does not exist.

    Args:
        model: Model, or folder of a model, which must pass `check_pretrained`.
        repo_id: Repository, OWNER/NAME.
        label_names: Names of the outputs, not for a folder.
        card: Model card, not for a folder.
        private: Make a new repository private.
        revision: Branch to commit to, the main branch by default.
        create_pr: Open a pull request instead of committing to the branch.
        commit_message: Message of the commit.
        token: Access token with write permission, by default that of `hf auth login`.

    Examples:
        >>> push_to_hub(model, 'me/gated_resnet20-cifar10', card=model_card(model, summary(record)))
        >>> timm.create_model('hf-hub:me/gated_resnet20-cifar10', pretrained=True)
    """
    if isinstance(model, (str, Path)):
        if label_names is not None or card is not None:
            raise ValueError(f'label_names and card cannot be set for a folder: {model} has its own.')
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
        files += [CommitOperationAdd(name, folder / name) for name in PICTURES if (folder / name).is_file()]
        return api.create_commit(
            repo_id, files, commit_message=commit_message, revision=revision, create_pr=create_pr)


def pull_from_hub(
        repo_id: str,
        directory: Union[str, Path],
        revision: Optional[str] = None,
        token: Optional[str] = None,
) -> Path:
    """Download a model from the hub as a folder for `timm.create_model('local-dir:…', pretrained=True)`.

    Only config, weights, card and its pictures are downloaded. The folder is created after the checksums have been
    compared with the hub's and the model has passed `check_pretrained`. Damaged files are downloaded once more.

    Args:
        repo_id: Repository, OWNER/NAME.
        directory: Folder to write. It must be empty or not exist.
        revision: Branch, tag or commit, the main branch by default.
        token: Access token, by default that of `hf auth login`.

    Examples:
        >>> pull_from_hub('me/gated_resnet20-cifar10', 'folder')
    """
    api = _api(token)
    with new_folder(directory) as partial:
        with _clear_errors(repo_id, 'read'):
            commit = api.model_info(repo_id, revision=revision).sha
            for again in (False, True):  # without force_download the client would reuse damaged files from its cache
                api.snapshot_download(
                    repo_id, revision=commit, local_dir=partial, force_download=again,
                    allow_patterns=[CONFIG_FILE, WEIGHTS_FILE, CARD_FILE, *PICTURES])
                damaged = api.verify_repo_checksums(repo_id, revision=commit, local_dir=partial).mismatches
                if not damaged:
                    break
        if damaged:
            names = _listed([mismatch['path'] for mismatch in damaged])
            raise ValueError(f'the download of {repo_id} was damaged twice: {names} (checksum mismatch). Try again.')
        shutil.rmtree(partial / '.cache', ignore_errors=True)  # metadata of the client
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
            f'you may not {what} {repo_id}: {error}\nLog in with `hf auth login`, or pass a token with this '
            f'permission.') from error
    except (HTTPError, RuntimeError) as error:  # the client raises a RuntimeError for failed uploads
        reason = error.__cause__ or error
        raise ConnectionError(f'the connection to the hub failed for {repo_id}: {reason}. Try again.') from error
