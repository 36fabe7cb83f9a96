"""An etcd and an API server of a test's own, run as those behind a kubeconfig are, so that the test may kill them."""

import contextlib
import json
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from tests.ports import free_port

LOCAL_PORT = re.compile(r"(?<=127\.0\.0\.1:)\d+")


@dataclass(frozen=True)
class Running:
    """A process of this machine."""

    program: str
    arguments: tuple[str, ...]
    folder: str


def _processes() -> Iterator[Running]:
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            arguments = (path / "cmdline").read_bytes().decode(errors="replace").split("\0")[1:-1]
            yield Running(str((path / "exe").readlink()), tuple(arguments), str((path / "cwd").readlink()))


def _find(what: str, argument: re.Pattern[str], program: str = "") -> Running:
    """Return the process of such a name with an argument that the pattern finds; skips where there is none."""
    named = [item for item in _processes() if program in Path(item.program).name]
    found = [item for item in named if any(argument.fullmatch(text) for text in item.arguments)]
    if not found:
        pytest.skip(f"UNBROKEN_TEST_KUBECONFIGS names no API server whose {what} runs on this machine")
    return found[0]


class Part:
    """One process of the control plane: killed and started again with the same arguments."""

    def __init__(self, argv: list[str], folder: Path, name: str) -> None:
        self._argv = argv
        self._folder = folder
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; it is not ready yet."""
        with self._log.open("ab") as output:
            self._process = subprocess.Popen(
                self._argv, cwd=self._folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def kill(self) -> None:
        """Kill it without a warning, as a machine that fails would."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()


@dataclass(frozen=True)
class ControlPlane:
    """What runs for one test."""

    kubeconfig: Path
    etcd: Part
    api_server: Part
    folder: Path

    def stop(self) -> None:
        """Kill both."""
        self.api_server.kill()
        self.etcd.kill()

    def start(self) -> None:
        """Start both; neither is ready yet."""
        self.etcd.start()
        self.api_server.start()

    def back_up(self) -> None:
        """Keep what etcd has stored, as a backup would; both are down meanwhile."""
        self.stop()
        shutil.copytree(self._data, self._data.with_name("backup"))
        self.start()

    def restore(self) -> None:
        """Let etcd have what the backup has, and nothing that came later."""
        self.stop()
        shutil.rmtree(self._data)
        shutil.copytree(self._data.with_name("backup"), self._data)
        self.start()

    @property
    def _data(self) -> Path:
        return self.folder / "etcd"


@contextlib.contextmanager
def own_control_plane(kubeconfig: Path, folder: Path) -> Iterator[ControlPlane]:
    """Run another etcd and API server like those of this kubeconfig; nothing of theirs is touched."""
    text = kubeconfig.read_text()
    server = str(yaml.safe_load(text)["clusters"][0]["cluster"]["server"])
    port = server.rpartition(":")[2]
    api_server = _find("API server", re.compile(rf"(--secure-port=)?{port}"))
    (etcd_url,) = (url for item in api_server.arguments for url in re.findall(r"http://127\.0\.0\.1:\d+", item))
    etcd = _find("etcd", re.compile(rf"(--listen-client-urls=)?{etcd_url}"), "etcd")
    ports = {found: str(free_port()) for item in etcd.arguments for found in LOCAL_PORT.findall(item)}
    ports[port] = str(free_port())

    def own(item: Running) -> list[str]:
        for path in re.findall(rf"{re.escape(item.folder)}/[\w.-]+", " ".join(item.arguments)):
            if Path(path).is_file():
                shutil.copy(path, folder)
        found = [LOCAL_PORT.sub(lambda match: ports[match[0]], text) for text in item.arguments]
        found = [re.sub(rf"^((?:--secure-port=)?){port}$", rf"\g<1>{ports[port]}", text) for text in found]
        return [item.program, *(text.replace(item.folder, str(folder)) for text in found)]

    mine = folder / "kubeconfig"
    mine.write_text(json.dumps(yaml.safe_load(text.replace(server, server.replace(port, ports[port])))))
    made = ControlPlane(mine, Part(own(etcd), folder, "etcd"), Part(own(api_server), folder, "api-server"), folder)
    try:
        made.start()
        yield made
    finally:
        made.stop()
