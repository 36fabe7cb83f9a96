"""Pure: reads a job's spec and says everything that is wrong with it, or gives what the rest of the operator needs.

The API server checks the same where it can; this is for what its schema cannot say, and for clusters without CEL.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from unbroken_core.protocol.log_rules.rules import LogRule
from unbroken_core.protocol.settings import JobSettings, RungBudget, Timeouts, violations
from unbroken_core.vocabulary.errors import InputError
from unbroken_core.vocabulary.layers import Layer
from unbroken_core.vocabulary.reasons import Rung
from unbroken_operator.api import health_models, layout, memory_rules, template_rules
from unbroken_operator.api.models import Spec
from unbroken_operator.api.pod_models import Variable
from unbroken_operator.api.template_shapes import misshapen, not_a_quantity
from unbroken_operator.decisions.limits.images import NOT_ALLOWED, image_violation, is_allowed
from unbroken_operator.decisions.limits.refusals import OperatorRefusal
from unbroken_operator.decisions.limits.stored_status import STORED_STATUS, believed
from unbroken_operator.decisions.limits.weight import num_characters

MAX_SHOWN = 8
MAX_MESSAGE = 1900
"""Characters of all violations in one sentence: a condition's message has at most 2,048."""
MAX_VIOLATION = 400
MAX_VALUES, MAX_DEPTH = 10_000, 64
"""Of a spec: each of them may be wrong in a way of its own, and a large template has a few hundred."""
_TOO_LARGE = "tooLarge"
"""Field of a job as it is held, and of no other: what is wrong with the size of its spec."""
_HELD = ("name", "namespace", "uid", "generation", "resourceVersion", "creationTimestamp", "deletionTimestamp")
MAX_TEMPLATE_CHARACTERS = 256 << 10
"""In a pod's template: each pod is a copy of it, in etcd and in whoever watches pods."""
MAX_CHARACTERS = 2 * MAX_TEMPLATE_CHARACTERS
MAX_WARNINGS = 3
MAX_KEYS, MAX_KEY = 3, 80
"""So many keys are named in one line, and so many characters of each."""


@dataclass(frozen=True)
class ValidSpec:
    """A sound spec."""

    spec: Spec
    settings: JobSettings
    refused: "InvalidSpec | None" = None
    """What is wrong with the job's newest spec; this is the one before, which stays in force."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is allowed, and lets a trainer reach what is its agent's; the first ones."""
        found = tuple(f"spec.template.spec.{text}" for text in template_rules.warnings(_as_json(self.spec)))
        rest = len(found) - MAX_WARNINGS
        return (*found[:MAX_WARNINGS], f"and {rest} more warnings") if rest > 0 else found


@dataclass(frozen=True)
class InvalidSpec:
    """A spec that cannot be acted on: one line for each fault, with where, seen and wanted."""

    violations: tuple[str, ...]

    @property
    def counted(self) -> frozenset[OperatorRefusal]:
        """What of it is counted."""
        signs = ((OperatorRefusal.RESERVED_KEYS, layout.RESERVED_KEYS), (OperatorRefusal.IMAGE, NOT_ALLOWED))
        found = (
            next((what for what, sign in signs if sign in violation), OperatorRefusal.SPEC)
            for violation in self.violations
        )
        return frozenset(found)

    @property
    def message(self) -> str:
        """All violations in one sentence, or the first ones and how many there are."""
        shown = list(self.violations[:MAX_SHOWN])
        while len(shown) > 1 and sum(map(len, shown)) > MAX_MESSAGE:
            shown.pop()
        rest = len(self.violations) - len(shown)
        return f"{'; '.join(shown)}; and {rest} more" if rest > 0 else "; ".join(shown)


