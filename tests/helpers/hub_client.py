"""What tests/test_hub_remote.py does in a process of its own, where the client of the hub knows the tests' server"""
from pathlib import Path
from typing import Any, List, Optional

import huggingface_hub.constants
import timm
import torch
import torch.nn as nn
from nets import shuffle

import timm_gated


def begin() -> None:
    """Called first in that process."""
    huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 1 << 16  # small files come in pieces too


def make(seed: int = 0, **kwargs) -> nn.Module:
    """A small network, whose gates decide differently for different images."""
    torch.manual_seed(seed)
    return shuffle(timm.create_model('gated_resnet20', **dict(dict(layers=(1, 1, 1)), **kwargs)), seed).eval()


@torch.no_grad()
def run(model: nn.Module) -> List[torch.Tensor]:
    """Output and decisions of all gates for some images."""
    images = torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return [model(images), *(gate.decision for _, gate in timm_gated.gates(model))]


def push(repo_id: str, seed: int = 0, **kwargs) -> str:
    return timm_gated.push_to_hub(make(seed), repo_id, **kwargs).oid


def push_folder(folder: Path, repo_id: str, **kwargs) -> str:
    return timm_gated.push_to_hub(folder, repo_id, **kwargs).oid


def create(repo_id: str, **kwargs) -> List[Any]:
    """Stock timm: what the model of the hub computes (as lists, which need no shared memory to get back)."""
    model = timm.create_model(f'hf-hub:{repo_id}', pretrained=True, **kwargs).eval()
    return [tensor.tolist() for tensor in run(model)]


def snapshot_folder(repo_id: str, snapshot_dir: str) -> Optional[str]:
    """The folder that a model of the hub would write to, if the user asks for one."""
    model: Any = timm.create_model(f'hf-hub:{repo_id}', pretrained=True, snapshot_dir=snapshot_dir)
    return str(model.gate_losses.snapshots.folder)


def pull(repo_id: str, directory: Path, **kwargs) -> Path:
    return timm_gated.pull_from_hub(repo_id, directory, **kwargs)
