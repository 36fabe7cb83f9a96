"""Pure: which training pods were made from an earlier template, and what becomes of them.

template, sidecar or logs changed ──> pods that have not started ──> deleted at once, and made anew
                                  └─> others ──OnDelete──> stay until they are deleted or lost
                                             └─Rolling───> leave like pods whose node is about to go (node_signals)
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

from unbroken_operator.api.models import Spec, UpdatePolicy
from unbroken_operator.decisions.actions import DeletePod
from unbroken_operator.decisions.snapshot import PodView

CHANGED = "it was made from an earlier template"


def template_digest(spec: Spec) -> str:
    """Return a short name of what training pods are made from; settings that the rendezvous tells them are no part."""
    return digest_of(spec, spec.template.model_dump(by_alias=True, exclude_none=True, mode="json"))


def digest_of(spec: Spec, template: Any) -> str:
    """Return the same where the template is dumped already."""
    # Without defaults: those of another release of the operator are no change of the user's.
    others = [part and part.model_dump(exclude_defaults=True, mode="json") for part in (spec.sidecar, spec.logs)]
    parts = [template, *others]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def outdated_pods(spec: Spec, pods: Iterable[PodView]) -> tuple[PodView, ...]:
    """Return the pods that were made from another template; those that do not say so are taken for present ones."""
    known = [pod for pod in pods if pod.template]
    if not known:
        return ()
    digest = template_digest(spec)
    return tuple(pod for pod in known if pod.template != digest)


def leaving_for_update(spec: Spec, outdated: Iterable[PodView]) -> dict[str, str]:
    """Return the uids of the pods that are to make way for others, and why."""
    return {pod.uid: CHANGED for pod in outdated} if spec.update_policy is UpdatePolicy.ROLLING else {}


def not_started(outdated: Iterable[PodView]) -> Iterator[DeletePod]:
    """Yield the deletions of pods that wait, perhaps for what the new template mends: an image, a size, a label."""
    for pod in outdated:
        if pod.phase == "Pending" and not pod.is_deleting:
            yield DeletePod(pod.name, pod.uid, CHANGED)
