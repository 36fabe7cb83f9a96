"""A keeper that is killed at a point: `breaking_keeper.py POINT --tell`.

Of an owner: `offered`, `half-sent`, `sent`, `kept`. Of a holder: `wanted`, `half-written`, `verified`, `half-sealed`,
`sealed`, `half-handed-out`. Of a reader: `unwritten`, `half-fetched`. `stopped` is `half-written`, but it may be
let go on.
"""

import itertools
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from unbroken.keeper import __main__ as keeper
from unbroken.keeper.copies import Receiving
from unbroken.keeper.copy_sender import CopySender
from unbroken.keeper.fetching import PartialShard
from unbroken.keeper.peer_link import Link
from unbroken_core.pod.memory_slots import SlotState
from unbroken_core.pod.replica_messages import Offer, Wanted

_SOME = 2
"""Blocks or chunks after which something is half done."""


def die(*_: Any, **__: Any) -> Any:
    """Be killed."""
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def stop() -> None:
    """Be stopped, until somebody lets it go on."""
    os.kill(os.getpid(), signal.SIGSTOP)


def after(owner: Any, name: str, number: int = 1, kind: type | None = None, then: Callable[[], object] = die) -> None:
    """Die once a method was called so often, with such an argument."""
    original, count = getattr(owner, name), itertools.count(1)

    def call(self: Any, *words: Any, **more: Any) -> Any:
        found = original(self, *words, **more)
        if (kind is None or isinstance(words[0], kind)) and next(count) >= number:
            then()
        return found

    setattr(owner, name, call)


def half_seal() -> None:
    """Die when the digests of a copy are there, and its head still says WRITING."""
    original = Receiving._write_head

    def write_head(self: Receiving, state: SlotState) -> None:
        die() if state is SlotState.SEALED else original(self, state)

    replace(Receiving, "_write_head", write_head)


def replace(owner: Any, name: str, method: Any) -> None:
    """Put something else in the place of a method."""
    setattr(owner, name, method)


POINTS: dict[str, Callable[[], None]] = {
    "offered": partial(after, Link, "send", kind=Offer),
    "wanted": partial(after, Link, "send", kind=Wanted),
    # Frames go this way, too: the answers before the content.
    "half-sent": partial(after, Link, "send_content", number=2 + _SOME),
    "half-handed-out": partial(after, Link, "send_content", number=3 + _SOME),
    "sent": partial(after, CopySender, "_send_content"),
    "kept": partial(replace, CopySender, "_set", die),
    "half-written": partial(after, Receiving, "write", number=_SOME),
    "stopped": partial(after, Receiving, "write", number=_SOME, then=stop),
    "verified": partial(replace, Receiving, "seal", die),
    "half-sealed": half_seal,
    "sealed": partial(after, Receiving, "seal"),
    "unwritten": partial(replace, PartialShard, "write", die),
    "half-fetched": partial(after, PartialShard, "write", number=_SOME),
}


if __name__ == "__main__":
    POINTS[sys.argv.pop(1)]()
    sys.exit(keeper.main())
