"""Pure: from one snapshot to the actions that bring the cluster closer to what the job wants.

    Observation to the rendezvous      it is on the recovery path, so it goes first
    Events                             before the status that records them
    status                             reserves the ordinals of the pods that follow
    Secret, Service, rendezvous, tokens, pods
                                       created in the order in which they need each other
    deletions, labels, and what others changed of all this

Doing the actions again, or stopping after any of them and planning again, ends in the same state.
"""

from collections.abc import Iterator
from dataclasses import replace

from unbroken_core.vocabulary.reasons import JobPhase, Role
from unbroken_operator.api import layout
from unbroken_operator.api.models import Spread
from unbroken_operator.api.status_models import JobStateWord
from unbroken_operator.decisions.actions import (
    Action,
    CreateNetworkPolicy,
    CreatePod,
    CreateSecret,
    CreateService,
    CreateTokens,
    Decision,
    DeletePod,
    LetLead,
    Ordinals,
    PostEvent,
    PushObservation,
    WriteStatus,
)
from unbroken_operator.decisions.admission import MAX_VIOLATION, InvalidSpec, ValidSpec, admit, admit_images, with_spec
from unbroken_operator.decisions.assessment import Assessment, assess, may_train_unheard_s, observation
from unbroken_operator.decisions.circles import NUM_FREE, YOUNG_S, pause_s
from unbroken_operator.decisions.cleanup import (
    Objects,
    after_the_end,
    force_wait_s,
    forced,
    suspended,
    unfit,
    without_agent,
)
from unbroken_operator.decisions.drift import drift, notices
from unbroken_operator.decisions.lifecycle import deadline_left_s, has_run, look_again_s, without_ended_report
from unbroken_operator.decisions.limits.batches import pods_a_plan
from unbroken_operator.decisions.limits.retry import retry_delay_s
from unbroken_operator.decisions.memory import STAND_BACK_S
from unbroken_operator.decisions.moves import moves, num_extra
from unbroken_operator.decisions.objects.affinity import AvoidedNodes, Preference
from unbroken_operator.decisions.objects.manifests import rendezvous_pod, secret, service, tokens_secret
from unbroken_operator.decisions.objects.network_policy import network_policies
from unbroken_operator.decisions.objects.training_pods import DumpedTemplate, dumped_template, training_pod
from unbroken_operator.decisions.reporting.events import events
from unbroken_operator.decisions.reporting.rivals import rival_event, stands_back
from unbroken_operator.decisions.reporting.status import earlier, next_status, status_patch
from unbroken_operator.decisions.snapshot import PodView, Snapshot
from unbroken_operator.decisions.spreading import spare_preferences
from unbroken_operator.decisions.suspects import avoided_nodes
from unbroken_operator.decisions.updates import not_started

LEAD_S = 1.0
"""Until a rendezvous that did not take the word to lead is told again."""
_ANY = (Preference((("kubernetes.io/hostname", "any"),), 1),)
_SOME = AvoidedNodes(("any",), ("any",))


def plan(snapshot: Snapshot) -> Decision:
    """Return what to do next; no actions once everything is as it should be."""
    if snapshot.job["metadata"].get("deletionTimestamp"):
        return Decision(tuple(_being_deleted(snapshot)))
    if stands_back(snapshot):
        return Decision(tuple(_rivalry(snapshot)), max(STAND_BACK_S - snapshot.memory.rival_for_s, 0.0) + 1.0)
    snapshot = without_ended_report(snapshot)
    snapshot, verdict = _in_force(snapshot)
    ordinals = _free_ordinals(snapshot)
    if isinstance(verdict, InvalidSpec):
        status = next_status(snapshot, verdict, None, ordinals)
        return Decision(tuple(_reports(snapshot, status)), counted=verdict.counted)
    assessment = assess(snapshot, verdict)
    objects = _objects(snapshot, verdict, assessment, ordinals)
    status = next_status(snapshot, verdict, assessment, objects.ordinals)
    push = _push(snapshot, verdict, assessment)
    waits = (
        objects.check_after_s,
        None if assessment.outcome else deadline_left_s(snapshot, verdict.spec),
        None if assessment.outcome or assessment.is_suspended else look_again_s(snapshot),
        None if assessment.outcome else may_train_unheard_s(snapshot, verdict.settings) or None,
    )
    check_after_s = min((wait for wait in waits if wait is not None), default=None)
    sound_spec = None if verdict.refused else snapshot.job["spec"]
    is_waiting = assessment.is_rendezvous_outdated and assessment.outcome is None and not assessment.is_suspended
    actions = (*push, *_reports(snapshot, status), *objects.actions)
    counted = frozenset() if verdict.refused is None else verdict.refused.counted
    return Decision(actions, check_after_s, counted, objects.num_held, sound_spec, is_waiting)


