"""`python -m unbroken.keeper`: started by the pod's agent."""

import os
import sys

from unbroken.keeper.config import read_config
from unbroken.keeper.server import Keeper
from unbroken.launch.process_tree import die_with
from unbroken.logs import read_level, start_log
from unbroken_core.vocabulary.errors import InputError


def main() -> int:
    """Run the keeper; return 2 for bad input."""
    try:
        start_log("unbroken.keeper", read_level(os.environ), with_time=False, pod=os.environ.get("UNBROKEN_POD", ""))
        if sys.argv[1:2] == ["--parent"]:
            die_with(int(sys.argv[2]))
        keeper = Keeper(read_config())
        if not sys.stdout.isatty() and "--tell" in sys.argv:
            keeper.converse(sys.stdin.buffer, sys.stdout.buffer)
        keeper.serve()
    except InputError as error:
        print(f"unbroken.keeper: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
