"""A process that has imported torch, and forks workers that behave as if started by themselves.

    python [options of the worker's command] fork_server.py DESCRIPTOR PADDING

Run by the interpreter of the user's command, without anything but the standard library, until its launcher hangs up.

    launcher ──setup──> imports ──ready or refused──> launcher                       one packet each, on DESCRIPTOR
             ──order: environment, stdout, stderr, talk──> fork ──> fork ──pid on talk──> launcher ──go──> the script
                                                            └──ends, so that the launcher adopts the worker

A worker that gets no "go" ends before the first line of the script: the launcher may have started another one.

The zygote of `unbroken local` is another program: it forks and then executes any command, without imports to keep.
"""

import sys

if __name__ == "__main__" and not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
    # The folder of this file: its modules must not hide the user's.
    del sys.path[0]

import builtins
import contextlib
import ctypes
import gc
import importlib
import importlib.util
import io
import json
import os
import runpy
import signal
import socket
import types
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

GO = b"go"
PADDING = "UNBROKEN_PADDING"
"""Last variable of the fork server's environment: a worker overwrites it with what /proc/<pid>/environ is to show."""
_SHOWN = ("UNBROKEN_INCARNATION", "UNBROKEN_LOCAL_RANK")
PACKET_BYTES = 128 << 10
"""Upper limit of a setup or a message."""
_PR_SET_PDEATHSIG = 1
_MAX_ORDER_BYTES = 16 << 20
_HARMLESS_FILES = ("/dev/null", "/dev/urandom", "/dev/random")
_MAIN = "__main__"
_DESCRIPTORS, _THREADS = Path("/proc/self/fd"), Path("/proc/self/task")


# ------------------------------------------------------------------------------------------------------ what it becomes


class Program:
    """The user's command."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._words: list[str] = setup["words"]
        self._target: str = setup["target"]
        self._is_module: bool = setup["is_module"]
        self._arguments: list[str] = setup["arguments"]
        self._arguments_area = _own_memory("cmdline", 45)
        start, size = _own_memory("environ", 47)
        before = Path("/proc/self/environ").read_bytes().rpartition(f"{PADDING}=".encode())[0] if size else b""
        self._padding = (start + len(before), size - len(before)) if before else (0, 0)

    def install(self) -> None:
        """Make arguments, path and `__main__` what the interpreter makes them before it runs the first line."""
        sys.argv = ["-m" if self._is_module else self._target, *self._arguments]
        sys.orig_argv = list(self._words)
        if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
            folder = Path.cwd() if self._is_module else Path(self._target).resolve().parent
            sys.path.insert(0, str(folder))
        main = types.ModuleType(_MAIN)
        main.__dict__["__builtins__"] = builtins
        if sys.version_info < (3, 14):
            vars(main)["__annotations__"] = {}
        if not self._is_module:
            main.__file__ = _absolute(self._target)
            main.__dict__["__cached__"] = None
            main.__loader__ = SourceFileLoader(_MAIN, main.__file__)
        sys.modules[_MAIN] = main

    def show(self) -> None:
        """Show the user's command and the worker's rank in /proc, as far as they fit."""
        start, size = self._arguments_area
        if size > 1:
            title = " ".join(self._words).encode(errors="surrogateescape")[: size - 2]
            # No NUL as the last byte tells the kernel that the text ends at the first one.
            _overwrite(start, title + bytes(size - 1 - len(title)) + b".")
        start, size = self._padding
        if size > 1:
            place = "\0".join(f"{name}={os.environ[name]}" for name in _SHOWN if name in os.environ).encode()[
                : size - 1
            ]
            _overwrite(start, place + bytes(size - len(place)))

    def run(self) -> None:
        """Run it to its end. Raises what makes the interpreter exit as it would after the script itself."""
        is_interrupt = False
        try:
            if self._is_module:
                # What the interpreter itself calls for -m.
                runpy._run_module_as_main(self._target)  # type: ignore[attr-defined] # not in the types
            else:
                _run_script(sys.modules[_MAIN].__dict__)
            return
        except SystemExit:
            raise
        except BaseException as error:
            is_interrupt = isinstance(error, KeyboardInterrupt)
            report(error)
        if is_interrupt:
            # The interpreter then ends itself with SIGINT; it has been reported already.
            sys.excepthook = lambda *_: None
            raise KeyboardInterrupt
        raise SystemExit(1)


def _run_script(namespace: dict[str, Any]) -> None:
    path = namespace["__file__"]
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(2)
    exec(compile(source, path, "exec", dont_inherit=True), namespace)


def report(error: BaseException) -> None:
    """Report an uncaught exception as the interpreter does, without the frames of this file."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    error.__traceback__ = frames
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, frames
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, frames)
    except SystemExit:
        raise
    except BaseException as hooks:
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(hooks), hooks, hooks.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, frames)


