"""For all tests: one thread each (they run side by side), and `scenarios` can be imported from every folder."""

import torch

torch.set_num_threads(1)
