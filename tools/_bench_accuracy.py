"""Accuracies of trained networks in the inference benchmark: float32 and int8, gated and dense"""
from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, Optional, Sequence, Tuple

from tqdm import tqdm

from timm_gated_cli._bench_networks import Network, create_images, load_images
from timm_gated_cli._bench_runtimes import INT8, prepare, prepare_onnx, quantize
from timm_gated_cli._options import format_table

__all__ = ['Accuracy', 'accuracy_table', 'measure_accuracies']


@dataclass
class Accuracy:
    """Accuracy of a network under a runtime."""
    network: str
    runtime: str
    num_images: int
    top1: float  # in per cent


def _runtimes(args: argparse.Namespace, network: Network) -> List[Tuple[bool, str]]:
    """Runtimes to measure, each with whether it runs the dense counterpart."""
    isa = args.isa[0]
    kinds = [(False, f'native {isa}' if isa != 'avxvnni' else 'native avx2'), (False, f'native {isa} int8')]
    if network.has_dense_weights:
        kinds += [(True, 'eager'), *((True, INT8) for _ in range(INT8 in args.dense_runtimes))]
    return [kind for kind in kinds if 'int8' in args.precision or not kind[1].endswith('int8')]


def measure_accuracies(args: argparse.Namespace, networks: Sequence[Network], folder: Path) -> List[Accuracy]:
    """Measure the accuracies of the trained networks on validation images spread over the data set.

    Args:
        args: Parsed command line.
        networks: Networks; those without trained weights are left out.
        folder: Folder with the files of the benchmark.
    """
    accuracies: List[Accuracy] = []
    for network in networks if args.data_dir is not None and args.simulate is None else ():
        if not network.is_trained:
            continue
        dataset = create_images(network, args.data_dir)
        count = min(args.accuracy_images, len(dataset))
        indices = [index * len(dataset) // count for index in range(count)]
        calibration = load_images(network, args.data_dir, args.calibration_images, seed=1)
        sides = []
        for is_dense, runtime in _runtimes(args, network):
            model: Any = network.dense() if is_dense else next(network.variants(()))[1]
            path: Optional[Path] = None
            if runtime == INT8:
                path = quantize(prepare_onnx(model, calibration[:1], folder / f'{network.name}-1.onnx'), calibration)
            name = network.dense_name if is_dense else network.name
            run = prepare(model, runtime, max(args.threads), path, calibration)
            sides.append((Accuracy(name, runtime, count, 0.), run))
        for index in tqdm(indices, desc=f'{network.name}, accuracy', leave=False):
            image, label = dataset[index]
            for accuracy, run in sides:
                accuracy.top1 += (run(image[None]).argmax(1).item() == label) * 100 / count
        accuracies.extend(accuracy for accuracy, _ in sides)
    return accuracies


def accuracy_table(accuracies: Sequence[Accuracy], calibration_images: int) -> str:
    """Format the accuracies.

    Args:
        accuracies: Accuracies of all networks.
        calibration_images: Largest number of images that int8 was calibrated on.
    """
    cells = [['network', 'runtime', 'validation images', 'top-1'], *(
        [row.network, row.runtime, f'{row.num_images}', f'{row.top1:.2f}'] for row in accuracies)]
    return (f'Accuracies. Int8 is calibrated on the same validation images everywhere, up to {calibration_images}.\n'
            f'{format_table(cells)}\n')
