"""Set-up of all tests"""
import torch
from hypothesis import settings

# The networks are tiny: a second thread gains little and is slow on a busy machine.
torch.set_num_threads(1)

# Same examples in every run and process. `pytest --hypothesis-profile=default` draws others.
settings.register_profile('fixed', deadline=None, derandomize=True)
settings.load_profile('fixed')
