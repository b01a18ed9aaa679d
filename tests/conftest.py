"""Set-up of all tests."""
import torch

# The networks here are tiny: a second thread gains little, and waiting for it on a busy machine costs a lot.
torch.set_num_threads(1)
