"""Vouches for the keys of pods' keepers, on the connection on which a pod has shown its token."""

from typing import TYPE_CHECKING

from unbroken.network.token import Verifier
from unbroken_core.protocol.messages import Certificate
from unbroken_core.vocabulary.errors import InputError

if TYPE_CHECKING:
    from unbroken.network.pod_certificates import PodAuthority


class Vouching:
    """The authority of one job. It follows from the job's key, and is the same after a restart."""

    def __init__(self, verifier: Verifier, job_uid: str) -> None:
        self._verifier = verifier
        self._job_uid = job_uid
        self._authorities: dict[str, PodAuthority] = {}
        """By the job's key."""

    def certificate(self, request: str, pod_uid: str, term: int) -> Certificate:
        """Return the answer to a request of this pod: a certificate, or why there is none."""
        keys = self._verifier.job_keys()
        if not keys:
            return Certificate(
                term, error="this job was begun without a key of its own, from which an authority follows"
            )
        try:
            authorities = [self._authority(key) for key in keys]
            # While a key is replaced, those that the one before has vouched for are believed, too.
            known = "".join(authority.certificate for authority in authorities)
            return Certificate(term, authorities[0].issue(request, pod_uid), known)
        except InputError as error:
            return Certificate(term, error=str(error))

    def _authority(self, key: str) -> "PodAuthority":
        # Only where copies are kept elsewhere.
        from unbroken.network.pod_certificates import PodAuthority  # noqa: PLC0415 - see above

        if key not in self._authorities:
            if len(self._authorities) > 1:
                self._authorities.clear()
            self._authorities[key] = PodAuthority(key, self._job_uid)
        return self._authorities[key]
