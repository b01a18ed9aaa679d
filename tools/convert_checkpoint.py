"""Convert a checkpoint between timm's gated ResNets and mmseg's gated backbones

    timm-gated convert --to mmseg gated_resnet50.pth backbone.pth
    timm-gated convert --to timm iter_150000.pth gated_resnet50.safetensors

The target is a bare state dict: of a backbone, for `init_cfg=dict(type='Pretrained', checkpoint=…)`, or of a timm model
without its classifier. Only tensors are read from the source. The target is written only when complete.
"""
import argparse
import sys
from pathlib import Path
from typing import List, Optional

from timm_gated_cli._options import execute, make_parser


def convert(source: Path, target: Path, to: str, overwrite: bool = False) -> int:
    """Convert a checkpoint and return the number of tensors written.

    Args:
        source: Checkpoint, `.pth` or `.safetensors`, a bare state dict or nested under `state_dict`.
        target: File to write, `.pth` or `.safetensors`.
        to: Format of the target, 'mmseg' or 'timm'.
        overwrite: Whether to replace an existing target.
    """
    import safetensors.torch
    import torch
    from timm.models import load_state_dict

    from mmseg_plugin.compat import history_allowed
    from mmseg_plugin.convert import mmseg_to_timm, timm_to_mmseg
    from timm_gated.utils import explained, new_file
    if not source.is_file():
        raise ValueError(f'no checkpoint at {source}.')
    if target.exists() and not overwrite:
        raise ValueError(f'{target} exists: choose another target or use --overwrite.')
    with explained(f'{source} cannot be converted'), history_allowed():  # in checkpoints of mmengine
        state_dict = load_state_dict(str(source), use_ema=False, device='cpu', weights_only=True)
        if not any('layer1.0.conv1' in key for key in state_dict):
            raise ValueError(f'{source} is not a ResNet: no key contains layer1.0.conv1.')
        out = timm_to_mmseg(state_dict) if to == 'mmseg' else mmseg_to_timm(state_dict)
    with new_file(target) as partial:
        if target.suffix == '.safetensors':
            safetensors.torch.save_file({k: v.contiguous() for k, v in out.items()}, partial)
        else:
            torch.save(out, partial)
    return len(out)


def run(args: argparse.Namespace) -> None:
    count = convert(args.source, args.target, args.to, args.overwrite)
    print(f'Wrote {count} tensors for {args.to} to {args.target}')


def main(argv: Optional[List[str]] = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument('source', type=Path, help='checkpoint to convert (.pth, .pth.tar or .safetensors)')
    parser.add_argument('target', type=Path, help='file to write (.pth or .safetensors)')
    parser.add_argument('--to', choices=('mmseg', 'timm'), required=True, help='format of the target')
    parser.add_argument('--overwrite', action='store_true', help='replace an existing target')
    return execute(run, parser.parse_args(argv))


if __name__ == '__main__':
    sys.exit(main())
