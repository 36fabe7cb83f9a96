"""Carries out what `decide_quarantine` says: writes taints and marks of nodes, every few seconds.

Where it is asked to, it writes a condition of these nodes as well, which others may look at.
"""

import asyncio
import datetime
import logging
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from unbroken_operator.adapters.errors import KubeError, KubeRefused, NotLeading
from unbroken_operator.adapters.kube import Kube, collection_path
from unbroken_operator.api import layout
from unbroken_operator.decisions.lifecycle import seconds_between
from unbroken_operator.decisions.quarantine import (
    JobsView,
    QuarantineDecision,
    QuarantineLimits,
    QuarantineMode,
    decide_quarantine,
    is_domain_label_unknown,
)
from unbroken_operator.decisions.reporting.offenders import (
    OffenderChange,
    as_if_quarantined,
    decide_offenders,
    is_in_hand,
)
from unbroken_operator.decisions.snapshot import NodeView

logger = logging.getLogger(__name__)

LOOK_S = 15.0
_REMIND_S = 3600.0
"""What cannot be written is told again, and what was refused for good is asked for again, after this time."""
_TAINT, _RELEASE, _CONDITION = "taint", "release", "condition"


class _Failures:
    """Writes that failed: each is told once in a while, however often it is tried."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], tuple[str, bool]] = {}
        """By kind and node: when it was told, and whether it was refused for good."""

    def forget_older(self, now: str) -> None:
        """Forget what is to be told again."""
        self._told = {
            key: found for key, found in self._told.items() if abs(seconds_between(found[0], now)) < _REMIND_S
        }

    def refused(self, kind: str) -> set[str]:
        """Return the nodes for which there is no use in asking again now."""
        return {node for (each, node), (_, is_for_good) in self._told.items() if is_for_good and each == kind}

    async def attempt(self, kind: str, node: str, now: str, write: Coroutine[Any, Any, object]) -> bool:
        """Write, and return whether it is done: other nodes are none the worse for it. Raises NotLeading."""
        try:
            await write
        except NotLeading:
            raise
        except KubeError as error:
            if (kind, node) not in self._told:
                logger.warning("%s of a node cannot be written node=%s error=%s", kind, node, error)
                self._told[kind, node] = (now, isinstance(error, KubeRefused))
            return False
        self._told.pop((kind, node), None)
        return True


class QuarantineTaints:
    """One for all jobs."""

    def __init__(
        self,
        kube: Kube,
        nodes: Callable[[], Mapping[str, NodeView]],
        jobs: Callable[[], Iterable[JobsView]],
        *,
        mode: QuarantineMode,
        limits: QuarantineLimits,
        has_condition: bool = False,
        may_act: Callable[[], bool] = lambda: True,
        count_withheld: Callable[[str], None] = lambda _why: None,
    ) -> None:
        self._kube = kube
        self._nodes = nodes
        self._jobs = jobs
        self._mode = mode
        self._limits = limits
        self._has_condition = has_condition
        self._may_act = may_act
        self._count_withheld = count_withheld
        self._reported: set[tuple[str, str]] = set()
        """Names of offenders, and what was said of them: there is nothing new to say."""
        self._is_label_unknown = False
        self._failures = _Failures()

    async def run(self) -> None:
        """Run until cancelled."""
        while self._mode is not QuarantineMode.OFF:
            try:
                await self.look(datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"))
            except KubeError as error:
                logger.warning("quarantine failed, trying again in_s=%.0f error=%s", LOOK_S, error)
            except Exception:
                # The boundary of this task: jobs do not need it.
                logger.exception("quarantine failed by a bug, trying again in_s=%.0f", LOOK_S)
            await asyncio.sleep(LOOK_S)

    async def look(self, now: str) -> None:
        """Judge once and act on it. Raises NotLeading."""
        self._failures.forget_older(now)
        self._tell_of_unknown_label()
        nodes = seen = self._nodes()
        if self._has_condition:
            nodes = as_if_quarantined(seen, self._mode, now, self._limits)
        is_on = self._mode is QuarantineMode.ON
        jobs = list(self._jobs())
        decision = decide_quarantine(nodes, jobs, now, self._limits, self._failures.refused(_TAINT))
        current: set[tuple[str, str]] = set()
        for item in decision.withheld:
            current.add((item.offender.name, item.because.value))
            if (item.offender.name, item.because.value) not in self._reported:
                self._count_withheld(item.because.value)
                words = ("node is not quarantined", item.offender.name, item.because.value, item.details)
                logger.warning("%s node=%s because=%s: %s why=%s", *words, item.offender.reason)
        for offender in () if is_on else decision.quarantine:
            current.add((offender.name, ""))
            if (offender.name, "") not in self._reported:
                what = "node would be quarantined, see --quarantine"
                logger.warning("%s node=%s why=%s", what, offender.name, offender.reason)
        self._reported = current
        if not self._may_act():
            return
        if is_on:
            await self._write_taints(decision, now)
        if self._has_condition:
            if not is_on:
                decision = self._without_places_lost(decision, nodes, jobs, now)
            await self._write_conditions(decide_offenders(seen, decision, self._mode, now, self._limits), now)

    def _without_places_lost(
        self, decision: QuarantineDecision, nodes: Mapping[str, NodeView], jobs: list[JobsView], now: str
    ) -> QuarantineDecision:
        """Decide again, if a node that gets no condition in any case has a place that another one could have."""
        lost = {name for name, node in nodes.items() if is_in_hand(node)} | self._failures.refused(_CONDITION)
        if lost.isdisjoint(offender.name for offender in decision.quarantine):
            return decision
        return decide_quarantine(nodes, jobs, now, self._limits, lost)

    async def _write_taints(self, decision: QuarantineDecision, now: str) -> None:
        for name in decision.release:
            if await self._failures.attempt(_RELEASE, name, now, self._write(name, None)):
                logger.info("node released node=%s", name)
        for offender in decision.quarantine:
            mark = f"{now} {offender.reason}"
            if await self._failures.attempt(_TAINT, offender.name, now, self._write(offender.name, mark)):
                logger.warning("node quarantined node=%s why=%s", offender.name, offender.reason)

    async def _write_conditions(self, changes: Iterable[OffenderChange], now: str) -> None:
        for change in changes:
            said = "node offends again and again" if change.since else "node offends no more"
            path = f"{collection_path('nodes')}/{change.node}/status"
            write = self._kube.merge_lists(path, change.to_patch())
            if await self._failures.attempt(_CONDITION, change.node, now, write):
                logger.warning("%s node=%s why=%r", said, change.node, change.why)

    def _tell_of_unknown_label(self) -> None:
        """Say once that no node has the label of the domains; nobody may notice before a node is to be tainted."""
        is_unknown = is_domain_label_unknown(self._nodes(), self._limits)
        if is_unknown and not self._is_label_unknown:
            what = "no node has the label of domains, none is quarantined until one has, see --quarantine-domain-label"
            logger.warning("%s label=%s", what, self._limits.domain_label)
        self._is_label_unknown = is_unknown

    async def _write(self, name: str, mark: str | None) -> None:
        path = f"{collection_path('nodes')}/{name}"
        node = await self._kube.get(path)
        taints = [item for item in (node.get("spec") or {}).get("taints") or () if item["key"] != layout.QUARANTINE]
        if mark is not None:
            taints.append({"key": layout.QUARANTINE, "effect": "NoSchedule"})
        patch: dict[str, Any] = {
            # The list of taints is written as a whole: the version makes the API server refuse it if others have
            # changed the node since.
            "metadata": {
                "resourceVersion": node["metadata"]["resourceVersion"],
                "annotations": {layout.QUARANTINE: mark},
            },
            "spec": {"taints": taints},
        }
        await self._kube.merge(path, patch)