def _rivalry(snapshot: Snapshot) -> Iterator[PostEvent]:
    manifest = rival_event(snapshot)
    if manifest is not None and manifest["metadata"]["name"] not in snapshot.memory.posted:
        yield PostEvent(manifest)


def _tried(verdict: ValidSpec | InvalidSpec, snapshot: Snapshot) -> ValidSpec | InvalidSpec:
    """Return the verdict, or that no pod can be made of the template: a check must have let something past.

    Else planning would fail for as long as the template stays, and no status, no Event would say so.
    """
    if isinstance(verdict, InvalidSpec):
        return verdict
    try:
        training_pod(
            verdict.spec, verdict.settings, 0, Role.SPARE, snapshot.options, preferences=_ANY, avoided_nodes=_SOME
        )
        avoided_nodes(snapshot, _node_selector(verdict))
    except Exception as error:  # whatever it is: the template is the user's
        return InvalidSpec(
            (f"spec.template: no pod can be made of it: {type(error).__name__}: {error}"[:MAX_VIOLATION],)
        )
    return verdict


def _in_force(snapshot: Snapshot) -> tuple[Snapshot, ValidSpec | InvalidSpec]:
    """Return the spec to act on: the job's own if it is sound, else the last sound one, for a job that goes on."""
    verdict = _tried(admit_images(admit(snapshot.job), snapshot.options.rendezvous_images), snapshot)
    if isinstance(verdict, ValidSpec) or snapshot.memory.sound_spec is None:
        return snapshot, verdict
    job = with_spec(snapshot.job, snapshot.memory.sound_spec)
    before = admit(job)
    if isinstance(before, InvalidSpec):
        return snapshot, verdict
    return replace(snapshot, job=job), replace(before, refused=verdict)


def _reports(snapshot: Snapshot, status: dict[str, object]) -> Iterator[Action]:
    yield from _rivalry(snapshot)
    for manifest in (*events(snapshot, status), *notices(snapshot)):
        if manifest["metadata"]["name"] not in snapshot.memory.posted:
            yield PostEvent(manifest)
    patch = status_patch(snapshot.status, status, snapshot.stored_status)
    if patch:
        yield WriteStatus(patch)


def _push(snapshot: Snapshot, verdict: ValidSpec, assessment: Assessment) -> Iterator[Action]:
    pod, report, memory = assessment.rendezvous, snapshot.report, snapshot.memory
    if pod is None or report is None or not snapshot.is_reachable or snapshot.report_from != pod.uid:
        return
    if assessment.outcome is not None or assessment.is_suspended:
        return
    seen = observation(snapshot, assessment, verdict.settings)
    if (memory.sent_to, memory.sent_term, memory.sent) != (pod.uid, report.term, seen):
        yield PushObservation(pod.uid, report.term, seen)


def _being_deleted(snapshot: Snapshot) -> Iterator[WriteStatus]:
    """Yield what people are to see of a job that something holds: nothing of it is repaired or kept up to date."""
    ends = (JobStateWord.COMPLETE.value, JobStateWord.FAILED.value, JobStateWord.DELETING.value)
    if snapshot.status.get("state") not in ends:
        ranks = {"ranks": None} if "ranks" in snapshot.status else {}
        yield WriteStatus({"state": JobStateWord.DELETING.value, **ranks})


def _free_ordinals(snapshot: Snapshot) -> Ordinals:
    """Return the lowest ordinals that were never used, as far as anybody tells."""
    return Ordinals(pod=snapshot.next_pod_ordinal, rendezvous=snapshot.next_rendezvous_ordinal)


