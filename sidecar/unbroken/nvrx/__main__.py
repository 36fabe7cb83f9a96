"""`python -m unbroken.nvrx script.py [args]`, or `-m module [args]`: run it with our `inprocess` for NVIDIA's."""

import runpy
import sys
from pathlib import Path

from unbroken.nvrx.finder import install

USAGE = "usage: python -m unbroken.nvrx SCRIPT [ARGUMENTS], or python -m unbroken.nvrx -m MODULE [ARGUMENTS]"


def main() -> None:
    """Run what the arguments name as `__main__`, as the interpreter would. Raises SystemExit."""
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    words = arguments[1:] if is_module else arguments
    if arguments[:1] in (["-h"], ["--help"]):
        print(USAGE)
        return
    if not words or (not is_module and words[0].startswith("-")):
        got = " ".join(arguments) or "nothing"
        raise SystemExit(f"python -m unbroken.nvrx: want a script or -m with a module, got {got}\n{USAGE}")
    install()
    sys.argv = words
    if is_module:
        # As `python -m` has it, which has put it there for us already.
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        return
    script = Path(words[0])
    if not script.exists():
        raise SystemExit(f"python -m unbroken.nvrx: no script {words[0]!r} in {Path.cwd()}\n{USAGE}")
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        # Else the first one is of PYTHONPATH, and the script's folder is in none.
        sys.path[0] = str(script.resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
