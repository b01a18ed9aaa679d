"""Evaluate gated and dense models: accuracy, MACs, parameters used and gates, as a table and JSON

    timm-gated evaluate --model gated_resnet20.bas_c10 --data-dir data/cifar10
    timm-gated evaluate --model gated_resnet20 --checkpoint runs/*/model_best.pth.tar --data-dir data/cifar10
    timm-gated evaluate --model gated_resnet20 --checkpoint gated.pth cifar_resnet20=dense.pth \\
        --data-dir data/cifar10 --output runs/evaluation.json
    timm-gated evaluate --model gated_resnet20.bas_c10 --pretrained --data-dir data/cifar10 --accelerate
    timm-gated evaluate --model gated_resnet20.bas_c10 --data-dir data/cifar10 --accelerate --precision int8 \\
        --calibration-crop-pct 0.8

A checkpoint belongs to --model unless it is written as MODEL=FILE. Without one, the pretrained weights of --model are
evaluated. `timm-gated tradeoff` draws the JSON file.

--accelerate also runs each network through `timm_gated.accelerate`, on the CPU. It adds the accuracy of the accelerated
network, the number of images whose prediction differs, the share of equal gate decisions, the number of convolutions
in int8, and milliseconds per image at batch 1: accelerated, the accelerated dense counterpart, and the network in eager
torch. The first table describes the network itself. --precision int8 quantises the accelerated networks; images of the
training split, as the network gets them in evaluation, choose the ranges.
"""
from __future__ import annotations

import argparse
import random
import re
import statistics
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Sequence

from timm_gated_cli._options import (
    Progress,
    add_data_options,
    add_json_option,
    add_model_options,
    add_threshold_option,
    execute,
    format_table,
    make_parser,
    write_json,
)

if TYPE_CHECKING:
    import torch
    import torch.nn as nn

Result = Dict[str, Any]
SIDES = {'accelerated': 'accelerated, ms', 'dense': 'dense, ms', 'eager': 'eager, ms'}


def dense_counterpart(network: Any) -> Optional[nn.Module]:
    """Create the dense counterpart of a gated network, with its weights. None if the network has no counterpart."""
    import timm

    from timm_gated import GatedNet
    if not isinstance(network, GatedNet):
        return None
    args = {**network.dense_args, 'num_classes': network.num_classes}
    dense = timm.create_model(network.dense_variant, **args).eval()
    names = dense.state_dict().keys()
    dense.load_state_dict({name: value for name, value in network.state_dict().items() if name in names}, strict=False)
    return dense