def _objects(snapshot: Snapshot, verdict: ValidSpec, assessment: Assessment, free: Ordinals) -> Objects:
    if assessment.outcome is not None:
        return after_the_end(snapshot, verdict.spec, assessment, assessment.outcome, free)
    if assessment.is_suspended:
        return suspended(snapshot, assessment, free)
    if foreign_objects(snapshot):
        return Objects((), free, check_after_s=5.0)
    actions: list[Action] = []
    if snapshot.secret is None:
        actions.append(CreateSecret(secret(verdict.settings)))
    if snapshot.service is None:
        actions.append(CreateService(service(verdict.settings)))
    wait_s = _hold_off_s(snapshot)
    # Once the training function has returned, no pod is worth replacing: nobody would give it a rank.
    is_ending = assessment.report is not None and assessment.report.phase is JobPhase.ENDING
    num_missing = 0 if wait_s > 0 or is_ending else _num_missing(verdict, assessment)
    found = assessment.succession
    needs_rendezvous = found.leader is None and found.successor is None and _wait_for_any_s(snapshot) <= 0
    dumped = dumped_template(verdict.spec) if num_missing else None
    batch = pods_a_plan(0 if dumped is None else dumped.size, snapshot.memory.num_refused_rounds)
    # After a refusal a new rendezvous is the one pod that is tried: it is refused like any other.
    num_missing = min(num_missing, batch - needs_rendezvous)
    num_held = _num_held(snapshot, num_missing + needs_rendezvous)
    needs_rendezvous = needs_rendezvous and num_held <= num_missing
    num_missing -= min(num_held, num_missing)
    options = snapshot.options_of_job
    if needs_rendezvous:
        before = earlier(snapshot, verdict.settings)
        # With each rendezvous pod: so it comes back by itself, and nothing needs to watch or read it.
        actions += map(CreateNetworkPolicy, network_policies(verdict.spec, verdict.settings, options.network_policy))
        actions.append(CreatePod(rendezvous_pod(verdict.spec, verdict.settings, free.rendezvous, options, before)))
    new_pods = _new_pods(snapshot, verdict, assessment, free.pod, num_missing, dumped=dumped)
    needed, ahead = _missing_tokens(snapshot, verdict, assessment, free.pod, len(new_pods))
    actions += [*needed, *new_pods, *ahead]
    actions += _deletions(snapshot, verdict, assessment)
    actions += moves(snapshot, verdict.settings, assessment)
    changed = drift(snapshot, verdict.settings, assessment)
    actions += changed.actions
    is_trying = bool(new_pods) and snapshot.memory.num_refused_rounds > 0
    may_create = not (needs_rendezvous or num_held or is_trying) and _wait_for_any_s(snapshot) <= 0
    successions = list(_succession(snapshot, verdict, assessment, free, may_create=may_create))
    actions += successions
    needs_rendezvous = needs_rendezvous or any(isinstance(action, CreatePod) for action in successions)
    ordinals = Ordinals(free.pod + len(new_pods), free.rendezvous + needs_rendezvous)
    waits = (wait_s, force_wait_s(snapshot, assessment), changed.wait_s, found.wait_s, LEAD_S if found.may_lead else 0)
    checks = [wait for wait in waits if wait > 0]
    if snapshot.memory.num_circles > NUM_FREE:
        # Nothing happens when pods last, and that is when it is over.
        checks.append(YOUNG_S)
    if num_held:
        checks.append(snapshot.memory.creation_wait_s)
    return Objects(tuple(actions), ordinals, min(checks, default=None), num_held)


def _succession(
    snapshot: Snapshot, verdict: ValidSpec, assessment: Assessment, free: Ordinals, *, may_create: bool
) -> Iterator[Action]:
    """Yield what brings the next rendezvous up beside the one that serves, and what lets it lead.

    It comes last: a quota that has no room for it must not keep back what else is to be done.
    """
    found = assessment.succession
    if found.wants_successor and may_create:
        options = snapshot.options_of_job
        # A job that copies checkpoints only now has no policy for its keepers yet.
        yield from map(CreateNetworkPolicy, network_policies(verdict.spec, verdict.settings, options.network_policy))
        yield CreatePod(rendezvous_pod(verdict.spec, verdict.settings, free.rendezvous, options, is_standby=True))
    if found.may_lead and found.successor is not None:
        pod = found.successor
        yield LetLead(pod.name, pod.uid, pod.ip, earlier(snapshot, verdict.settings))


