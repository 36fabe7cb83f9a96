"""The background process of a local cluster: `python -m unbroken_local.daemon`, started by `unbroken local up`.

It holds DIR/lock from its start until the last process of the last pod is gone, and says on the descriptor --report, in
lines of JSON, what it does: {"say": text}, and last {"ready": true} or {"error": text}.
"""

import argparse
import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from unbroken_core.vocabulary.errors import UnbrokenError
from unbroken_core.vocabulary.plurals import counted
from unbroken_local.cluster import ClusterSettings, LocalCluster, open_cluster
from unbroken_local.control import ControlServer
from unbroken_local.detection import has_scheduler
from unbroken_local.inventory import Inventory, read_inventory
from unbroken_local.kube.client import KubeClient
from unbroken_local.kube.kubeconfig import Access, read_kubeconfig
from unbroken_local.kubelet.folders import Folders
from unbroken_local.kubelet.logs import tail_text
from unbroken_local.kubelet.restart import BackOff
from unbroken_local.lifecycle import LifecycleSettings
from unbroken_local.processes.host import Process, ProcessHost, ProcessSpec

log = logging.getLogger(__name__)

API_SERVER_LIMIT_S = 60.0
READY_LIMIT_S = 60.0
DEREGISTER_LIMIT_S = 5.0
LOCK_NAME = "lock"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What `up` passes on."""

    nodes: Path
    directory: Path
    api_server: Path | None
    control_loops: str
    node_grace_s: float
    back_off_s: float

    @property
    def kubeconfig(self) -> Path:
        """The kubeconfig that everybody is given."""
        return self.directory / "kubeconfig"


def take_lock(directory: Path) -> int | None:
    """Return a descriptor that locks a cluster's folder, or None when a cluster runs there."""
    descriptor = os.open(directory / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


async def run(options: Options, lock: int, say: Say, ready: Callable[[], None]) -> None:
    """Run a cluster until SIGTERM, SIGINT or a shutdown request. Raises UnbrokenError when it cannot."""
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    inventory = read_inventory(options.nodes)
    folders = Folders.create(options.directory)
    try:
        # Two hosts, so that what ends the one (and with it all pods) does not end the API server.
        async with (
            ProcessHost((lock,)) as servers,
            ProcessHost((lock,)) as host,
            _api_server(options, servers, say, stop) as access,
        ):
            settings = await _settings(options, access, say)
            async with open_cluster(access, inventory, folders, host, settings) as cluster:
                await _serve(cluster, _Serving(options, inventory, folders, access), stop, say, ready)
    finally:
        await asyncio.to_thread(_clean, options, folders)


@dataclass(frozen=True)
class _Serving:
    options: Options
    inventory: Inventory
    folders: Folders
    access: Access


async def _serve(
    cluster: LocalCluster, serving: _Serving, stop: asyncio.Event, say: Say, ready: Callable[[], None]
) -> None:
    began_s = time.monotonic()
    facts = {"server": serving.access.server, "kubeconfig": str(serving.options.kubeconfig)}
    async with ControlServer(serving.folders.short, cluster, stop.set, facts):
        try:
            async with asyncio.timeout(READY_LIMIT_S):
                await cluster.wait_ready()
        except TimeoutError as error:
            raise UnbrokenError(
                f"nodes: want all to be ready within {READY_LIMIT_S:g} s, got some that are not"
            ) from error
        nodes = counted(len(serving.inventory.nodes), "node is", "nodes are")
        say(f"{nodes} ready after {time.monotonic() - began_s:.1f} s")
        ready()
        await stop.wait()
        log.info("shutting down")
    if serving.options.api_server is not None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEREGISTER_LIMIT_S):
                await cluster.deregister()


async def _settings(options: Options, access: Access, say: Say) -> ClusterSettings:
    is_ours = options.control_loops == "on"
    if options.control_loops == "auto":
        is_ours = options.api_server is None
        if options.api_server is not None:
            async with KubeClient(access) as client:
                is_ours = not await has_scheduler(client)
            say(f"this control plane has {'no' if is_ours else 'its own'} scheduler")
    return ClusterSettings(
        has_control_loops=is_ours,
        back_off=BackOff(base_s=options.back_off_s),
        lifecycle=LifecycleSettings(grace_s=options.node_grace_s),
    )


