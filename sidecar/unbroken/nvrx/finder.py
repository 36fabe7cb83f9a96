"""Makes `nvidia_resiliency_ext.inprocess` and its modules name ours.

Nothing is imported before the script does so: it may set torch's variables first. The rest of the extension, where it
is installed, stays as it is.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from unbroken_core.vocabulary.errors import UnbrokenError

PACKAGE = "nvidia_resiliency_ext"
_INPROCESS = f"{PACKAGE}.inprocess"
_OURS = "unbroken.nvrx.inprocess"
_BASE = "unbroken.inprocess"

MODULES = {
    "": _OURS,
    "abort": f"{_OURS}.abort",
    "attribution": f"{_BASE}.attribution",
    "completion": f"{_BASE}.completion",
    "compose": f"{_BASE}.compose",
    "exception": f"{_BASE}.exception",
    "finalize": f"{_BASE}.finalize",
    "health_check": f"{_OURS}.health_check",
    "initialize": f"{_BASE}.initialize",
    "monitor_thread": f"{_OURS}.monitor_thread",
    "nested_restarter": f"{_OURS}.nested_restarter",
    "rank_assignment": f"{_BASE}.rank_assignment",
    # A module of its own up to version 0.4.
    "rank_filter": f"{_BASE}.rank_assignment",
    "state": f"{_BASE}.state",
    "store": f"{_OURS}.store",
    "terminate": f"{_BASE}.terminate",
    # Up to version 0.4; later it is in shared_utils.
    "tools": f"{_OURS}.tools",
    "tools.inject_fault": "unbroken.nvrx.inject_fault",
    "wrap": f"{_OURS}.wrap",
}
"""Our module for each of theirs, by its name below `inprocess`."""

_STAND_INS = {
    f"{PACKAGE}.shared_utils": f"{_OURS}.tools",
    f"{PACKAGE}.shared_utils.inject_fault": "unbroken.nvrx.inject_fault",
}
"""Where the extension is not installed."""


class AlreadyLoadedError(UnbrokenError):
    """The extension's own `inprocess` is loaded in this process."""


class _Alias(Loader):
    """Puts one of our modules into sys.modules under another name."""

    def __init__(self, target: str) -> None:
        self._target = target

    def exec_module(self, module: ModuleType) -> None:
        # The import system takes what is here when this returns.
        sys.modules[module.__name__] = importlib.import_module(self._target)


class _Inprocess(MetaPathFinder):
    """First of all finders: `inprocess` and everything below it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname != _INPROCESS and not fullname.startswith(f"{_INPROCESS}."):
            return None
        ours = MODULES.get(fullname[len(_INPROCESS) + 1 :])
        if ours is None:
            known = ", ".join(name for name in MODULES if name)
            raise ModuleNotFoundError(
                f"No module named {fullname!r}: unbroken.nvrx stands in for {_INPROCESS}, and this one is not part of "
                f"its public interface; there are {known}",
                name=fullname,
            )
        return ModuleSpec(fullname, _Alias(ours), is_package=True)


class _Absent(MetaPathFinder):
    """Last of all finders: asked for the extension only where it is not installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname == PACKAGE:
            return ModuleSpec(fullname, _Empty(), is_package=True)
        if not fullname.startswith(f"{PACKAGE}."):
            return None
        is_installed = getattr(sys.modules.get(PACKAGE), "__file__", None) is not None
        if is_installed:
            return None
        if fullname in _STAND_INS:
            return ModuleSpec(fullname, _Alias(_STAND_INS[fullname]), is_package=True)
        raise ModuleNotFoundError(
            f"No module named {fullname!r}: nvidia-resiliency-ext is not installed, and unbroken.nvrx stands in for "
            f"{_INPROCESS} alone; install it beside, its other packages are left as they are",
            name=fullname,
        )


class _Empty(Loader):
    """The package itself, where it is not installed."""

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = "Stands in for nvidia-resiliency-ext: `inprocess` is unbroken's."


def install() -> None:
    """Let `import nvidia_resiliency_ext.inprocess` find ours, in this process, from now on. Repeating it is harmless.

    Raises AlreadyLoadedError if the extension's own is loaded: classes of both would be mixed.
    """
    if any(isinstance(finder, _Inprocess) for finder in sys.meta_path):
        return
    for name in sorted(name for name in sys.modules if name == _INPROCESS or name.startswith(f"{_INPROCESS}.")):
        where = getattr(sys.modules[name], "__file__", None) or "an unknown file"
        raise AlreadyLoadedError(
            f"{name} is loaded already, from {where}: want install() before the first import of {_INPROCESS}, at the "
            "top of the script, or `python -m unbroken.nvrx script.py`"
        )
    sys.meta_path.insert(0, _Inprocess())
    sys.meta_path.append(_Absent())
