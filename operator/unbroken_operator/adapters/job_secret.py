"""One job's Secrets: read when needed instead of watched, so that the operator needs no right to list Secrets."""

import logging
import secrets as randomness
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from unbroken_operator.adapters.certificates import make_certificates
from unbroken_operator.adapters.errors import KubeConflict, KubeNotFound, KubeRefused
from unbroken_operator.adapters.kube import Kube, collection_path
from unbroken_operator.adapters.stores import JobKey
from unbroken_operator.api import layout
from unbroken_operator.decisions.actions import RepairTokens
from unbroken_operator.decisions.limits.refusals import OperatorRefusal
from unbroken_operator.decisions.objects.credentials import (
    Certificates,
    TokenKeys,
    certificates_of,
    encoded,
    identity_of,
    missing_keys,
    pod_tokens,
    refused_certificates,
    with_credentials,
    wrong_keys,
)
from unbroken_operator.decisions.snapshot import SecretView, controller_uid, is_orphan

logger = logging.getLogger(__name__)


class JobSecret:
    """Knows the job's Secret, its key and its certificates, and the Secrets with the tokens of its pods."""

    def __init__(
        self,
        kube: Kube,
        key: JobKey,
        uid: str,
        encrypts: bool,
        count_refusal: Callable[[OperatorRefusal], None] = lambda _: None,
    ) -> None:
        """`encrypts`: whether a new Secret gets certificates."""
        self._count_refusal = count_refusal
        self._kube = kube
        self.key = key
        self.uid = uid
        self._read_at: float | None = None
        self._encrypts = encrypts
        self._certificates: Certificates | None = None
        self._identity: TokenKeys | None = None
        self.tokens: dict[int, SecretView] = {}
        """The Secrets with tokens that are known to exist, by block."""
        self._tokens_read_at: dict[int, float] = {}
        self.view: SecretView | None = None
        self._token = ""

    @property
    def token(self) -> str:
        """What the operator shows to the rendezvous; "" until it is known, and while no authority can be believed."""
        is_blind = self._certificates is None and self.view is not None and self.view.refused
        return "" if is_blind else self._token

    @property
    def authority(self) -> str:
        """The authority that signed the rendezvous' certificate, in PEM; "" without encryption."""
        return "" if self._certificates is None else self._certificates.authority

    @property
    def is_foreign(self) -> bool:
        """Whether one of the Secrets' names belongs to someone else."""
        views = [*([] if self.view is None else [self.view]), *self.tokens.values()]
        return any(view.owner_uid != self.uid for view in views)

    @property
    def has_job_key(self) -> bool:
        """Whether each pod has a token of its own; else an earlier release began the job."""
        return self._identity is None or bool(self._identity.job_key)

    # -------------------------------------------------------------------------------------------------------- reading

    async def refresh(self, max_age_s: float) -> None:
        """Read the Secret again unless that was done within `max_age_s`. Raises KubeError."""
        if self._read_at is not None and time.monotonic() - self._read_at <= max_age_s:
            return
        try:
            self._take(await self._kube.get(self._path(layout.rendezvous_name(self.key[1]))))
        except KubeNotFound:
            self.view = None
        self._read_at = time.monotonic()

    async def refresh_tokens(self, blocks: Iterable[int], max_age_s: float) -> None:
        """Read these Secrets again unless that was done within `max_age_s`. Raises KubeError."""
        for block in sorted(blocks) if self.has_job_key else ():
            read_at = self._tokens_read_at.get(block)
            if read_at is None or time.monotonic() - read_at > max_age_s:
                await self._read_tokens(block)

    async def _read_tokens(self, block: int) -> None:
        try:
            item = await self._kube.get(self._path(layout.tokens_name(self.key[1], block)))
        except KubeNotFound:
            self.tokens.pop(block, None)
            self._tokens_read_at[block] = time.monotonic()
            return
        self._take_tokens(block, item)

    # -------------------------------------------------------------------------------------------------------- writing

    async def create(self, manifest: Mapping[str, Any]) -> None:
        """Create the Secret. Raises KubeError, but not when it exists already."""
        # When someone deleted the Secret, what was in it is still in use in every pod.
        identity = self._identity or TokenKeys(randomness.token_hex(layout.TOKEN_BYTES))
        certificates = self._certificates
        if certificates is None and self._encrypts:
            certificates = make_certificates([layout.rendezvous_host(self.key[1], self.key[0]), layout.LOCALHOST])
        secret = with_credentials(manifest, identity, self.uid, certificates)
        try:
            item = await self._kube.create(collection_path("secrets", self.key[0]), secret)
        except KubeConflict:
            await self.refresh(max_age_s=-1.0)
            return
        self._take(item)
        self._read_at = time.monotonic()

    async def create_tokens(self, block: int, manifest: Mapping[str, Any]) -> None:
        """Create a Secret with tokens. Raises KubeError, but not when it exists already."""
        wanted = self._wanted(block)
        if wanted is None:
            # Without a key that can be read no token would be good: pods wait for the Secret, and its state is told.
            return
        try:
            item = await self._kube.create(
                collection_path("secrets", self.key[0]), {**manifest, "data": encoded(wanted)}
            )
        except KubeConflict:
            await self._read_tokens(block)
            return
        self._take_tokens(block, item)

    async def repair(self, action: RepairTokens) -> None:
        """Write the present tokens. Raises KubeError, but not when the Secret was replaced, or may not be written."""
        wanted = self._wanted(action.block)
        if wanted is None:
            return
        patch = {"metadata": {"uid": action.uid}, "data": encoded(wanted)}
        try:
            item = await self._kube.merge(self._path(action.name), patch)
        except (KubeNotFound, KubeConflict):
            # Somebody has deleted it, and maybe made another one.
            if action.block is None:
                await self.refresh(max_age_s=-1.0)
            else:
                await self._read_tokens(action.block)
            return
        except KubeRefused as error:
            logger.warning("secret cannot be repaired, delete it job=%s/%s error=%s", *self.key, error)
            return
        logger.info("secret has the tokens of the present job key job=%s/%s secret=%s", *self.key, action.name)
        if action.block is None:
            self._take(item)
        else:
            self._take_tokens(action.block, item)

    # ------------------------------------------------------------------------------------------------------ internals

    def _path(self, name: str) -> str:
        return f"{collection_path('secrets', self.key[0])}/{name}"

    def _wanted(self, block: int | None) -> dict[str, str] | None:
        """Return the tokens of a block, None: of readers; None without a job key."""
        if self._identity is None or not self._identity.job_key:
            return None
        if block is None:
            return {layout.TOKEN_KEY: self._identity.reader_token(self.uid)}
        return pod_tokens(self._identity.job_key, self.key[1], self.uid, block)

    def _take_tokens(self, block: int, item: Mapping[str, Any]) -> None:
        wanted, metadata = self._wanted(block), item["metadata"]
        is_stale = wanted is not None and bool(wrong_keys(item, wanted))
        self.tokens[block] = SecretView(
            metadata["name"], metadata["uid"], controller_uid(item), is_orphan(item), is_stale=is_stale
        )
        self._tokens_read_at[block] = time.monotonic()

    def _take_identity(self, identity: TokenKeys) -> None:
        if identity != self._identity:
            # To compare them all at each look would take long: the key of a job seldom changes.
            self.tokens = {block: replace(view, is_stale=True) for block, view in self.tokens.items()}
        self._identity, self._token = identity, identity.operator_token(self.uid)

    def _take(self, item: Mapping[str, Any]) -> None:
        identity, certificates = identity_of(item), certificates_of(item) or self._certificates
        metadata, refused = item["metadata"], refused_certificates(item)
        is_own = controller_uid(item) == self.uid
        self._tell_refused(refused, is_own=is_own)
        if is_own and identity is not None:
            self._take_identity(identity)
        readers = self._wanted(None)
        self.view = SecretView(
            metadata["name"],
            metadata["uid"],
            controller_uid(item),
            is_orphan(item),
            has_certificates=certificates is not None or bool(refused),
            lacks=missing_keys(item, is_encrypted=certificates is not None),
            refused=refused,
            is_stale=identity is not None and readers is not None and bool(wrong_keys(item, readers)),
        )
        if not is_own:
            return
        if certificates_of(item) is None and certificates is not None and not refused:
            advice = "delete it, and the operator recreates it as it was"
            logger.error("secret has lost its certificates job=%s/%s; %s", *self.key, advice)
        self._certificates = certificates
        if identity is None:
            logger.error("secret has no key that can be read job=%s/%s secret=%s", *self.key, self.view.name)

    def _tell_refused(self, refused: str, *, is_own: bool) -> None:
        """Count and log it, once until it changes."""
        if is_own and refused and (self.view is None or self.view.refused != refused):
            logger.error("certificates refused job=%s/%s secret key %s", *self.key, refused)
            self._count_refusal(OperatorRefusal.CERTIFICATES)
