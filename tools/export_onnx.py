"""Export a network to ONNX or torch.export and check the file

    timm-gated export --model gated_resnet20 --checkpoint gated.pth --output gated.onnx
    timm-gated export --model local-dir:pruned --output pruned.onnx --compare gated.onnx
    timm-gated export --model gated_resnet20 --checkpoint gated.pth --output gated.pt2
    timm-gated export --model gated_resnet20 --checkpoint gated.pth --output gated.onnx --conditional

Without a checkpoint, the pretrained weights are exported. The batch size is dynamic. The file is deleted if its outputs
differ from torch's by more than 1e-4. --compare times other ONNX files against this one. An exported gated network
computes all filters and masks them; prune or specialize it first (`timm-gated prune`) to make it faster, or give
--conditional: the file then computes only open filters in ONNX Runtime, and is timed against the masked network and
against the dense one, all gates open. The images are noise, for which gates may decide differently than for real ones.
"""
from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Sequence, Tuple

from timm_gated_cli._options import CheckFailed, Progress, add_json_option, add_model_options, execute, make_parser

if TYPE_CHECKING:
    import numpy as np
    import torch.nn as nn

TOLERANCE = 1e-4


def load(args: argparse.Namespace) -> Tuple[nn.Module, str]:
    """Check the options and load the network; returns it with its title."""
    from timm_gated import gates
    from timm_gated.analysis import create_network, parse_checkpoint, title
    if args.output.suffix not in ('.onnx', '.pt2'):
        raise ValueError(f'--output must end in .onnx or .pt2, got {args.output}.')
    if args.conditional and args.output.suffix != '.onnx':
        raise ValueError(f'--conditional writes ONNX files: --output must end in .onnx, got {args.output}.')
    if args.output.exists() and not args.overwrite:
        raise ValueError(f'{args.output} exists; choose another file or use --overwrite.')
    model, checkpoint = parse_checkpoint(args.checkpoint, args.model) if args.checkpoint else (args.model, '')
    if not model:
        raise ValueError('no model. Give --model.')
    network = create_network(model, checkpoint, args)
    if args.conditional and not gates(network):
        raise ValueError(f'{model} has no gates: leave out --conditional.')
    return network, title(network, model, Path(checkpoint).name)


def export(network: nn.Module, name: str, args: argparse.Namespace) -> float:
    """Export and check a network; returns the largest difference of its outputs."""
    import torch

    from timm_gated.inference import export_onnx, export_program, onnx_difference
    size = input_size(network, args)
    images = torch.randn(3, *size, generator=torch.Generator().manual_seed(0)).to(next(network.parameters()).device)
    print(f'Exporting {name}: this may take a minute.', file=sys.stderr)
    unchecked = args.output.with_name(f'.{args.output.stem}.unchecked{args.output.suffix}')
    try:
        if args.output.suffix == '.pt2':
            export_program(network, unchecked, size)
            with torch.no_grad():
                difference = float((torch.export.load(unchecked).module()(images) - network(images)).abs().max())
            runtime = 'torch.export'
        else:
            export_onnx(network, unchecked, size, args.opset, args.conditional)
            difference = onnx_difference(unchecked, network, images)
            runtime = f'ONNX Runtime, opset {args.opset}'
        if difference > TOLERANCE:
            raise CheckFailed(
                f'outputs differ by {difference:.2g} in {runtime}, more than {TOLERANCE}; the file was deleted.')
        unchecked.replace(args.output)
    finally:
        unchecked.unlink(missing_ok=True)
    print(
        f'{args.output}: {name}, {args.output.stat().st_size / 1e6:.2f} MB, batches of any size, '
        f'outputs differ by {difference:.1e} ({runtime})')
    return difference


def input_size(network: nn.Module, args: argparse.Namespace) -> Tuple[int, ...]:
    """Return channels, height and width of the images."""
    return tuple(args.input_size or network.pretrained_cfg['input_size'])  # type: ignore[arg-type, index]


def export_baselines(network: nn.Module, args: argparse.Namespace, folder: Path) -> Dict[str, Path]:
    """Export the masked and the dense counterpart of a conditional file."""
    from timm_gated import force_gates
    from timm_gated.inference import export_onnx
    size = input_size(network, args)
    masked = export_onnx(network, folder / 'masked.onnx', size, args.opset)
    with force_gates(network, 'open'):
        dense = export_onnx(network, folder / 'dense.onnx', size, args.opset, conditional=True)  # leaves out the gates
    return {'masked': masked, 'dense': dense}


