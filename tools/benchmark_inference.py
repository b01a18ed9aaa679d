"""Benchmark the latency of gated networks against dense baselines

Dense networks run in eager torch, torch.compile, ONNX Runtime and OpenVINO, with OpenVINO in int8, and with our native
kernels. Gated networks run masked (all filters are computed) and with both backends of `accelerate`, 'torch' and
'native'. Without trained weights, networks are untrained and the gate biases are set to keep a given share of the
filters. OpenVINO and our kernels are also measured in int8, calibrated on the same images. With a trained network and
--data-dir, accuracies in float32 and int8 are measured, too, and those of the dense network with --dense-weights.

With one instruction set, for example --isa avx2, torch and OpenVINO are limited to it, too (by ONEDNN_MAX_CPU_ISA).

Networks are gated models of timm, with a tag for their packaged weights, or as local-dir:FOLDER; a number is short for
a gated ResNet of that depth for ImageNet. pspnet_r50 is mmseg's PSPNet with a ResNet-50, run at batch size 1 only, as
is int8.

Writes a table, a figure and all timings as JSON to --output.

    timm-gated bench --quick
    timm-gated bench --networks 34 --keep 0.43 1 --batch-sizes 1 --threads 1
    timm-gated bench --networks gated_resnet20.bas_c10 pspnet_r50 --isa avx2
    timm-gated bench --networks 34 --checkpoint model.safetensors --data-dir imagenet
    timm-gated bench --networks gated_resnet20.bas_c10 --dense-weights cifar_resnet20.e28_c10 \\
        --data-dir data/cifar10 --precision int8
    timm-gated bench --networks local-dir:gated --dense-weights local-dir:dense --data-dir images --rounds 200
    timm-gated bench --networks 34 --simulate 16 --device cuda
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
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Optional, Sequence, Tuple

from tqdm import tqdm

from timm_gated_cli._bench_accuracy import accuracy_table, measure_accuracies
from timm_gated_cli._bench_networks import PSPNET, Network, PSPNet, find_network, has_mmseg, load_images
from timm_gated_cli._bench_report import LEGEND, Row, fit_lines, fit_table, plot, table
from timm_gated_cli._bench_runtimes import (
    DENSE_RUNTIMES,
    INT8,
    Run,
    is_int8,
    limit_onednn,
    prepare,
    prepare_onnx,
    quantize,
)
from timm_gated_cli._options import add_json_option, execute, make_parser

if TYPE_CHECKING:
    import torch

    from timm_gated.inference import SlicedRunner


def check_outputs(sides: Sequence[Tuple[Row, Run]], x: torch.Tensor) -> None:
    """Check that all runtimes of a network give the same outputs for a batch.

    Float32 outputs must agree to 1e-3 of the largest one. For int8 this is only a sanity check: the outputs must be
    within half the norm of the float32 outputs.
    """
    import torch
    expected: Dict[Any, torch.Tensor] = {}
    for row, run in sorted(sides, key=lambda side: is_int8(side[0].runtime)):  # int8 last
        output = torch.as_tensor(run(x))
        first = expected.setdefault((row.network, row.keep), output.clone())
        if is_int8(row.runtime):
            error = ((output - first).norm() / first.norm()).item()
            if not error < 0.5:  # or NaN
                raise AssertionError(
                    f'{row.network} under {row.runtime} is off by {error:.2f} of the norm of its outputs.')
            continue
        torch.testing.assert_close(
            output, first, atol=1e-3 * first.abs().max().item(), rtol=0,
            msg=lambda text, row=row: f'{row.network} under {row.runtime} gives different outputs: {text}')


def time_in_turns(sides: Sequence[Tuple[Row, Run]], batches: Sequence[torch.Tensor], rounds: int) -> None:
    """Time all sides once per round, in random order, on the next batch. The first round is a warm-up."""
    order = random.Random(0)
    for index in tqdm(range(rounds + 1), desc='rounds', leave=False):
        x = batches[index % len(batches)]
        for row, run in order.sample(sides, len(sides)):
            time.sleep(0.03)  # idle threads of the previous runtime spin for a while
            run(x)  # warm the caches
            start = time.perf_counter()
            run(x)
            if index:
                row.times.append(1e3 * (time.perf_counter() - start))


def benchmark_network(
        args: argparse.Namespace, network: Network, batch_size: int, threads: int, folder: Path) -> List[Row]:
    """Time all runtimes of a network in one setting. Int8 and whole segmentors run at batch size 1 only."""
    import torch

    from timm_gated import count_macs
    torch.set_num_threads(threads)
    dense = network.dense()
    is_fast = batch_size == 1 and not isinstance(network, PSPNet)
    rounds = args.rounds if is_fast else max(5, args.rounds // 4)
    # Trained gates decide by the image: another one in each round.
    count = rounds if network.is_trained and args.data_dir is not None else 1
    images = load_images(network, args.data_dir, count * batch_size)
    batches = images.split(batch_size)
    x = batches[0]
    native = native_runtimes(args, batch_size)
    calibration = load_images(network, args.data_dir, args.calibration_images, seed=1)
    sides: List[Tuple[Row, Run]] = []
    prepared = tqdm(desc=f'{network.name}, prepared', unit=' runtimes', leave=False)

    def add(name: str, model: torch.nn.Module, runtime: str, keep: Optional[float], gmacs: float) -> None:
        path = None
        if runtime in ('onnxruntime', 'openvino', INT8):
            path = prepare_onnx(model, x, folder / f'{network.name}-{batch_size}.onnx')
        if runtime == INT8:
            path = quantize(path, calibration)
        row = Row(name, network.dense_name, runtime, keep, network.image_size, batch_size, threads, gmacs)
        sides.append((row, prepare(model, runtime, threads, path, calibration)))
        prepared.update()

    dense_macs = count_macs(dense, x[:1]).dense / 1e9
    for runtime in (*args.dense_runtimes, *native):
        if runtime != INT8 or batch_size == 1:
            add(network.dense_name, dense, runtime, None, dense_macs)
    for keep, gated in network.variants(args.keep):
        macs = torch.cat([count_macs(gated, batch).per_sample for batch in batches]).double().mean().item() / 1e9
        for runtime in ('masked', 'torch', *native):
            add(network.name, gated, runtime, keep, dense_macs if runtime == 'masked' else macs)
    prepared.close()
    check_outputs(sides, x)
    time_in_turns(sides, batches, rounds)
    return [row for row, _ in sides]


def native_runtimes(args: argparse.Namespace, batch_size: int) -> List[str]:
    """Names of the native runtimes to measure."""
    from timm_gated import instruction_sets
    runtimes = []
    if 'float32' in args.precision:
        runtimes += [f'native {isa}' for isa in args.isa if isa in instruction_sets()]
    if 'int8' in args.precision and batch_size == 1:
        runtimes += [f'native {isa} int8' for isa in args.isa]
    return runtimes


def benchmark(args: argparse.Namespace, networks: Sequence[Network], folder: Path) -> List[Row]:
    runs = [(batch_size, threads, network) for batch_size in args.batch_sizes for threads in args.threads
            for network in networks if batch_size == 1 or not isinstance(network, PSPNet)]
    rows: List[Row] = []
    for batch_size, threads, network in tqdm(runs, desc='settings', unit=''):
        rows.extend(benchmark_network(args, network, batch_size, threads, folder))
    return rows


def fma_peaks() -> Dict[str, float]:
    """Measure the FMA peak of one core in GFLOP/s, for each vectorised instruction set of this machine."""
    from timm_gated import instruction_sets
    from timm_gated.inference.native import fma_peak
    return {isa: fma_peak(isa) for isa in instruction_sets() if isa != 'portable'}


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


def simulate(args: argparse.Namespace, networks: Sequence[Network]) -> List[Row]:
    """Simulate batched kernels as in the paper: per image, time the sparse network of its gate decisions on a batch.

    Paper: Batch-Shaping for Learning Conditional Channel Gated Networks (https://openreview.net/forum?id=Bke89JBtvB)
    """
    import torch

    from timm_gated import count_macs
    from timm_gated.inference import SlicedRunner, compile_trunk, trunk
    device = torch.device(args.device)

    def milliseconds(run: Callable[[], Any]) -> float:
        times = []
        for _ in range(args.rounds + 1):
            start = time.perf_counter()
            run()
            if device.type != 'cpu':
                torch.accelerator.synchronize(device)
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times[1:])

    rows, batch_size = [], args.simulate_batch_size
    for network in networks:
        dense = network.dense()
        images = load_images(network, args.data_dir, args.simulate)
        batch = images[:1].expand(batch_size, -1, -1, -1).to(device)
        macs = count_macs(dense, images[:1]).dense / 1e9
        # both without the head and with batch norm folded
        plain = SlicedRunner(compile_trunk(trunk(dense).modules)).to(device)
        rows.append(Row(
            network.dense_name, network.dense_name, 'eager', None, network.image_size, batch_size,
            torch.get_num_threads(), macs, [milliseconds(lambda plain=plain, batch=batch: plain.run_together(batch))]))
        for keep, gated in network.variants(args.keep):
            runner = SlicedRunner(compile_trunk(trunk(gated).modules))
            times = []
            for image in tqdm(images, desc=f'{network.name}, images', leave=False):
                opened = runner.run_together(image[None]).opened
                sparse = fix_gates(runner, opened).to(device)
                times.append(milliseconds(lambda sparse=sparse, batch=batch: sparse.run_together(batch)))
            macs = count_macs(gated, images).per_sample.double().mean().item() / 1e9
            rows.append(Row(
                network.name, network.dense_name, 'simulated', keep, network.image_size, batch_size,
                torch.get_num_threads(), macs, times))
    return rows


def machine(isa: Sequence[str]) -> Dict[str, Any]:
    """Describe the machine and the versions of the runtimes."""
    cpu = platform.processor()
    if Path('/proc/cpuinfo').exists():
        names = [line.split(':', 1)[1].strip() for line in Path('/proc/cpuinfo').read_text().splitlines()
                 if line.startswith('model name')]
        cpu = names[0] if names else cpu
    versions = {}
    if 'ONEDNN_MAX_CPU_ISA' in os.environ:
        versions['torch and openvino limited to'] = os.environ['ONEDNN_MAX_CPU_ISA']
    for name in ('torch', 'timm', 'onnxruntime', 'openvino', 'nncf', 'mmsegmentation'):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return dict(cpu=cpu, cores=os.cpu_count(), kernels=' and '.join(isa) or 'none', **versions)


def choose_isa(asked: Optional[Sequence[str]], only_fastest: bool) -> List[str]:
    """Choose the instruction sets of the native kernels: those asked for, or all vectorised ones of this CPU."""
    from timm_gated import instruction_sets
    available = instruction_sets('int8')
    missing = [isa for isa in asked or () if isa not in available]
    if missing:
        raise ValueError(f'--isa {" ".join(missing)} is not available here, only {", ".join(available) or "none"}.')
    chosen = list(asked or [isa for isa in available if isa != 'portable'] or available)
    return chosen[:1] if only_fastest and not asked else chosen


def choose_networks(args: argparse.Namespace) -> List[Network]:
    """Find the networks asked for, or the default ones."""
    names = args.networks
    if names is None:
        names = ['18', '34', '50']
        if not args.quick and args.simulate is None and 1 in args.batch_sizes:
            if has_mmseg():
                names.append(PSPNET)
            else:
                print(f"skipped {PSPNET}: mmsegmentation is not installed (pip install 'timm-gated[mmseg]').")
    networks = [find_network(name, args.img_size, args.checkpoint, args.dense_weights) for name in names]
    return list({network.name: network for network in networks}.values())


def parse_args(argv: Optional[List[str]]) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument('--quick', action='store_true', help='batch 1, --keep 0.43 0.55 1, 7 rounds, the fastest '
                        'instruction set, no torch.compile, int8 and PSPNet: within three minutes')
    parser.add_argument('--networks', nargs='+', metavar='NAME', help='gated models of timm, 18, 34, … or '
                        f'{PSPNET} (default: 18 34 50 and, with mmseg, {PSPNET})')
    parser.add_argument('--keep', type=float, nargs='+', default=[0.25, 0.43, 0.55, 0.75, 1.],
                        help='shares of filters to keep (default: 0.25 0.43 0.55 0.75 1)')
    parser.add_argument('--batch-sizes', type=int, nargs='+', default=[1, 32])
    parser.add_argument('--threads', type=int, nargs='+', help='numbers of threads (default: 1 and all)')
    parser.add_argument('--dense-runtimes', nargs='+', default=list(DENSE_RUNTIMES), choices=DENSE_RUNTIMES)
    parser.add_argument('--isa', nargs='+', choices=('avx512', 'avxvnni', 'avx2', 'portable'),
                        help='instruction sets of the native kernels; avxvnni is that of avx2 in float32 (default: all '
                        'vectorised ones of this CPU)')
    parser.add_argument('--precision', nargs='+', choices=('float32', 'int8'), default=['float32', 'int8'],
                        help='precisions of the native kernels (default: both)')
    parser.add_argument('--img-size', type=int, metavar='N', help=f"image size (default: the network's, 224 or 32); "
                        f'{PSPNET} has N x 2N (default: 288 x 576)')
    parser.add_argument('--rounds', type=int, default=21, help=f'timed rounds at batch size 1; larger batches and '
                        f'{PSPNET} have a quarter, at least 5 (default: 21)')
    parser.add_argument('--checkpoint', help='weights of a trained gated network; needs a single --networks')
    parser.add_argument('--dense-weights', metavar='NAME', help='trained weights of the dense counterpart: a file, or '
                        'a model of timm with its tag; needs a single --networks')
    parser.add_argument('--accuracy-images', type=int, default=1000, metavar='N', help='number of validation images '
                        'for the accuracies of trained networks (default: 1000)')
    parser.add_argument('--calibration-images', type=int, metavar='N', help='number of images that int8 is calibrated '
                        'on, ours and that of OpenVINO (default: 128 with --data-dir, 16 of noise)')
    parser.add_argument('--data-dir', help='image folder to use instead of noise; a trained network '
                        'gets another image in each round')
    parser.add_argument('--simulate', type=int, metavar='IMAGES',
                        help='simulate batched kernels as in the paper, on the sparse networks of this many images')
    parser.add_argument('--simulate-batch-size', type=int, default=128,
                        help='batch size of the simulation (default: 128, as in the paper)')
    parser.add_argument('--device', default='cpu', help='device of the simulation (default: cpu)')
    parser.add_argument('--output', type=Path, default=Path('output/bench'), help='folder for the results')
    add_json_option(parser)
    args = parser.parse_args(argv)
    if args.rounds < 1:
        parser.error(f'--rounds must be at least 1, got {args.rounds}.')
    if args.calibration_images is None:
        args.calibration_images = 16 if args.data_dir is None else 128
    if args.calibration_images < 1:
        parser.error(f'--calibration-images must be at least 1, got {args.calibration_images}.')
    if not all(0 <= share <= 1 for share in args.keep):
        parser.error(f'--keep must be between 0 and 1, got {args.keep}.')
    if args.checkpoint is not None and len(args.networks or ()) != 1:
        parser.error('--checkpoint needs a single network, for example --networks 34.')
    if args.checkpoint is not None and not Path(args.checkpoint).is_file():
        parser.error(f'--checkpoint {args.checkpoint} does not exist.')
    if args.dense_weights is not None and len(args.networks or ()) != 1:
        parser.error('--dense-weights needs a single network, for example --networks 34.')
    if args.data_dir is not None and not Path(args.data_dir).is_dir():
        parser.error(f'--data-dir {args.data_dir} does not exist.')
    whole = PSPNET in (args.networks or ())
    if whole and (args.quick or args.simulate is not None):
        parser.error(f'{PSPNET} is not part of --quick and --simulate.')
    if whole and 1 not in args.batch_sizes:
        parser.error(f'{PSPNET} runs at batch size 1 only, got --batch-sizes {args.batch_sizes}.')
    if args.quick:
        args.keep, args.batch_sizes, args.rounds, args.precision = [0.43, 0.55, 1.], [1], 7, ['float32']
        args.dense_runtimes = [runtime for runtime in args.dense_runtimes if runtime not in ('compile', INT8)]
    return args


def run(args: argparse.Namespace) -> Dict[str, Any]:
    limit_onednn(args.isa or ())

    import torch
    if args.threads is None:
        args.threads = sorted({1, torch.get_num_threads()})
    args.isa = choose_isa(args.isa, args.quick)
    networks = choose_networks(args)
    weights = 'random (untrained)'
    trained = [args.checkpoint or network.name for network in networks if network.is_trained]
    if trained:
        rest = 'random (all others, untrained)'
        if len(trained) == len(networks):
            rest = f'{args.dense_weights} (dense)' if args.dense_weights else 'random (dense, untrained)'
        weights = f'{", ".join(trained)} (gated), {rest}'
    args.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=args.output) as scratch:
        folder = Path(scratch)
        peaks = {} if args.simulate is not None else fma_peaks()
        with torch.inference_mode():
            rows = simulate(args, networks) if args.simulate is not None else benchmark(args, networks, folder)
            accuracies = measure_accuracies(args, networks, folder)
        found, fits = machine(args.isa), fit_lines(rows)
        conditions = f'{", ".join(f"{key} {value}" for key, value in found.items())}\nweights: {weights}'
        if peaks:
            conditions += '\nFMA peak of one core: ' + ', '.join(
                f'{isa} {peak:.0f} GFLOP/s' for isa, peak in peaks.items())
        summary = f'{conditions}\n\n{table(rows, peaks)}\n{LEGEND}\n'
        if accuracies:
            summary += f'\n{accuracy_table(accuracies, args.calibration_images)}'
        if fits:
            summary += f'\n{fit_table(fits)}'
        (folder / 'table.txt').write_text(summary)
        results = dict(
            machine=found, weights=weights, fma_peaks=peaks, fits=[asdict(fit) for fit in fits],
            accuracies=[asdict(accuracy) for accuracy in accuracies],
            rows=[dict(asdict(row), ms=row.ms, share_of_peak=row.share_of_peak(peaks)) for row in rows])
        (folder / 'results.json').write_text(json.dumps(results, indent=1))
        plot(rows, fits, weights, folder / 'speed.png')
        for name in ('table.txt', 'results.json', 'speed.png'):
            os.replace(folder / name, args.output / name)
    print(f'{summary}\nFigure and timings: {args.output}')
    return results


def main(argv: Optional[List[str]] = None) -> int:
    return execute(run, parse_args(argv))


if __name__ == '__main__':
    sys.exit(main())