def admit(job: Mapping[str, Any]) -> ValidSpec | InvalidSpec:
    """Check one ResilientTrainingJob object, as the API server returns it. Time and memory are linear in its size."""
    metadata = job["metadata"]
    accepted = (job.get("status") or {}).get("accepted")
    found = list(_name_violations(metadata["name"], is_known=accepted is not None))
    size = str(job.get(_TOO_LARGE) or "") or _size_violation(job.get("spec"))
    if size:
        return _invalid((*found, size))
    try:
        # As JSON, since strict models take words for enums and lists for tuples only from there.
        spec = Spec.model_validate_json(json.dumps(job.get("spec") or {}))
    except ValidationError as error:
        return _invalid((*found, *(_describe(item) for item in _causes(error))))
    try:
        settings = to_settings(spec, metadata["name"], metadata["namespace"], metadata["uid"])
    except InputError:
        found += _settings_violations(spec, metadata["name"])
        settings = None
    if spec.topology.preset is not None and spec.topology.layers:
        found.append(
            f"spec.topology.preset: {spec.topology.preset.value} is a list of layers, and spec.topology.layers is one, "
            "too: leave one of them out"
        )
    presets = [preset.value for preset in spec.node_signals.presets]
    if len(set(presets)) < len(presets):
        found.append(f"spec.nodeSignals.presets: want each preset at most once, got {presets}")
    found += _template_violations(spec)
    found += _resource_violations(spec)
    found += (f"spec.{text}" for text in memory_rules.refusals(_memory_and_template(spec)))
    found += (f"spec.health.{text}" for text in health_models.refusals(spec.health))
    names = spec.rendezvous.image_pull_secrets or ()
    found += template_rules.pull_secret_refusals(names, "spec.rendezvous.imagePullSecrets")
    found += _change_violations(spec, accepted)
    return _invalid(found) if found or settings is None else ValidSpec(spec, settings)


