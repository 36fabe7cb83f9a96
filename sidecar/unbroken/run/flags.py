"""Messages of the parts, which name fields of a job's spec, in the words of a reader who has typed options."""

import re

_FLAGS = {
    "replicas": "--pods",
    "minReplicas": "--min-pods",
    "spares.count": "--spares",
    "ranksPerPod": "--ranks-per-pod",
    "world.divisibleBy": "--divisible-by",
    "world.maxRanks": "--max-ranks",
    "world.minRanksPerPod": "--min-ranks-per-pod",
    "topology.layers": "--layers",
    "restart.rungs": "--rungs",
    "restart.noProgressLimit": "--no-progress-limit",
    "restart.maxFaultsPerRank": "--max-faults-per-rank",
    "maxFaultsPerRank": "--max-faults-per-rank",
    "restart.growBackSeconds": "--grow-back",
    "timeouts.soft": "--soft-timeout",
    "timeouts.hard": "--hard-timeout",
    "timeouts.barrier": "--barrier-timeout",
    "timeouts.heartbeat": "--heartbeat-timeout",
    "timeouts.completion": "--completion-timeout",
    "timeouts.startup": "--startup-timeout",
    "timeouts.reconnect": "--reconnect-timeout",
    "timeouts.terminationGrace": "--termination-grace",
    "timeouts.lastCall": "--last-call",
    "timeouts.drain": "--drain-timeout",
}
# Not within a longer name, such as that of a Python attribute or a file.
_FIELD = re.compile(
    rf"(?<![\w./-])({'|'.join(sorted(map(re.escape, _FLAGS), key=len, reverse=True))})(?:Seconds)?(?![\w-]|\.\w)"
)


def in_flags(text: str) -> str:
    """Return the text with the options of `unbroken run` instead of fields of a spec."""
    return _FIELD.sub(lambda found: _FLAGS[found[1]], text)
