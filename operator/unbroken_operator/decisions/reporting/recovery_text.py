"""Pure: a recovery in words, for Events and conditions."""

from unbroken_core.protocol.messages import Recovery
from unbroken_core.recovery.fault_words import other_texts, rest_text, takers_text
from unbroken_core.vocabulary.plurals import counted
from unbroken_core.vocabulary.reasons import Phase

_ORDER = [phase.value for phase in Phase]


def culprit(recovery: Recovery) -> str:
    """Return who failed and where."""
    who = [
        "" if recovery.rank is None else f"rank {recovery.rank}",
        recovery.pod and f"pod {recovery.pod}",
        recovery.node and f"node {recovery.node}",
        recovery.domain and recovery.domain != recovery.node and f"domain {recovery.domain}",
    ]
    first, *rest = [part for part in who if part] or ["the job"]
    return f"{first} ({', '.join(rest)})" if rest else first


def recovery_sentence(recovery: Recovery) -> str:
    """Return who failed, why, and what it took."""
    detail = f": {recovery.detail}" if recovery.detail else ""
    moves = [(recovery.pod, recovery.taken_by), *((other.pod, other.taken_by) for other in recovery.others)]
    taken = takers_text(recovery.replaced_by, moves)
    takers = f"; {taken}" if taken else ""
    # Last: the command line finds the detail by what stands around it.
    rest = rest_text(recovery.cause, recovery.num_faults, len(recovery.others)) if recovery.others else ""
    others = other_texts(recovery.cause, recovery.detail, recovery.others)
    also = "".join(f"; and {text}" for text in (*others, rest) if text)
    world = (
        f"; {recovery.world_size_before} -> {counted(recovery.world_size_after, 'rank')}"
        if recovery.world_size_before != recovery.world_size_after
        else ""
    )
    phases = sorted(recovery.phase_s.items(), key=lambda item: _ORDER.index(item[0]) if item[0] in _ORDER else 99)
    seconds = ", ".join(f"{phase} {value:.3f}" for phase, value in phases)
    return (
        f"{culprit(recovery)}: {recovery.cause}{detail}; recovered by rung {recovery.rung} in "
        f"{sum(recovery.phase_s.values()):.3f} s ({seconds}), "
        f"iteration {recovery.iteration_before} -> {recovery.iteration_after}{takers}{world}{also}"
    )
