"""Versions that are known to be bad, each with who says so. What a cluster knows itself comes with --bad-version."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

NAMES = ("torch", "cuda", "nccl", "driver")


@dataclass(frozen=True)
class BadVersion:
    """One of them."""

    name: str
    """One of NAMES."""
    pattern: str
    """Of the version, as file names are matched: 2.17.1, 560.*"""
    why: str
    source: str = ""

    def matches(self, versions: Mapping[str, str]) -> bool:
        """Return whether a host has it; one that does not say its version has not."""
        version = versions.get(self.name, "")
        # What follows a + says where it was built: 2.9.1+cu128.
        return bool(version) and any(fnmatchcase(each, self.pattern) for each in (version, version.partition("+")[0]))


KNOWN_BAD = (
    BadVersion(
        "nccl",
        "2.29.2",
        "collectives may hang, which 2.28 did not; use 2.29.3 or newer",
        "https://github.com/pytorch/pytorch/pull/174338",
    ),
    BadVersion(
        "nccl",
        "2.25.1",
        "ncclCommAbort hangs, so that no restart in the process succeeds; use 2.26.2 or newer",
        "https://github.com/pytorch/pytorch/issues/149153",
    ),
    BadVersion(
        "nccl",
        "2.17.1",
        "ncclCommAbort waits for other ranks, and hangs where one is gone; use 2.26.2 or newer",
        "https://github.com/pytorch/pytorch/issues/119215",
    ),
)


def differences(versions_by_host: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return a sentence for each name of which hosts have different versions, most hosts first."""
    found = []
    for name in NAMES:
        hosts_by_version: dict[str, list[str]] = {}
        for host, versions in versions_by_host.items():
            hosts_by_version.setdefault(versions.get(name, "") or "none", []).append(host)
        if len(hosts_by_version) > 1:
            ordered = sorted(hosts_by_version.items(), key=lambda item: (-len(item[1]), item[0]))
            found.append(f"{name}: " + "; ".join(f"{version} on {listed(hosts)}" for version, hosts in ordered))
    return found


def listed(names: Iterable[str], most: int = 4) -> str:
    """Return names with commas, the first few of many."""
    every = list(names)
    shown = ", ".join(every[:most])
    return shown if len(every) <= most else f"{shown} and {len(every) - most} more"
