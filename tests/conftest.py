"""For all tests: one thread each (they run side by side), no test decided by time, and in CI the same examples each time."""

import os

import hypothesis
import torch

torch.set_num_threads(1)
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")
