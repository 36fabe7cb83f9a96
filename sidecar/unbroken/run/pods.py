"""One pod of a run: an agent and a launcher, and what starts them."""

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from unbroken.run.certificates import CertificateFiles
from unbroken.run.children import Child
from unbroken.run.options import RunOptions
from unbroken.watch.checks.probe import VARIABLE as WATCH_PROBES
from unbroken_core.pod.fault_orders import ALLOW
from unbroken_core.protocol.messages import PodObservation
from unbroken_core.protocol.settings import HealthMode
from unbroken_core.protocol.wire import settings_to_json
from unbroken_core.vocabulary.reasons import Role

RENDEZVOUS_PORT = 29600
METRICS_PORT = 29601
AGENT_METRICS_PORT = 29602
COPIES_PORT = 29603
_USERS = (
    "UNBROKEN_DRAIN",
    "UNBROKEN_MEMORY_DISK",
    "UNBROKEN_MEMORY_DISK_EVERY",
    "UNBROKEN_MEMORY_DISK_KEEP",
    "UNBROKEN_MEMORY_EVERY",
    "UNBROKEN_PREIMPORT",
    "UNBROKEN_WATCH_DELAY",
    "UNBROKEN_WATCH_ROOT",
    WATCH_PROBES,
    "UNBROKEN_WATCH_STORAGE",
)
"""Variables that a user may set; all others with this prefix belong to one job."""


@dataclass
class Pod:
    """One pod; its replacement is another one."""

    name: str
    uid: str
    address: str
    node: str
    domains: tuple[str, ...]
    role: Role
    folder: Path
    agent: Child | None = None
    launcher: Child | None = None
    agent_starts_s: list[float] = field(default_factory=list)
    """When its agent was started, monotonic seconds."""
    is_over: bool = False

    @property
    def token_file(self) -> Path:
        """File with the token of its agent."""
        return self.private_folder / "token"

    @property
    def private_folder(self) -> Path:
        """What its agent writes for itself; its processes do not learn where that is."""
        return self.folder.with_name(f"{self.folder.name}.agent")

    @property
    def observation(self) -> PodObservation:
        """The pod as an operator would see it."""
        return PodObservation(self.name, self.node, self.domains, self.role)


