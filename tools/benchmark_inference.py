"""Benchmark the latency of gated networks against dense baselines

Dense ResNets run in eager torch, torch.compile, ONNX Runtime and OpenVINO. Gated ResNets run masked (all filters are
computed) and with both backends of `accelerate`, 'torch' and 'native'. All compute in float32. Without a checkpoint,
networks are untrained and the gate biases are set to keep a given share of the filters.

Writes a table, a figure and all timings as JSON to --output.

    python tools/benchmark_inference.py --quick
    python tools/benchmark_inference.py --networks 34 --keep 0.43 1 --batch-sizes 1 --threads 1
    python tools/benchmark_inference.py --networks 34 --checkpoint model.safetensors --data-dir imagenet
    python tools/benchmark_inference.py --networks 34 --simulate 16 --device cuda
"""
from __future__ import annotations

import argparse
import contextlib
import copy
import importlib.metadata
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

from _options import make_parser
from tqdm import tqdm

if TYPE_CHECKING:
    import torch
    import torch.nn as nn

    from timm_gated.inference import SlicedRunner

Run = Callable[[], Any]
DENSE_RUNTIMES = ('eager', 'compile', 'onnxruntime', 'openvino')
GATED_RUNTIMES = ('masked', 'torch', 'native')


@dataclass
class Row:
    """One line of the table."""
    network: str
    runtime: str
    keep: Optional[float]  # share of filters kept by the gates; None for dense and for trained networks
    batch_size: int
    threads: int
    gmacs: float  # per image
    times: List[float] = field(default_factory=list)  # milliseconds per batch

    @property
    def ms(self) -> float:
        return statistics.median(self.times)

    @property
    def spread(self) -> float:
        """Half the interquartile range."""
        quartiles = statistics.quantiles(self.times, n=4) if len(self.times) > 1 else [0., 0., 0.]
        return (quartiles[2] - quartiles[0]) / 2

    @property
    def is_dense(self) -> bool:
        return self.runtime in DENSE_RUNTIMES


def keep_filters(model: nn.Module, share: float) -> nn.Module:
    """Set the gate biases in place so that each gate keeps a random share of its filters, the same for all images."""
    import torch

    from timm_gated import gates
    generator = torch.Generator().manual_seed(0)
    for _, gate in gates(model):
        order = torch.randperm(gate.num_gates, generator=generator)
        with torch.no_grad():
            gate.fc2.weight.zero_()
            gate.fc2.bias.fill_(-1.)
            gate.fc2.bias[order[:round(share * gate.num_gates)]] = 1.
    return model


def prepare_onnx(model: nn.Module, x: torch.Tensor, folder: Path) -> str:
    import torch
    path = folder / f'{id(model)}-{x.shape[0]}.onnx'
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        torch.onnx.export(model, (x,), str(path), dynamo=True, verbose=False)
    return str(path)


def prepare(
        model: nn.Module, runtime: str, x: torch.Tensor, threads: int, folder: Path, isa: Optional[str] = None) -> Run:
    """Return a function that runs a batch."""
    import torch

    from timm_gated import accelerate
    if runtime in ('eager', 'masked'):
        return lambda: model(x)
    if runtime == 'compile':
        torch._dynamo.reset()  # past its recompilation limit it would run eagerly
        compiled = torch.compile(model, dynamic=False)
        return lambda: compiled(x)
    if runtime in ('torch', 'native'):
        fast = accelerate(model, runtime, isa if runtime == 'native' else None)
        return lambda: fast(x)
    path, images = prepare_onnx(model, x, folder), x.numpy()
    if runtime == 'onnxruntime':
        import onnxruntime
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        session = onnxruntime.InferenceSession(path, options, providers=['CPUExecutionProvider'])
        name = session.get_inputs()[0].name
        return lambda: session.run(None, {name: images})[0]
    import openvino
    request = openvino.Core().compile_model(path, 'CPU', {
        # with the throughput hint, a single request would use one thread
        'INFERENCE_NUM_THREADS': threads, 'PERFORMANCE_HINT': 'LATENCY',
        'INFERENCE_PRECISION_HINT': 'f32'}).create_infer_request()
    return lambda: request.infer({0: images}, share_inputs=True, share_outputs=True)[0]


