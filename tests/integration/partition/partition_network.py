"""A network of its own for a test: hosts are network namespaces on one bridge, with links that can be cut.

Nothing of the machine's own network is touched or reachable: the bridge has a namespace to itself, the addresses are
those that RFC 5737 sets apart for documentation, and all of it is gone with the process that made it. Every host knows
the link-layer address of every other from the beginning, so that a direction can be taken away by a wrong one: the
switch then delivers to nobody, and neither end is told, as when a cable or a switch drops frames.
"""

import ctypes
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
_NET_ADMIN = 12
_SYS_ADMIN = 21
_PREFIX = "198.51.100"
_LIMIT_S = 30.0
_libc = ctypes.CDLL(None, use_errno=True)


def missing_ability() -> str:
    """Return what this process lacks to make such a network; "" when it lacks nothing."""
    lines = dict(line.split(":\t", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":\t" in line)
    capabilities = int(lines["CapEff"], 16)
    if not (capabilities >> _NET_ADMIN & 1 and capabilities >> _SYS_ADMIN & 1):
        return "want root with CAP_NET_ADMIN and CAP_SYS_ADMIN"
    for tool in ("ip", "bridge", "nsenter"):
        if not any((Path(folder) / tool).is_file() for folder in os.get_exec_path()):
            return f"want the program {tool!r}"
    try:
        Network("left", "right").close()
    except (OSError, subprocess.SubprocessError) as error:
        return f"want a kernel with network namespaces, veth and bridge: {error}"
    return ""


class _Namespace:
    """A network namespace, kept by a descriptor, and one thread that lives in it."""

    def __init__(self) -> None:
        """Raises OSError when the kernel refuses."""
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._descriptor = self.call(self._unshare)

    @staticmethod
    def _unshare() -> int:
        if _libc.unshare(_CLONE_NEWNET) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)

    @property
    def path(self) -> str:
        """File that names the namespace for other processes."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def call(self, function: Callable[[], T]) -> T:
        """Run a function in the namespace's thread: the sockets that it makes belong there."""
        return self._thread.submit(function).result()

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs `command` in the namespace, in the same process."""
        return ["nsenter", f"--net={self.path}", "--", *command]

    def run(self, *command: str) -> None:
        """Run a command in the namespace. Raises CalledProcessError, with what it said, when it fails."""
        try:
            subprocess.run(self.inside(*command), check=True, capture_output=True, text=True, timeout=_LIMIT_S)
        except subprocess.CalledProcessError as error:
            error.add_note(error.stderr)
            raise

    def close(self) -> None:
        """Let go of it; the kernel removes it with its last process."""
        self._thread.shutdown()
        os.close(self._descriptor)


class Host:
    """One machine of the network. `number` is 1 to 250."""

    def __init__(self, name: str, number: int, namespace: _Namespace) -> None:
        self.name = name
        self.address = f"{_PREFIX}.{number}"
        self.link_address = f"02:00:00:00:00:{number:02x}"
        self.port = f"port{number}"
        self._namespace = namespace

    def inside(self, *command: str) -> list[str]:
        """Return the command that runs `command` on this host."""
        return self._namespace.inside(*command)

    def call(self, function: Callable[[], T]) -> T:
        """Run a function whose sockets are this host's."""
        return self._namespace.call(function)

    def run(self, *command: str) -> None:
        """Run a command on this host."""
        self._namespace.run(*command)


class Network:
    """A switch and its hosts."""

    def __init__(self, *names: str) -> None:
        self._switch = _Namespace()
        self._namespaces = [self._switch]
        self._switch.run("ip", "link", "add", "switch", "type", "bridge", "stp_state", "0", "mcast_snooping", "0")
        self._switch.run("ip", "link", "set", "switch", "up")
        self._hosts = {name: self._add(name, number) for number, name in enumerate(names, 1)}
        for host in self._hosts.values():
            for other in self._hosts.values():
                if host is not other:
                    self._teach(host, other.address, other.link_address)

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    def _add(self, name: str, number: int) -> Host:
        namespace = _Namespace()
        self._namespaces.append(namespace)
        host = Host(name, number, namespace)
        end = ["peer", "name", "eth0", "address", host.link_address, "netns", namespace.path]
        self._switch.run("ip", "link", "add", host.port, "type", "veth", *end)
        self._switch.run("ip", "link", "set", host.port, "master", "switch", "up")
        host.run("ip", "link", "set", "lo", "up")
        host.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.run("ip", "link", "set", "eth0", "up")
        return host

    @staticmethod
    def _teach(host: Host, address: str, link_address: str) -> None:
        host.run("ip", "neighbour", "replace", address, "lladdr", link_address, "dev", "eth0", "nud", "permanent")

    def unplug(self, name: str) -> None:
        """Take the link of a host down at the switch."""
        self._switch.run("ip", "link", "set", self[name].port, "down")

    def plug_in(self, name: str) -> None:
        """Take the link of a host up again."""
        self._switch.run("ip", "link", "set", self[name].port, "up")

    def drop(self, source: str, target: str) -> None:
        """Lose everything that one host sends to another; what comes back arrives."""
        self._teach(self[source], self[target].address, "02:00:00:00:ff:ff")

    def deliver(self, source: str, target: str) -> None:
        """Deliver again what one host sends to another."""
        self._teach(self[source], self[target].address, self[target].link_address)

    def part(self, one: str, other: str) -> None:
        """Lose everything between two hosts."""
        self.drop(one, other)
        self.drop(other, one)

    def join(self, one: str, other: str) -> None:
        """Deliver everything between two hosts again."""
        self.deliver(one, other)
        self.deliver(other, one)

    def share(self, address: str, *names: str) -> None:
        """Give several hosts one more address, the same, as those behind a Service have; see `direct`."""
        for name in names:
            self[name].run("ip", "address", "add", f"{address}/32", "dev", "lo")

    def direct(self, address: str, source: str, target: str) -> None:
        """Let a host reach a shared address at `target`."""
        self._teach(self[source], address, self[target].link_address)

    def close(self) -> None:
        """Let go of everything; end the processes on the hosts first."""
        for namespace in self._namespaces:
            namespace.close()
