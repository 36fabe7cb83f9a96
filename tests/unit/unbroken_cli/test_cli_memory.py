"""What `unbroken status` says of checkpoints in memory."""

import pytest

from unbroken_cli.sources.from_rendezvous import memory_text
from unbroken_core.vocabulary.checkpoints import MemoryStatus


@pytest.mark.parametrize(
    ("memory", "text"),
    [
        (MemoryStatus(-1), "no step is on all ranks yet"),
        (MemoryStatus(120), "step 120 on all ranks (2 steps ago)"),
        (
            MemoryStatus(120, -1, 120, 3, "memory"),
            "step 120 on all ranks (2 steps ago); restored step 120 from memory, 3 steps redone",
        ),
        (
            MemoryStatus(-1, -1, 100, 1, "disk", "step 120: 2 shards were lost with pod-3"),
            "no step is on all ranks yet; restored step 100 from disk, 1 step redone: "
            "step 120: 2 shards were lost with pod-3",
        ),
        (
            MemoryStatus(120, -1, 120, 3, "memory", is_redone_least=True),
            "step 120 on all ranks (2 steps ago); restored step 120 from memory, at least 3 steps redone",
        ),
        (
            MemoryStatus(120, -1, 120, 0, "disk", is_redone_least=True),
            "step 120 on all ranks (2 steps ago); restored step 120 from disk, how many steps are redone is not known",
        ),
        (MemoryStatus(120, source="nothing"), "step 120 on all ranks (2 steps ago)"),
        (
            MemoryStatus(120, -1, -1, 19, "nothing", "step 18 could not be read by pod-1: Size mismatch"),
            "step 120 on all ranks (2 steps ago); nothing was restored, 19 steps redone: "
            "step 18 could not be read by pod-1: Size mismatch",
        ),
        (
            MemoryStatus(
                -1, reason="step 120: 1 shard was lost with pod-3", disk_every=50, disk_problem="the disk is full"
            ),
            "no step is on all ranks yet; no step is on the disk, the disk is full; "
            "step 120: 1 shard was lost with pod-3",
        ),
        (
            MemoryStatus(120, 110, across="across rack"),
            "step 120 on all ranks (2 steps ago); protected to step 110 across rack",
        ),
        (
            MemoryStatus(120, 110, 100, 3, "memory", across="no other rack: across host"),
            "step 120 on all ranks (2 steps ago); protected to step 110, no other rack: across host; "
            "restored step 100 from memory, 3 steps redone",
        ),
        (
            MemoryStatus(120, across="across rack"),
            "step 120 on all ranks (2 steps ago); no step is protected yet, wanted across rack",
        ),
        (
            MemoryStatus(-1, across="2 pods have too few others to keep copies, want 3"),
            "no step is on all ranks yet; no step is protected: 2 pods have too few others to keep copies, want 3",
        ),
        (
            MemoryStatus(120, disk_step=100, disk_every=50),
            "step 120 on all ranks (2 steps ago); step 100 on the disk (22 steps ago)",
        ),
        (
            MemoryStatus(120, -1, 100, 1, "disk", disk_every=50, disk_problem="step 100 was given up by rank 3: full"),
            "step 120 on all ranks (2 steps ago); no step is on the disk, step 100 was given up by rank 3: full; "
            "restored step 100 from disk, 1 step redone",
        ),
    ],
)
def test_the_line_says_what_is_safe_and_what_was_lost(memory: MemoryStatus, text: str) -> None:
    assert memory_text(memory, 122) == text
