"""Layout of the shared page of progress stamps: one file a pod, one slot a worker, written by the worker's library.

    0        8        16       24      ...
    | magic  | slots  | unused ...     64 | slot 0: 128 bytes | slot 1 ... | lock 0: 64 bytes | lock 1 ... |

Every field is one aligned little-endian 64-bit integer with one writer, so that a reader never sees half a value.
Stamps are CLOCK_MONOTONIC nanoseconds of the pod's host (all containers of a pod share it); 0 means never.

A lock is a robust mutex (pthread_mutexattr_setrobust) that the worker's main thread holds while its function may run.
Its first 32 bits are the futex that Linux marks, and wakes the agent at, when that thread ends: before the memory of
the process is torn down, which takes 10 ms with torch and half a second with 4 GB, and long before its parent hears.
"""

import struct
from dataclasses import dataclass

MAGIC = 0x3230_4E4B_4F52_4255
HEADER_BYTES = 64
SLOT_BYTES = 128
"""Of two cache lines, the second one for what is written once in a while."""

PID, ITERATION, ALIVE, MAIN, PING, STEP, FLAGS, INCARNATION, CHECKPOINT, NUM_WINDOWS, BUSY, PACE = range(12)
"""Index of each field in a slot."""

FLAG_IN_FUNCTION = 1
"""The main thread is inside the training function: timeouts apply."""
FLAG_PING_ARMED = 2
"""The function has pinged in this iteration: PING must stay fresh as well."""
FLAG_PROTECTION_OFF = 4
"""Inside `disable_hang_protection`: no timeout applies."""

LOCK_BYTES = 64
"""At least sizeof(pthread_mutex_t) on every architecture."""
LOCK_HAS_WAITER = 0x8000_0000
LOCK_OWNER_DIED = 0x4000_0000
LOCK_OWNER = 0x3FFF_FFFF
"""Bits of a lock's first word as Linux defines them: the last ones are the thread that holds it, 0 for nobody."""


@dataclass(frozen=True)
class WorkerStamps:
    """One worker's stamps."""

    pid: int
    iteration: int
    alive_ns: int
    """Written by a thread of the library: stale when the GIL is held or the process is stopped."""
    main_ns: int
    """Written by a pending call in the main thread: stale when that thread is blocked outside of Python, too."""
    ping_ns: int
    step: int
    flags: int
    incarnation: int
    checkpoint_ns: int = 0
    """For how long this iteration has stood still for checkpoints that are over."""
    num_windows: int = 0
    """Windows of this iteration that are over, the last one of which is told; written last. 0: none."""
    busy_ns: int = 0
    step_ns: int = 0
    """Of that window: how long the worker was busy in a step, and how long the step took."""


def page_bytes(num_slots: int) -> int:
    """Return the size of the page's file in bytes."""
    return HEADER_BYTES + num_slots * (SLOT_BYTES + LOCK_BYTES)


def slot_offset(local_rank: int) -> int:
    """Return the byte offset of a worker's slot."""
    return HEADER_BYTES + local_rank * SLOT_BYTES


def lock_offset(local_rank: int, num_slots: int) -> int:
    """Return the byte offset of a worker's lock."""
    return HEADER_BYTES + num_slots * SLOT_BYTES + local_rank * LOCK_BYTES


def pack_header(num_slots: int) -> bytes:
    """Return the first HEADER_BYTES of the page."""
    return struct.pack("<2Q", MAGIC, num_slots).ljust(HEADER_BYTES, b"\0")


def unpack_slot(page: bytes | memoryview, local_rank: int) -> WorkerStamps:
    """Read one slot. Raises struct.error when the page is too short."""
    return WorkerStamps(*struct.unpack_from("<12q", page, slot_offset(local_rank)))
