"""Links, PCI Express, storage and the node: what the watch makes of samples, and what it reads of strange files."""

from pathlib import Path
from typing import Any

import pytest
from tests.devices import System

from unbroken.watch.checks import node, pcie, ports, storage
from unbroken.watch.checks.check import Check, Judgement
from unbroken.watch.checks.storage import PathSample, judge_storage, read_answer
from unbroken.watch.errors import NotCheckedError
from unbroken.watch.files import Files
from unbroken.watch.lane import Lane
from unbroken_core.vocabulary.findings import Finding, Verdict


def brief(findings: tuple[Finding, ...]) -> list[tuple[str, str, Verdict, int]]:
    return [(each.entity, each.code, each.verdict, each.seen) for each in findings]


OK = ("", "", Verdict.OK, 1)


@pytest.fixture
def system(tmp_path: Path) -> System:
    found = System(tmp_path)
    found.add_adapter("mlx5_0", 0, "0000:3b:00.0", ports=2)
    return found


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Watched:
    """A check of ports, sample by sample."""

    def __init__(self, system: System) -> None:
        self.clock = Clock()
        self.reader = ports.PortReader(Files(system.root), self.clock)
        self.history: Any = None

    def look(self, after_s: float = 1.0) -> list[tuple[str, str, Verdict, int]]:
        self.clock.now_s += after_s
        judgement = ports.judge_adapters(self.history, self.reader.sample())
        self.history = judgement.history
        return brief(judgement.findings)


def test_a_port_that_goes_down_is_suspect_and_seen_again_in_the_next_sample(system: System) -> None:
    watched = Watched(system)
    assert watched.look() == [OK]
    system.set_port("mlx5_0/2", "1: DOWN")
    assert watched.look() == [("mlx5_0/2", "link-down", Verdict.SUSPECT, 1)]
    assert watched.look() == [("mlx5_0/2", "link-down", Verdict.SUSPECT, 2)]
    system.set_port("mlx5_0/2", "4: ACTIVE")
    assert [watched.look() for _ in range(3)][-1] == [OK]


def test_each_of_many_ports_is_followed_and_those_beyond_the_most_are_said(tmp_path: Path) -> None:
    """Seen before: errors of the 52nd port and all further ones were not seen, and all was said to be well."""
    system = System(tmp_path)
    for number in range(32):
        system.add_adapter(f"mlx5_{number:02}", number, f"0000:{number:02x}:00.0", ports=2)
        for port in (1, 2):
            counters = dict.fromkeys(("link_error_recovery", "local_link_integrity_errors", "port_rcv_errors"), 0)
            system.count(f"mlx5_{number:02}/{port}", **counters)
    watched = Watched(system)
    assert watched.look() == [OK]
    system.count("mlx5_31/2", link_downed=1)
    assert watched.look(10.0) == [("mlx5_31/2", "link-flapped", Verdict.SUSPECT, 1)]
    system.add_adapter("mlx5_32", 32, "0000:32:00.0")
    assert watched.look(10.0)[1:] == [("", "not-told", Verdict.UNKNOWN, 1)]


def test_an_interface_with_a_device_is_found_among_many_of_other_pods(tmp_path: Path) -> None:
    """A pod on the network of its node sees one of each pod there."""
    system = System(tmp_path)
    for number in range(200):
        system.add_interface(f"veth{number}", has_device=False)
    system.add_interface("eth0")
    assert ports.InterfaceReader(Files(tmp_path), Clock()).sample().states == {"eth0": True}


def test_links_that_have_not_changed_are_not_judged_anew(system: System) -> None:
    """The port check runs each second for as long as the pod lives."""
    watched = Watched(system)
    watched.look()
    system.count("mlx5_0/1", link_downed=1)
    flapped = watched.look(10.0)
    judged = watched.history
    assert watched.look() == flapped == [("mlx5_0/1", "link-flapped", Verdict.SUSPECT, 1)]
    assert watched.history is judged
    system.set_port("mlx5_0/2", "1: DOWN")
    assert len(watched.look()) == 2
    assert len(watched.look()) == 2, "and counts how often it was seen"
    assert watched.history is not judged


@pytest.mark.parametrize(("due_s", "num_runs"), [(0.04, 2), (0.06, 1)])
def test_what_is_due_in_a_moment_runs_with_what_is_due(due_s: float, num_runs: int) -> None:
    clock, ran = Clock(), []

    def check(name: str, period_s: float) -> Check:
        return Check(name, period_s, lambda: ran.append(name), lambda _history, _sample: Judgement((), None))

    lane = Lane([check("a", 10.0), check("b", 10.0 + due_s)], lambda _check, _findings: None, clock)
    assert lane.step() == 10.0
    clock.now_s += 9.99
    lane.step()
    assert ran == ["a", "b"], "nothing is due"
    clock.now_s = 110.0
    lane.step()
    assert len(ran) == 2 + num_runs


