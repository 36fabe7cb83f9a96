"""What iterations began with, as pods report it, and which timelines that has ended.

    pod ──loads────> votes ──> floors: what is void, on whatever holder comes back with it

Changed in place, as the table is that asks it (`table`).
"""

from collections.abc import Callable, Iterable, Iterator, Set

from unbroken_core.vocabulary.checkpoints import MAX_FLOORS, MAX_LOADS, Load, is_void

PodsOf = Callable[[int], Set[str] | None]
"""Returns the pods of an iteration's world; None where they are not known."""


class Loads:
    """All that is reported of loads."""

    def __init__(self) -> None:
        self.floors: tuple[Load, ...] = ()
        """Loads that end timelines, oldest first; they stay known when the pods go."""
        self.num_known = 0
        """Rises when a load, or a step that could not be loaded, is reported for the first time."""
        self._votes: dict[Load, set[str]] = {}
        """Uids of the pods that report it."""
        self._by_pod: dict[str, tuple[Load, ...]] = {}
        """What each present pod reports."""
        self._refusals: dict[int, tuple[int, str, str]] = {}
        """By iteration: the first step that a rank could not read, why, and the name of its pod."""
        self._reached: dict[int, int] = {}
        """By iteration: the highest step that workers remember to have made before it."""

    def receive(
        self, uid: str, name: str, loads: tuple[Load, ...], last_iteration: int
    ) -> tuple[tuple[Load, ...], int]:
        """Take all that a pod reports. Return what may be so, and how many loads cannot."""
        loads = loads[-MAX_LOADS:]
        sound = [
            Load(load.term, load.iteration, load.source, load.of_term, load.of_iteration, load.step)
            for load in loads
            if 0 <= load.iteration <= last_iteration and load.of_order < (load.iteration, load.term, 0)
        ]
        # Each once: a pod has one vote for it to take back.
        told = tuple(dict.fromkeys(sound))
        for load in self._by_pod.pop(uid, ()):
            self._votes[load].discard(uid)
        self._by_pod[uid] = told
        for load in told:
            self.num_known += load not in self._votes
            self._votes.setdefault(load, set()).add(uid)
        self._votes = {load: voters for load, voters in self._votes.items() if voters}
        self._note_refusals(name, loads)
        self._note_reached(loads, last_iteration)
        return told, len(loads) - len(sound)

    def lose(self, uid: str) -> None:
        """Take a pod's votes back."""
        for load in self._by_pod.pop(uid, ()):
            self._votes[load].discard(uid)
            if not self._votes[load]:
                del self._votes[load]

    def agree(self, loads: Iterable[Load] | None, pods_of: PodsOf) -> Iterator[Load]:
        """Yield each load that has become a floor, as more than half of the pods say; None: look at all."""
        for load in sorted(self._votes, key=_epoch) if loads is None else loads:
            if load not in self.floors and self._is_agreed(load, pods_of(load.iteration)):
                floors = [known for known in self.floors if _epoch(known) != _epoch(load)]
                self.floors = tuple(sorted([*floors, load], key=_epoch))[-MAX_FLOORS:]
                yield load

    def is_void(self, iteration: int, term: int, step: int) -> bool:
        """Return whether a checkpoint belongs to a timeline that is over."""
        return is_void(self.floors, iteration, term, step)

    def of(self, iteration: int) -> Load | None:
        """Return what an iteration began with, as far as anybody has said so."""
        return max((load for load in self._votes if load.iteration == iteration), key=self._num_votes, default=None)

    def refusal_of(self, iteration: int) -> tuple[int, str, str] | None:
        """Return which step a rank could not read at the beginning of an iteration, why, and the name of its pod."""
        return self._refusals.get(iteration)

    def reached_before(self, iteration: int) -> int:
        """Return the highest step that workers had made when an iteration began, as far as they remember; -1: none."""
        return self._reached.get(iteration, -1)

    def _note_reached(self, loads: tuple[Load, ...], last_iteration: int) -> None:
        for load in loads:
            if load.iteration <= last_iteration and load.reached > self.reached_before(load.iteration):
                self.num_known += 1
                self._reached[load.iteration] = load.reached
        for old in sorted(self._reached)[:-MAX_LOADS]:
            del self._reached[old]

    def _note_refusals(self, name: str, loads: tuple[Load, ...]) -> None:
        for load in loads:
            if load.refused and load.iteration not in self._refusals:
                self.num_known += 1
                self._refusals[load.iteration] = (*load.refused[0], name)
        for old in sorted(self._refusals)[:-MAX_LOADS]:
            del self._refusals[old]

    def _is_agreed(self, load: Load, pods: Set[str] | None) -> bool:
        """Return whether more than half say so: of the present pods of that world; else of who says anything of it."""
        votes = self._votes[load]
        if pods is not None:
            num_pods = len(pods & self._by_pod.keys())
            return 2 * len(votes) > num_pods and 2 * len(votes & pods) > num_pods
        others = [voters for other, voters in self._votes.items() if other.iteration == load.iteration]
        return 2 * len(votes) > len(set().union(*others))

    def _num_votes(self, load: Load) -> int:
        return len(self._votes[load])


def _epoch(load: Load) -> tuple[int, int]:
    return (load.iteration, load.term)