def share_of_macs(network: nn.Module, args: argparse.Namespace) -> float:
    """Share of the MACs that a gated network uses on the images of `time_files`."""
    import torch

    from timm_gated import count_macs
    images = torch.from_numpy(noise(args.batch_size, input_size(network, args)))
    return float(count_macs(network, images.to(next(network.parameters()).device)).share)


def noise(batch_size: int, size: Sequence[int]) -> np.ndarray:
    """Return the images that files are timed on."""
    import numpy as np
    return np.random.default_rng(0).standard_normal((batch_size, *size), dtype=np.float32)


def time_files(files: Mapping[str, Path], batch_size: int, threads: int, rounds: int) -> Dict[str, List[float]]:
    """Time ONNX files alternately in ONNX Runtime; returns milliseconds per batch.

    Args:
        files: ONNX files with one input, by name.
        batch_size: Images per batch.
        threads: Number of threads of ONNX Runtime.
        rounds: Timed batches per file.
    """
    import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    runs = {}
    for name, file in files.items():
        session = onnxruntime.InferenceSession(str(file), options, providers=['CPUExecutionProvider'])
        entry = session.get_inputs()[0]
        runs[name] = session, {entry.name: noise(batch_size, entry.shape[1:])}
    times: Dict[str, List[float]] = {name: [] for name in files}
    for turn in Progress(range(rounds + 3), 'times', unit='round'):
        for name, (session, feed) in runs.items():
            start = time.perf_counter()
            session.run(None, feed)
            if turn >= 3:  # after the warm-up
                times[name].append(1e3 * (time.perf_counter() - start))
    return times


def compare(network: nn.Module, args: argparse.Namespace) -> Dict[str, Any]:
    """Print and return the times of the exported file, of its baselines and of other files."""
    files = {str(args.output): args.output}
    result: Dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        if args.conditional:
            files.update(export_baselines(network, args, Path(folder)))
            result['macs_share'] = share_of_macs(network, args)
            print(f'{args.output}: conditional, {result["macs_share"]:.0%} of the MACs')
        files.update((str(file), file) for file in args.compare)
        times = time_files(files, args.batch_size, args.threads, args.rounds)
    medians = {name: statistics.median(values) for name, values in times.items()}
    own = medians[str(args.output)]
    for name, median in medians.items():
        print(f'{name}: {median:.3f} ms, batch {args.batch_size}, {args.threads} thread(s); {median / own:.2f} x')
    return {**result, 'milliseconds': medians, 'batch_size': args.batch_size, 'threads': args.threads}


def parse_args(argv: Optional[List[str]]) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument('--checkpoint', default='', metavar='[MODEL=]FILE', help='weights of the model')
    parser.add_argument('--output', type=Path, required=True, metavar='FILE', help='file to write, .onnx or .pt2')
    parser.add_argument('--overwrite', action='store_true', help='replace an existing file')
    parser.add_argument('--opset', type=int, default=23, metavar='N', help='ONNX opset version (default: %(default)s)')
    parser.add_argument(
        '--conditional', action='store_true', help='compute only open filters (ONNX Runtime); time the result')
    parser.add_argument(
        '--input-size', nargs=3, type=int, metavar='N', help="channels, height and width (default: the model's)")
    parser.add_argument('--compare', nargs='+', type=Path, default=[], metavar='FILE', help='other ONNX files to time')
    parser.add_argument(
        '--batch-size', '-b', type=int, default=1, metavar='N', help='for timing (default: %(default)s)')
    parser.add_argument('--threads', type=int, default=1, metavar='N', help='for timing (default: %(default)s)')
    parser.add_argument('--rounds', type=int, default=200, metavar='N', help='for timing (default: %(default)s)')
    add_json_option(parser)
    add_model_options(parser)
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> Dict[str, Any]:
    missing = [file for file in args.compare if not file.is_file()]
    if missing:
        raise ValueError(f'--compare: no file {missing[0]}.')
    network, name = load(args)
    result = {'file': str(args.output), 'name': name, 'difference': export(network, name, args)}
    if args.compare or args.conditional:
        result.update(compare(network, args))
    return result


def main(argv: Optional[List[str]] = None) -> int:
    return execute(run, parse_args(argv))


if __name__ == '__main__':
    sys.exit(main())
