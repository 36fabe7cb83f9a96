"""`python -m unbroken.install DIR`: the init container of a training pod."""

import sys
from pathlib import Path

from unbroken.install import install
from unbroken_core.vocabulary.errors import InputError


def main() -> int:
    """Install into the folder named; return 0, or 2 for bad input."""
    if len(sys.argv) != 2:
        print(f"unbroken.install: want one folder, got {sys.argv[1:]}", file=sys.stderr)
        return 2
    try:
        for path in install(Path(sys.argv[1])):
            print(f"unbroken.install: {path}")
    except InputError as error:
        print(f"unbroken.install: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
