"""Where each worker's output goes. Pure, but for the folders that it makes."""

import errno
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from unbroken_core.vocabulary.errors import InputError

logger = logging.getLogger(__name__)

OUT, ERR = 1, 2
"""Bits of torch's `Std`."""
_MAX_SAME_NAMES = 10_000
_STREAMS = re.compile(r"\d+:[0-3](,\d+:[0-3])*")
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


@dataclass(frozen=True)
class StreamPlan:
    """Where one stream of one worker goes."""

    target: str
    """File to which it is redirected; "": torchrun's own stream; os.devnull: nowhere."""
    is_tailed: bool
    """Whether the file's content is shown on torchrun's own stream as well."""


def read_streams(text: str) -> int | dict[int, int]:
    """Return the streams of all local ranks, or by local rank: "3", "0:3,10:1". Raises InputError.

    torch's own reader of these words knows ranks of one digit only.
    """
    if re.fullmatch(r"[0-3]", text):
        return int(text)
    if not _STREAMS.fullmatch(text):
        raise InputError(f"streams: want 0 to 3, or RANK:STREAMS with commas between them, got {text!r}")
    return {int(rank): int(streams) for rank, streams in (item.split(":") for item in text.split(","))}


def streams_of(streams: int | Mapping[int, int], local_rank: int) -> int:
    """Return the streams of one local rank."""
    return streams if isinstance(streams, int) else streams.get(local_rank, 0)


def plan_stream(path: str, *, is_redirected: bool, is_teed: bool, is_shown: bool) -> StreamPlan:
    """Return where a stream goes whose file would be `path`; "": there is no file.

    `is_shown`: the filter of local ranks lets it through. What is teed is in the file whether or not it is shown.
    """
    if path and (is_redirected or is_teed):
        return StreamPlan(path, is_teed and is_shown)
    return StreamPlan("" if is_shown else os.devnull, False)


def check_folder(log_dir: str) -> None:
    """Make the folder for logs if it is missing. Raises NotADirectoryError or another OSError."""
    path = Path(log_dir)
    if path.exists() and not path.is_dir():
        raise NotADirectoryError(f"log-dir: want a folder, got {log_dir}, which is a file")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except NotADirectoryError:
        raise NotADirectoryError(f"log-dir: want a folder, got {log_dir}, which lies below a file") from None


def make_run_folder(log_dir: str, run_id: str) -> str:
    """Return a new folder for one torchrun. Raises OSError."""
    name = re.sub(r"[^\w.@=+-]", "_", run_id)[:100]
    return tempfile.mkdtemp(prefix=f"{name}_", dir=log_dir)


def make_attempt_folder(run_folder: str, attempt: str, local_ranks: Iterable[int]) -> str:
    """Return a new folder with one for each local rank: `attempt_<n>`, or where that is there `attempt_<n>.1`.

    torch counts only those attempts that cost a restart: after a node has come or gone the number is the same, and the
    former files are what tells why. Raises OSError.
    """
    ranks = list(local_ranks)
    for number in range(_MAX_SAME_NAMES):
        folder = Path(run_folder, f"attempt_{attempt}" + (f".{number}" if number else ""))
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        for rank in ranks:
            (folder / str(rank)).mkdir()
        return str(folder)
    raise FileExistsError(errno.EEXIST, f"want an unused name, got {_MAX_SAME_NAMES} used ones", run_folder)


def is_full(error: OSError) -> bool:
    """Return whether the disk is full or unusable: training can go on without files."""
    return error.errno in _DISK_ERRORS