def test_a_port_whose_path_is_gone_is_no_healthy_one(system: System) -> None:
    watched = Watched(system)
    watched.look()
    (system.root / "sys/class/infiniband/mlx5_0/ports/2/state").unlink()
    watched.reader._files._open.clear()  # sysfs: an open file of what is gone cannot be read
    assert watched.look() == [("mlx5_0/2", "port-gone", Verdict.SUSPECT, 1)]


def test_a_port_that_was_never_active_is_unknown(system: System) -> None:
    system.set_port("mlx5_0/2", "1: DOWN")
    assert Watched(system).look() == [OK, ("", "never-active", Verdict.UNKNOWN, 1)]


def test_counters_speak_by_their_rise_and_not_when_they_begin_anew(system: System) -> None:
    system.count("mlx5_0/1", link_downed=40, symbol_error=9_000)
    watched = Watched(system)
    assert watched.look() == [OK]
    system.count("mlx5_0/1", link_downed=0, symbol_error=0)
    assert watched.look(10.0) == [OK]
    system.count("mlx5_0/1", link_downed=1, symbol_error=9)
    assert watched.look(10.0) == [("mlx5_0/1", "link-flapped", Verdict.SUSPECT, 1)]
    system.count("mlx5_0/1", link_downed=2, symbol_error=100)
    assert watched.look(10.0) == [
        ("mlx5_0/1", "link-flapped", Verdict.SUSPECT, 2),
        ("mlx5_0/1", "link-errors", Verdict.DEGRADED, 1),
    ]


def test_adapters_of_other_pods_are_none_of_ours(tmp_path: Path) -> None:
    system = System(tmp_path)
    system.add_adapter("mlx5_0", 0, "0000:3b:00.0")
    (tmp_path / "dev/infiniband/uverbs0").unlink()
    with pytest.raises(NotCheckedError, match="no InfiniBand"):
        ports.PortReader(Files(tmp_path), Clock()).sample()


def test_interfaces_without_a_device_are_the_clusters_own(tmp_path: Path) -> None:
    system = System(tmp_path)
    system.add_interface("veth7", has_device=False)
    clock = Clock()
    with pytest.raises(NotCheckedError, match="no network interface"):
        ports.InterfaceReader(Files(tmp_path), clock).sample()
    system.add_interface("eth0")
    reader = ports.InterfaceReader(Files(tmp_path), clock)
    first = ports.judge_interfaces(None, reader.sample())
    system.add_interface("eth0", "down")
    assert brief(ports.judge_interfaces(first.history, reader.sample()).findings) == [
        ("eth0", "link-down", Verdict.SUSPECT, 1)
    ]


def test_pci_errors_count_for_devices_of_the_pod_only(system: System) -> None:
    system.set_errors("0000:01:00.0", fatal=3, correctable=5000)
    system.set_errors("0000:99:00.0")
    clock = Clock()
    reader = pcie.PcieReader(Files(system.root), lambda: ["0000:01:00.0", "0000:02:00.0"], clock)
    judgement = pcie.judge_pcie(None, reader.sample())
    assert brief(judgement.findings) == [OK, ("", "aer", Verdict.UNKNOWN, 1)]
    system.set_errors("0000:01:00.0", fatal=4, correctable=5050)
    system.set_errors("0000:99:00.0", fatal=9)
    clock.now_s += 10
    assert brief(pcie.judge_pcie(judgement.history, reader.sample()).findings) == [
        ("0000:01:00.0", "aer-fatal", Verdict.SUSPECT, 1),
        ("", "aer", Verdict.UNKNOWN, 1),
    ]


def test_a_counter_that_could_not_be_read_once_counts_from_what_it_was_before(system: System) -> None:
    system.set_errors("0000:01:00.0")
    reader = pcie.PcieReader(Files(system.root), lambda: ["0000:01:00.0"], Clock())
    judgement = pcie.judge_pcie(None, reader.sample())
    errors = system.root / "sys/bus/pci/devices/0000:01:00.0/aer_dev_fatal"
    errors.write_text("")
    judgement = pcie.judge_pcie(judgement.history, reader.sample())
    assert brief(judgement.findings) == [OK]
    errors.write_text("TOTAL_ERR_FATAL 1\n")
    assert brief(pcie.judge_pcie(judgement.history, reader.sample()).findings) == [
        ("0000:01:00.0", "aer-fatal", Verdict.SUSPECT, 1)
    ]


