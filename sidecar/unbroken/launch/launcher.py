"""The launcher's event loop: one thread, woken by the agent, by signals, by workers' output and by deadlines.

WAITING ──agent's socket there──> SERVING ──Shutdown, or a signal to end──> ENDING ──no worker left──> exit
   └── not there in time: exit 1
"""

import math
import select
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING

from unbroken.launch.config import LaunchConfig
from unbroken.launch.link import LauncherLink
from unbroken.launch.output import Console, Stream, complain
from unbroken.launch.process_tree import adopt_orphans
from unbroken.launch.watch_process import WatchProcess
from unbroken.launch.workers import Workers
from unbroken_core.pod.pod_messages import (
    DumpStack,
    End,
    EndPairs,
    Follow,
    Inspect,
    Processes,
    Shutdown,
    Spawn,
    ToLauncher,
)
from unbroken_core.protocol.messages import PairOrder, PairState
from unbroken_core.vocabulary.errors import assert_never

if TYPE_CHECKING:
    from unbroken.launch.preflight_process import PodPreflight

_LEAVE_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
_COMPLAIN_AFTER_S = 2.0
_LAST_OUTPUT_S = 3.0


class Launcher:
    """One launcher process; create it in the main thread, which takes the signals."""

    def __init__(self, config: LaunchConfig) -> None:
        self._config = config
        pod = config.pod if config.is_supervised else ""
        self._stdout, self._stderr = Console(sys.stdout.fileno(), pod), Console(sys.stderr.fileno(), pod)
        self._workers = Workers(config, self._stdout, self._stderr)
        self._watch = WatchProcess(config)
        self._workers.note_other_end = self._note_other_end
        self._preflight = _make_preflight(config)
        """What the pod finds of itself before its first process; None: it does not look."""
        self._is_preflight_told = self._preflight is None
        """Until then the agent is told of no places, so that the pod is not ready."""
        self._pairs_told: PairState | None = None
        self._link = LauncherLink(config.directory / "agent.sock")
        self._streams: list[Stream] = []
        self._reported: Processes | None = None
        self._is_leaving = False
        self._drain_until_s: float | None = None
        """Set while the pod is terminating and its workers were not signalled yet."""
        self._exit_code: int | None = None
        """Set from the moment that the launcher is to end."""
        self._end_at_s: float | None = None
        """When workers that still run after Shutdown are ended."""
        now_s = time.monotonic()
        self._give_up_at_s: float | None = now_s + config.agent_timeout_s
        self._complain_at_s = None if config.is_supervised else now_s + _COMPLAIN_AFTER_S

    def run(self) -> int:
        """Run until the agent or a signal ends it and no worker is left; return the exit code."""
        adopt_orphans()
        wake = self._take_signals()
        self._workers.prepare(time.monotonic())
        if self._preflight is not None:
            self._preflight.start(time.monotonic())
        try:
            while not self._is_over():
                self._turn(wake)
            self._flush()
        finally:
            signal.set_wakeup_fd(-1)
            self._link.close()
            self._workers.close()
            self._watch.close()
            if self._preflight is not None:
                self._preflight.close()
            wake.close()
        # Once all has been well, the pod is as good as the ends of its workers.
        return self._exit_code or self._workers.failed_end

    def _take_signals(self) -> socket.socket:
        """Turn signals into bytes on a socket, so that one `select` waits for everything."""
        wake, waker = socket.socketpair()
        wake.setblocking(False)
        waker.setblocking(False)
        signal.set_wakeup_fd(waker.detach(), warn_on_full_buffer=False)
        for number in (*_LEAVE_SIGNALS, *_FORWARDED_SIGNALS, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        return wake

    def _is_over(self) -> bool:
        return self._exit_code is not None and not self._workers.is_any_alive

    def _turn(self, wake: socket.socket) -> None:
        """Wait for events, and handle them all."""
        self._connect(time.monotonic())
        self._report()
        ready = self._wait(wake)
        if wake.fileno() in ready:
            self._handle_signals(wake)
        looked_s = time.monotonic()
        if self._link.socket is not None and self._link.socket.fileno() in ready:
            self._link.flush()
            for order in self._link.receive(time.monotonic()):
                self._obey(order)
        self._move_output(ready)
        self._tell_lines(looked_s)
        # Always: the byte of a SIGCHLD may be lost when the socket is full, and reaping costs one call.
        if self._workers.reap() and not self._is_leaving and self._exit_code is None:
            self._workers.start_waiting(time.monotonic())
        self._settle_preflight(ready)
        # After what orders starts, and what ends the fork server: nothing else may happen for a minute.
        self._workers.advance_starts(time.monotonic())
        self._check_deadlines(time.monotonic())

    def _wait(self, wake: socket.socket) -> set[int]:
        """Return the descriptors that are ready."""
        # Not epoll: the console may be a regular file, which epoll refuses.
        poller = select.poll()
        poller.register(wake, select.POLLIN)
        if self._link.socket is not None:
            poller.register(self._link.socket, select.POLLIN | (select.POLLOUT if self._link.has_unsent else 0))
        for descriptor in self._workers.descriptors:
            poller.register(descriptor, select.POLLIN)
        if self._preflight is not None and self._preflight.descriptor is not None:
            poller.register(self._preflight.descriptor, select.POLLIN)
        self._streams += self._workers.take_new_streams()
        for stream in self._streams:
            if stream.is_open and not stream.console.is_full:
                poller.register(stream, select.POLLIN)
        for console in (self._stdout, self._stderr):
            if console.has_output:
                poller.register(console, select.POLLOUT)
        deadline_s = self._next_deadline_s()
        timeout_s = 60.0 if deadline_s is None else max(deadline_s - time.monotonic(), 0.0)
        return {descriptor for descriptor, _ in poller.poll(math.ceil(timeout_s * 1000))}

    def _move_output(self, ready: set[int]) -> None:
        for stream in self._streams:
            if stream.is_open and stream.fileno() in ready:
                stream.pump()
        for console in (self._stdout, self._stderr):
            if console.has_output:
                console.flush_some()
        self._streams = [stream for stream in self._streams if stream.is_open]

    def _settle_preflight(self, ready: set[int]) -> None:
        """Go on with the preflight; once it is over, say what it has found."""
        preflight = self._preflight
        if preflight is None:
            return
        if preflight.descriptor in ready:
            preflight.pump()
        preflight.check(time.monotonic())
        if preflight.health is None:
            return
        if not self._is_preflight_told:
            self._is_preflight_told = True
            for text in preflight.complaints:
                complain(self._stderr, text)
            self._link.send(preflight.health)
        if preflight.pairs is not None and preflight.pairs != self._pairs_told:
            self._pairs_told = preflight.pairs
            self._link.send(preflight.pairs)

    def _note_other_end(self, pid: int) -> None:
        """Note the end of a child that was no worker."""
        self._watch.note_end(pid)
        if self._preflight is not None:
            self._preflight.note_end(pid)

    def _tell_lines(self, looked_s: float) -> None:
        """Tell the agent what log rules have found. What was printed until `looked_s` was read, unless it must wait."""
        rules = self._workers.line_rules
        if rules is None:
            return
        rules.note_look(looked_s, is_complete=not (self._stdout.is_full or self._stderr.is_full))
        if rules.complaint:
            complain(self._stderr, rules.complaint)
            rules.complaint = ""
        # While the agent does not read, the newest mark of each rule is all that is kept.
        while self._is_taking_lines and (lines := rules.take(time.monotonic())) is not None:
            self._link.send(lines)

    @property
    def _is_taking_lines(self) -> bool:
        return self._link.socket is not None and not self._link.has_unsent

    def _follow(self, order: Follow) -> None:
        """Look for what these rules ask for from now on; an agent that was restarted says so again."""
        from unbroken.launch.line_rules import LineRules  # noqa: PLC0415 - no job without rules loads it

        rules = self._workers.line_rules
        if rules is None or rules.rules != order.rules:
            self._workers.line_rules = LineRules(order.rules)
        else:
            rules.reconnect()

    def _next_deadline_s(self) -> float | None:
        due = [
            self._workers.next_deadline_s,
            self._link.retry_at_s,
            self._end_at_s,
            self._give_up_at_s,
            self._complain_at_s,
        ]
        due += [self._drain_until_s, self._watch.due_s, None if self._preflight is None else self._preflight.due_s]
        if self._workers.line_rules is not None and self._is_taking_lines:
            due.append(self._workers.line_rules.due_s)
        return min((at_s for at_s in due if at_s is not None), default=None)

    def _check_deadlines(self, now_s: float) -> None:
        self._workers.kill_overdue(now_s)
        self._workers.log_stacks(now_s)
        if not self._is_leaving and self._exit_code is None:
            self._watch.settle(now_s, has_workers=self._workers.is_any_alive)
            if self._watch.complaint:
                complain(self._stderr, self._watch.complaint)
                self._watch.complaint = ""
        if self._complain_at_s is not None and now_s >= self._complain_at_s:
            self._complain_at_s = None
            path = self._config.directory / "agent.sock"
            complain(self._stderr, f"waits for the agent at {path}, at most {self._config.agent_timeout_s:g} s")
        if self._give_up_at_s is not None and now_s >= self._give_up_at_s:
            self._give_up_at_s = None
            waited = f"{self._config.agent_timeout_s:g} s"
            complain(self._stderr, f"agent: no socket at {self._config.directory}/agent.sock within {waited}")
            self._exit_code = 1
        if self._drain_until_s is not None and (now_s >= self._drain_until_s or self._link.socket is None):
            self._end_workers(signal.SIGTERM, self._config.grace_s)
        if self._end_at_s is not None and now_s >= self._end_at_s:
            self._end_at_s = None
            self._workers.end_all(self._config.grace_s, now_s)

    # ----------------------------------------------------------------------------------------------------------- agent

    def _connect(self, now_s: float) -> None:
        if self._link.complaint:
            complain(self._stderr, self._link.complaint)
            self._link.complaint = ""
        if self._link.retry_at_s is None or now_s < self._link.retry_at_s:
            return
        state = self._state()
        # What was found comes first: who hears of places that are ready knows it.
        found = () if self._preflight is None else (self._preflight.health, self._preflight.pairs)
        words = [*(word for word in found if word is not None), state] if self._is_preflight_told else []
        if self._link.connect(words, now_s):
            self._reported = state if words else None
            self._pairs_told = None if self._preflight is None or not words else self._preflight.pairs
            self._give_up_at_s = self._complain_at_s = None

    def _state(self) -> Processes:
        return Processes(self._workers.states, self._is_leaving, self._drain_until_s is not None)

    def _report(self) -> None:
        """Report changes to the agent."""
        if not self._is_preflight_told:
            return
        state = self._state()
        if state != self._reported:
            self._reported = state
            self._link.send(state)

    def _obey(self, order: ToLauncher) -> None:
        now_s = time.monotonic()
        match order:
            case Spawn():
                if not self._is_leaving and self._exit_code is None:
                    self._workers.spawn(order, now_s)
            case End(local_rank=local_rank, incarnation=incarnation, grace_s=grace_s):
                self._workers.end(local_rank, incarnation, grace_s, now_s)
            case DumpStack() | Inspect() | Follow():
                self._look(order, now_s)
            case PairOrder() | EndPairs():
                self._test(order, now_s)
            case Shutdown(exit_code=exit_code, grace_s=grace_s, message=message, released=released):
                if self._exit_code is None:
                    if not self._config.is_supervised:
                        complain(self._stderr, f"the {'training' if exit_code == 0 else 'job'} is over: {message}")
                    self._exit_code, self._end_at_s = exit_code, now_s + max(grace_s, 0.0)
                    self._workers.cancel_starts()
                    self._workers.expect_ends(released)
            case _:
                assert_never(order)

    def _look(self, order: DumpStack | Inspect | Follow, now_s: float) -> None:
        """Look at workers, or at what they print."""
        match order:
            case DumpStack():
                self._workers.dump_stack(order, now_s)
            case Inspect():
                self._workers.inspect(order)
            case Follow():
                self._follow(order)
            case _:
                assert_never(order)

    def _test(self, order: PairOrder | EndPairs, now_s: float) -> None:
        """Let the preflight test with another pod, or with no other one any more."""
        if self._preflight is None:
            return
        if isinstance(order, PairOrder) and not self._is_leaving and self._exit_code is None:
            self._preflight.test(order, now_s)
        else:
            self._preflight.end_tests()

    # --------------------------------------------------------------------------------------------------------- signals

    def _handle_signals(self, wake: socket.socket) -> None:
        try:
            numbers = set(wake.recv(4096))
        except BlockingIOError:
            return
        for number in numbers:
            if number in _FORWARDED_SIGNALS:
                self._workers.forward(number)
            elif number in _LEAVE_SIGNALS:
                self._leave(number)

    def _leave(self, number: int) -> None:
        """The pod terminates: pass the signal on, and kill what still runs after the grace, at once the second time.

        If there is time to drain, and an agent, the agent ends the workers as soon as their ranks have moved.
        """
        is_first, self._is_leaving = not self._is_leaving, True
        self._exit_code = 128 + number
        if is_first and number == signal.SIGTERM and self._config.drain_s > 0 and self._link.socket is not None:
            self._drain_until_s = time.monotonic() + self._config.drain_s
            self._workers.cancel_starts()
            self._report()
            return
        self._end_workers(number, self._config.grace_s if is_first else 0.0)

    def _end_workers(self, number: int, grace_s: float) -> None:
        self._drain_until_s = None
        # The agent must know before the workers do: their end must not look like a fault.
        self._report()
        self._workers.end_all(grace_s, time.monotonic(), number)

    def _flush(self) -> None:
        """Give agent and console a last chance to take pending data."""
        self._report()
        for stream in self._streams:
            stream.drain()
            stream.close()
        until_s = time.monotonic() + _LAST_OUTPUT_S
        consoles = [console for console in (self._stdout, self._stderr) if console.has_output]
        while time.monotonic() < until_s and (consoles or (self._link.has_unsent and self._link.socket is not None)):
            poller = select.poll()
            for console in consoles:
                poller.register(console, select.POLLOUT)
            if self._link.has_unsent and self._link.socket is not None:
                poller.register(self._link.socket, select.POLLOUT)
            poller.poll(100)
            self._link.flush()
            for console in consoles:
                console.flush_some()
            consoles = [console for console in consoles if console.has_output]


def _make_preflight(config: LaunchConfig) -> "PodPreflight | None":
    if config.preflight_s is None:
        return None
    from unbroken.launch.preflight_process import PodPreflight  # noqa: PLC0415 - no job without one loads it

    return PodPreflight(config, config.preflight_s)
