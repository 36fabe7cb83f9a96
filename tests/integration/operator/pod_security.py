"""The Pod Security standard `restricted`.

Source: https://kubernetes.io/docs/concepts/security/pod-security-standards. No API server of these tests has the
admission plug-in, so its controls are a table here.
"""

from collections.abc import Callable, Iterator
from typing import Any

JsonObject = dict[str, Any]
_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
_SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_syncookies",
}
_SELINUX_TYPES = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
_SECCOMP = {"RuntimeDefault", "Localhost"}


def violations(pod: JsonObject) -> list[str]:
    """Return what in a pod the standard does not allow, by the path of the field."""
    spec = pod["spec"]
    context = spec.get("securityContext") or {}
    found = [f"spec.{key}" for key in ("hostNetwork", "hostPID", "hostIPC") if spec.get(key)]
    found += [f"volume {item['name']}" for item in spec.get("volumes") or () if not set(item) - {"name"} <= _VOLUMES]
    found += [f"sysctl {item['name']}" for item in context.get("sysctls") or () if item["name"] not in _SYSCTLS]
    found += [f"pod.{said}" for said in _shared(context, is_pod=True)]
    found += [
        f"annotation {key}"
        for key, value in (pod["metadata"].get("annotations") or {}).items()
        if key.startswith("container.apparmor.security.beta.kubernetes.io/")
        and value != "runtime/default"
        and not value.startswith("localhost/")
    ]
    for kind in ("initContainers", "containers", "ephemeralContainers"):
        for container in spec.get(kind) or ():
            found += [f"{container['name']}.{said}" for said in _of_container(container, context)]
    return found


def _of_container(container: JsonObject, pods: JsonObject) -> Iterator[str]:
    own = container.get("securityContext") or {}
    capabilities = own.get("capabilities") or {}
    checks: tuple[tuple[str, Callable[[], bool]], ...] = (
        ("privileged", lambda: not own.get("privileged")),
        ("allowPrivilegeEscalation", lambda: own.get("allowPrivilegeEscalation") is False),
        ("capabilities.drop", lambda: "ALL" in (capabilities.get("drop") or ())),
        ("capabilities.add", lambda: set(capabilities.get("add") or ()) <= {"NET_BIND_SERVICE"}),
        ("runAsNonRoot", lambda: own.get("runAsNonRoot", pods.get("runAsNonRoot")) is True),
        ("procMount", lambda: own.get("procMount", "Default") == "Default"),
        ("hostPort", lambda: not any(port.get("hostPort") for port in container.get("ports") or ())),
        (
            "seccompProfile",
            lambda: (own.get("seccompProfile") or pods.get("seccompProfile") or {}).get("type") in _SECCOMP,
        ),
    )
    yield from (name for name, is_met in checks if not is_met())
    yield from _shared(own, is_pod=False)
    for hook in ("livenessProbe", "readinessProbe", "startupProbe"):
        for action in ("httpGet", "tcpSocket"):
            if ((container.get(hook) or {}).get(action) or {}).get("host"):
                yield f"{hook}.{action}.host"


def _shared(context: JsonObject, *, is_pod: bool) -> Iterator[str]:
    """Say what neither a pod nor a container may have."""
    if context.get("runAsUser") == 0:
        yield "runAsUser"
    if is_pod and context.get("runAsNonRoot") is False:
        yield "runAsNonRoot"
    if is_pod and "seccompProfile" in context and context["seccompProfile"].get("type") not in _SECCOMP:
        yield "seccompProfile"
    if (context.get("windowsOptions") or {}).get("hostProcess"):
        yield "windowsOptions.hostProcess"
    if (context.get("appArmorProfile") or {}).get("type", "RuntimeDefault") not in _SECCOMP:
        yield "appArmorProfile"
    linux = context.get("seLinuxOptions") or {}
    if linux.get("type", "") not in _SELINUX_TYPES or linux.get("user") or linux.get("role"):
        yield "seLinuxOptions"