def calibration_images(network: nn.Module, args: argparse.Namespace) -> List[torch.Tensor]:
    """Batches of one image of the training split, spread evenly, as the network gets them in evaluation."""
    from timm_gated.analysis import create_data
    options = {**vars(args), 'split': args.calibration_split}
    if args.calibration_crop_pct is not None:
        options['crop_pct'] = args.calibration_crop_pct
    dataset = create_data(network, argparse.Namespace(**options)).loader.dataset
    count = min(args.calibration_images, len(dataset))
    return [dataset[index * len(dataset) // count][0][None] for index in range(count)]


def accelerated(network: nn.Module, model: str, args: argparse.Namespace) -> nn.Module:
    """Accelerate a network. Raise a ValueError that names the model if that is not possible."""
    from timm_gated import accelerate
    calibration = None
    if args.precision == 'int8':
        calibration = Progress(calibration_images(network, args), 'ranges for int8', unit='image')
    try:
        return accelerate(network, precision=args.precision, calibration=calibration)
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"--accelerate does not support '{model}': {error} Run without --accelerate.") from error


def count_int8(fast: nn.Module) -> Dict[str, int]:
    """Count the convolutions of accelerated networks: those in int8 and all of them, linear layers included."""
    from timm_gated.inference import Accelerated
    from timm_gated.inference.program import ConvOp, Int8ConvOp, Int8LinearOp
    ops = [op for part in fast.modules() if isinstance(part, Accelerated) for op in part.runner.program.ops]
    return {
        'int8': sum(isinstance(op, (Int8ConvOp, Int8LinearOp)) for op in ops),
        'all': sum(isinstance(op, ConvOp) for op in ops)}


def time_in_turns(sides: Dict[str, nn.Module], images: Sequence[torch.Tensor]) -> Dict[str, float]:
    """Return the median milliseconds per image of each side at batch 1.

    Each image runs on all sides in random order, so that a disturbance of the machine affects all of them.
    """
    import torch
    order = random.Random(0)
    times: Dict[str, List[float]] = {name: [] for name in sides}
    with torch.inference_mode():
        for image in Progress(images, 'times', unit='image'):
            for name in order.sample(list(sides), len(sides)):
                time.sleep(0.03)  # idle threads of the previous side spin for a while
                sides[name](image[None])  # warm the caches
                start = time.perf_counter()
                sides[name](image[None])
                times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def measure_speed(
        network: nn.Module, fast: nn.Module, model: str, dataset: Any, args: argparse.Namespace) -> Result:
    """Time a network on images spread evenly over a data set, and describe the conditions.

    Args:
        network: Network in evaluation mode.
        fast: The accelerated network.
        model: Name of the model.
        dataset: Data set of (image, label).
        args: Parsed command line.
    """
    import torch

    from timm_gated.inference import Accelerated
    sides = {'accelerated': fast, 'eager': network}
    dense = dense_counterpart(network)
    if dense is not None:
        sides['dense'] = accelerated(dense, model, args)
    count = min(args.timed_images, len(dataset))
    images = [dataset[index * len(dataset) // count][0] for index in range(count)]
    times = time_in_turns(sides, images)
    part = next(module for module in fast.modules() if isinstance(module, Accelerated))
    return {
        'milliseconds': {name: times.get(name) for name in SIDES}, 'num_images': count, 'batch_size': 1,
        'threads': torch.get_num_threads(), 'precision': args.precision,
        'backend': part.backend, 'isa': getattr(part.runner, 'isa', None)}


def evaluate(text: str, args: argparse.Namespace) -> Result:
    """Evaluate one checkpoint.

    Args:
        text: FILE or MODEL=FILE; empty for the pretrained weights.
        args: Parsed command line.
    """
    import torch
    from tqdm import tqdm

    from timm_gated import gates
    from timm_gated.analysis import (
        create_data,
        create_network,
        parse_checkpoint,
        record_gates,
        summary,
        title,
    )
    model, checkpoint = parse_checkpoint(text, args.model)
    path = Path(checkpoint)
    name = re.sub(r'(\.(pth|pt|th|tar|safetensors))+$', '', path.name)
    if name in ('model_best', 'last'):  # in timm, the folder has the name of the run
        name = path.resolve().parent.name
    network = create_network(model, checkpoint, args)
    fast: Any = accelerated(network, model, args) if args.accelerate else None
    name = title(network, model, name)
    data = create_data(network, args)
    batches = tqdm(data.loader, desc=name, unit='batch')
    predictions: List[int] = []
    equal_decisions: List[float] = []

    def run_both() -> Iterator[Any]:
        """Run the accelerated network before each batch is recorded: a record counts the MACs of all that runs."""
        for batch in batches:
            output, decisions = fast.run_with_decisions(batch[0])
            predictions.extend(output.argmax(1).tolist())
            yield batch
            equal = [decisions[name][:, :gate.num_gates] == gate.decision.bool() for name, gate in gates(network)]
            equal_decisions.extend(torch.cat(equal, dim=1).float().mean(1).tolist() if equal else [])

    record = record_gates(network, run_both() if fast is not None else batches, data.class_names, data.step)
    result = {
        'name': name, 'model': model, 'checkpoint': checkpoint, 'untrained': network.untrained,
        'data': f'{args.data_dir}, {args.split}', **summary(record, args.threshold)}
    if fast is not None:
        result['accelerate'] = {
            'top1': 100 * sum(record.label == predictions) / record.num_samples,
            'different_predictions': int(sum(record.prediction != predictions)),
            'equal_decisions': statistics.fmean(equal_decisions) if equal_decisions else None,
            'int8_convolutions': count_int8(fast), **measure_speed(network, fast, model, data.loader.dataset, args)}
    return result


def table(results: Sequence[Result]) -> str:
    """Format the results, one per line."""
    from timm_gated.analysis import GateCounts
    rows = [(
        '', 'top-1', 'top-5', 'MACs per sample', 'share', 'parameters used', 'open',
        'always on / conditional / always off')]
    for result in results:
        gated = bool(result['num_gates'])
        rows.append((
            result['name'],
            f'{result["top1"]:.2f}',
            '-' if result['top5'] is None else f'{result["top5"]:.2f}',
            f'{result["mean_macs"] / 1e6:.2f} M',
            f'{result["macs_share"]:.1%}',
            f'{result["parameters_used"] / 1e6:.3f} of {result["parameters"] / 1e6:.3f} M',
            f'{result["gate_density"]:.1%}' if gated else '-',
            ' / '.join(str(result[kind]) for kind in GateCounts._fields) if gated else 'no gates'))
    return format_table(rows)


def speed_table(results: Sequence[Result]) -> str:
    """Format the times of the accelerated networks, one per line, under their conditions."""
    speed = results[0]['accelerate']
    kernels = f'native kernels ({speed["isa"]})' if speed['isa'] else f'{speed["backend"]} backend'
    rows = [('', *SIDES.values(), 'images', 'top-1', 'different predictions', 'equal gate decisions',
             'convolutions in int8')]
    for result in results:
        speed = result['accelerate']
        times = [speed['milliseconds'][name] for name in SIDES]
        rows.append((
            result['name'],
            *('-' if value is None else f'{value:.3f}' for value in times),
            str(speed['num_images']),
            f'{speed["top1"]:.2f}',
            f'{speed["different_predictions"]} of {result["num_samples"]}',
            '-' if speed['equal_decisions'] is None else f'{speed["equal_decisions"]:.2%}',
            '{int8} of {all}'.format(**speed['int8_convolutions'])))
    threads = f'{speed["threads"]} thread{"s" if speed["threads"] > 1 else ""}'
    return (
        f'Median milliseconds per image at batch 1, {threads}, {speed["precision"]}, {kernels}.\n'
        f'dense: accelerated dense counterpart; eager: the network in torch.\n\n{format_table(rows)}')


def parse_args(argv: Optional[List[str]]) -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument(
        '--checkpoint', nargs='+', default=[''], metavar='[MODEL=]FILE', help='weights to evaluate')
    parser.add_argument('--output', type=Path, metavar='FILE', help='JSON file for the results')
    add_json_option(parser)
    add_threshold_option(parser)
    parser.add_argument(
        '--accelerate', action='store_true', help='also run and time the accelerated networks, on the CPU')
    parser.add_argument(
        '--timed-images', type=int, default=50, metavar='N',
        help='number of images to time with --accelerate (default: %(default)s)')
    parser.add_argument(
        '--precision', choices=['float32', 'int8'], default='float32',
        help='precision of the accelerated networks (default: %(default)s)')
    parser.add_argument(
        '--calibration-images', type=int, default=256, metavar='N',
        help='number of images that choose the ranges in int8 (default: %(default)s)')
    parser.add_argument(
        '--calibration-split', default='train', metavar='NAME',
        help='split of these images (default: %(default)s)')
    parser.add_argument(
        '--calibration-crop-pct', type=float, metavar='X',
        help='centre crop fraction of these images (default: as in evaluation); 0.8 for those of prepare-cifar10, '
        'which are padded')
    add_model_options(parser)
    add_data_options(parser)
    args = parser.parse_args(argv)
    if args.precision == 'int8' and not args.accelerate:
        parser.error('--precision int8 is for accelerated networks: give --accelerate.')
    if args.calibration_images < 1:
        parser.error(f'--calibration-images must be at least 1, got {args.calibration_images}.')
    if args.timed_images < 1:
        parser.error(f'--timed-images must be at least 1, got {args.timed_images}.')
    if args.accelerate:
        args.device = args.device or 'cpu'
        if args.device.partition(':')[0] != 'cpu':
            parser.error(f'--accelerate runs on the CPU, got --device {args.device}. Give --device cpu.')
    return args


def run(args: argparse.Namespace) -> Result:
    from timm_gated.analysis import check_threshold
    check_threshold(args.threshold)
    results = {'results': [evaluate(text, args) for text in args.checkpoint]}
    print(table(results['results']))
    if args.accelerate:
        print(f'\n{speed_table(results["results"])}')
    if args.output:
        write_json(args.output, results)
    return results


def main(argv: Optional[List[str]] = None) -> int:
    return execute(run, parse_args(argv))


if __name__ == '__main__':
    sys.exit(main())
