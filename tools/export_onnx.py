"""Export a network to ONNX or torch.export and check the file

    python tools/export_onnx.py --model gated_resnet20 --checkpoint gated.pth --output gated.onnx
    python tools/export_onnx.py --model local-dir:pruned --output pruned.onnx --compare gated.onnx
    python tools/export_onnx.py --model gated_resnet20 --checkpoint gated.pth --output gated.pt2

Without a checkpoint, the pretrained weights are exported. The batch size is dynamic. The file is deleted if its outputs
differ from torch's by more than 1e-4. --compare times other ONNX files against this one. An exported gated network
computes all filters and masks them; prune or specialize it first (tools/prune.py) to make it faster.
"""
import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Dict, List, Optional, Sequence

from _options import add_model_options, make_parser

TOLERANCE = 1e-4


def export(args: argparse.Namespace) -> str:
    """Export and check a network; returns a summary."""
    import torch

    from timm_gated.analysis import create_network, parse_checkpoint, title
    from timm_gated.inference import export_onnx, export_program, onnx_difference
    if args.output.suffix not in ('.onnx', '.pt2'):
        raise ValueError(f'--output must end in .onnx or .pt2, got {args.output}.')
    if args.output.exists() and not args.overwrite:
        raise ValueError(f'{args.output} exists; choose another file or use --overwrite.')
    model, checkpoint = parse_checkpoint(args.checkpoint, args.model) if args.checkpoint else (args.model, '')
    if not model:
        raise ValueError('no model. Give --model.')
    network = create_network(model, checkpoint, args)
    size = tuple(args.input_size or network.pretrained_cfg['input_size'])  # type: ignore[arg-type]
    images = torch.randn(3, *size, generator=torch.Generator().manual_seed(0)).to(next(network.parameters()).device)
    unchecked = args.output.with_name(f'.{args.output.stem}.unchecked{args.output.suffix}')
    try:
        if args.output.suffix == '.pt2':
            export_program(network, unchecked, size)
            with torch.no_grad():
                difference = float((torch.export.load(unchecked).module()(images) - network(images)).abs().max())
            runtime = 'torch.export'
        else:
            export_onnx(network, unchecked, size, args.opset)
            difference = onnx_difference(unchecked, network, images)
            runtime = f'ONNX Runtime, opset {args.opset}'
        if difference > TOLERANCE:
            raise ValueError(
                f'outputs differ by {difference:.2g} in {runtime}, more than {TOLERANCE}; the file was deleted.')
        unchecked.replace(args.output)
    finally:
        unchecked.unlink(missing_ok=True)
    name = title(network, model, Path(checkpoint).name)
    return (
        f'{args.output}: {name}, {args.output.stat().st_size / 1e6:.2f} MB, batches of any size, '
        f'outputs differ by {difference:.1e} ({runtime})')


def time_files(files: Sequence[Path], batch_size: int, threads: int, rounds: int) -> Dict[Path, List[float]]:
    """Time ONNX files alternately in ONNX Runtime; returns milliseconds per batch.

    Args:
        files: ONNX files with one input.
        batch_size: Images per batch.
        threads: Number of threads of ONNX Runtime.
        rounds: Timed batches per file.
    """
    import numpy as np
    import onnxruntime
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    runs = {}
    for file in files:
        session = onnxruntime.InferenceSession(str(file), options, providers=['CPUExecutionProvider'])
        entry = session.get_inputs()[0]
        images = np.random.default_rng(0).standard_normal((batch_size, *entry.shape[1:]), dtype=np.float32)
        runs[file] = session, {entry.name: images}
    times: Dict[Path, List[float]] = {file: [] for file in files}
    for turn in range(rounds + 3):
        for file, (session, feed) in runs.items():
            start = time.perf_counter()
            session.run(None, feed)
            if turn >= 3:  # after the warm-up
                times[file].append(1e3 * (time.perf_counter() - start))
    return times


def main(argv: Optional[List[str]] = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument('--checkpoint', default='', metavar='[MODEL=]FILE', help='weights of the model')
    parser.add_argument('--output', type=Path, required=True, metavar='FILE', help='file to write, .onnx or .pt2')
    parser.add_argument('--overwrite', action='store_true', help='replace an existing file')
    parser.add_argument('--opset', type=int, default=23, metavar='N', help='ONNX opset version (default: %(default)s)')
    parser.add_argument(
        '--input-size', nargs=3, type=int, metavar='N', help="channels, height and width (default: the model's)")
    parser.add_argument('--compare', nargs='+', type=Path, default=[], metavar='FILE', help='other ONNX files to time')
    parser.add_argument(
        '--batch-size', '-b', type=int, default=1, metavar='N', help='for timing (default: %(default)s)')
    parser.add_argument('--threads', type=int, default=1, metavar='N', help='for timing (default: %(default)s)')
    parser.add_argument('--rounds', type=int, default=200, metavar='N', help='for timing (default: %(default)s)')
    add_model_options(parser)
    args = parser.parse_args(argv)
    missing = [file for file in args.compare if not file.is_file()]
    try:
        if missing:
            raise ValueError(f'--compare: no file {missing[0]}.')
        print(export(args))
    except ValueError as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    if args.compare:
        times = time_files([args.output, *args.compare], args.batch_size, args.threads, args.rounds)
        own = statistics.median(times[args.output])
        for file, values in times.items():
            median = statistics.median(values)
            print(f'{file}: {median:.3f} ms, batch {args.batch_size}, {args.threads} thread(s); {median / own:.2f} x')
    return 0


if __name__ == '__main__':
    sys.exit(main())
