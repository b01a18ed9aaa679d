"""Write the cards and pictures of all packaged weights anew, from the results in experiments/

Run it after adding weights: each card compares its network with the others.

    python tools/dev/packaged_cards.py
"""
import json
import re
from pathlib import Path

from timm_gated_cli._options import make_parser

RUNS = Path(__file__).resolve().parents[2] / 'experiments' / 'cifar10'


def main() -> None:
    make_parser(__doc__).parse_args()

    import timm

    from timm_gated import model_card
    from timm_gated.models._registry import WEIGHTS_DIR
    results = {result['name']: result for result in json.loads((RUNS / 'evaluation.json').read_text())['results']}
    commands = {
        path: re.search(r'^bash experiments/cifar10/run.sh (\w+)$', path.read_text(), re.MULTILINE)
        for path in sorted(WEIGHTS_DIR.glob('*.md'))}
    for path, command in commands.items():
        assert command is not None, f'{path} has no command'
        others = [
            {**results[run.group(1)], 'name': other.stem} for other, run in commands.items() if run and other != path]
        card = model_card(
            timm.create_model(path.stem, pretrained=True), results[command.group(1)], 'uoft-cs/cifar10', 'test',
            command.group(), tag=path.stem.split('.')[1], others=others)
        path.write_text(str(card))
        for name, picture in card.pictures.items():
            (WEIGHTS_DIR / name).write_bytes(picture)
        print(path.name)


if __name__ == '__main__':
    main()
