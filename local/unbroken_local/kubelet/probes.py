"""Probes: one check (exec, httpGet, tcpSocket), and the loop that turns checks into verdicts."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp

from unbroken_local.kube import Json
from unbroken_local.kubelet.spec import ProbeSpec
from unbroken_local.processes.host import StartError

Execute = Callable[[list[str], float], Awaitable[int]]
"""Run a command in the container with a time limit in seconds; returns its exit code, raises TimeoutError."""


@dataclass(frozen=True)
class Target:
    """The container that is probed."""

    pod_ip: str
    container: Json
    execute: Execute
    session: aiohttp.ClientSession


async def check(handler: Json, target: Target, timeout_s: float) -> str:
    """Run one check; return why it failed, or an empty string."""
    try:
        async with asyncio.timeout(timeout_s):
            if "exec" in handler:
                code = await target.execute(handler["exec"].get("command") or [], timeout_s)
                return "" if code == 0 else f"command exited with {code}"
            if "httpGet" in handler:
                return await _http_get(handler["httpGet"], target)
            if "tcpSocket" in handler:
                host = handler["tcpSocket"].get("host") or target.pod_ip
                _, writer = await asyncio.open_connection(
                    host, port_number(handler["tcpSocket"]["port"], target.container)
                )
                writer.close()
                return ""
            return "a local kubelet knows exec, httpGet and tcpSocket only"
    except TimeoutError:
        return f"no answer in {timeout_s:g} s"
    except (OSError, ValueError, aiohttp.ClientError, StartError) as error:
        return str(error) or repr(error)


async def _http_get(get: Json, target: Target) -> str:
    scheme = (get.get("scheme") or "HTTP").lower()
    path = get.get("path") or "/"
    host = get.get("host") or target.pod_ip
    url = (
        f"{scheme}://{host}:{port_number(get['port'], target.container)}{path if path.startswith('/') else '/' + path}"
    )
    headers = {header["name"]: header["value"] for header in get.get("httpHeaders") or []}
    async with target.session.get(url, headers=headers, allow_redirects=False, ssl=False) as reply:
        return "" if 200 <= reply.status < 400 else f"HTTP probe failed with statuscode: {reply.status}"


def port_number(port: int | str, container: Json) -> int:
    """Return a port given as number or as the name of one of the container's ports. Raises ValueError."""
    if isinstance(port, int) or str(port).isdigit():
        return int(port)
    for candidate in container.get("ports") or []:
        if candidate.get("name") == port:
            return int(candidate["containerPort"])
    raise ValueError(f"port: want a number or the name of a port of the container, got {port!r}")


async def probe_loop(
    probe: ProbeSpec, run_check: Callable[[], Awaitable[str]], verdict: Callable[[bool, str], bool]
) -> None:
    """Check again and again; call `verdict` with success or failure when its threshold is reached.

    `verdict` returns whether to go on. It is called at each check after the threshold, too.
    """
    await asyncio.sleep(probe.initial_delay_s)
    in_a_row, was_good = 0, None
    while True:
        failure = await run_check()
        is_good = not failure
        in_a_row = in_a_row + 1 if is_good is was_good else 1
        was_good = is_good
        threshold = probe.success_threshold if is_good else probe.failure_threshold
        if in_a_row >= threshold and not verdict(is_good, failure):
            return
        await asyncio.sleep(probe.period_s)
