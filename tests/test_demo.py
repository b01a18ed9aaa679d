"""The quick start ends with its table and its figure, and leaves nothing else"""
import subprocess
import sys
from pathlib import Path

from PIL import Image

DEMO = Path(__file__).parents[1] / 'tools' / 'demo.py'


def test_demo(tmp_path):
    command = [sys.executable, str(DEMO), '--epochs', '3', '--output', str(tmp_path / 'out')]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert 'gated_resnet20: 100%' in done.stderr
    table = (tmp_path / 'out' / 'table.txt').read_text()
    assert table.strip() in done.stdout
    dense, gated = (line.split() for line in table.splitlines()[2:4])
    assert dense[:2] == ['dense', 'ResNet-20'] and '100.0' in dense
    accuracy, macs, counts = float(gated[2]), float(gated[4]), [int(gated[i]) for i in (8, 10, 12)]
    assert 10 < accuracy <= 100 and 0 < macs < 10.06 and sum(counts) == 336
    with Image.open(tmp_path / 'out' / 'gates.png') as figure:
        assert figure.size == (1200, 1200)
    assert {path.name for path in (tmp_path / 'out').iterdir()} == {'gates.png', 'table.txt'}


def test_too_few_epochs():
    done = subprocess.run([sys.executable, str(DEMO), '--epochs', '2'], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and 'at least 3' in done.stderr
