"""Two gloo processes train gated models of several methods through the task and end with equal parameters"""
import subprocess
import sys
from pathlib import Path

WORKER = Path(__file__).parent / 'distributed_worker.py'


def test_two_processes(tmp_path):
    command = [
        sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node=2', str(WORKER), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (tmp_path / 'rank0').read_text() == 'equal' and (tmp_path / 'rank1').read_text() == 'equal'
