"""What the script asks of the coordinator, as its workers report it: the same on all of them.

The first worker that reports decides, unless another one has trained longer: a rendezvous that was restarted follows
the workers of the running iteration. At the start of a job, workers that ask for different things end it. Later they
get no ranks, like a pod whose script does not start. Exit codes may say that no restart would help.
"""

from unbroken_core.coordinator.ending import finish
from unbroken_core.coordinator.state.job import JobState
from unbroken_core.coordinator.state.phases import OVER, Forming
from unbroken_core.coordinator.state.places import Member, WorkerPlace
from unbroken_core.protocol.bounds import MAX_DETAIL
from unbroken_core.protocol.log_rules.rules import LogVerdict
from unbroken_core.protocol.messages import Interrupt, Policy
from unbroken_core.ranks.rules import Rules
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.reasons import Cause, JobPhase, Reason, WorkerPhase

_SPEAKING = (WorkerPhase.READY, WorkerPhase.RUNNING)


def receive_script(job: JobState, member: Member) -> None:
    """Take over what the workers of a pod ask for. The caller sorts the member anew."""
    if not job.settings.is_in_process:
        return
    for place in member.places.values():
        if place.state.phase in _SPEAKING and job.phase.kind not in OVER:
            _receive_worker(job, member, place)
    if job.phase.kind not in OVER:
        seat(job, member)


def receive_exits(job: JobState, member: Member) -> None:
    """Fail the job when a process of this pod has ended by itself with a code that says that no restart would help."""
    codes = job.settings.fatal_exit_codes
    if not codes or job.phase.kind in OVER:
        return
    for local_rank, place in member.places.items():
        fault = place.state.fault
        if fault is None or place.state.phase is not WorkerPhase.GONE or place.replacing is not None:
            continue  # What was told to end may end as it likes.
        if fault.exit_code in codes:
            rank = member.ranks.get(local_rank)
            who = _who(member, place) if rank is None else f"rank {rank} ({member.pod})"
            message = f"{who} exited with code {fault.exit_code}, after which restart.fatalExitCodes wants no restart"
            finish(job, JobPhase.FAILED, Reason.FATAL_EXIT, message)
            return


def receive_fatal_lines(job: JobState, member: Member) -> None:
    """Fail the job when a worker of this pod has printed, or has not, what ends it by a log rule."""
    fatal = {rule.name for rule in job.settings.log_rules if rule.verdict is LogVerdict.FATAL_STOP}
    if not fatal or job.phase.kind in OVER:
        return
    for local_rank, place in member.places.items():
        fault = place.state.fault
        if fault is not None and fault.cause is Cause.LOG_RULE and fault.rule in fatal:
            rank = member.ranks.get(local_rank)
            if rank is None and not 0 <= fault.iteration <= job.numbers.highest_iteration:
                continue  # It has no rank, and never had one: no rule is about its lines.
            who = _who(member, place) if rank is None else f"rank {rank} ({member.pod})"
            if job.phase.kind is JobPhase.RUNNING:
                # Else ranks would go on until their launchers' grace is over, and might save what they should not.
                stop = Interrupt(
                    job.numbers.term, job.world.iteration, fault.cause, rank, member.pod, fault.detail[:MAX_DETAIL]
                )
                job.broadcast(stop)
            finish(job, JobPhase.FAILED, Reason.FATAL_LINE, f"{who}: {fault.detail[:MAX_DETAIL]}")
            return


def seat(job: JobState, member: Member) -> None:
    """Put a pod where the keys of its workers say that it is."""
    if not job.script.names_domains:
        return
    speaking = [place for place in member.places.values() if place.state.phase in _SPEAKING and not place.refusal]
    for place in speaking:
        keys, first = place.state.keys, speaking[0].state.keys
        if len(keys) != len(job.rules.layers) or keys != first:
            text = (
                f"Tree: key_or_fn: want the same {len(job.rules.layers)} keys on all workers of a pod, "
                f"got {list(keys)}, and {list(first)} on worker {speaking[0].state.local_rank}"
            )
            _refuse(job, member, place, text)
            return
    if speaking:
        member.has_domains = True
        job.members.ranking.place(member.uid, member.pod, speaking[0].state.keys)


def _receive_worker(job: JobState, member: Member, place: WorkerPlace) -> None:
    script, state = job.script, place.state
    is_senior = isinstance(job.phase, Forming) and state.iteration > script.iteration
    if state.keys and state.policy is not None and state.policy.code:
        script.keys[member.uid, state.local_rank] = state.keys
    if not script.source or (is_senior and state.policy != script.policy):
        _follow(job, member, place)
    elif state.policy != script.policy:
        text = (
            f"rank_assignment: want the same on all workers, got {describe(state.policy)}, "
            f"and {describe(script.policy)} on {script.source}"
        )
        _refuse(job, member, place, text)
    script.iteration = max(script.iteration, state.iteration)


def _follow(job: JobState, member: Member, place: WorkerPlace) -> None:
    """Plan as this worker's script asks from now on."""
    script, policy = job.script, place.state.policy
    try:
        rules = Rules.of(job.settings, policy)
    except InputError as error:
        _fail(job, member, place, f"rank_assignment: {error}")
        return
    is_second_thought = bool(script.source)
    script.policy = policy
    script.source = _who(member, place)
    if rules != job.rules:
        job.rules = rules
        job.members.follow(rules, keeps_domains=not script.names_domains)
        if job.world.size:
            held = job.members.by_uid.values()
            places = {rank: (other.uid, local) for other in held for local, rank in other.ranks.items()}
            job.members.ranking.adopt(job.world.size, places)
    if is_second_thought:
        for other in list(job.members.by_uid.values()):
            if other is not member:
                receive_script(job, other)
                job.members.sort(other)


def _refuse(job: JobState, member: Member, place: WorkerPlace, text: str) -> None:
    phase = job.phase
    if isinstance(phase, Forming) and phase.adoption is None and phase.outage is None:
        _fail(job, member, place, text)
    elif place.state.phase is WorkerPhase.READY:
        place.refusal = text


def _fail(job: JobState, member: Member, place: WorkerPlace, text: str) -> None:
    finish(job, JobPhase.FAILED, Reason.POLICY_REFUSED, f"{_who(member, place)}: {text}")


def _who(member: Member, place: WorkerPlace) -> str:
    return f"{member.pod} worker {place.state.local_rank}"


def describe(policy: Policy | None) -> str:
    """Return a policy in the words of the script."""
    asked = policy or Policy()
    if asked.code:
        return asked.code
    found = [f"MaxActiveWorldSize({asked.max_ranks})"] if asked.max_ranks is not None else []
    found += [f"ActiveWorldSizeDivisibleBy({asked.divisible_by})"] if asked.divisible_by != 1 else []
    found += ["FillGaps()"] if asked.fills_gaps else []
    found += [f"a world_size_filter of {len(asked.sizes)} steps"] if asked.sizes else []
    if asked.layers:
        layers = ", ".join(map(_describe_layer, asked.layers))
        found.append(f"Tree([{layers}]) with the root {asked.root_key!r}")
    return ", ".join(found) or "nothing"


def _describe_layer(layer: Layer) -> str:
    flags = [name for name, is_set in (("RESERVE", layer.replace_from), ("BACKFILL", layer.close_gaps)) if is_set]
    flag = f", flag={'|'.join(flags)}" if flags else ""
    return f"Layer(min_ranks={layer.min_ranks}, max_ranks={layer.max_ranks}{flag})"
