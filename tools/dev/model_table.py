"""Print the rows of the model tables in README.md and configs/timm/README.md

    python tools/dev/model_table.py 'convnet_aig_*'

MACs are counted as in `count_macs`, on the meta device. Tests compare the tables with this output.
"""
import sys
from typing import List, Optional

from timm_gated_cli._options import make_parser

HEADER = '| model | input | parameters | dense parameters | dense MACs | gate overhead | gates |'


def row(name: str) -> str:
    """Row of a model in the table."""
    import timm

    from timm_gated import Gating, gates, mac_formula
    model = timm.create_model(name, device='meta')
    input_size = model.pretrained_cfg['input_size']
    formula = mac_formula(model, input_size)
    overhead = formula.fixed + sum(macs for macs, _ in formula.switched.values()) - formula.dense
    parameters = {parameter: parameter.numel() for parameter in model.parameters()}
    gating = {p for module in model.modules() if isinstance(module, Gating) for p in module.parameters()}
    total, extra = sum(parameters.values()), sum(parameters[parameter] for parameter in gating)
    cells = (
        f'`{name}`',
        str(input_size[1]),
        f'{total / 1e6:.3f} M',
        f'{(total - extra) / 1e6:.3f} M',
        f'{formula.dense / 1e9:.3f} G',
        f'{100 * overhead / formula.dense:.3f} %',
        str(sum(gate.num_gates for _, gate in gates(model))),
    )
    return f'| {" | ".join(cells)} |'


def main(argv: Optional[List[str]] = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument('pattern', nargs='?', default='', help='model name with wildcards (default: all gated models)')
    args = parser.parse_args(argv)

    from timm_gated import list_gated_models
    from timm_gated.models import near_models
    names = list_gated_models(args.pattern)
    if not names:
        near = [name for name in near_models(args.pattern) if name in list_gated_models()]
        print(f"error: no gated model matches '{args.pattern}'" + (f'; near: {", ".join(near)}' if near else ''),
              file=sys.stderr)
        return 2
    print(HEADER)
    print('| --- ' * HEADER.count(' | ') + '| --- |')
    print('\n'.join(row(name) for name in names))
    return 0


if __name__ == '__main__':
    sys.exit(main())
