"""`python -m unbroken.watch`: started by the pod's launcher."""

import os
import sys

from unbroken.launch.process_tree import die_with
from unbroken.logs import read_level, start_log
from unbroken.watch.config import read_config
from unbroken.watch.watch import Watch
from unbroken_core.vocabulary.errors import InputError


def main() -> int:
    """Watch; return 2 for bad input."""
    try:
        start_log("unbroken.watch", read_level(os.environ), with_time=False, pod=os.environ.get("UNBROKEN_POD", ""))
        if sys.argv[1:2] == ["--parent"]:
            die_with(int(sys.argv[2]))
        Watch(read_config()).run()
    except InputError as error:
        print(f"unbroken.watch: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
