"""What the launcher keeps of the words of log rules for an agent that does not read."""

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from unbroken.launch import launcher as module
from unbroken.launch.config import read_config
from unbroken.launch.launcher import Launcher
from unbroken.launch.line_rules import LineRules
from unbroken_core.pod.pod_messages import Lines
from unbroken_core.protocol import wire
from unbroken_core.protocol.log_rules.rules import LogRule, LogVerdict

RULES = tuple(LogRule(f"rule-{number}", "line", LogVerdict.SLOW) for number in range(15))
LOSS = LogRule("loss", "loss=", LogVerdict.HANG, every_s=60.0)


class Pod:
    """A launcher whose clock stands still unless it is moved, and the agent's end of its connection."""

    def __init__(self, directory: Path, num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.launcher = Launcher(read_config(["--", "true"], {"UNBROKEN_DIR": str(directory)}))
        self.link = self.launcher._link
        self.link._socket, self.agent = socket.socketpair()
        self.link._socket.setblocking(False)
        self.agent.setblocking(False)
        self.link.retry_at_s = self.launcher._give_up_at_s = self.launcher._complain_at_s = None
        self.rules = LineRules((*RULES, LOSS), lambda: self.now_s, lambda: 0.0)
        self.launcher._workers.line_rules = self.rules
        self.taps = [self.rules.tap(rank, 0)() for rank in range(num_ranks)]
        self._unread = b""

    def turn(self, after_s: float = 0.25) -> None:
        """Let each worker print a line that all rules but one ask for."""
        self.now_s += after_s
        for tap in self.taps:
            tap.feed(b"line " + b"x" * 200 + b"\n")
        self.launcher._tell_lines(self.now_s)

    def read(self) -> Iterator[Lines]:
        """Read as the agent all that the launcher has to say now."""
        while True:
            self.link.flush()
            try:
                self._unread += self.agent.recv(1 << 20)
            except BlockingIOError:
                return
            *lines, self._unread = self._unread.split(b"\n")
            yield from (wire.decode(line, Lines) for line in lines)

    def close(self) -> None:
        self.link.close()
        self.agent.close()
        for worker in self.launcher._workers._workers:
            worker.port.release()


@pytest.fixture
def make_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], Pod]]:
    pods: list[Pod] = []

    def make(num_ranks: int) -> Pod:
        pods.append(Pod(tmp_path, num_ranks, monkeypatch))
        return pods[-1]

    yield make
    for pod in pods:
        pod.close()


def test_for_an_agent_that_does_not_read_no_more_than_one_message_is_kept(
    make_pod: Callable[[int], Pod],
) -> None:
    pod = make_pod(8)
    for _ in range(200):
        pod.turn()
    assert pod.link.has_unsent, "the socket takes no more"
    assert len(pod.link._unsent) < 120 * 1000
    next_s = pod.launcher._next_deadline_s()
    assert next_s is None or next_s > pod.now_s, "it waits for the agent, not in a busy loop"
    assert all(lines.marks for lines in pod.read())
    pod.turn()
    (lines,) = pod.read()
    assert {(mark.local_rank, mark.rule) for mark in lines.marks} == {(r, x.name) for r in range(8) for x in RULES}


def test_however_many_ranks_print_it_is_told_until_when_all_was_looked_at(make_pod: Callable[[int], Pod]) -> None:
    pod = make_pod(64)
    for _ in range(20):
        pod.turn()
        told: list[Lines] = []
        while more := list(pod.read()):
            told += more
            # As when the socket takes more: what did not fit goes on its way.
            pod.launcher._tell_lines(pod.now_s)
        assert [lines.looked_s for lines in told] == [0.0] * (len(told) - 1) + [pod.now_s]
        marks = [(mark.local_rank, mark.rule) for lines in told for mark in lines.marks]
        assert sorted(marks) == sorted((rank, rule.name) for rank in range(64) for rule in RULES)
        assert max(len(lines.marks) for lines in told) <= 256
