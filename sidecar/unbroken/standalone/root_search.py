"""How a host finds the root: it tries the ports until one knows the job's key, reports its workers, and waits."""

import asyncio
import hmac
import logging
import secrets
from collections.abc import Callable
from dataclasses import replace

from unbroken.standalone.lines import read_message, write_message
from unbroken.standalone.messages import (
    MAX_LINE_BYTES,
    Attendance,
    Busy,
    Challenge,
    Failed,
    PodAssignment,
    Proof,
    StandaloneConfig,
    ToHost,
    Waiting,
    prove,
)
from unbroken_core.vocabulary.errors import WireError

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 2.0
"""Another program that listens there may never answer."""
_FIRST_RETRY_S = 0.02
_LAST_RETRY_S = 1.0


class RootSearch:
    """Runs in the event loop of the host process."""

    def __init__(self, config: StandaloneConfig) -> None:
        self._config = config
        self._changed = asyncio.Event()
        self._obstacle = ""
        """Why the last connection could not be made."""
        self.root_port: int | None = None
        """Port of the root that this host started; None before that, and on all other hosts."""

    def note_change(self) -> None:
        """The workers of this host have changed."""
        self._changed.set()

    async def run(
        self, present: Callable[[], Attendance | None], announce: Callable[[str], None]
    ) -> PodAssignment | Failed:
        """Return the root's assignment, or why there will be none; runs until then, or until cancelled."""
        pause_s = _FIRST_RETRY_S
        while True:
            now = present()
            ports = self._config.ports
            if now is not None and now.is_owner:
                ports = () if self.root_port is None else (self.root_port,)
            for port in ports if now is not None else ():
                answer = await self._ask(port, present, announce)
                if answer is not None:
                    return answer
            if now is None or (now.is_owner and self.root_port is None):
                self._changed.clear()
                await self._changed.wait()
                pause_s = _FIRST_RETRY_S
                continue
            first, last = self._config.ports[0], self._config.ports[-1]
            why = f" ({self._obstacle})" if self._obstacle else ""
            announce(f"waits for rank 0 on {self._config.master_host}, ports {first} to {last}{why}")
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _LAST_RETRY_S)

    async def _ask(
        self, port: int, present: Callable[[], Attendance | None], announce: Callable[[str], None]
    ) -> PodAssignment | Failed | None:
        """Return the root's final message; None when there is no root at this port, or it has gone."""
        host = self._config.master_host
        try:
            connecting = asyncio.open_connection(host, port, limit=MAX_LINE_BYTES)
            reader, writer = await asyncio.wait_for(connecting, _CONNECT_TIMEOUT_S)
        except (OSError, asyncio.TimeoutError) as error:
            logger.debug("no root: host=%s port=%d error=%s", host, port, error)
            self._obstacle = "no answer" if isinstance(error, asyncio.TimeoutError) else _describe(error)
            return None
        try:
            proof = await self._authenticate(reader, writer)
            if proof is None:
                logger.info("another program listens: host=%s port=%d", host, port)
                return None
            return await self._wait_for_assignment(reader, writer, proof, present, announce)
        except (OSError, WireError, asyncio.TimeoutError) as error:
            logger.info("root lost: host=%s port=%d error=%s", host, port, str(error) or type(error).__name__)
            return None
        finally:
            writer.close()

    async def _authenticate(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str | None:
        """Return our proof once the peer has proven that it knows the key; None when it cannot."""
        nonce = secrets.token_hex(16)
        write_message(writer, Challenge(nonce))
        try:
            answer = await read_message(reader, Proof, _ANSWER_TIMEOUT_S)
        except (WireError, asyncio.TimeoutError):
            return None
        key = self._config.key
        if answer is None or not hmac.compare_digest(answer.proof, prove(key, "root", answer.nonce, nonce)):
            return None
        return prove(key, "host", nonce, answer.nonce)

    async def _wait_for_assignment(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        proof: str,
        present: Callable[[], Attendance | None],
        announce: Callable[[str], None],
    ) -> PodAssignment | Failed | None:
        reading = asyncio.ensure_future(read_message(reader, ToHost))
        try:
            while True:
                now = present()
                if now is None:
                    return None
                write_message(writer, replace(now, proof=proof))
                self._changed.clear()
                changing = asyncio.ensure_future(self._changed.wait())
                try:
                    while not changing.done():
                        await asyncio.wait((reading, changing), return_when=asyncio.FIRST_COMPLETED)
                        if not reading.done():
                            break
                        answer = reading.result()
                        if not isinstance(answer, Waiting):
                            if isinstance(answer, Busy):
                                announce(answer.message)
                            return answer if isinstance(answer, (PodAssignment, Failed)) else None
                        announce(answer.message)
                        reading = asyncio.ensure_future(read_message(reader, ToHost))
                finally:
                    changing.cancel()
        finally:
            reading.cancel()


def _describe(error: OSError) -> str:
    """Return the reason without what the sentence says already; of several addresses asyncio joins the errors."""
    return (error.strerror or str(error) or type(error).__name__)[:200]
