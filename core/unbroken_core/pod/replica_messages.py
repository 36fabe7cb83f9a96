"""What keepers of different pods say to each other: TLS 1.3, each showing the certificate of its pod.

    owner   Offer  ->           holder
                   <- Declined  no room, or it is not asked to keep it
                   <- Kept      it has it already
                   <- Wanted    then the owner sends the content, in order, without anything between
                   <- Kept      once all blocks were compared with their digests, and the copy is sealed
                   <- Declined  if a block differs: nothing was kept

    reader  Fetch  ->           holder
                   <- Missing
                   <- Sending   then the blocks that were asked for, in order; or, where ranges were, of each block
                                that they touch their bytes in it, and a CRC-32 (4 bytes, big-endian) of each gap

A frame is its length (4 bytes, big-endian) and a JSON object. Content is sent as it is.
"""

from dataclasses import dataclass
from typing import Union

from unbroken_core.vocabulary.checkpoints import Load

MAX_FRAME_BYTES = 4 << 20


@dataclass(frozen=True)
class Offer:
    """A checkpoint that was sealed and digested, for a pod that shall keep a copy."""

    local_rank: int
    head: str
    """The packed head of the slot, hexadecimal, without the zeros at its end."""
    checksums: tuple[int, ...]
    """CRC-32 of each block."""
    began_with: Load | None = None
    """What the iteration in which it was saved went back to: later copies of this owner are void. None: not known."""


@dataclass(frozen=True)
class Declined:
    """It is not wanted, or was not kept."""

    reason: str
    is_soon: bool = False
    """Whether it is worth asking again in a moment: nothing is wrong."""


@dataclass(frozen=True)
class Wanted:
    """Send the content."""


@dataclass(frozen=True)
class Kept:
    """There is a verified copy."""


@dataclass(frozen=True)
class Fetch:
    """Blocks of a checkpoint that the holder has, its own or a copy."""

    rank: int
    world_size: int
    term: int
    iteration: int
    step: int
    first_block: int = 0
    num_blocks: int = 0
    """0: the digests alone."""
    ranges: tuple[tuple[int, int], ...] = ()
    """(start, length) in bytes of the content, MAX_RANGES at most: instead of blocks. A holder of an earlier release
    passes over them, and sends no content."""


@dataclass(frozen=True)
class Sending:
    """The answer to Fetch."""

    head: str
    checksums: tuple[int, ...]
    has_ranges: bool = False
    """Whether what follows is the ranges."""


@dataclass(frozen=True)
class Missing:
    """The other answer to Fetch."""

    reason: str


ToHolder = Union[Offer, Fetch]
ToOwner = Union[Wanted, Kept, Declined]
AfterContent = Union[Kept, Declined]
ToReader = Union[Sending, Missing]
