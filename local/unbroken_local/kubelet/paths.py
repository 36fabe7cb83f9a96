"""Rewriting of paths and names: what takes the place of mount namespaces and cluster DNS on a laptop.

A container's volume is a real folder elsewhere, so every occurrence of a mount path in its command, arguments,
environment, working directory, exec probes and hooks becomes that folder's path. An occurrence counts when it stands on
path boundaries: `/data` is found in `/data`, `/data/a`, `--dir=/data`, `/lib:/data:/x`, `file:///data`, and not in
`/data2`, `/data.txt`, `/old/data` or `data`. Longer mount paths win. Programs that hold a mount path in their own code,
or read it from a file, do not see the volume.

Where a container mounts a service account, KUBECONFIG names a kubeconfig of it, unless the container sets it itself. So
it does for a pod with a `serviceAccountName` on a control plane that mounts no accounts; there it is the one user.

In the values of environment variables and in arguments, `<service>.<namespace>.svc`, with or without `.cluster.local`,
and cluster IPs become the loopback address of the service proxy.
"""

import re
from collections.abc import Callable, Mapping

_NAME = r"[a-z0-9](?:[-a-z0-9]*[a-z0-9])?"
_SERVICE = re.compile(rf"(?<![-a-z0-9.])({_NAME})\.({_NAME})\.svc(?:\.cluster\.local\.?)?(?![-a-z0-9]|\.[a-z0-9])")
_ADDRESS = re.compile(r"(?<![0-9.])(?:\d{1,3}\.){3}\d{1,3}(?![0-9]|\.\d)")

Rewrite = Callable[[str], str]


def path_rewriter(folders: Mapping[str, str]) -> Rewrite:
    """Return a function that replaces mount paths (keys) by folders (values)."""
    by_path = {path.rstrip("/"): folder for path, folder in folders.items() if path.rstrip("/")}
    if not by_path:
        return lambda text: text
    longest_first = sorted(by_path, key=len, reverse=True)
    alternatives = "|".join(re.escape(path) for path in longest_first)
    pattern = re.compile(rf"(?:(?<=://)|(?<![\w./-]))({alternatives})(?![\w.-])")
    return lambda text: pattern.sub(lambda match: by_path[match[1]], text)


def name_rewriter(address_of: Callable[[str, str], str], address_by_cluster_ip: Mapping[str, str]) -> Rewrite:
    """Return a function that replaces service names and cluster IPs by local addresses.

    `address_of` takes namespace and service name.
    """

    def rewrite(text: str) -> str:
        text = _SERVICE.sub(lambda match: address_of(match[2], match[1]), text)
        return _ADDRESS.sub(lambda match: address_by_cluster_ip.get(match[0], match[0]), text)

    return rewrite
