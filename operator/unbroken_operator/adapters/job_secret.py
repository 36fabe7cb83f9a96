"""One job's Secret: read when needed instead of watched, so that the operator needs no right to list Secrets."""

import logging
import secrets as randomness
import time
from collections.abc import Mapping
from typing import Any

from unbroken_operator.adapters.certificates import make_certificates
from unbroken_operator.adapters.errors import KubeConflict, KubeNotFound
from unbroken_operator.adapters.kube import Kube, collection_path
from unbroken_operator.adapters.stores import JobKey
from unbroken_operator.api import layout
from unbroken_operator.decisions.objects.credentials import (
    Certificates,
    certificates_of,
    missing_keys,
    token_of,
    with_credentials,
)
from unbroken_operator.decisions.snapshot import SecretView, controller_uid, is_orphan

logger = logging.getLogger(__name__)


class JobSecret:
    """Knows the job's Secret, its token and its certificates."""

    def __init__(self, kube: Kube, key: JobKey, uid: str, encrypts: bool) -> None:
        """`encrypts`: whether a new Secret gets certificates."""
        self._kube = kube
        self.key = key
        self.uid = uid
        self._read_at: float | None = None
        self._encrypts = encrypts
        self._certificates: Certificates | None = None
        self.view: SecretView | None = None
        self.token = ""
        """"" until it is known."""

    @property
    def authority(self) -> str:
        """The authority that signed the rendezvous' certificate, in PEM; "" without encryption."""
        return "" if self._certificates is None else self._certificates.authority

    @property
    def is_foreign(self) -> bool:
        """Whether the Secret of that name belongs to someone else."""
        return self.view is not None and self.view.owner_uid != self.uid

    async def refresh(self, max_age_s: float) -> None:
        """Read the Secret again unless that was done within `max_age_s`. Raises KubeError."""
        if self._read_at is not None and time.monotonic() - self._read_at <= max_age_s:
            return
        path = f"{collection_path('secrets', self.key[0])}/{layout.rendezvous_name(self.key[1])}"
        try:
            self._take(await self._kube.get(path))
        except KubeNotFound:
            self.view = None
        self._read_at = time.monotonic()

    async def create(self, manifest: Mapping[str, Any]) -> None:
        """Create the Secret. Raises KubeError, but not when it exists already."""
        # When someone deleted the Secret, what was in it is still in use in every pod.
        token = self.token or randomness.token_hex(layout.TOKEN_BYTES)
        certificates = self._certificates
        if certificates is None and self._encrypts:
            certificates = make_certificates([layout.rendezvous_host(self.key[1], self.key[0]), layout.LOCALHOST])
        secret = with_credentials(manifest, token, certificates)
        try:
            item = await self._kube.create(collection_path("secrets", self.key[0]), secret)
        except KubeConflict:
            await self.refresh(max_age_s=-1.0)
            return
        self._take(item)
        self._read_at = time.monotonic()

    def _take(self, item: Mapping[str, Any]) -> None:
        token, certificates = token_of(item), certificates_of(item) or self._certificates
        metadata = item["metadata"]
        self.view = SecretView(
            metadata["name"],
            metadata["uid"],
            controller_uid(item),
            is_orphan(item),
            has_certificates=certificates is not None,
            lacks=missing_keys(item, is_encrypted=certificates is not None),
        )
        if self.is_foreign:
            return
        if certificates_of(item) is None and certificates is not None:
            advice = "delete it, and the operator recreates it as it was"
            logger.error("secret has lost its certificates job=%s/%s; %s", *self.key, advice)
        self._certificates = certificates
        if token:
            self.token = token
        else:
            logger.error("secret has no token that can be read job=%s/%s secret=%s", *self.key, self.view.name)
