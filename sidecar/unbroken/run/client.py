"""The run's side of the rendezvous API: status and observations."""

import asyncio
import ssl

import aiohttp

from unbroken_core import wire
from unbroken_core.errors import WireError
from unbroken_core.messages import JobStatus, Observation

_TIMEOUT = aiohttp.ClientTimeout(total=40.0)


class StatusClient:
    """Talks to one rendezvous; every failure is an answer of None or False, as it may just be starting again."""

    def __init__(self, url: str, token: str, context: ssl.SSLContext | None) -> None:
        """`context` opens connections to a rendezvous at https://; None where it speaks in clear."""
        self._url = url
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=context or True),
            headers={"Authorization": f"Bearer {token}"},
            timeout=_TIMEOUT,
        )

    async def newer_status(self, known: JobStatus | None, wait_s: float = 30.0) -> JobStatus | None:
        """Wait for a status newer than the known one, at most `wait_s`; None when there was no answer."""
        query = {}
        if known is not None:
            query = {"after": str(known.revision), "generation": str(known.generation), "timeout": f"{wait_s:g}"}
        try:
            async with self._session.get(f"{self._url}/v1/status", params=query) as response:
                if response.status != 200:
                    return None
                status: JobStatus = wire.decode(await response.read(), JobStatus)
                return status
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError, WireError):
            return None

    async def observe(self, observation: Observation) -> bool:
        """Send what the operator would send; return whether it was taken."""
        try:
            async with self._session.put(f"{self._url}/v1/observation", data=wire.encode(observation)) as response:
                return response.status == 204
        except (aiohttp.ClientError, OSError, asyncio.TimeoutError):
            return False

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()
