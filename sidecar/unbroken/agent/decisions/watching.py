"""What the pod's watch has found, over the ends of watches, and what its preflight has. Pure."""

from dataclasses import replace

from unbroken.agent.decisions.events import PreflightReported, WatchLost, WatchReported
from unbroken_core.vocabulary.findings import PREFLIGHT, STARTING, WATCH, Finding, Health, Verdict, bounded

ENDED = Finding(WATCH, "", Verdict.UNKNOWN, "ended", message="the watch on devices and links has ended")
SILENT_S = 30.0
"""A watch that has told nothing for so long since it began is told of: its checks say within seconds what they know."""


class Watching:
    """One pod's watch, as its agent knows it."""

    def __init__(self) -> None:
        self._told: Health | None = None
        """By the watch that runs, or by the last one."""
        self._lasting: tuple[Finding, ...] = ()
        """What earlier watches have found fatal: an event is told once, and the next watch was not there."""
        self._watched: Health | None = None
        self._began_s: float | None = None
        """When a watch began of which nothing else was heard; None: there is no such one."""
        self._preflight: Health | None = None
        self.health: Health | None = None
        """What is known of the pod's health; None: nothing was ever said."""

    def note(self, event: WatchReported | WatchLost | PreflightReported, now_s: float = 0.0) -> Health | None:
        """Take what a watch says, or its end, or what the preflight has found; return what is known now."""
        if isinstance(event, PreflightReported):
            self._preflight = event.message
        elif isinstance(event, WatchReported) and event.message.findings == (STARTING,):
            # What is known from before stays until there is more.
            self._began_s = now_s
        else:
            self._watched = self._noted(event)
            self._began_s = None
        self.health = self._joined()
        return self.health

    def look(self, now_s: float) -> bool:
        """Give up waiting for a watch's first words, if it is time; return whether that is news."""
        if self._began_s is None or now_s - self._began_s < SILENT_S:
            return False
        self._began_s = None
        if self._told is not None:
            return False  # What it was before it ended, and that it has ended, is told.
        self._watched = self._health((STARTING,))
        self.health = self._joined()
        return True

    def _joined(self) -> Health | None:
        """Return what both say, each of its own checks."""
        watched, own = self._watched, self._preflight
        if watched is not None and any(each.check in PREFLIGHT for each in watched.findings):
            watched = replace(watched, findings=tuple(each for each in watched.findings if each.check not in PREFLIGHT))
        if own is None:
            return watched
        findings = tuple(each for each in own.findings if each.check in PREFLIGHT)
        if watched is None:
            return Health(findings, own.num_dropped)
        joined = bounded((*findings, *watched.findings))
        return replace(joined, num_dropped=joined.num_dropped + own.num_dropped + watched.num_dropped)

    def _noted(self, event: WatchReported | WatchLost) -> Health | None:
        if isinstance(event, WatchReported):
            self._told = event.message
            return self._health(self._told.findings)
        if self._told is None:
            # One that has begun has code of others to thank for its end, most likely.
            return self._watched if self._began_s is None else self._health((ENDED,))
        findings = self._told.findings
        self._lasting = tuple(
            dict.fromkeys((*self._lasting, *(each for each in findings if each.verdict is Verdict.FATAL)))
        )
        # That all was well is not known any more; that something was not still is.
        return self._health((*(each for each in findings if each.verdict.severity > Verdict.OK.severity), ENDED))

    def _health(self, findings: tuple[Finding, ...]) -> Health:
        known = {(each.check, each.entity, each.code) for each in findings}
        lasting = tuple(each for each in self._lasting if (each.check, each.entity, each.code) not in known)
        health = bounded((*findings, *lasting))
        dropped = 0 if self._told is None else self._told.num_dropped
        return replace(health, num_dropped=health.num_dropped + dropped)
