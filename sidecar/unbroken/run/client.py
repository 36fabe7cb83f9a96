"""The run's side of the rendezvous API: status and observations."""

import asyncio
import ssl

import aiohttp

from unbroken_core.protocol import wire
from unbroken_core.protocol.messages import JobStatus, Observation
from unbroken_core.vocabulary.errors import WireError

_TIMEOUT = aiohttp.ClientTimeout(total=40.0)


class StatusClient:
    """Talks to one rendezvous; a failure returns None or False, as the rendezvous may be restarting."""

    def __init__(self, url: str, token: str, context: ssl.SSLContext | None) -> None:
        """`context` is for a rendezvous at https://; None for plain http."""
        self._url = url
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context or True),
            headers={"Authorization": f"Bearer {token}"},
            timeout=_TIMEOUT,
        )

    async def newer_status(self, known: JobStatus | None, wait_s: float = 30.0) -> JobStatus | None:
        """Wait for a status newer than the known one, at most `wait_s`; None without an answer."""
        query = {}
        if known is not None:
            query = {"after": str(known.revision), "term": str(known.term), "timeout": f"{wait_s:g}"}
        try:
            async with self._session.get(f"{self._url}/v1/status", params=query) as response:
                if response.status != 200:
                    return None
                status: JobStatus = wire.decode(await response.read(), JobStatus)
                return status
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError, WireError):
            return None

    async def observe(self, observation: Observation) -> bool:
        """Send an observation, as the operator would; return whether it was accepted."""
        try:
            async with self._session.put(f"{self._url}/v1/observation", data=wire.encode(observation)) as response:
                return response.status == 204
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
            return False

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()
