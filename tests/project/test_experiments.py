"""Figures in experiments/ and in the model cards equal the measured ones, and every run has its command"""
import argparse
import ast
import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import yaml
from paths import ROOT
from PIL import Image

from timm_gated import model_card
from timm_gated.models._registry import WEIGHTS_DIR

FOLDER = ROOT / 'experiments'
RUNS = FOLDER / 'cifar10'
RESULTS = {result['name']: result for result in json.loads((RUNS / 'evaluation.json').read_text())['results']}
CARDS = sorted(WEIGHTS_DIR.glob('*.md'))
COMMAND = re.compile(r'^bash experiments/cifar10/run.sh (\w+)$', re.MULTILINE)
COMMANDS = {path: COMMAND.search(path.read_text()) for path in CARDS}


def row(result: dict) -> list:
    gates = ' / '.join(str(result[kind]) for kind in ('always_on', 'conditional', 'always_off'))
    return [
        f'{result["top1"]:.2f}', f'{result["mean_macs"] / 1e6:.2f} M', f'{100 * result["macs_share"]:.1f} %',
        gates if result['num_gates'] else '']


def test_tables_have_the_measured_figures():
    text = (FOLDER / 'README.md').read_text()
    rows = dict(re.findall(r'^ *\| `(\w+)`: [^|]+\|(.*)\|$', text, re.MULTILINE))
    assert rows.keys() == RESULTS.keys()
    for name, cells in rows.items():
        assert [cell.strip() for cell in cells.split('|')] == row(RESULTS[name]), name


def test_table_of_calibrated_networks_has_the_measured_figures():
    text = (FOLDER / 'README.md').read_text()
    rows = dict(re.findall(r'^\| (\d+) % \| (.*) \|$', text, re.MULTILINE))
    expected: dict = {}
    for result in json.loads((RUNS / 'calibration.json').read_text())['results']:
        cell = f'{result["top1"]:.2f} at {100 * result["macs_share"]:.1f} %'
        expected.setdefault(f'{100 * result["target"]:.0f}', []).append(cell)
    assert {target: re.findall(r'[\d.]+ at [\d.]+ %', row) for target, row in rows.items()} == expected


def settings(name: str, folder: Path) -> dict:
    """Settings that `run.sh` gives to train.py: those of its config, and its arguments."""
    (folder / 'train.py').write_text('import json, sys; print(json.dumps(sys.argv[1:]))')
    path = f'{Path(sys.executable).parent}:{os.environ["PATH"]}'
    command = ['bash', RUNS / 'run.sh', name]
    printed = subprocess.run(
        command, env=dict(os.environ, TRAIN=str(folder / 'train.py'), PATH=path), stdout=subprocess.PIPE, check=True)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument('--config')
    parser.add_argument('--experiment')
    for option, kind in (('--epochs', int), ('--seed', int), ('--batch-size', int), ('--lr', float)):
        parser.add_argument(option, type=kind)
    parser.add_argument('--model-kwargs', nargs='*')
    given = vars(parser.parse_known_args(json.loads(printed.stdout))[0])
    if given['model_kwargs']:
        pairs = (item.split('=') for item in given['model_kwargs'])
        given['model_kwargs'] = {key: ast.literal_eval(value) for key, value in pairs}
    config = yaml.safe_load((ROOT / given.pop('config')).read_text())
    return {**config, **{key: value for key, value in given.items() if value is not None}}


@pytest.mark.parametrize('name', RESULTS)
def test_every_run_is_kept_and_has_its_command(name, tmp_path):
    args = yaml.safe_load((RUNS / name / 'args.yaml').read_text())
    with (RUNS / name / 'summary.csv').open() as file:
        curve = list(csv.DictReader(file))
    assert [int(line['epoch']) for line in curve] == list(range(args['epochs']))
    # train.py evaluates in bfloat16, `timm-gated evaluate` in float32
    assert abs(float(curve[-1]['eval_top1']) - RESULTS[name]['top1']) < 0.25
    assert 'Train: 0 [   0/' in (RUNS / name / 'log.txt').read_text()
    asked = settings(name, tmp_path)
    for key in ('model', 'epochs', 'seed', 'batch_size', 'lr', 'kd_model_name'):
        assert args.get(key) == asked.get(key), key
    assert (args.get('model_kwargs') or {}) == (asked.get('model_kwargs') or {})
    assert asked['experiment'] == name and args['model'].partition('.')[0] == RESULTS[name]['model']


def test_no_local_paths():
    for path in [*RUNS.rglob('*'), *CARDS]:
        if path.is_file() and path.suffix != '.png':
            assert not re.search(r'(?<![\w.])/(tmp|work|home|root|data)/', path.read_text()), path


@pytest.mark.parametrize('path', CARDS, ids=lambda path: path.stem)
def test_cards_have_the_measured_figures(path):
    architecture, tag = path.stem.split('.')
    model = timm.create_model(path.stem, pretrained=True)
    result = RESULTS[COMMANDS[path].group(1)]
    others = [{**RESULTS[run.group(1)], 'name': other.stem} for other, run in COMMANDS.items() if other != path]
    card = model_card(model, result, 'uoft-cs/cifar10', 'test', COMMANDS[path].group(), tag=tag, others=others)
    assert path.read_text() == str(card) and result['model'] == architecture
    assert {f'{path.stem}.trade_off.png'} <= card.pictures.keys() == {
        picture.name for picture in WEIGHTS_DIR.glob(f'{path.stem}.*.png')}
    assert (f'{path.stem}.gates.png' in card.pictures) == bool(result['num_gates'])
    for name, drawn in card.pictures.items():
        pixels, expected = (
            np.asarray(Image.open(file).convert('L'), dtype=float) for file in (WEIGHTS_DIR / name, io.BytesIO(drawn)))
        # other versions of matplotlib and FreeType draw slightly different text
        assert pixels.shape == expected.shape and np.abs(pixels - expected).mean() < 4
        assert len(drawn) < 50_000  # the wheel includes it
    zoo = (FOLDER.parent / 'docs' / 'model_zoo.md').read_text()
    assert '| '.join((f'| `{path.stem}` ', *(f'{cell} '.lstrip() for cell in row(result)))) + '|' in zoo
