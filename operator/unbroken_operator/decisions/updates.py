"""Pure: which training pods were made from an earlier template, and what happens to them.

template, sidecar or logs changed ──> pods that have not started ──> deleted at once, and recreated
                                  └─> others ──OnDelete──> stay until they are deleted or lost
                                             └─Rolling───> leave like pods whose node is about to go (node_signals)
"""

from collections.abc import Iterable, Iterator

from unbroken_operator.api.models import Spec, UpdatePolicy
from unbroken_operator.decisions.actions import DeletePod
from unbroken_operator.decisions.objects.training_pods import template_digest
from unbroken_operator.decisions.snapshot import PodView

CHANGED = "it was made from an earlier template"


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
    """Yield the deletions of pods that wait, perhaps for what the new template corrects: an image, a size, a label."""
    for pod in outdated:
        if pod.phase == "Pending" and not pod.is_deleting:
            yield DeletePod(pod.name, pod.uid, CHANGED)