@contextlib.asynccontextmanager
async def _api_server(options: Options, host: ProcessHost, say: Say, stop: asyncio.Event) -> AsyncIterator[Access]:
    """Use the control plane that was given, or run our own API server; its end is the cluster's end."""
    if options.api_server is not None:
        access = read_kubeconfig(options.api_server)
        shutil.copyfile(options.api_server, options.kubeconfig)
        options.kubeconfig.chmod(0o600)
        say(f"using the control plane at {access.server}")
        yield access
        return
    options.kubeconfig.unlink(missing_ok=True)
    log_file = options.directory / "apiserver.log"
    argv = (sys.executable, "-m", "unbroken_local.apiserver", "--kubeconfig", str(options.kubeconfig))
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    process = await host.start(ProcessSpec(argv, environment, str(options.directory), str(log_file)))
    watcher = asyncio.create_task(_stop_with(process, stop))
    try:
        await _wait_for_file(options.kubeconfig, watcher, log_file)
        access = read_kubeconfig(options.kubeconfig)
        say(f"the API server listens at {access.server}")
        yield access
    finally:
        watcher.cancel()


async def _stop_with(process: Process, stop: asyncio.Event) -> None:
    code = await process.wait()
    log.error("the API server ended: code=%d", code)
    stop.set()


async def _wait_for_file(path: Path, watcher: "asyncio.Task[None]", log_file: Path) -> None:
    deadline = time.monotonic() + API_SERVER_LIMIT_S
    while not await asyncio.to_thread(path.exists):
        if watcher.done() or time.monotonic() > deadline:
            tail = tail_text(log_file, 40, 4000).strip()
            raise UnbrokenError(f"the API server did not start; the end of {log_file}:\n{tail}")
        await asyncio.sleep(0.02)


def _clean(options: Options, folders: Folders) -> None:
    shutil.rmtree(folders.directory / "v", ignore_errors=True)
    options.kubeconfig.unlink(missing_ok=True)
    folders.remove_short()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m unbroken_local.daemon")
    parser.add_argument("--nodes", type=Path, required=True)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--api-server", type=Path)
    parser.add_argument("--control-loops", choices=("auto", "on", "off"), default="auto")
    parser.add_argument("--node-grace", type=float, default=8.0)
    parser.add_argument("--back-off", type=float, default=1.0)
    parser.add_argument("--report", type=int, required=True)
    return parser.parse_args()


def main() -> NoReturn:
    """Run until told to stop; ends with exit code 1 after it reported an error."""
    arguments = _arguments()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    report = os.fdopen(arguments.report, "w", encoding="utf-8")

    def tell(**message: object) -> None:
        with contextlib.suppress(BrokenPipeError, ValueError):
            report.write(json.dumps(message) + "\n")
            report.flush()

    def ready() -> None:
        tell(ready=True)
        report.close()

    options = Options(
        nodes=arguments.nodes,
        directory=arguments.dir,
        api_server=arguments.api_server,
        control_loops=arguments.control_loops,
        node_grace_s=arguments.node_grace,
        back_off_s=arguments.back_off,
    )
    lock = take_lock(options.directory)
    if lock is None:
        tell(error=f"{options.directory}: a cluster runs here already; end it with `unbroken local down`")
        sys.exit(1)
    os.truncate(lock, 0)
    os.write(lock, str(os.getpid()).encode())
    try:
        asyncio.run(run(options, lock, lambda text: tell(say=text), ready))
    except Exception as error:
        log.exception("the cluster ended")
        tell(error="; ".join(_messages(error)))
        sys.exit(1)
    sys.exit(0)


def _messages(error: BaseException) -> list[str]:
    """Return the message of each error; a task group raises several as one."""
    inner = getattr(error, "exceptions", None)
    if inner is not None:
        return [text for each in inner for text in _messages(each)]
    return [str(error) if isinstance(error, UnbrokenError) else repr(error)]


if __name__ == "__main__":
    main()
