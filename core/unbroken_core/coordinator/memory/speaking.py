"""Which pod may tell of copies of whose shards.

    assigned   this coordinator has told the pod to keep them, now or before: it is believed
    claimed    the pod told of them before this coordinator had told any pod, as pods do to a new one: it is
               believed of owners that are gone, and where somebody else says the same; until then it is put off
    else       refused, and counted

Bounded: a pod has a few owners at a time, of which the newest are remembered.
"""

from collections.abc import Container, Iterable, Mapping
from typing import Generic, TypeVar

MAX_OWNERS = 16
"""Owners of one pod that are remembered, assigned or claimed: three at a time, and those before."""

Word = TypeVar("Word")


class Speakers(Generic[Word]):
    """See above. `Word` is what a pod told, to be heard again."""

    def __init__(self) -> None:
        self._assigned: dict[str, dict[str, None]] = {}
        """Owners by pod; the newest last."""
        self._claimed: dict[str, dict[str, None]] = {}
        self._put_off: dict[str, dict[str, None]] = {}
        """Pods by owner."""
        self._words: dict[str, Word] = {}
        """Of pods that were put off."""
        self._is_settled = False
        """Whether any pod was told whose copies to keep: what is claimed after that was never asked for."""

    def begin(self, uid: str, owners: Iterable[str]) -> None:
        """A pod tells of copies of these owners anew."""
        self._words.pop(uid, None)
        if not self._is_settled:
            claimed = self._claimed.setdefault(uid, {})
            for owner in owners:
                if len(claimed) < MAX_OWNERS:
                    claimed[owner] = None

    def may_speak(self, uid: str, owner: str) -> bool:
        """Return whether a pod may tell of copies of this owner at all."""
        return owner in self._claimed.get(uid, ()) or self.is_assigned(uid, owner)

    def is_assigned(self, uid: str, owner: str) -> bool:
        """Return whether this coordinator has told the pod to keep copies of this owner."""
        return owner in self._assigned.get(uid, ())

    def assign(self, owners: Mapping[str, Iterable[str]], living: Container[str]) -> list[Word]:
        """Note whose copies each pod shall keep. Return what is to be heard again."""
        self._is_settled = True
        if len(self._assigned) > 2 * len(owners) + MAX_OWNERS:
            self._assigned = {uid: known for uid, known in self._assigned.items() if uid in living}
        words = []
        for uid, wanted in owners.items():
            known = self._assigned.setdefault(uid, {})
            news = [owner for owner in wanted if owner not in known]
            for owner in wanted:
                known.pop(owner, None)
                known[owner] = None
            for old in list(known)[:-MAX_OWNERS]:
                del known[old]
            if news and uid in self._words:
                words.append(self._words.pop(uid))
        return words

    def lose(self, uid: str) -> None:
        """A pod's agent is gone; the next one tells all of it anew."""
        self._words.pop(uid, None)

    def put_off(self, uid: str, owner: str) -> None:
        """Nothing speaks for what a pod tells of this owner yet."""
        self._put_off.setdefault(owner, {})[uid] = None

    def is_put_off(self, uid: str) -> bool:
        """Return whether something that this pod tells was put off."""
        return any(uid in self._put_off.get(owner, ()) for owner in self._claimed.get(uid, ()))

    def remember(self, uid: str, word: Word) -> None:
        """Keep what a pod told, until it tells anew."""
        self._words[uid] = word

    def put_off_for(self, owner: str) -> list[Word]:
        """Return what is to be heard again, now that this owner has said something, or has gone."""
        return [self._words.pop(uid) for uid in self._put_off.pop(owner, ()) if uid in self._words]