def _absolute(path: str) -> str:
    """Return the path as the interpreter makes `__file__` of it."""
    return path if path.startswith("/") else f"{Path.cwd()}/{path[2:] if path.startswith('./') else path}"


def _own_memory(name: str, field: int) -> tuple[int, int]:
    """Return address and size of what /proc/self/`name` shows; (0, 0) where the kernel does not tell."""
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
        shown = Path(f"/proc/self/{name}").read_bytes()
        start, end = int(fields[field]), int(fields[field + 1])
        with Path("/proc/self/mem").open("rb", buffering=0) as memory:
            seen = os.pread(memory.fileno(), len(shown), start)
    except (OSError, ValueError, IndexError, OverflowError):
        return 0, 0
    return (start, end - start) if shown and end - start == len(shown) and seen == shown else (0, 0)


def _overwrite(start: int, data: bytes) -> None:
    """Write into this process' own memory; an invalid address does not crash it."""
    with contextlib.suppress(OSError), Path("/proc/self/mem").open("r+b", buffering=0) as memory:
        os.pwrite(memory.fileno(), data, start)


# -------------------------------------------------------------------------------------------------------------- imports


def import_all(names: list[str]) -> str:
    """Import the modules that exist; return why workers cannot be forked from here, "" if they can."""
    before = set(_DESCRIPTORS.iterdir())
    num_found = 0
    for name in names:
        try:
            if importlib.util.find_spec(name) is None:
                continue
            importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        except BaseException as error:
            return f"import {name}: {type(error).__name__}: {error}"[:500]
        num_found += 1
    if not num_found:
        return f"none of {', '.join(names)} can be imported"
    return _opened(before) or _lost_threads()


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Imports leave nearly no garbage, and looking for it takes a quarter of their time."""
    thresholds = gc.get_threshold()
    gc.set_threshold(0)
    yield
    if gc.get_threshold()[0] == 0:
        # What an import has set itself stays.
        gc.set_threshold(*thresholds)


def _opened(before: set[Path]) -> str:
    """Return the descriptors that the imports opened and that processes must not share."""
    for descriptor in sorted(set(_DESCRIPTORS.iterdir()) - before):
        try:
            target = descriptor.readlink()
        except OSError:
            continue
        if str(target) not in _HARMLESS_FILES and not target.is_file():
            return f"the imports hold {target} open"
    return ""


def _lost_threads() -> str:
    """Return which threads would be lost in a fork."""
    if len(list(_THREADS.iterdir())) > 1:
        # Some libraries, such as OpenBLAS, end their threads before a fork and restart them when there is work.
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    names = []
    for thread in _THREADS.iterdir():
        with contextlib.suppress(OSError):
            names.append((thread / "comm").read_text().strip())
    return (
        "" if len(names) <= 1 else f"the imports started threads ({len(names)} run: {', '.join(sorted(names))[:200]})"
    )


# ---------------------------------------------------------------------------------------------------------------- forks


class ForkServer:
    """Serves orders; in a worker, `serve` returns."""

    def __init__(self, control: socket.socket, launcher_pid: int) -> None:
        self._control = control
        self._launcher_pid = launcher_pid
        self._folder = os.open(".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._umask = os.umask(0)
        os.umask(self._umask)
        # Resolved before any fork: a child should do as little as possible.
        self._prctl = ctypes.CDLL(None, use_errno=True).prctl

    def say(self, **facts: object) -> None:
        """Tell the launcher."""
        self._control.send(json.dumps(facts).encode())

    def serve(self, program: Program) -> None:
        """Fork workers until the launcher hangs up; returns only in a worker, once it may run."""
        while True:
            data, descriptors, _, _ = socket.recv_fds(self._control, 16, 4)
            if not data:
                os._exit(0)
            if len(descriptors) == 4 and self._fork(descriptors, program):
                return
            for descriptor in descriptors:
                os.close(descriptor)

    def _fork(self, descriptors: list[int], program: Program) -> bool:
        """Fork a worker that the launcher adopts; return whether this process is the worker."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        refusal = _lost_threads()
        if refusal:
            _refuse(descriptors[3], refusal)
            return False
        adopted, adopting = os.pipe()
        try:
            middle = os.fork()
        except OSError as error:
            os.close(adopted)
            os.close(adopting)
            _refuse(descriptors[3], f"fork: {error.strerror}")
            return False
        if middle:
            os.close(adopted)
            os.waitpid(middle, 0)
            # The end of the pipe shows the worker that the launcher has adopted it.
            os.close(adopting)
            return False
        try:
            if os.fork():
                os._exit(0)
            os.close(adopting)
            os.read(adopted, 1)
            os.close(adopted)
            self._become(descriptors, program)
        except BaseException:
            os._exit(1)
        return True

    def _become(self, descriptors: list[int], program: Program) -> None:
        """Become the ordered worker, and wait for "go"."""
        self._prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != self._launcher_pid:
            # The launcher has ended, or another process adopts orphans here.
            os._exit(1)
        os.setsid()
        order_file, output, errors, talk = descriptors
        order = json.loads(os.pread(order_file, _MAX_ORDER_BYTES, 0))
        os.dup2(output, 1)
        os.dup2(errors, 2)
        os.fchdir(self._folder)
        os.umask(self._umask)
        _set_environment(order["environment"])
        _renew_secrets()
        program.show()
        self._control.close()
        for descriptor in (order_file, output, errors, self._folder):
            os.close(descriptor)
        os.write(talk, json.dumps({"pid": os.getpid()}).encode())
        if os.read(talk, len(GO)) != GO:
            os._exit(1)
        os.close(talk)


