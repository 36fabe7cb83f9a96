"""What the pod's watch has found, over the ends of watches. Pure."""

from dataclasses import replace

from unbroken.agent.decisions.events import WatchLost, WatchReported
from unbroken_core.vocabulary.findings import Finding, Health, Verdict, bounded

ENDED = Finding("watch", "", Verdict.UNKNOWN, "ended", message="the watch on devices and links has ended")


class Watching:
    """One pod's watch, as its agent knows it."""

    def __init__(self) -> None:
        self._told: Health | None = None
        """By the watch that runs, or by the last one."""
        self._lasting: tuple[Finding, ...] = ()
        """What earlier watches have found fatal: an event is told once, and the next watch was not there."""
        self.health: Health | None = None
        """What is known of the pod's health; None: nothing was ever said."""

    def note(self, event: WatchReported | WatchLost) -> Health | None:
        """Take what a watch says, or its end; return what is known now."""
        self.health = self._noted(event)
        return self.health

    def _noted(self, event: WatchReported | WatchLost) -> Health | None:
        if isinstance(event, WatchReported):
            self._told = event.message
            return self._health(self._told.findings)
        if self._told is None:
            return None
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