def _num_held(snapshot: Snapshot, num_wanted: int) -> int:
    """Return how many of the wanted pods the job's budget does not allow now."""
    allowed = snapshot.memory.creations_left
    return 0 if allowed is None else max(0, num_wanted - allowed)


def foreign_objects(snapshot: Snapshot) -> list[str]:
    """Return the Secret and Service that bear our names but belong to someone else."""
    named = [("Secret", item) for item in snapshot.secrets] + [("Service", snapshot.service)]
    return [f"{kind} {item.name}" for kind, item in named if item is not None and item.owner_uid != snapshot.uid]


def _missing_tokens(
    snapshot: Snapshot, verdict: ValidSpec, assessment: Assessment, first: int, num_new: int
) -> tuple[list[CreateTokens], list[CreateTokens]]:
    """Return what the pods mount, and what later ones will: a replacement then finds its token there."""
    if not snapshot.has_job_key:
        return [], []
    # What is too much goes, and may be a stranger's: a Secret for each would be anybody's to make.
    ordinals = {pod.ordinal for pod in assessment.alive[: _num_wanted(verdict, assessment)]} | set(
        range(first, first + num_new)
    )
    needed = {layout.token_block(ordinal) for ordinal in ordinals}
    later = {layout.token_block(first + num_new + layout.TOKENS_AHEAD)} - needed if ordinals else set()
    return (
        [_tokens(verdict, block) for block in sorted(needed - snapshot.tokens.keys())],
        [_tokens(verdict, block) for block in sorted(later - snapshot.tokens.keys())],
    )


def _tokens(verdict: ValidSpec, block: int) -> CreateTokens:
    return CreateTokens(block, tokens_secret(verdict.settings, block))


def _num_missing(verdict: ValidSpec, assessment: Assessment) -> int:
    return max(0, _num_wanted(verdict, assessment) - len(assessment.alive))


def _num_wanted(verdict: ValidSpec, assessment: Assessment) -> int:
    settings = verdict.settings
    return settings.replicas + settings.spares + num_extra(settings, assessment)


def _hold_off_s(snapshot: Snapshot) -> float:
    memory = snapshot.memory
    early = retry_delay_s(memory.num_early_failures) - memory.since_failure_s
    return max(0.0, early, _wait_for_any_s(snapshot))


def _wait_for_any_s(snapshot: Snapshot) -> float:
    """Return for how long no pod is made at all, after refusals or in circles."""
    memory = snapshot.memory
    refused = retry_delay_s(memory.num_refused_rounds) - memory.since_refusal_s
    return max(0.0, refused, pause_s(memory.num_circles) - memory.since_circle_s)


def _new_pods(
    snapshot: Snapshot,
    verdict: ValidSpec,
    assessment: Assessment,
    first: int,
    num_missing: int,
    *,
    dumped: DumpedTemplate | None,
) -> list[CreatePod]:
    roles = _roles_of_new_pods(verdict, assessment, num_missing)
    preferences: dict[int, tuple[Preference, ...]] = {}
    is_spread = bool(verdict.settings.layers) and verdict.spec.spares.spread is Spread.DOMAINS
    if (is_spread or _is_gang(verdict)) and (Role.ACTIVE in roles or _has_unscheduled_actives(assessment)):
        # Where spares are missed is known once the active pods have nodes. They also take no room before those: a gang
        # that lacked it would wait for ever.
        roles = [role for role in roles if role is Role.ACTIVE]
    if is_spread:
        spares = [index for index, role in enumerate(roles) if role is Role.SPARE]
        lost = _lost_actives(snapshot, assessment)
        found = spare_preferences(verdict.settings, assessment, lost, len(spares))
        preferences = dict(zip(spares, found, strict=True))
    avoided = avoided_nodes(snapshot, _node_selector(verdict))
    return [
        CreatePod(
            training_pod(
                verdict.spec,
                verdict.settings,
                first + index,
                role,
                snapshot.options_of_job,
                preferences=preferences.get(index, ()),
                avoided_nodes=avoided,
                dumped=dumped,
            )
        )
        for index, role in enumerate(roles)
    ]


