"""What the operator refuses of a job, or holds back: the words of one metric."""

from enum import Enum


class OperatorRefusal(str, Enum):
    """One kind of it."""

    REPORT = "report"
    """A report of the rendezvous that is too large, or out of bounds."""
    RESERVED_KEYS = "reserved-keys"
    """A template with keys that are the operator's own."""
    POD = "pod"
    """A pod that somebody made, with labels or annotations longer than any of ours: they are left out."""
    IMAGE = "image"
    """A rendezvous image that is not among those that the operator allows."""
    SPEC = "spec"
    """A spec with any other fault: a volume or mount that is not the user's, numbers that do not fit."""
    STATUS = "status"
    """A field of a stored status that cannot be: somebody wrote it. It is taken as absent, and repaired."""
    CERTIFICATES = "certificates"
    """Certificates in a job's Secret that are too long or too many."""
    CIRCLE = "circle"
    """A round of pods that were made and went before they were of use, after the first few."""
    EVENTS = "events"
    """Events beyond the job's budget, which are never posted."""
    STATUS_WRITES = "status-writes"
    """Writes of the status that had to wait."""
    POD_CREATIONS = "pod-creations"
    """Pods that had to wait for their creation."""
    POD_DELETIONS = "pod-deletions"
    """Pods that had to wait for their deletion."""
