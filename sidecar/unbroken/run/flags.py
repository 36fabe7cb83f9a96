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
    "health.logRules": "--log-rules",
    "health.probes": "--probes",
    "health.preflight.timeoutSeconds": "--preflight-timeout",
    "health.preflight.pairs": "--preflight-pairs",
    "health.preflight.mode": "--preflight",
    "memory.replicas": "--memory-replicas",
    "memory.across": "--memory-across",
    "timeouts.softSeconds": "--soft-timeout",
    "timeouts.hardSeconds": "--hard-timeout",
    "timeouts.barrierSeconds": "--barrier-timeout",
    "timeouts.heartbeatSeconds": "--heartbeat-timeout",
    "timeouts.completionSeconds": "--completion-timeout",
    "timeouts.startupSeconds": "--startup-timeout",
    "timeouts.reconnectSeconds": "--reconnect-timeout",
    "timeouts.terminationGraceSeconds": "--termination-grace",
    "timeouts.lastCallSeconds": "--last-call",
    "timeouts.drainSeconds": "--drain-timeout",
}
_SECONDS = "Seconds"
_BY_STEM = {name.removesuffix(_SECONDS): flag for name, flag in _FLAGS.items()}
_STEMS = "|".join(sorted(map(re.escape, _BY_STEM), key=len, reverse=True))
# Not within a longer name, such as that of a Python attribute or a file, nor what an exception of the script quotes.
# A script has its own replicas: those of the spec have a number, an operator or, at the beginning, a colon after them.
_FIELD = re.compile(
    rf"(?<![\w./'\"`-])(?!replicas\b(?! \(\d| [x+] ))({_STEMS})(?:{_SECONDS})?(?![\w'\"`-]|\.\w)|^(replicas)(?=: )"
)


def in_flags(text: str) -> str:
    """Return the text with the options of `unbroken run` instead of fields of a spec."""
    return _FIELD.sub(lambda found: _BY_STEM[found[1] or found[2]], text)