def _is_gang(verdict: ValidSpec) -> bool:
    metadata = verdict.spec.template.metadata
    return metadata is not None and layout.GANG_LABEL in (metadata.labels or {})


def _node_selector(verdict: ValidSpec) -> dict[str, str]:
    return (verdict.spec.template.spec.model_extra or {}).get("nodeSelector") or {}


def _has_unscheduled_actives(assessment: Assessment) -> bool:
    return any(not pod.node and assessment.role(pod) is Role.ACTIVE for pod in assessment.alive)


def _lost_actives(snapshot: Snapshot, assessment: Assessment) -> list[PodView]:
    """Return the lost pods whose ranks the rendezvous has not reassigned yet."""
    report = assessment.report
    if report is None or report.iteration < 0:
        return []
    present = {pod.uid for pod in assessment.alive}
    active = {uid for uid, member in assessment.members.items() if member.role is Role.ACTIVE}
    return [pod for pod in snapshot.trainers() if pod.uid in active - present]


def _roles_of_new_pods(verdict: ValidSpec, assessment: Assessment, num_missing: int) -> list[Role]:
    roles = [assessment.role(pod) for pod in assessment.alive]
    num_active = roles.count(Role.ACTIVE)
    has_run = assessment.report is not None and assessment.report.iteration >= 0
    if has_run and Role.SPARE in roles:
        # The spare is about to be promoted, so that what is missing is a spare.
        num_active += roles.count(Role.SPARE)
    wanted = max(0, verdict.settings.replicas - num_active)
    return [Role.ACTIVE if index < wanted else Role.SPARE for index in range(num_missing)]


def _deletions(snapshot: Snapshot, verdict: ValidSpec, assessment: Assessment) -> Iterator[Action]:
    for pod in assessment.stale_rendezvous:
        if not pod.is_deleting:
            yield DeletePod(pod.name, pod.uid, "another rendezvous takes over")
    yield from forced(snapshot, assessment)
    trainers = snapshot.trainers()
    for pod in trainers:
        if pod.uid in assessment.lost and not pod.is_deleting:
            yield DeletePod(pod.name, pod.uid, f"node {pod.node} is lost")
    forbidden = avoided_nodes(snapshot, _node_selector(verdict)).forbidden
    for pod in assessment.alive:
        if not pod.node and not set(pod.avoids) <= set(forbidden):
            yield DeletePod(pod.name, pod.uid, "it waits for another node than it would have to now")
    yield from unfit(snapshot, verdict.settings, assessment)
    yield from not_started(assessment.outdated)
    yield from without_agent(snapshot, assessment)
    yield from _old_failures(trainers, verdict.spec.failed_pods_history_limit)
    yield from _surplus(snapshot, verdict, assessment)


def _old_failures(trainers: tuple[PodView, ...], num_kept: int) -> Iterator[Action]:
    failed = sorted(
        (pod for pod in trainers if pod.phase == "Failed" and not pod.is_deleting), key=lambda pod: pod.ordinal
    )
    for pod in failed[: max(0, len(failed) - num_kept)]:
        yield DeletePod(pod.name, pod.uid, f"spec.failedPodsHistoryLimit ({num_kept}) newer failed pods are kept")


def _surplus(snapshot: Snapshot, verdict: ValidSpec, assessment: Assessment) -> Iterator[Action]:
    """Delete what is too much after scaling down: pods without work first, an active pod never while the job runs."""
    num_surplus = len(assessment.alive) - _num_wanted(verdict, assessment)
    if num_surplus <= 0:
        return
    knows_ranks = assessment.report is not None and assessment.report.iteration >= 0
    may_have_begun = any(pod.has_run for pod in snapshot.rendezvous_pods())
    if not snapshot.is_reachable and (may_have_begun or has_run(snapshot)):
        # Who trains is known to the rendezvous alone: what was spare when it was last heard may have a rank now.
        return
    if has_run(snapshot) and not knows_ranks:
        return
    candidates = [pod for pod in assessment.alive if not knows_ranks or assessment.role(pod) is Role.SPARE]
    order = sorted(candidates, key=lambda pod: (assessment.role(pod) is Role.ACTIVE, pod.is_ready, -pod.ordinal))
    for pod in order[:num_surplus]:
        yield DeletePod(pod.name, pod.uid, "the job wants fewer pods")
