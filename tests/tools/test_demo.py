"""The quick start writes its table and its figure"""
import json

from forked import run_script
from PIL import Image
from sklearn import datasets
from tool import TOOLS, load_tool


def test_demo(tmp_path, monkeypatch, capsys):
    demo = load_tool('demo')
    monkeypatch.chdir(tmp_path)
    x, y = datasets.load_digits(return_X_y=True)
    monkeypatch.setattr(datasets, 'load_digits', lambda return_X_y: (x[:400], y[:400]))  # fewer images, for speed
    assert demo.main(['--epochs', '3', '--batch-size', '32', '--output', 'out', '--json']) == 0
    printed = capsys.readouterr()
    assert 'gated_resnet20: 100%' in printed.err
    table = (tmp_path / 'out' / 'table.txt').read_text()
    assert table.strip() in printed.err
    dense, gated = (line.split() for line in table.splitlines()[2:4])
    assert dense[:2] == ['dense', 'ResNet-20'] and '100.0' in dense
    accuracy, macs, counts = float(gated[2]), float(gated[4]), [int(gated[i]) for i in (8, 10, 12)]
    result = json.loads(printed.out)['gated ResNet-20']
    assert round(result['accuracy'], 1) == accuracy and [*result['gates'].values()] == counts
    assert 10 < accuracy <= 100 and 0 < macs < 10.06 and sum(counts) == 336
    with Image.open(tmp_path / 'out' / 'gates.png') as figure:
        assert figure.size == (1200, 1200)
    assert {path.name for path in tmp_path.rglob('*')} == {'out', 'gates.png', 'table.txt'}


def test_too_few_epochs(tmp_path):
    done = run_script(TOOLS / 'demo.py', '--epochs', '2', cwd=tmp_path)
    assert done.returncode == 2 and 'at least 3' in done.output