def check_outputs(sides: Sequence[Tuple[Row, Run]]) -> None:
    """Check that all runtimes of a network give the same outputs."""
    import torch
    expected: Dict[Any, torch.Tensor] = {}
    for row, run in sides:
        output = torch.as_tensor(run())
        first = expected.setdefault((row.network, row.keep), output.clone())
        torch.testing.assert_close(
            output, first, atol=1e-3 * first.abs().max().item(), rtol=0,
            msg=lambda text, row=row: f'{row.network} under {row.runtime} gives different outputs: {text}')


def time_in_turns(sides: Sequence[Tuple[Row, Run]], rounds: int) -> None:
    """Time all sides once per round, in random order. The first round is a warm-up."""
    order = random.Random(0)
    for index in tqdm(range(rounds + 1), desc='rounds', leave=False):
        for row, run in order.sample(sides, len(sides)):
            time.sleep(0.03)  # idle threads of the previous runtime spin for a while
            run()  # warm the caches
            start = time.perf_counter()
            run()
            if index:
                row.times.append(1e3 * (time.perf_counter() - start))


def load_images(args: argparse.Namespace, model: nn.Module, count: int) -> torch.Tensor:
    """Load images of the data set, or draw noise."""
    import timm
    import torch
    if args.data_dir is None:
        return torch.randn(count, 3, args.img_size, args.img_size, generator=torch.Generator().manual_seed(0))
    config = timm.data.resolve_data_config({'input_size': (3, args.img_size, args.img_size)}, model=model)
    dataset = timm.data.create_dataset('', args.data_dir, split='validation')
    transform = timm.data.create_transform(**config)
    step = max(1, len(dataset) // count)
    return torch.stack([transform(dataset[i * step % len(dataset)][0]) for i in range(count)])


def gated_networks(args: argparse.Namespace, depth: int) -> Iterator[Tuple[Optional[float], nn.Module]]:
    """Yield the trained gated network, or one network per share of filters kept."""
    import timm
    import torch

    from timm_gated.utils import explained
    if args.checkpoint is not None:
        with explained(f'{args.checkpoint} does not load into gated_resnet{depth}'):
            model = timm.create_model(f'gated_resnet{depth}', checkpoint_path=args.checkpoint).eval()
        if model.fresh_gates:
            raise ValueError(f'{args.checkpoint} has no weights for the gates; use a checkpoint of a gated network.')
        yield None, model
        return
    for share in args.keep:
        torch.manual_seed(0)
        yield share, keep_filters(timm.create_model(f'gated_resnet{depth}', zero_init_last=False), share).eval()


def benchmark(args: argparse.Namespace, folder: Path) -> List[Row]:
    import timm
    import torch

    from timm_gated import count_macs
    rows: List[Row] = []
    settings = [(batch_size, threads) for batch_size in args.batch_sizes for threads in args.threads]
    progress = tqdm(total=len(settings) * len(args.networks), desc='settings', unit='')
    for batch_size, threads in settings:
        torch.set_num_threads(threads)
        rounds = args.rounds if batch_size == 1 else max(5, args.rounds // 4)
        for depth in args.networks:
            sides: List[Tuple[Row, Run]] = []
            torch.manual_seed(0)
            # zero_init_last would make the weights zero after folding
            dense = timm.create_model(f'resnet{depth}', zero_init_last=False).eval()
            x = load_images(args, dense, batch_size)
            dense_macs = count_macs(dense, x[:1]).dense / 1e9
            for runtime in args.dense_runtimes:
                run = prepare(dense, runtime, x, threads, folder)
                sides.append((Row(f'resnet{depth}', runtime, None, batch_size, threads, dense_macs), run))
            for keep, gated in gated_networks(args, depth):
                macs = count_macs(gated, x).per_sample.double().mean().item() / 1e9
                for runtime in GATED_RUNTIMES:
                    run = prepare(gated, runtime, x, threads, folder, args.isa)
                    computed = dense_macs if runtime == 'masked' else macs
                    sides.append((Row(f'gated_resnet{depth}', runtime, keep, batch_size, threads, computed), run))
            check_outputs(sides)
            time_in_turns(sides, rounds)
            rows.extend(row for row, _ in sides)
            progress.update()
    progress.close()
    return rows


def fastest_dense(rows: Sequence[Row], like: Row, depth: str) -> Optional[Row]:
    """Find the fastest dense runtime of a ResNet in the same setting."""
    found = [row for row in rows if row.is_dense and row.network == f'resnet{depth}'
             and (row.batch_size, row.threads) == (like.batch_size, like.threads)]
    return min(found, key=lambda row: row.ms, default=None)


def columns(rows: Sequence[Row], row: Row) -> List[str]:
    """Format a row of the table."""
    depth = row.network.rsplit('resnet', 1)[1]
    ratios = []
    for against in (depth, '18'):
        best = fastest_dense(rows, row, against)
        ratios.append(f'{row.ms / best.ms:.2f}' if best else '')
    full = next((other for other in rows if other.keep == 1. and (
        other.network, other.runtime, other.batch_size, other.threads) == (
        row.network, row.runtime, row.batch_size, row.threads)), None)
    became_time = ''
    if full is not None and row.gmacs < full.gmacs:
        became_time = f'{100 * (1 - row.ms / full.ms) / (1 - row.gmacs / full.gmacs):.0f} %'
    filters = '' if row.is_dense else 'as trained' if row.keep is None else f'{100 * row.keep:.0f} %'
    return [row.network, row.runtime, filters, f'{row.gmacs:.2f}', f'{row.ms:.1f}', f'± {row.spread:.1f}',
            f'{1e3 * row.batch_size / row.ms:.1f}', *ratios, became_time]


HEADER = ['network', 'runtime', 'filters kept', 'GMACs', 'ms', '', 'images/s', '× fastest dense', '× dense ResNet-18',
          'of MACs saved, time saved']


LEGEND = """ms: median per batch, ± half the interquartile range.
GMACs: computed MACs per image (masked: all of them).
× fastest dense: time relative to the fastest dense runtime of the same depth, batch size and threads.
of MACs saved, time saved: saved time as a share of saved MACs, relative to the same runtime with all filters kept."""


def table(rows: Sequence[Row]) -> str:
    """Format all rows, grouped by setting."""
    text = []
    for setting in dict.fromkeys((row.batch_size, row.threads) for row in rows):
        some = [row for row in rows if (row.batch_size, row.threads) == setting]
        cells = [HEADER, *(columns(rows, row) for row in some)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ['  '.join(map(str.ljust, line, widths)).rstrip() for line in cells]
        text.append(f'batch {setting[0]}, {setting[1]} thread{"s" if setting[1] > 1 else ""}')
        text.extend([lines[0], '-' * max(map(len, lines)), *lines[1:], ''])
    return '\n'.join(text)


def plot(rows: Sequence[Row], weights: str, path: Path) -> None:
    """Plot milliseconds against MACs per image, with one panel per setting."""
    from matplotlib.figure import Figure
    settings = list(dict.fromkeys((row.batch_size, row.threads) for row in rows))
    fig = Figure(figsize=(5.2 * len(settings), 4.4), layout='constrained')
    fig.suptitle(f'Weights: {weights}', fontsize='small')
    axes = fig.subplots(1, len(settings), squeeze=False)
    for axis, setting in zip(axes[0], settings, strict=True):
        lines: Dict[Tuple[str, str], List[Row]] = {}
        for row in rows:
            if (row.batch_size, row.threads) == setting:
                lines.setdefault((row.runtime, row.network), []).append(row)
        runtimes = list(dict.fromkeys(runtime for runtime, _ in lines))
        labelled = set()
        for (runtime, _), line in lines.items():
            line = sorted(line, key=lambda row: row.gmacs)
            axis.plot(
                [row.gmacs for row in line], [row.ms / row.batch_size for row in line],
                's' if line[0].is_dense else 'o-', color=f'C{runtimes.index(runtime)}',
                label=None if runtime in labelled else runtime)
            labelled.add(runtime)
        axis.set(
            xlabel='GMACs per image', ylabel='ms per image', ylim=(0, None), xlim=(0, None),
            title=f'batch {setting[0]}, {setting[1]} thread{"s" if setting[1] > 1 else ""}')
        axis.grid(alpha=0.3)
    axes[0][0].legend(frameon=False, title='dense (squares), gated (lines)', fontsize='small')
    fig.savefig(path, dpi=150)


def fix_gates(runner: SlicedRunner, opened: Dict[int, torch.Tensor]) -> SlicedRunner:
    """Copy a network with the open filters of one image only. Its gates still run."""
    runner = copy.deepcopy(runner)
    for step in runner.steps:
        gate_in, gate_out = getattr(step, 'gate_in', None), getattr(step, 'gate_out', None)
        if gate_out is not None:
            step.weight, step.bias, step.gate_out = step.weight[opened[gate_out]], step.bias[opened[gate_out]], None
        if gate_in is not None:
            step.weight, step.gate_in = step.weight[:, opened[gate_in]], None
    return runner


def simulate(args: argparse.Namespace) -> List[Row]:
    """Simulate batched kernels as in the paper: per image, time the sparse network of its gate decisions on a batch.

    Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)
    """
    import timm
    import torch

    from timm_gated import count_macs
    from timm_gated.inference import SlicedRunner, compile_trunk, trunk
    device = torch.device(args.device)

    def milliseconds(run: Run) -> float:
        times = []
        for _ in range(args.rounds + 1):
            start = time.perf_counter()
            run()
            if device.type != 'cpu':
                torch.accelerator.synchronize(device)
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times[1:])

    rows, batch_size = [], args.simulate_batch_size
    for depth in args.networks:
        dense = timm.create_model(f'resnet{depth}', zero_init_last=False).eval()
        images = load_images(args, dense, args.simulate)
        batch = images[:1].expand(batch_size, -1, -1, -1).to(device)
        macs = count_macs(dense, images[:1]).dense / 1e9
        # both without the head and with batch norm folded
        plain = SlicedRunner(compile_trunk(trunk(dense).modules)).to(device)
        rows.append(Row(f'resnet{depth}', 'eager', None, batch_size, torch.get_num_threads(), macs,
                        [milliseconds(lambda plain=plain, batch=batch: plain.run_together(batch))]))
        for keep, gated in gated_networks(args, depth):
            runner = SlicedRunner(compile_trunk(trunk(gated).modules))
            times = []
            for image in tqdm(images, desc=f'gated_resnet{depth}, images', leave=False):
                opened = runner.run_together(image[None]).opened
                sparse = fix_gates(runner, opened).to(device)
                times.append(milliseconds(lambda sparse=sparse, batch=batch: sparse.run_together(batch)))
            macs = count_macs(gated, images).per_sample.double().mean().item() / 1e9
            rows.append(Row(
                f'gated_resnet{depth}', 'simulated', keep, batch_size, torch.get_num_threads(), macs, times))
    return rows


def machine(isa: Optional[str] = None) -> Dict[str, Any]:
    """Describe the machine and the versions of the runtimes."""
    from timm_gated import instruction_sets
    cpu = platform.processor()
    if Path('/proc/cpuinfo').exists():
        names = [line.split(':', 1)[1].strip() for line in Path('/proc/cpuinfo').read_text().splitlines()
                 if line.startswith('model name')]
        cpu = names[0] if names else cpu
    versions = {}
    for name in ('torch', 'timm', 'onnxruntime', 'openvino'):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return dict(cpu=cpu, cores=os.cpu_count(), kernels=isa or (instruction_sets() or ['none'])[0], **versions)


def main(argv: Optional[List[str]] = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument('--quick', action='store_true', help='batch 1, --keep 0.43 0.55 1, 7 rounds, no torch.compile: '
                        'within three minutes')
    parser.add_argument('--networks', type=int, nargs='+', default=[18, 34, 50], choices=(18, 34, 50, 101, 152))
    parser.add_argument('--keep', type=float, nargs='+', default=[0.25, 0.43, 0.55, 0.75, 1.],
                        help='shares of filters to keep (default: 0.25 0.43 0.55 0.75 1)')
    parser.add_argument('--batch-sizes', type=int, nargs='+', default=[1, 32])
    parser.add_argument('--threads', type=int, nargs='+', help='numbers of threads (default: 1 and all)')
    parser.add_argument('--dense-runtimes', nargs='+', default=list(DENSE_RUNTIMES), choices=DENSE_RUNTIMES)
    parser.add_argument('--isa', choices=('avx512', 'avx2', 'portable'),
                        help='instruction set of the native kernels (default: the fastest one here)')
    parser.add_argument('--img-size', type=int, default=224)
    parser.add_argument('--rounds', type=int, default=21, help='timed rounds at batch size 1; larger batches have '
                        'a quarter, at least 5 (default: 21)')
    parser.add_argument('--checkpoint', help='weights of a trained gated network; needs a single --networks')
    parser.add_argument('--data-dir', help='image folder to use instead of noise')
    parser.add_argument('--simulate', type=int, metavar='IMAGES',
                        help='simulate batched kernels as in the paper, on the sparse networks of this many images')
    parser.add_argument('--simulate-batch-size', type=int, default=128,
                        help='batch size of the simulation (default: 128, as in the paper)')
    parser.add_argument('--device', default='cpu', help='device of the simulation (default: cpu)')
    parser.add_argument('--output', type=Path, default=Path('output/bench'), help='folder for the results')
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f'--rounds must be at least 1, got {args.rounds}.')
    if not all(0 <= share <= 1 for share in args.keep):
        parser.error(f'--keep must be between 0 and 1, got {args.keep}.')
    if args.checkpoint is not None and len(args.networks) != 1:
        parser.error('--checkpoint needs a single network, for example --networks 34.')
    if args.checkpoint is not None and not Path(args.checkpoint).is_file():
        parser.error(f'--checkpoint {args.checkpoint} does not exist.')
    if args.data_dir is not None and not Path(args.data_dir).is_dir():
        parser.error(f'--data-dir {args.data_dir} does not exist.')
    if args.quick:
        args.keep, args.batch_sizes, args.rounds = [0.43, 0.55, 1.], [1], 7
        args.dense_runtimes = [runtime for runtime in args.dense_runtimes if runtime != 'compile']

    import torch
    if args.threads is None:
        args.threads = sorted({1, torch.get_num_threads()})
    weights = 'random (untrained)'
    if args.checkpoint is not None:
        weights = f'{args.checkpoint} (gated), random (dense, untrained)'
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.output) as scratch:
        folder = Path(scratch)
        try:
            with torch.inference_mode():
                rows = simulate(args) if args.simulate is not None else benchmark(args, folder)
        except ValueError as error:
            print(f'error: {error}', file=sys.stderr)
            return 1
        found = machine(args.isa)
        conditions = f'{", ".join(f"{key} {value}" for key, value in found.items())}\nweights: {weights}'
        summary = f'{conditions}\n\n{table(rows)}\n{LEGEND}\n'
        (folder / 'table.txt').write_text(summary)
        (folder / 'results.json').write_text(json.dumps(
            dict(machine=found, weights=weights, rows=[dict(asdict(row), ms=row.ms) for row in rows]), indent=1))
        plot(rows, weights, folder / 'speed.png')
        for name in ('table.txt', 'results.json', 'speed.png'):
            os.replace(folder / name, args.output / name)
    print(f'{summary}\nFigure and timings: {args.output}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
