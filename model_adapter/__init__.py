"""DeepSeek-V4.1-Flash in PyTorch, its caches kept in a kvstore."""

import os

# Threads that spin for their next piece of work take the cores from each other on a busy machine:
# a layer then costs ten times as much. OpenMP reads this once, when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
