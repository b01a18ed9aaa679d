"""Set-up of all tests."""
import torch
from hypothesis import settings

# The networks here are tiny: a second thread gains little, and waiting for it on a busy machine costs a lot.
torch.set_num_threads(1)

# The same examples in every run and every process. `pytest --hypothesis-profile=default` looks for others.
settings.register_profile('fixed', deadline=None, derandomize=True)
settings.load_profile('fixed')
