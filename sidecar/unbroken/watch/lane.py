"""A lane: checks that may wait for the same thing, one after the other, in a thread of its own.

What hangs (a driver, a file of a dead adapter) holds up its lane only. The watch sees it, and says so.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from unbroken.watch.checks.check import Check, not_checked
from unbroken.watch.errors import NotCheckedError, words_of
from unbroken_core.conventions.printable import printable
from unbroken_core.vocabulary.findings import Finding, Verdict

logger = logging.getLogger(__name__)

NUM_LANES = 4
_SHARE = 1000 * (NUM_LANES + 1)
"""So many times its cost, in CPU time, passes before the next run: all of it takes a thousandth of a core."""
_LONGEST_S = 600.0
_EARLY_S = 0.05
"""What is due so soon runs with what is due: a thread that wakes costs more than most checks."""
_RETRY_S = 60.0
"""What cannot be looked at is not tried more often."""
_TOLD_S = 600.0
"""That a check knows nothing is logged no more often than that."""
_MOST_TOLD = 8

Tell = Callable[[str, tuple[Finding, ...]], None]
"""Takes what a check says, by its name. Called in the lane's thread."""


class Lane:
    """Checks that share a thread. `is_wanted`: somebody has asked for them, and reads in the log why they know nothing;
    of what each node happens to have, nobody wants to."""

    def __init__(
        self,
        checks: Sequence[Check],
        tell: Tell,
        clock: Callable[[], float] = time.monotonic,
        *,
        is_wanted: bool = False,
    ) -> None:
        self.checks = tuple(checks)
        self._is_wanted = is_wanted
        self._tell = tell
        self._clock = clock
        self._history: dict[str, Any] = {}
        self._due_s = {check.name: 0.0 for check in checks}
        self._running: tuple[str, float] | None = None
        self._cost_s: dict[str, float] = {}
        """CPU time of the last run of each check."""
        self._silent: set[str] = set()
        """Checks of which the log says that they know nothing."""
        self._logged_s: dict[str, float] = {}

    def start(self) -> None:
        """Begin, in a thread that ends with the process: what hangs in the kernel cannot be ended otherwise."""
        threading.Thread(target=self._run, name="-".join(check.name for check in self.checks), daemon=True).start()

    def hanging(self, now_s: float, patience_s: float) -> str:
        """Return the check that has not come back for so long; "" for none."""
        running = self._running
        return running[0] if running is not None and now_s - running[1] > patience_s else ""

    def _run(self) -> None:
        while True:
            time.sleep(max(self.step(), 0.01))

    def step(self) -> float:
        """Run what is due; return for how long nothing is."""
        due_s = self._clock() + _EARLY_S
        for check in self.checks if due_s - _EARLY_S >= min(self._due_s.values()) else ():
            if due_s >= self._due_s[check.name]:
                self._due_s[check.name] = self._clock() + self._run_one(check)
        return min(self._due_s.values()) - self._clock()

    def _run_one(self, check: Check) -> float:
        """Run one check; return when it is due again."""
        self._running = (check.name, self._clock())
        before_s, pause_s = time.thread_time(), check.period_s
        try:
            judgement = check.judge(self._history.get(check.name), check.sample())
            self._history[check.name] = judgement.history
            findings = judgement.findings
        except NotCheckedError as error:
            findings, pause_s = (not_checked(check.name, str(error)),), max(check.period_s, _RETRY_S)
            self._log_silence(check.name, findings)
        except BaseException as error:  # One check that fails, whatever the reason, must not end its lane.
            text = words_of(error)
            logger.warning("check failed: check=%s error=%s", check.name, text)
            findings, pause_s = (not_checked(check.name, text, "failed"),), max(check.period_s, _RETRY_S)
        else:
            self._log_silence(check.name, findings)
        self._tell(check.name, findings)
        self._running = None
        cost_s = time.thread_time() - before_s
        # The first run loads a library, or opens files: the next one does not.
        usual_s = min(cost_s, self._cost_s.get(check.name, 0.0))
        self._cost_s[check.name] = cost_s
        return min(max(pause_s, _SHARE * usual_s), _LONGEST_S)

    def _log_silence(self, name: str, findings: Sequence[Finding]) -> None:
        """Say why a check knows nothing, once while that lasts: the status names the check alone."""
        unknown = [each for each in findings if each.verdict is Verdict.UNKNOWN] if self._is_wanted else []
        if not unknown:
            self._silent.discard(name)
            return
        now_s = self._clock()
        if name in self._silent or now_s - self._logged_s.get(name, float("-inf")) < _TOLD_S:
            return
        self._silent.add(name)
        self._logged_s[name] = now_s
        for each in unknown[:_MOST_TOLD]:
            logger.warning("nothing is known: check=%s why=%s", name, printable(each.message))
