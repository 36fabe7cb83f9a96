"""How long a slot stays mapped: as long as anybody may read it, and no longer."""

import zlib
from pathlib import Path

import torch

from unbroken.keeper.digests import Digests, write_digests
from unbroken.memory.slots import Slot
from unbroken.memory.sources import Source, open_source
from unbroken_core.pod.memory_messages import FoundSlot
from unbroken_core.pod.memory_slots import Head, Moment, SlotState, digests_name, pack_head

CONTENT = bytes(range(256)) * 64


def is_mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def sealed_at(path: Path) -> FoundSlot:
    """Seal a checkpoint there, and digest it."""
    head = Head(SlotState.SEALED, 1, b"j" * 16, Moment(1, 0, 5), 0, 1, b"l" * 16, 10, 10, 20, len(CONTENT))
    path.write_bytes(pack_head(head) * 2 + CONTENT)
    write_digests(path.with_name(digests_name(path.name)), Digests(1, "", [zlib.crc32(CONTENT)]))
    return FoundSlot(str(path), 1, 1, 0, 5, 0, 1, head.layout_digest.hex())


def test_a_thread_that_still_compares_can_read_on_after_the_end_of_a_restore(tmp_path: Path) -> None:
    path = tmp_path / "0-0.slot"
    source: Source = open_source(sealed_at(path))
    # As a thread has it that got no processor, and for which nobody waits.
    content = source.content

    source.close()

    # Looked up first: to read what is not mapped would end this process.
    assert is_mapped(path)
    assert bytes(content.tolist()) == CONTENT
    del content
    assert not is_mapped(path)


def test_a_slot_is_unmapped_at_once_where_nobody_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "0-0.slot"
    source: Source = open_source(sealed_at(path))

    source.close()

    assert not is_mapped(path)


def test_a_slot_of_the_own_can_be_read_on_after_it_was_replaced_by_a_larger_one(tmp_path: Path) -> None:
    path = tmp_path / "0-0.slot"
    found = sealed_at(path)
    slot = Slot(str(path))
    source: Source = open_source(found, slot.bytes)

    slot.close()

    assert is_mapped(path)
    source.verify([(0, len(CONTENT))])
    assert torch.equal(source.content, torch.frombuffer(bytearray(CONTENT), dtype=torch.uint8))
    source.close()
    assert not is_mapped(path)
