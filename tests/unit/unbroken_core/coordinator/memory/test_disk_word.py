"""What the coordinator knows of checkpoints on the disk: the last word of who has rank 0."""

import pytest

from unbroken_core.coordinator.memory.choosing import Recall, memory_status
from unbroken_core.coordinator.memory.table import Checkpoints, ReportingPod
from unbroken_core.protocol.messages import Report
from unbroken_core.protocol.wire import decode, encode
from unbroken_core.vocabulary.checkpoints import Held, OnDisk
from unbroken_core.vocabulary.errors import WireError


def table() -> Checkpoints:
    """Return one in which pod a has rank 0 of iterations 0 and 2, and pod b of iteration 1."""
    table = Checkpoints()
    for iteration, uids in enumerate(("ab", "ba", "ab")):
        table.begin(iteration, dict(enumerate(uids)))
    return table


def say(table: Checkpoints, uid: str, disk: OnDisk | None) -> None:
    table.receive(ReportingPod(uid, f"pod-{uid}", 3, 64, lambda _: True), Held(f"0{uid}", disk=disk))


def shown(table: Checkpoints) -> tuple[int, int, str]:
    status = memory_status(table, Recall(), 0)
    return status.disk_step, status.disk_every, status.disk_problem


def test_a_job_that_writes_nothing_there_says_nothing_of_it() -> None:
    known = table()
    say(known, "a", None)
    assert shown(known) == (-1, 0, "")
    assert "disk" not in encode(memory_status(known, Recall(), 0))
    assert "disk" not in encode(Report(1, (), memory=Held("aa")))


def test_the_last_word_of_the_newest_iteration_counts_and_outlives_its_pod() -> None:
    known = table()
    say(known, "a", OnDisk(1, 0, 50, 100))
    assert shown(known) == (100, 50, "")
    say(known, "a", OnDisk(1, 0, 50, 100, 1, "step 150 was given up by rank 1: full"))
    assert shown(known) == (100, 50, "step 150 was given up by rank 1: full")
    say(known, "b", OnDisk(1, 1, 50, 200))
    say(known, "a", OnDisk(1, 0, 50, 100))
    assert shown(known) == (200, 50, "")
    # Its keeper was started again, and then the pod is lost: the disk has not gone.
    say(known, "b", None)
    known.lose("b")
    assert shown(known) == (200, 50, "")
    # Who goes back says so: a newest step may also be removed.
    say(known, "a", OnDisk(1, 2, 50, -1))
    assert shown(known) == (-1, 50, "")


@pytest.mark.parametrize("told", [OnDisk(1, 1, 50, 100), OnDisk(1, 4, 50, 100), OnDisk(1, -1, 50, 100)])
def test_nobody_speaks_for_another_rank_0_or_an_iteration_that_has_not_begun(told: OnDisk) -> None:
    known = table()
    say(known, "a", told)
    assert shown(known) == (-1, 0, "")
    assert known.num_refused == 1


@pytest.mark.parametrize(
    "part",
    ['"every":0', '"every":9e99', '"step":-2', '"num_given_up":-1', f'"problem":"{"x" * 100_000}"', '"every":true'],
)
def test_numbers_and_texts_that_no_disk_has_are_refused(part: str) -> None:
    sound = encode(Report(1, (), memory=Held("aa", disk=OnDisk(1, 0, 50, 10, 2, "p"))))
    assert isinstance(decode(sound, Report), Report)
    name = part.partition(":")[0]
    values = {'"every"': '"every":50', '"step"': '"step":10', '"num_given_up"': '"num_given_up":2'}
    old = values.get(name, '"problem":"p"')
    assert sound.count(old) == 1
    with pytest.raises(WireError):
        decode(sound.replace(old, part), Report)
