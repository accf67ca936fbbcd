"""What every test shares: threads that do not fight over the cores, and how hypothesis searches."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

settings.register_profile("everyday", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("everyday"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "everyday")

if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])))

collect_ignore = []
if not torch.cuda.is_available():
    collect_ignore.append("gpu")  # `make test-gpu` runs these where there is a device
if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore.append("interpreted")  # `make test` runs these in a process of their own