def held(job: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what is kept of a job for as long as it exists; the verdict on it is the same.

    A spec that is too large to be acted on stays away: 1.3 MB of JSON may take 60 MB as objects, and so may what the
    API server adds about who wrote which field. Of a status stays what can be, and the stored
    one where that is another.
    """
    metadata = {key: job["metadata"][key] for key in _HELD if key in job["metadata"]}
    kept = {key: job[key] for key in ("apiVersion", "kind", "spec", STORED_STATUS) if key in job}
    status = job.get("status") or {}
    found, faults = believed(status)
    kept |= {"status": found, "metadata": metadata} | ({STORED_STATUS: status} if faults else {})
    size = str(job.get(_TOO_LARGE) or "") or _size_violation(job.get("spec"))
    return kept | {"spec": _numbers(job.get("spec")), _TOO_LARGE: size} if size else kept


def with_spec(job: Mapping[str, Any], spec: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a job as it is held, with another spec."""
    return {key: value for key, value in job.items() if key != _TOO_LARGE} | {"spec": spec}


def _numbers(spec: Any) -> dict[str, Any]:
    """Return the part of a spec that says how large the job is."""
    fields = spec if isinstance(spec, dict) else {}
    spares = fields.get("spares")
    count = spares.get("count") if isinstance(spares, dict) else None
    found = {key: fields[key] for key in ("replicas", "ranksPerPod") if type(fields.get(key)) is int}
    return found | ({"spares": {"count": count}} if type(count) is int else {})


def _invalid(found: Iterable[str]) -> InvalidSpec:
    # What was seen is in them, however long: names, keys and values of the user's.
    return InvalidSpec(
        tuple(text if len(text) <= MAX_VIOLATION else f"{text[: MAX_VIOLATION - 3]}..." for text in found)
    )


def _size_violation(spec: Any) -> str:
    """Return what is wrong with the number and depth of values; "" for nothing."""
    level = [spec]
    num_left = MAX_VALUES - 1
    for _ in range(MAX_DEPTH):
        children: list[Any] = []
        for item in level:
            if isinstance(item, dict | list):
                num_left -= len(item)
                if num_left < 0:
                    return f"spec: must have at most {MAX_VALUES} values, got more"
                children += item.values() if isinstance(item, dict) else item
        if not children:
            return _length_violation(spec)
        level = children
    return f"spec: must have at most {MAX_DEPTH} levels of values in each other, got more"


def _length_violation(spec: Any) -> str:
    """Return what is wrong with the length of a spec with a bounded number of values; "" for nothing."""
    for where, part, most in (
        ("spec.template", spec.get("template") if isinstance(spec, dict) else None, MAX_TEMPLATE_CHARACTERS),
        ("spec", spec, MAX_CHARACTERS),
    ):
        num = num_characters(part)
        if num > most:
            return f"{where}: must have at most {most} characters in keys and values together, got {num}"
    return ""


def admit_images(verdict: ValidSpec | InvalidSpec, allowed: tuple[str, ...]) -> ValidSpec | InvalidSpec:
    """Return the verdict under a list of allowed rendezvous images; empty allows all. The operator's own always is."""
    if not allowed or isinstance(verdict, InvalidSpec):
        return verdict
    spec = verdict.spec
    field = "spec.rendezvous.image" if spec.rendezvous.image else "spec.sidecar.image"
    image = spec.rendezvous.image or spec.sidecar.image
    if image is None or is_allowed(image, allowed):
        return verdict
    return InvalidSpec((image_violation(field, image, allowed),))


def to_settings(spec: Spec, name: str, namespace: str, uid: str) -> JobSettings:
    """Return what rendezvous and agents need to know. Raises InputError that names the field."""
    return JobSettings(job=name, namespace=namespace, uid=uid, **_settings_fields(spec))


def _settings_fields(spec: Spec) -> dict[str, Any]:
    boxes = spec.timeouts
    return {
        "replicas": spec.replicas,
        "min_replicas": spec.min_replicas,
        "spares": spec.spares.count,
        "ranks_per_pod": spec.ranks_per_pod,
        "layers": tuple(
            Layer(layer.name, layer.label, layer.min_ranks, layer.max_ranks, layer.replace_from, layer.close_gaps)
            for layer in spec.topology.all_layers
        ),
        "divisible_by": spec.world.divisible_by,
        "max_ranks": spec.world.max_ranks,
        "min_ranks_per_pod": spec.world.min_ranks_per_pod,
        "rungs": tuple(
            RungBudget(rung.name, rung.limit, float(rung.window_seconds))
            for rung in sorted(spec.restart.rungs, key=lambda rung: list(Rung).index(rung.name))
        ),
        "max_faults_per_rank": spec.restart.max_faults_per_rank,
        "no_progress_limit": spec.restart.no_progress_limit,
        "fatal_exit_codes": spec.restart.fatal_exit_codes,
        "uncounted_causes": spec.restart.uncounted_causes,
        "grow_back_s": None if spec.restart.grow_back_seconds is None else float(spec.restart.grow_back_seconds),
        "timeouts": Timeouts(
            soft_s=float(boxes.soft_seconds),
            hard_s=float(boxes.hard_seconds),
            heartbeat_s=float(boxes.heartbeat_seconds),
            barrier_s=float(boxes.barrier_seconds),
            completion_s=float(boxes.completion_seconds),
            termination_grace_s=float(boxes.termination_grace_seconds),
            startup_s=float(boxes.startup_seconds),
            reconnect_s=float(boxes.reconnect_seconds),
            last_call_s=float(boxes.last_call_seconds),
            drain_s=float(boxes.drain_seconds),
            isolation_s=None if boxes.isolation_seconds is None else float(boxes.isolation_seconds),
        ),
        "health": spec.health.mode,
        "stragglers": spec.health.stragglers.mode,
        "straggler_window_s": float(spec.health.stragglers.window_seconds),
        "pipeline_stages": spec.health.stragglers.pipeline_stages,
        "preflight": spec.health.preflight.mode,
        "preflight_s": float(spec.health.preflight.timeout_seconds),
        "preflight_pairs": spec.health.preflight.pairs,
        "log_rules": tuple(
            LogRule(
                rule.name,
                rule.pattern,
                rule.verdict,
                None if rule.expected_within_seconds is None else float(rule.expected_within_seconds),
                None if rule.recurring_seconds is None else float(rule.recurring_seconds),
                rule.ranks,
            )
            for rule in spec.health.log_rules
        ),
        "copies": 0 if spec.memory is None else spec.memory.replicas,
        "across": "" if spec.memory is None else spec.memory.across or "",
    }


def accepted_facts(spec: Spec) -> dict[str, Any]:
    """Return status.accepted: what cannot change after admission."""
    return {
        "ranksPerPod": spec.ranks_per_pod,
        "layers": [f"{layer.name}={layer.label}" for layer in spec.topology.all_layers],
        "isInProcess": any(rung.name is Rung.IN_PROCESS for rung in spec.restart.rungs),
    }


def _as_cut(fact: Any) -> Any:
    """Return the fact as it stands in the status of older jobs, which keeps 253 characters of a layer."""
    return [text[:253] for text in fact] if isinstance(fact, list) else fact


def _causes(error: ValidationError) -> list[Any]:
    """Return the errors without those that only follow from an error deeper inside."""
    items = error.errors(include_url=False)
    inner = {item["loc"][:length] for item in items for length in range(len(item["loc"]))}
    return [item for item in items if item["loc"] not in inner]


def _describe(error: Any) -> str:
    where = "spec" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown field; see `kubectl explain rtj.spec`"
    if error["type"] == "missing":
        return f"{where}: is required"
    seen = repr(error["input"])
    if error["type"] in ("too_short", "too_long"):
        limits = error["ctx"]
        wanted = f"at least {limits['min_length']}" if "min_length" in limits else f"at most {limits['max_length']}"
        return f"{where}: must have {wanted} items, got {len(error['input'])}"
    return (
        f"{where}: {error['msg'][:1].lower()}{error['msg'][1:]}, got {seen if len(seen) <= 80 else seen[:77] + '...'}"
    )


def _name_violations(name: str, *, is_known: bool) -> Iterator[str]:
    if name.endswith(layout.SECRET_SUFFIX) and not is_known:
        # Jobs that an earlier release has accepted go on.
        other = name.removesuffix(layout.SECRET_SUFFIX)
        yield (
            f"metadata.name: must not end with {layout.SECRET_SUFFIX}, since the rendezvous pods of a job {other!r} "
            f"have such names, got {name!r}"
        )
    if len(name) > layout.MAX_JOB_NAME:
        yield (
            f"metadata.name: must have at most {layout.MAX_JOB_NAME} characters, since pods are named after it, "
            f"got {len(name)}"
        )
    is_service_name = name[:1].isalpha() and all(char.isascii() and (char.isalnum() or char == "-") for char in name)
    if not is_service_name or name != name.lower() or name.endswith("-"):
        yield (
            "metadata.name: must be lowercase letters, digits and '-', beginning with a letter, since a Service is "
            f"named after it, got {name!r}"
        )


def _settings_violations(spec: Spec, name: str) -> Iterator[str]:
    """Return every violation, where JobSettings raises for the first one only."""
    unchecked = object.__new__(JobSettings)
    for field, value in {"job": name, "namespace": "", "uid": "", **_settings_fields(spec)}.items():
        object.__setattr__(unchecked, field, value)
    for message in violations(unchecked):
        yield f"spec.{message}"


def _template_violations(spec: Spec) -> Iterator[str]:
    pod = spec.template.spec
    where = "spec.template.spec"
    if not pod.containers[0].command:
        yield (
            f"{where}.containers[0].command: is required: the command that starts the training "
            "(an image's own entrypoint cannot be put under the launcher)"
        )
    yield from (f"{where}.{found}" for found in misshapen(_as_json(spec)))
    yield from (f"{where}.{found}" for found in template_rules.refusals(_as_json(spec)))
    names = [container.name for container in pod.containers]
    if len(set(names)) != len(names):
        twice = next(name for name, num in Counter(names).items() if num > 1)
        yield f"{where}.containers: names must differ, got {twice!r} more than once"
    yield from _key_violations(spec)
    yield from _variable_violations(pod.containers[0].env or (), f"{where}.containers[0].env")


def _resource_violations(spec: Spec) -> Iterator[str]:
    """Say which resources of our own containers are no quantities."""
    for name, resources in (("sidecar", spec.sidecar.resources), ("rendezvous", spec.rendezvous.resources)):
        given = {} if resources is None else {"limits": resources.limits, "requests": resources.requests}
        for kind, values in given.items():
            for key, value in (values or {}).items():
                yield from not_a_quantity(f"spec.{name}.resources.{kind}.{key}", value)


def _memory_and_template(spec: Spec) -> Mapping[str, Any]:
    return spec.model_dump(by_alias=True, exclude_none=True, mode="json", include={"memory", "template"})


def _as_json(spec: Spec) -> Mapping[str, Any]:
    return spec.template.spec.model_dump(by_alias=True, exclude_none=True, mode="json")


def _key_violations(spec: Spec) -> Iterator[str]:
    metadata = spec.template.metadata
    if metadata is None:
        return
    for field, items in (("labels", metadata.labels), ("annotations", metadata.annotations)):
        keys = sorted(filter(layout.is_reserved_key, items or ()))
        if keys:
            shown = ", ".join(
                repr(key if len(key) <= MAX_KEY else f"{key[: MAX_KEY - 3]}...") for key in keys[:MAX_KEYS]
            )
            rest = f" and {len(keys) - MAX_KEYS} more" if len(keys) > MAX_KEYS else ""
            yield f"spec.template.metadata.{field}: {layout.RESERVED_KEYS}, got {shown}{rest}"


def _variable_violations(variables: Sequence[Variable], where: str) -> Iterator[str]:
    for index, variable in enumerate(variables):
        name = variable.name
        if name.startswith(layout.RESERVED_VARIABLE_PREFIX) and name not in template_rules.USERS_VARIABLES:
            yield f"{where}[{index}].name: {template_rules.OWN_VARIABLES}, got {name!r}"


def _change_violations(spec: Spec, before: Mapping[str, Any] | None) -> Iterator[str]:
    if before is None:
        return
    names = {"ranksPerPod": "ranksPerPod", "layers": "topology.layers", "isInProcess": "restart.rungs (in-process)"}
    for key, seen in accepted_facts(spec).items():
        if key in before and before[key] not in (seen, _as_cut(seen)):
            yield f"spec.{names[key]}: cannot change after the job was admitted (from {before[key]} to {seen})"
