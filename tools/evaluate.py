"""Evaluate gated and dense models: accuracy, MACs, parameters used and gates, as a table and JSON

    python tools/evaluate.py --model gated_resnet20.bas_c10 --data-dir data/cifar10
    python tools/evaluate.py --model gated_resnet20 --checkpoint runs/*/model_best.pth.tar --data-dir data/cifar10
    python tools/evaluate.py --model gated_resnet20 --checkpoint gated.pth cifar_resnet20=dense.pth \\
        --data-dir data/cifar10 --output runs/evaluation.json

A checkpoint belongs to --model unless it is written as MODEL=FILE. Without one, the pretrained weights of --model are
evaluated. tools/tradeoff.py draws the JSON file.
"""
import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from _options import add_data_options, add_model_options, add_threshold_option, format_table, make_parser

Result = Dict[str, Any]


def evaluate(text: str, args: argparse.Namespace) -> Result:
    """Evaluate one checkpoint.

    Args:
        text: FILE or MODEL=FILE; empty for the pretrained weights.
        args: Parsed command line.
    """
    from tqdm import tqdm

    from timm_gated.analysis import create_data, create_network, parse_checkpoint, record_gates, summary, title
    model, checkpoint = parse_checkpoint(text, args.model)
    path = Path(checkpoint)
    name = re.sub(r'(\.(pth|pt|th|tar|safetensors))+$', '', path.name)
    if name in ('model_best', 'last'):  # in timm, the folder has the name of the run
        name = path.resolve().parent.name
    network = create_network(model, checkpoint, args)
    name = title(network, model, name)
    data = create_data(network, args)
    batches = tqdm(data.loader, desc=name, unit='batch')
    record = record_gates(network, batches, data.class_names, data.step)
    return {
        'name': name, 'model': model, 'checkpoint': checkpoint, 'untrained': network.untrained,
        'data': f'{args.data_dir}, {args.split}', **summary(record, args.threshold)}


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


def main(argv: Optional[List[str]] = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument(
        '--checkpoint', nargs='+', default=[''], metavar='[MODEL=]FILE', help='weights to evaluate')
    parser.add_argument('--output', type=Path, metavar='FILE', help='JSON file for the results')
    add_threshold_option(parser)
    add_model_options(parser)
    add_data_options(parser)
    args = parser.parse_args(argv)

    from timm_gated.analysis import check_threshold
    from timm_gated.utils import new_file
    try:
        check_threshold(args.threshold)
        results = [evaluate(text, args) for text in args.checkpoint]
    except ValueError as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    print(table(results))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        with new_file(args.output) as partial:
            text = json.dumps({'results': results}, indent=1, allow_nan=False)
            partial.write_text(f'{text}\n', encoding='utf-8')
        print(f'Results: {args.output}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
