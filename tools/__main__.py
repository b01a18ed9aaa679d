"""Channel-gated networks for timm and mmsegmentation: evaluate, analyse, slim and deploy them

    timm-gated evaluate --model gated_resnet20.bas_c10 --data-dir data/cifar10
    timm-gated evaluate --help
"""
import importlib
import sys
from importlib.metadata import version
from typing import Dict, List, NamedTuple, Optional

from timm_gated_cli._options import make_parser


class Command(NamedTuple):
    """Module of a command, what it does, and the extra that it needs."""
    module: str
    about: str
    extra: str = ''


COMMANDS: Dict[str, Command] = {
    'evaluate': Command('evaluate', 'accuracy, MACs, gates and speed of networks'),
    'analyze': Command('analyze_gates', 'report on the gates over a data set', 'analysis'),
    # 'explore': Command('explore', 'explore the gates in a browser'),
    'tradeoff': Command('tradeoff', 'figure of accuracy against MACs', 'analysis'),
    'calibrate': Command('calibrate', 'set the average MACs of a trained network'),
    'prune': Command('prune', 'smaller network without filters that are never used'),
    'export': Command('export_onnx', 'ONNX or torch.export file', 'bench'),
    'bench': Command('benchmark_inference', 'speed against dense networks in other runtimes', 'bench'),
    'hub': Command('hub', 'model folders and cards; push to and pull from the Hugging Face hub'),
    'convert': Command('convert_checkpoint', 'checkpoint of timm for mmsegmentation, or the other way', 'mmseg'),
    'prepare-cifar10': Command('prepare_cifar10', 'image folders of CIFAR-10'),
    'configs': Command('configs', 'list and copy the training configs'),
    'demo': Command('demo', 'train a gated network on handwritten digits, in two minutes', 'bench'),
}

EXIT_CODES = """exit codes:
  0  success
  1  negative result of a check (export: outputs differ), or an internal error, with a traceback
  2  wrong usage or input, with a message"""


def main(argv: Optional[List[str]] = None) -> int:
    width = max(map(len, COMMANDS))
    commands = '\n'.join(f'  {name:<{width}}  {command.about}' for name, command in COMMANDS.items())
    parser = make_parser(__doc__)
    parser.prog = 'timm-gated'
    parser.usage = 'timm-gated COMMAND …'
    parser.epilog = f'commands:\n{commands}\n\n{EXIT_CODES}'
    parser.add_argument('--version', action='version', version=f'timm-gated {version("timm-gated")}')
    parser.add_argument('command', choices=COMMANDS, metavar='COMMAND', help='see below; COMMAND --help explains it')
    parser.add_argument('args', nargs='...', metavar='…', help='arguments of the command')
    options = parser.parse_args(argv)
    command = COMMANDS[options.command]
    sys.argv = [f'timm-gated {options.command}', *options.args]  # as the parser of the command expects
    try:
        return importlib.import_module(f'timm_gated_cli.{command.module}').main()
    except ModuleNotFoundError as error:
        extra = 'mmseg' if '--mmseg-config' in options.args else command.extra
        if not extra:
            raise
        parser.error(f"{error}, which {options.command} needs: pip install 'timm-gated[{extra}]'.")


if __name__ == '__main__':
    sys.exit(main())