@dataclass(frozen=True)
class Recipes:
    """Commands and environments of all parts of one run."""

    options: RunOptions
    job_key_file: Path
    reader_file: Path
    """File with the token of whoever looks at the run."""
    rendezvous_host: str
    certificates: CertificateFiles | None
    """None: plain http."""
    base: Mapping[str, str]
    """The user's environment."""
    memory: Path | None
    """Folder for checkpoints in memory; None: a job without them."""

    @property
    def rendezvous_command(self) -> list[str]:
        """Command of the rendezvous."""
        return [sys.executable, "-m", "unbroken.rendezvous"]

    @property
    def rendezvous_url(self) -> str:
        """URL at which agents and this run reach the rendezvous."""
        scheme = "http" if self.certificates is None else "https"
        host = f"[{self.rendezvous_host}]" if ":" in self.rendezvous_host else self.rendezvous_host
        return f"{scheme}://{host}:{RENDEZVOUS_PORT}"

    @property
    def page_command(self) -> list[str]:
        """Command that shows the run live."""
        authority = [] if self.certificates is None else ["--ca-file", str(self.certificates.authority)]
        return ["unbroken", "page", "--url", self.rendezvous_url, "--token-file", str(self.reader_file), *authority]

    def rendezvous_environment(self) -> dict[str, str]:
        """Environment of the rendezvous."""
        encryption = {}
        if self.certificates is not None:
            encryption["UNBROKEN_TLS_CERTIFICATE"] = str(self.certificates.certificate)
            encryption["UNBROKEN_TLS_KEY"] = str(self.certificates.key)
        return {
            **self._common(),
            **encryption,
            "UNBROKEN_JOB_KEY_FILE": str(self.job_key_file),
            "UNBROKEN_LISTEN": f"{self.rendezvous_host}:{RENDEZVOUS_PORT}",
            "UNBROKEN_METRICS_LISTEN": f"{self.rendezvous_host}:{METRICS_PORT}",
        }

    @property
    def agent_command(self) -> list[str]:
        """Command of an agent."""
        return [sys.executable, "-m", "unbroken.agent"]

    def agent_environment(self, pod: Pod) -> dict[str, str]:
        """Environment of a pod's agent."""
        trust = {} if self.certificates is None else {"UNBROKEN_RENDEZVOUS_CA": str(self.certificates.authority)}
        return {
            **self._common(),
            **self._identity(pod),
            **trust,
            "UNBROKEN_TOKEN_FILE": str(pod.token_file),
            "UNBROKEN_PRIVATE_DIR": str(pod.private_folder),
            **self._memory(pod),
            "UNBROKEN_RENDEZVOUS_URL": self.rendezvous_url,
            "UNBROKEN_METRICS_LISTEN": f"{pod.address}:{AGENT_METRICS_PORT}",
            "UNBROKEN_DOMAINS": "/".join(pod.domains),
        }

    def launcher_command(self) -> list[str]:
        """Command of a launcher."""
        # The launcher must not import from the user's folder; the workers' command sets its own sys.path.
        safe = ["-P"] if sys.version_info >= (3, 11) else []
        grace = f"{self.options.settings.timeouts.termination_grace_s:g}"
        said = ["--supervised"] if self.options.is_quiet else ["--supervised", "--name-processes"]
        return [sys.executable, *safe, "-m", "unbroken.launch", "--grace", grace, *said, "--", *self.options.command]

    def launcher_environment(self, pod: Pod) -> dict[str, str]:
        """Environment of a pod's launcher, and so of its workers."""
        environment = {
            **self._user(),
            **self._identity(pod),
            "UNBROKEN_RANKS_PER_POD": str(self.options.settings.ranks_per_pod),
            **dict(self.options.variables),
        }
        if self.options.allows_faults:
            environment[ALLOW] = "1"
        if self.options.settings.health is not HealthMode.OFF:
            environment["UNBROKEN_WATCH"] = "1"
        if self.options.probes:
            environment[WATCH_PROBES] = self.options.probes
        if self.options.settings.preflight is not HealthMode.OFF:
            environment["UNBROKEN_PREFLIGHT"] = f"{self.options.settings.preflight_s:g}"
        if self.options.settings.preflight_pairs:
            # Pods of one host share its GPUs, which NCCL refuses.
            environment["UNBROKEN_PREFLIGHT_PAIRS"] = "gloo"
        if self.memory is not None:
            environment["UNBROKEN_MEMORY_LIMIT"] = str(self.options.memory_bytes)
        if self.options.log_dir is not None:
            environment["UNBROKEN_LOG_DIR"] = str(self.options.log_dir)
        return environment

    def _user(self) -> dict[str, str]:
        """Return the user's environment without variables of another job."""
        return {name: value for name, value in self.base.items() if not name.startswith("UNBROKEN_") or name in _USERS}

    def memory_of(self, pod: Pod) -> Path | None:
        """Return the folder with the memory of this pod alone, which ends with it; None: all pods share theirs.

        With copies a pod is to lose what a host would. Without them pods of one machine read each other's memory.
        """
        return None if self.memory is None or not self.options.settings.copies else self.memory / pod.folder.name

    def _memory(self, pod: Pod) -> dict[str, str]:
        if self.memory is None:
            return {}
        return {
            "UNBROKEN_MEMORY_DIR": str(self.memory_of(pod) or self.memory),
            "UNBROKEN_MEMORY_LIMIT": str(self.options.memory_bytes),
            "UNBROKEN_MEMORY_PORT": str(COPIES_PORT),
        }

    def _common(self) -> dict[str, str]:
        return {
            **self._user(),
            "UNBROKEN_SETTINGS": settings_to_json(self.options.settings),
            "UNBROKEN_LOG_LEVEL": self.base.get("UNBROKEN_LOG_LEVEL", "WARNING"),
        }

    @staticmethod
    def _identity(pod: Pod) -> dict[str, str]:
        return {
            "UNBROKEN_POD": pod.name,
            "UNBROKEN_POD_UID": pod.uid,
            "UNBROKEN_NODE": pod.node,
            "UNBROKEN_POD_IP": pod.address,
            "UNBROKEN_DIR": str(pod.folder),
        }


def make_recipes(
    options: RunOptions,
    job_key_file: Path,
    reader_file: Path,
    rendezvous_host: str,
    certificates: CertificateFiles | None,
    *,
    memory: Path | None,
) -> Recipes:
    """Return the recipes for this process' environment."""
    return Recipes(options, job_key_file, reader_file, rendezvous_host, certificates, dict(os.environ), memory)
