"""Keeps a running pod's Secret, ConfigMap, downward API and projected volumes as their sources are."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from unbroken_local.kube import Json
from unbroken_local.kube.client import ApiError
from unbroken_local.kubelet.environment import ConfigError
from unbroken_local.kubelet.payload import MountError, write_files
from unbroken_local.kubelet.volumes import FetchToken, VolumeContext, volume_files

log = logging.getLogger(__name__)

REFRESH_S = 5.0
"""A real kubelet takes up to a minute plus its caches' time, which is too long to wait on a laptop."""
_KINDS = ("secret", "configMap", "downwardAPI", "projected")
_TOKEN_SHARE = 0.8
"""Of a token's life, after which a new one is asked for."""


class VolumeRefresher:
    """One pod's. What cannot be read stays as it is: a Secret that was deleted does not take the files away."""

    def __init__(self, context: Callable[[], VolumeContext], report: Callable[[str], None]) -> None:
        self._context = context
        self._report = report
        """Told in words when a volume cannot be brought up to date; once for each reason."""
        self._lock = asyncio.Lock()
        self._reported: set[str] = set()

    async def run(self, volumes: Mapping[str, Path]) -> None:
        """Refresh all volumes now and then, until cancelled."""
        while any(kind in volume for volume in self._specs() for kind in _KINDS):
            await asyncio.sleep(REFRESH_S)
            await self.refresh(volumes, _KINDS)

    async def refresh(self, volumes: Mapping[str, Path], kinds: Collection[str]) -> None:
        """Refresh the volumes of these kinds."""
        async with self._lock:
            for volume in self._specs():
                if volume["name"] in volumes and any(kind in volume for kind in kinds):
                    await self._refresh(volume, volumes[volume["name"]])

    async def _refresh(self, volume: Json, folder: Path) -> None:
        try:
            if write_files(folder, await volume_files(volume, self._context())):
                self._reported.clear()
        except ApiError as error:
            # The API server is away, or has no token: training goes on with what is there.
            log.debug("volume not refreshed: volume=%s error=%s", volume["name"], error)
        except (MountError, ConfigError, OSError) as error:
            if str(error) not in self._reported:
                self._reported.add(str(error))
                self._report(str(error))

    def _specs(self) -> list[Json]:
        volumes: list[Json] = self._context().sources.pod["spec"].get("volumes") or []
        return volumes


class TokenCache:
    """Asks for a new service account token only when the last one has lived for most of its time."""

    def __init__(self, fetch: FetchToken, clock: Callable[[], float] = time.monotonic) -> None:
        self._fetch = fetch
        self._clock = clock
        self._tokens: dict[tuple[str, str], tuple[float, str]] = {}

    async def fetch(self, account: str, source: Json) -> str:
        """Return a token that has time left."""
        key = (account, str(source.get("audience") or ""))
        until_s, token = self._tokens.get(key, (0.0, ""))
        if not token or self._clock() >= until_s:
            token = await self._fetch(account, source)
            until_s = self._clock() + _TOKEN_SHARE * float(source.get("expirationSeconds") or 3600)
            self._tokens[key] = (until_s, token)
        return token
