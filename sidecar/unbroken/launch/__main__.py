"""`python -m unbroken.launch -- COMMAND ARGUMENTS...`: process 1 of the trainer container."""

import sys

from unbroken.launch.config import read_config
from unbroken.launch.launcher import Launcher
from unbroken_core.conventions.printable import printable
from unbroken_core.vocabulary.errors import InputError


def main() -> int:
    """Run the launcher; return the agent's exit code, 128 + N after signal N, 1 without an agent, 2 for bad input."""
    try:
        return Launcher(read_config(sys.argv[1:])).run()
    except InputError as error:
        print(printable(f"unbroken.launch: {error}"), file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
