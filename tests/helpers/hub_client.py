"""Functions that tests/hub/test_hub_remote.py runs in a process whose hub client is connected to the test server"""
from pathlib import Path
from typing import Any, Dict, List, Optional

import huggingface_hub.constants
import timm
import torch
import torch.nn as nn
from models import create, images

import timm_gated


def begin() -> None:
    """Initialize the process."""
    huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE = 1 << 16  # download small files in several chunks


def make(seed: int = 0, **kwargs) -> nn.Module:
    """Small network whose gates decide differently for different images."""
    return create('gated_resnet20', seed, **dict(dict(layers=(1, 1, 1)), **kwargs)).eval()


@torch.no_grad()
def run(model: nn.Module) -> List[torch.Tensor]:
    """Output and decisions of all gates for some images."""
    return [model(images(batch=8)), *(gate.decision for _, gate in timm_gated.gates(model))]


def push(repo_id: str, seed: int = 0, **kwargs) -> str:
    return timm_gated.push_to_hub(make(seed), repo_id, **kwargs).oid


def push_folder(folder: Path, repo_id: str, **kwargs) -> str:
    return timm_gated.push_to_hub(folder, repo_id, **kwargs).oid


def run_from_hub(repo_id: str, **kwargs) -> List[Any]:
    """Outputs of a model that timm loads from the hub, as lists, which can be sent between processes."""
    model = timm.create_model(f'hf-hub:{repo_id}', pretrained=True, **kwargs).eval()
    return [tensor.tolist() for tensor in run(model)]


def dense_tag(name: str, seed: int) -> bool:
    """Whether the weights of a tag of timm are loaded under fresh gates."""
    model: Any = timm.create_model(name, pretrained=True)
    own, expected = model.state_dict(), dense_weights(name, seed)
    return len(model.fresh_gates) == len(timm_gated.gates(model)) > 0 and all(
        torch.equal(own[key], value) for key, value in expected.items())


def dense_weights(name: str, seed: int) -> Dict[str, torch.Tensor]:
    """Weights for the dense counterpart of a gated model."""
    return create(name.removeprefix('gated_'), seed).state_dict()


def snapshot_folder(repo_id: str, snapshot_dir: str) -> Optional[str]:
    """Snapshot folder of a model that timm loads from the hub with this option."""
    model: Any = timm.create_model(f'hf-hub:{repo_id}', pretrained=True, snapshot_dir=snapshot_dir)
    return str(model.gate_losses.snapshots.folder)


def pull(repo_id: str, directory: Path, **kwargs) -> Path:
    return timm_gated.pull_from_hub(repo_id, directory, **kwargs)
