"""Soak test of an accelerated network: check that memory does not grow and that outputs do not change

    python tools/dev/soak_inference.py                                              # 10,000 of a small network
    python tools/dev/soak_inference.py --model gated_resnet34 --no-pretrained --img-size 224
    python tools/dev/soak_inference.py --precision int8

Every tenth inference has another image and batch size, with more sizes than memory is kept for. Every hundredth creates
a new network. Outputs must be bitwise equal to the first one for the same images. Resident memory is measured ten times
and must not grow after the first time. Needs /proc (Linux).
"""
from __future__ import annotations

import argparse
import gc
import os
import pickle
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Callable, Dict, List, Optional

from timm_gated_cli._options import make_parser

if TYPE_CHECKING:
    import torch

MEGABYTE = 2 ** 20


def resident_bytes() -> int:
    """Collect garbage and return the resident memory of this process."""
    gc.collect()
    return int(Path('/proc/self/statm').read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE')


def make_batches(channels: int, size: int) -> List[torch.Tensor]:
    """Create one image of the given size, then batches of other sizes."""
    import torch
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, size, size)] + [(1 + i % 3, size + i, size - i // 2) for i in range(1, 8)]
    return [torch.randn(count, channels, *shape, generator=generator) for count, *shape in shapes]


def soak(
        make: Callable[[], torch.nn.Module],
        batches: List[torch.Tensor],
        count: int,
) -> Dict[str, List[int]]:
    """Return the inferences whose output changed, and the memory after each tenth of them.

    Args:
        make: Function that creates the network.
        batches: Batches to run.
        count: Number of inferences.
    """
    import torch
    expected: Dict[int, torch.Tensor] = {}
    changed, memory = [], []
    fast = make()
    for i in range(count):
        if i % 100 == 99:
            fast = make()
        which = 1 + i // 10 % (len(batches) - 1) if i % 10 == 9 else 0
        output = fast(batches[which])
        if not torch.equal(output, expected.setdefault(which, output)):
            changed.append(i)
        if (i + 1) % (count // 10) == 0:
            memory.append(resident_bytes())
    return dict(changed=changed, memory=memory)


def network_maker(
        model: torch.nn.Module, batches: List[torch.Tensor], args: argparse.Namespace) -> Callable[[], torch.nn.Module]:
    """Return a function that accelerates a model. In int8, it loads the first network again: the choice of the layers
    that stay in float32 depends on times."""
    import timm_gated
    if args.precision == 'float32':
        return lambda: timm_gated.accelerate(model, args.backend)
    first = timm_gated.accelerate(model, args.backend, precision='int8', calibration=batches[0])
    saved = pickle.dumps(first)
    return lambda: pickle.loads(saved)


def main(argv: Optional[List[str]] = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument('--model', default='gated_resnet20', help='classifier (default: %(default)s)')
    parser.add_argument('--pretrained', action=argparse.BooleanOptionalAction, default=True, help='pretrained weights')
    parser.add_argument('--img-size', type=int, default=32, help='size of most images (default: %(default)s)')
    parser.add_argument('--count', type=int, default=10000, help='number of inferences (default: %(default)s)')
    parser.add_argument('--backend', default='auto', choices=['auto', 'native', 'torch'], help='default: %(default)s')
    parser.add_argument('--precision', default='float32', choices=['float32', 'int8'], help='default: %(default)s')
    parser.add_argument('--growth', type=float, default=4, help='allowed growth of memory in MB (default: %(default)s)')
    args = parser.parse_args(argv)
    if args.count < 10 or args.img_size < 8:
        parser.error('--count must be at least 10 and --img-size at least 8.')

    import timm
    import torch

    from timm_gated.models import check_model_name, check_weights
    torch.manual_seed(0)
    try:
        check_model_name(args.model)
        if args.pretrained:
            check_weights(args.model, 'Give --no-pretrained for random weights.')
    except ValueError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    model = timm.create_model(args.model, pretrained=args.pretrained).eval()
    batches = make_batches(model.pretrained_cfg['input_size'][0], args.img_size)
    result = soak(network_maker(model, batches, args), batches, args.count)
    megabytes = [memory / MEGABYTE for memory in result['memory']]
    growth = max(megabytes[1:]) - megabytes[0]
    name = f'{args.model}{"" if args.pretrained else " (untrained)"}, {args.precision}'
    print(f'{name}, {args.count} inferences: {len(result["changed"])} outputs changed; resident memory '
          f'{megabytes[0]:.1f} MB after a tenth, at most {growth:+.1f} MB later, {megabytes[-1]:.1f} MB at the end')
    return 1 if result['changed'] or growth > args.growth else 0


if __name__ == '__main__':
    sys.exit(main())
