"""`python -m unbroken.preflight`, where the command `unbroken` is not installed."""

import sys

from unbroken.preflight import main
from unbroken_core.conventions.console import run_command

if __name__ == "__main__":
    sys.exit(run_command(main))
