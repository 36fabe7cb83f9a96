"""What happened to checkpoints of this pod since the keeper began, as its workers tell it: sums of bounded size."""

import threading
from bisect import bisect_left
from dataclasses import replace

from unbroken_core.pod.memory_messages import (
    LOAD_SOURCES,
    SAVE_BOUNDS_S,
    SKIP_REASONS,
    Counted,
    Measure,
    Measured,
)


class Counting:
    """Used by all threads of a keeper."""

    def __init__(self, limit_bytes: int) -> None:
        self._lock = threading.Lock()
        self._counted = Counted(
            limit_bytes=limit_bytes,
            saves=(0,) * (len(SAVE_BOUNDS_S) + 1),
            skips=(0,) * len(SKIP_REASONS),
            loads=(0,) * len(LOAD_SOURCES),
            load_seconds=(0.0,) * len(LOAD_SOURCES),
        )

    def counted(self) -> Counted:
        """Return all sums."""
        with self._lock:
            return self._counted

    def take(self, measured: Measured) -> None:
        """Count what a worker has measured."""
        with self._lock:
            now = self._counted
            match measured.what:
                case Measure.SAVED:
                    saves = _one_more(now.saves, bisect_left(SAVE_BOUNDS_S, measured.seconds))
                    self._counted = replace(now, saves=saves, save_seconds=now.save_seconds + measured.seconds)
                case Measure.SKIPPED:
                    self._counted = replace(now, skips=_one_more(now.skips, _place(SKIP_REASONS, measured.word)))
                case Measure.LOADED:
                    place = _place(LOAD_SOURCES, measured.word)
                    seconds = list(now.load_seconds)
                    seconds[place] += measured.seconds
                    self._counted = replace(
                        now,
                        loads=_one_more(now.loads, place),
                        load_seconds=tuple(seconds),
                        steps_redone=max(measured.steps_redone, -1),
                    )
                case Measure.UNWRITTEN:
                    self._counted = replace(now, disk_failures=now.disk_failures + 1)
                case Measure.DIFFERS:
                    self._counted = replace(now, digest_failures=now.digest_failures + 1)

    def on_disk(self, step: int, whole_at_s: float) -> None:
        """This step is the newest on the disk since then; -1: not known."""
        with self._lock:
            now = self._counted
            if step != now.disk_step or whole_at_s >= 0:
                self._counted = replace(now, disk_step=step, disk_whole_at_s=whole_at_s)

    def bad_digest(self) -> None:
        """A checkpoint was refused since its content is not what was saved."""
        with self._lock:
            self._counted = replace(self._counted, digest_failures=self._counted.digest_failures + 1)

    def refused(self) -> None:
        """A connection or a message of a worker was refused."""
        with self._lock:
            self._counted = replace(self._counted, num_refused=self._counted.num_refused + 1)

    def copied(self, num_bytes: int) -> None:
        """Another pod has verified a copy of so many bytes."""
        with self._lock:
            self._counted = replace(self._counted, copied_bytes=self._counted.copied_bytes + num_bytes)

    def fetched(self, num_bytes: int) -> None:
        """So many bytes came from another pod for a restore."""
        with self._lock:
            self._counted = replace(self._counted, fetched_bytes=self._counted.fetched_bytes + num_bytes)

    def uses(self, used_bytes: int) -> None:
        """The slots take so many bytes now."""
        with self._lock:
            self._counted = replace(self._counted, used_bytes=used_bytes)


def _one_more(numbers: tuple[int, ...], place: int) -> tuple[int, ...]:
    return (*numbers[:place], numbers[place] + 1, *numbers[place + 1 :])


def _place(words: tuple[str, ...], word: str) -> int:
    """Return the place of a word; the last one, which means all others, for what is none of them."""
    return words.index(word) if word in words else len(words) - 1
