"""What a worker does, from the Python stack of its main thread: does it wait for other ranks, or they for it? Pure.

Frames are looked at from the innermost one outwards, until one decides. The standard library, most of torch and this
library decide nothing: a collective may be waited for in `threading.py`, and so may a disk.

    torch.distributed's calls                  collective
    torch's engine of backward, synchronize    waiting: it may wait for other ranks in there, or compute
    torch's data loaders                       data-loader
    torch.load, shutil, sockets                io
    anything else                              own-code, unless it is blocked in a call that may wait for other ranks
                                               (`work.wait()` has no frame of its own), or nobody knows in which
"""

import re
from collections.abc import Sequence
from enum import Enum, auto
from functools import lru_cache
from typing import NamedTuple

from unbroken_core.pod.pod_messages import MainThread
from unbroken_core.protocol.bounds import MAX_PLACE
from unbroken_core.vocabulary.reasons import Doing

_FRAME = re.compile(r"(?P<file>[^\n]*):(?P<line>\d{1,9}|\?\?\?) in (?P<function>[^\n]*)", re.ASCII)
_COLLECTIVE = re.compile(
    r"/torch/distributed/(distributed_c10d|_functional_collectives\w*|rendezvous|nn/functional)\.py$"
    r"|/torch/distributed/_symmetric_memory/"
    r"|/(horovod|mpi4py|deepspeed/comm|ray/util/collective)/"
)
_MAY_WAIT = re.compile(r"/torch/(cuda|xpu|mps|mtia|accelerator|npu)/")
_BACKWARD = re.compile(r"/torch/autograd/(graph|__init__)\.py$|/torch/_tensor\.py$")
_BACKWARD_FUNCTIONS = ("_engine_run_backward", "backward", "grad")
_LOADER = re.compile(r"/torch/utils/data/")
_IO = re.compile(
    r"/torch/serialization\.py$|/torch/distributed/checkpoint/(filesystem|_fsspec_filesystem|_hf\w*|hf_storage)\.py$"
    r"|/(fsspec|s3fs|gcsfs|safetensors|boto3|botocore|urllib3|requests|h5py|zarr)/"
    r"|/lib/python3\.\d+/(shutil|socket|ssl|zipfile|tarfile|gzip|http/client)\.py$"
)
_LIBRARY = re.compile(r"/unbroken/(inprocess|memory)/")
_LEFT = re.compile(r"/unbroken/inprocess/loop/(call|call_wrapper|step_hold)\.py$")
"""What runs the function, and what halts in it: whose innermost frames are ours up to here is not in the script."""
_TORCH = re.compile(r"/torch/|/torchinductor_[^/]*/")
_STANDARD = re.compile(r"^<frozen |/lib/python3\.\d+/(?!site-packages/|dist-packages/)")


class _Kind(Enum):
    COLLECTIVE = auto()
    BACKWARD = auto()
    MAY_WAIT = auto()
    LOADER = auto()
    IO = auto()
    LEFT = auto()
    TORCH = auto()
    NEUTRAL = auto()
    SCRIPT = auto()


_NEUTRAL = (_Kind.TORCH, _Kind.NEUTRAL)
_DOING = {
    _Kind.COLLECTIVE: Doing.COLLECTIVE,
    _Kind.BACKWARD: Doing.WAITING,
    _Kind.MAY_WAIT: Doing.WAITING,
    _Kind.LOADER: Doing.DATA_LOADER,
    _Kind.IO: Doing.IO,
}


class _Frame(NamedTuple):
    kind: _Kind
    file: str
    line: str
    function: str

    @property
    def place(self) -> str:
        """The place as people read it."""
        return f"{self.file.rpartition('/')[2]}:{self.line} {self.function}"[:MAX_PLACE]


class Reading(NamedTuple):
    """What a stack says."""

    doing: Doing
    what: str = ""


def read(thread: MainThread, is_blocked: bool) -> Reading:
    """Return what a worker does. `is_blocked`: its main thread has not run Python code for a while."""
    frames = [frame for frame in map(_parse, thread.stack) if frame is not None]
    decides = next((i for i in range(len(frames) - 1, -1, -1) if frames[i].kind not in _NEUTRAL), None)
    if decides is None or frames[decides].kind is _Kind.LEFT:
        return Reading(Doing.UNKNOWN)
    frame, outer, inner = frames[decides], frames[: decides + 1], frames[decides + 1 :]
    if frame.kind is _Kind.SCRIPT:
        return _read_script(thread, frame, inner, is_blocked)
    doing = _DOING[frame.kind]
    if doing is Doing.COLLECTIVE:
        return Reading(doing, _public(outer))
    if doing is Doing.WAITING:
        return Reading(doing, "backward" if frame.kind is _Kind.BACKWARD else frame.function[:MAX_PLACE])
    return Reading(doing, _script_place(outer))


def _read_script(thread: MainThread, frame: _Frame, inner: Sequence[_Frame], is_blocked: bool) -> Reading:
    """Return what is done in code of the script, whose innermost frames are torch's or the standard library's."""
    own = Reading(Doing.OWN_CODE, frame.place)
    if is_blocked and thread.beside:
        # It may wait for the thread that waits for other ranks.
        return Reading(Doing.WAITING, thread.beside)
    if thread.may_wait:
        return Reading(Doing.WAITING, f"{thread.call[: MAX_PLACE - 2]}()")
    is_in_standard_library = bool(inner) and inner[-1].kind is _Kind.NEUTRAL
    if not is_blocked or thread.may_wait is False or is_in_standard_library:
        return own
    return Reading(Doing.UNKNOWN, frame.place)


def place_of(stack: Sequence[str]) -> str:
    """Return the innermost place in the script; "" where there is none."""
    return _script_place([frame for frame in map(_parse, stack) if frame is not None])


def _script_place(frames: Sequence[_Frame]) -> str:
    return next((frame.place for frame in reversed(frames) if frame.kind is _Kind.SCRIPT), "")


def _public(frames: Sequence[_Frame]) -> str:
    """Return the name of the innermost call of torch.distributed that scripts may call."""
    names = [frame.function for frame in reversed(frames) if frame.kind is _Kind.COLLECTIVE]
    return next((name for name in names if not name.startswith("_")), names[0])[:MAX_PLACE]


def _parse(text: str) -> _Frame | None:
    found = _FRAME.fullmatch(text)
    if found is None:
        return None
    file, function = found["file"].replace("\\", "/"), found["function"]
    return _Frame(_kind(file, function), file, found["line"], function)


@lru_cache(maxsize=4096)
def _kind(file: str, function: str) -> _Kind:
    if _LIBRARY.search(file):
        return _Kind.LEFT if _LEFT.search(file) else _Kind.NEUTRAL
    if _BACKWARD.search(file) and function in _BACKWARD_FUNCTIONS:
        return _Kind.BACKWARD
    kinds = {
        _Kind.COLLECTIVE: _COLLECTIVE,
        _Kind.MAY_WAIT: _MAY_WAIT,
        _Kind.LOADER: _LOADER,
        _Kind.IO: _IO,
        _Kind.TORCH: _TORCH,
        _Kind.NEUTRAL: _STANDARD,
    }
    return next((kind for kind, pattern in kinds.items() if pattern.search(file)), _Kind.SCRIPT)
