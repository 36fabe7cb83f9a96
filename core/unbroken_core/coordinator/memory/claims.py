"""Which pod may report copies of whose shards.

    assigned   this coordinator has told the pod to keep them, now or before: the report counts
    claimed    the pod reported them before this coordinator had assigned any, as pods do to a new one, or when
               its keeper was first reached, if the pod was there before this coordinator and no step has been
               protected since: the report counts if the owner is gone, or if another pod says the same; until then
               it is put off
    else       refused, and counted, but for shards of an owner that is gone and of which somebody else has said the
               same: the pod may have been away when copies were assigned anew

Bounded: a pod has a few owners at a time, of which the newest are remembered.
"""

from collections.abc import Container, Iterable, Mapping
from typing import Generic, TypeVar

MAX_OWNERS = 16
"""Owners of one pod that are remembered, assigned or claimed: three at a time, and those before."""

Payload = TypeVar("Payload")


class CopyClaims(Generic[Payload]):
    """See above. `Payload` is what a pod reported, to be received again."""

    def __init__(self) -> None:
        self._assigned: dict[str, dict[str, None]] = {}
        """Owners by pod; the newest last."""
        self._claimed: dict[str, dict[str, None]] = {}
        self._put_off: dict[str, dict[str, None]] = {}
        """Pods by owner."""
        self._reports: dict[str, Payload] = {}
        """Of pods that were put off."""
        self._is_settled = False
        """Whether copies were ever assigned: what is claimed after that was never asked for."""

    def begin(self, uid: str, owners: Iterable[str], is_back: bool = False) -> None:
        """Note that a pod reports copies of these owners anew; `is_back`: and was away when others first did."""
        self._reports.pop(uid, None)
        if is_back or not self._is_settled:
            claimed = self._claimed.setdefault(uid, {})
            for owner in owners:
                if len(claimed) < MAX_OWNERS:
                    claimed[owner] = None

    def may_report(self, uid: str, owner: str) -> bool:
        """Return whether a pod may report copies of this owner at all."""
        return owner in self._claimed.get(uid, ()) or self.is_assigned(uid, owner)

    def is_assigned(self, uid: str, owner: str) -> bool:
        """Return whether this coordinator has told the pod to keep copies of this owner."""
        return owner in self._assigned.get(uid, ())

    def assign(self, owners: Mapping[str, Iterable[str]], living: Container[str]) -> list[Payload]:
        """Note whose copies each pod shall keep. Return the reports to receive again."""
        self._is_settled = True
        if len(self._assigned) > 2 * len(owners) + MAX_OWNERS:
            self._assigned = {uid: known for uid, known in self._assigned.items() if uid in living}
        reports = []
        for uid, wanted in owners.items():
            known = self._assigned.setdefault(uid, {})
            news = [owner for owner in wanted if owner not in known]
            for owner in wanted:
                known.pop(owner, None)
                known[owner] = None
            for old in list(known)[:-MAX_OWNERS]:
                del known[old]
            if news and uid in self._reports:
                reports.append(self._reports.pop(uid))
        return reports

    def lose(self, uid: str) -> None:
        """Forget the report of a pod whose agent is gone; the next one reports anew."""
        self._reports.pop(uid, None)

    def put_off(self, uid: str, owner: str) -> None:
        """Note that nothing confirms yet what a pod reports of this owner."""
        self._put_off.setdefault(owner, {})[uid] = None

    def is_put_off(self, uid: str) -> bool:
        """Return whether something that this pod reports was put off."""
        return any(uid in self._put_off.get(owner, ()) for owner in self._claimed.get(uid, ()))

    def remember(self, uid: str, report: Payload) -> None:
        """Keep a pod's report until the next one."""
        self._reports[uid] = report

    def put_off_for(self, owner: str) -> list[Payload]:
        """Return the reports to receive again, now that this owner has reported, or has gone."""
        return [self._reports.pop(uid) for uid in self._put_off.pop(owner, ()) if uid in self._reports]