def _refuse(talk: int, reason: str) -> None:
    """Report why a worker is not forked, if the launcher still listens."""
    with contextlib.suppress(OSError):
        os.write(talk, json.dumps({"refused": reason}).encode())


def _set_environment(wanted: dict[str, str]) -> None:
    """Set the ordered environment, in the C library as well."""
    for name in set(os.environ) - set(wanted):
        del os.environ[name]
    for name, value in wanted.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def _renew_secrets() -> None:
    """Renew random generators and keys that the imports have made: workers must not share them."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "default_generator"):
        torch.default_generator.seed()
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None:
        processes.current_process().authkey = os.urandom(32)
    importlib.invalidate_caches()


def main() -> None:
    """Import, then serve; in a worker, run the user's program."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    setup = json.loads(control.recv(PACKET_BYTES))
    server, program = ForkServer(control, setup["launcher"]), Program(setup)
    program.install()
    with without_collector():
        refusal = import_all(setup["modules"])
    if refusal:
        server.say(refused=refusal)
        os._exit(0)
    # Garbage would be collected again in each worker, and each collection would copy the pages of everything else.
    gc.collect()
    gc.freeze()
    server.say(ready=True)
    server.serve(program)
    del server, control, setup
    program.run()


if __name__ == "__main__":
    main()