def test_of_nothing_it_is_not_said_that_all_is_well(tmp_path: Path) -> None:
    reader = pcie.PcieReader(Files(tmp_path), lambda: ["0000:01:00.0"], Clock())
    assert brief(pcie.judge_pcie(None, reader.sample()).findings) == [("", "aer", Verdict.UNKNOWN, 1)]


@pytest.mark.parametrize("text", ["", "garbage", "4" * 5000, "\x00\x01", "-1: DOWN", "٤: ACTIVE", "4 ACTIVE"])
def test_a_state_that_is_none_is_no_active_one(system: System, text: str) -> None:
    watched = Watched(system)
    watched.look()
    (system.root / "sys/class/infiniband/mlx5_0/ports/1/state").write_text(text)
    assert watched.look() == [("mlx5_0/1", "link-down", Verdict.SUSPECT, 1)]


@pytest.mark.parametrize("text", ["", "full", "full avg60=nan", "full avg60=x", "full avg60=900", "some avg60=50"])
def test_pressure_that_cannot_be_read_is_unknown(tmp_path: Path, text: str) -> None:
    System(tmp_path).write("/sys/fs/cgroup/memory.pressure", text)
    with pytest.raises(NotCheckedError):
        node.read_pressure(Files(tmp_path))


def test_memory_pressure_and_kills_are_notes(tmp_path: Path) -> None:
    system = System(tmp_path)
    system.set_pressure(35.0)
    assert brief(node.judge_pressure(None, node.read_pressure(Files(tmp_path))).findings) == [
        ("container", "memory-pressure", Verdict.DEGRADED, 1)
    ]
    files, clock = Files(tmp_path), Clock()
    with pytest.raises(NotCheckedError):
        node.read_oom(files, clock)
    system.set_kills(5)
    first = node.judge_oom(None, node.read_oom(files, clock))
    assert brief(first.findings) == [OK]
    system.set_kills(6)
    found = node.judge_oom(first.history, node.read_oom(files, clock)).findings
    assert brief(found) == [("container", "oom-killed", Verdict.DEGRADED, 1)]


def test_a_clock_that_nobody_ever_set_is_unknown_and_one_that_is_lost_is_a_note() -> None:
    lost = node.ClockSample(False, 16_000_000)
    assert brief(node.judge_clock(None, lost).findings) == [("node", "unsynchronised", Verdict.UNKNOWN, 1)]
    first = node.judge_clock(None, node.ClockSample(True, 5_000))
    assert brief(first.findings) == [OK]
    found = node.judge_clock(first.history, lost).findings
    assert brief(found) == [("node", "clock-unsynchronised", Verdict.DEGRADED, 1)]


@pytest.mark.parametrize("words", ["", "1 2 3 4", "1 2 3 4 5 6", "a b c d e", "9" * 40 + " 1 1 1 1"])
def test_a_child_that_prints_something_else_has_said_nothing(words: str) -> None:
    assert read_answer(0, words) == PathSample("unknown")
    assert read_answer(-9, words) == PathSample("unknown")


def test_storage_is_judged_by_what_it_was_before() -> None:
    well, absent = PathSample("answered", 0.5), PathSample("absent")
    never = judge_storage(None, {"/data": absent})
    assert brief(never.findings) == [("", "not-told", Verdict.UNKNOWN, 1)]
    first = judge_storage(None, {"/data": well})
    assert brief(first.findings) == [OK]
    for sample, code, verdict in (
        (absent, "storage-absent", Verdict.SUSPECT),
        (PathSample("silent"), "storage-silent", Verdict.SUSPECT),
        (PathSample("answered", 0.5, True), "storage-read-only", Verdict.SUSPECT),
        (PathSample("answered", 0.001), "storage-full", Verdict.DEGRADED),
    ):
        assert brief(judge_storage(first.history, {"/data": sample}).findings) == [("/data", code, verdict, 1)]


def test_a_path_answers_through_a_child(tmp_path: Path) -> None:
    reader = storage.StorageReader([str(tmp_path), str(tmp_path / "none")])
    sample = reader.sample()
    assert [each.state for each in sample.values()] == ["answered", "absent"]
    with pytest.raises(NotCheckedError, match="no path is named"):
        storage.StorageReader([]).sample()


def test_of_a_folder_with_many_names_a_few_are_read_and_it_is_closed(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / str(number)).touch()
    assert len(Files(tmp_path).names("", 10)) == 10  # What stays open is a ResourceWarning, and an error here.
