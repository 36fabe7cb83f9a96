"""`plain` and `wrapped` of sidecar_workload.py for a launcher that looks for imports at the top, as most scripts have.

It imports them once, and forks its workers.
"""

import runpy
from pathlib import Path

import torch.distributed  # noqa: F401 - for the launcher

from unbroken import inprocess  # noqa: F401 - for the launcher

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("sidecar_workload.py")), run_name="__main__")
