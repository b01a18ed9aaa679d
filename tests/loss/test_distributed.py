"""Two gloo processes train gated models of several methods and end with equal parameters"""

from forked import run_script
from paths import HELPERS


def test_two_processes(tmp_path):
    done = run_script(HELPERS / 'distributed_worker.py', tmp_path, cwd=tmp_path, processes=2)
    assert done.returncode == 0, done.output[-4000:]
    assert (tmp_path / 'rank0').read_text() == 'equal' and (tmp_path / 'rank1').read_text() == 'equal'
