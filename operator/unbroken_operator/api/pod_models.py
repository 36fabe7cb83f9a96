"""Models of the pods of a job: the user's template of the training pods, and what may be said of our own containers."""

from collections.abc import Iterable
from enum import Enum
from typing import Annotated, Any

from pydantic import ConfigDict, Field

from unbroken_operator.api import layout, template_rules
from unbroken_operator.api.model_base import (
    DNS_LABEL,
    Image,
    LabelKey,
    Labels,
    Model,
    Resources,
    TaintEffect,
    rule,
    rules,
)

NO_PATTERN: dict[str, Any] = {"x-kubernetes-preserve-unknown-fields": True}


ObjectName = Annotated[str, Field(pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", max_length=253)]


class SidecarMode(str, Enum):
    """How the agent runs in a training pod."""

    AUTO = "Auto"
    NATIVE = "Native"
    CONTAINER = "Container"


class PullPolicy(str, Enum):
    """When the kubelet pulls an image."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class TolerationOperator(str, Enum):
    """How a toleration compares."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class Toleration(Model):
    """Lets the pod run on nodes with a taint, as in a pod."""

    key: Annotated[str, Field(max_length=317)] | None = None
    """Key of the taint; empty with operator Exists means every taint."""
    operator: TolerationOperator | None = None
    """Exists or Equal (the default)."""
    value: Annotated[str, Field(max_length=63)] | None = None
    """Value of the taint, with operator Equal."""
    effect: TaintEffect | None = None
    """Effect of the taint; empty means all."""
    toleration_seconds: Annotated[int, Field(ge=0)] | None = None
    """How long the pod stays after a NoExecute taint appears; empty means for ever."""


class Sidecar(Model):
    """The agent beside the trainer in every training pod."""

    image: Image | None = None
    """Image with the agent and the library; empty means the operator's default."""
    mode: SidecarMode = SidecarMode.AUTO
    """Native runs the agent as an init container with restartPolicy Always (Kubernetes 1.29 and newer), Container as a
    plain container; Auto chooses by the version of the cluster."""
    image_pull_policy: PullPolicy | None = None
    """When to pull the image; empty means Kubernetes' default."""
    resources: Resources | None = None
    """Compute resources of the agent."""


class Rendezvous(Model):
    """The pod that coordinates the job. It needs little CPU and no GPU."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(template_rules.PULL_SECRETS_CEL, f"imagePullSecrets: {template_rules.HELD}", ".imagePullSecrets")
        )
    )

    image: Image | None = None
    """Image with the rendezvous; empty means the sidecar's."""
    resources: Resources | None = None
    """Compute resources of the rendezvous."""
    node_selector: Labels | None = None
    """Labels of the nodes where it may run, such as those of a pool of CPU nodes."""
    tolerations: Annotated[tuple[Toleration, ...], Field(strict=False, max_length=32)] | None = None
    """Taints that it tolerates."""
    image_pull_secrets: Annotated[tuple[ObjectName, ...], Field(strict=False, max_length=16)] | None = None
    """Names of Secrets to pull its image with; empty means the template's imagePullSecrets."""
    service_account_name: ObjectName | None = None
    """Its service account, of which it gets no token; empty means the template's."""
    priority_class_name: ObjectName | None = None
    """Its priority class; empty means the template's."""


class Logs(Model):
    """Where the output of the workers goes besides the pod's log."""

    directory: Annotated[str, Field(pattern="^/", max_length=4096)]
    """Absolute path in the trainer container; each worker writes <pod>/rank-<local>/<incarnation>.log below it. Mount a
    volume there in the template."""


def _checked(found: Iterable[template_rules.TemplateRule]) -> list[dict[str, str]]:
    return [rule(item.cel, item.message, item.field_path) for item in found]


def _no_reserved_keys(field: str) -> dict[str, str]:
    expression = f"!has(self.{field}) || self.{field}.all(key, !({layout.IS_RESERVED_KEY_CEL}))"
    return rule(expression, f"{field}: {layout.RESERVED_KEYS}", f".{field}")


class TemplateMetadata(Model):
    """Metadata of the training pods."""

    model_config = ConfigDict(
        json_schema_extra=rules(_no_reserved_keys("labels"), _no_reserved_keys("annotations")),
    )

    labels: Labels | None = None
    """Labels; those under unbroken.dev/ are the operator's, and refused."""
    annotations: Annotated[dict[LabelKey, Annotated[str, Field(max_length=262_144)]], Field(max_length=64)] | None = (
        None
    )
    """Annotations; those under unbroken.dev/ are the operator's, and refused."""


class PodPart(Model):
    """Part of a pod, with every field that it has there; those that are checked are named."""

    model_config = ConfigDict(extra="allow", json_schema_extra=NO_PATTERN)


SecretName = Annotated[str, Field(max_length=253)]


class SecretReference(PodPart):
    """Names a Secret."""

    name: SecretName | None = None
    """Name of the Secret; those of jobs are refused."""


class SecretVolume(PodPart):
    """A volume with a Secret."""

    secret_name: SecretName | None = None
    """Name of the Secret; those of jobs are refused."""


class ReferringVolume(PodPart):
    """A volume whose driver gets a Secret."""

    secret_ref: SecretReference | None = None
    """The Secret; those of jobs are refused."""


class CsiVolume(PodPart):
    """A volume of a CSI driver."""

    node_publish_secret_ref: SecretReference | None = None
    """The Secret that the driver gets; those of jobs are refused."""


class ProjectedSource(PodPart):
    """One source of a projected volume."""

    secret: SecretReference | None = None
    """A Secret."""


class ProjectedVolume(PodPart):
    """A volume from several sources."""

    sources: Annotated[tuple[ProjectedSource, ...], Field(strict=False, max_length=64)] | None = None
    """Its sources."""


class Volume(PodPart):
    """A volume, with every field that a pod's volume has."""

    name: Annotated[str, Field(pattern=DNS_LABEL, min_length=1, max_length=63)]
    """Name of the volume; those of the operator are refused."""
    secret: SecretVolume | None = None
    """A Secret."""
    projected: ProjectedVolume | None = None
    """Several sources."""
    azure_file: SecretVolume | None = None
    """A share of Azure."""
    csi: CsiVolume | None = None
    """A volume of a CSI driver."""
    cephfs: ReferringVolume | None = None
    """A CephFS."""
    cinder: ReferringVolume | None = None
    """A volume of OpenStack."""
    flex_volume: ReferringVolume | None = None
    """A volume of a FlexVolume driver."""
    iscsi: ReferringVolume | None = None
    """An iSCSI disk."""
    rbd: ReferringVolume | None = None
    """A Ceph block device."""
    scale_io: Annotated[ReferringVolume | None, Field(alias="scaleIO")] = None
    """A ScaleIO volume."""
    storageos: ReferringVolume | None = None
    """A StorageOS volume."""


class VolumeMount(PodPart):
    """A mount, with every field that a container's mount has."""

    name: Annotated[str, Field(min_length=1, max_length=63)]
    """Name of the volume; those of the operator are refused."""
    mount_path: Annotated[str, Field(max_length=4096)] | None = None
    """Where in the container; in a job with memory the operator's own place is refused."""


class VariableSource(PodPart):
    """Where the value of a variable comes from."""

    secret_key_ref: SecretReference | None = None
    """A key of a Secret."""


class Variable(PodPart):
    """An environment variable, as a container has it."""

    name: Annotated[str, Field(min_length=1, max_length=4096)]
    """Name of the variable; in the first container those that begin with UNBROKEN_ are the operator's."""
    value_from: VariableSource | None = None
    """Where its value comes from."""


class VariablesSource(PodPart):
    """Variables that come from elsewhere."""

    secret_ref: SecretReference | None = None
    """A Secret."""


class Container(PodPart):
    """A container, with every field that a pod's container has."""

    model_config = ConfigDict(json_schema_extra=NO_PATTERN | rules(*_checked(template_rules.CONTAINER_RULES)))

    name: Annotated[str, Field(pattern=DNS_LABEL, min_length=1, max_length=63)]
    """Name of the container."""
    image: Image
    """Image of the container; the first container's needs Python 3.10 or newer and torch."""
    command: (
        Annotated[tuple[Annotated[str, Field(max_length=131_072)], ...], Field(strict=False, max_length=1024)] | None
    ) = None
    """Command of the container. The first container must name one: the operator puts the launcher before it."""
    env: Annotated[tuple[Variable, ...], Field(strict=False, max_length=1024)] | None = None
    """Environment variables."""
    env_from: Annotated[tuple[VariablesSource, ...], Field(strict=False, max_length=64)] | None = None
    """Where more variables come from."""
    volume_mounts: Annotated[tuple[VolumeMount, ...], Field(strict=False, max_length=128)] | None = None
    """Mounts of the template's own volumes."""


class PodRestartPolicy(str, Enum):
    """What the kubelet does when a container ends."""

    NEVER = "Never"


class TemplateSpec(Model):
    """Spec of the training pods, with every field that a pod has. The first container is the trainer."""

    model_config = ConfigDict(
        extra="allow",
        json_schema_extra=NO_PATTERN
        | rules(
            rule(
                "has(self.containers[0].command) && self.containers[0].command.size() > 0",
                "containers[0].command: is required: the command that starts the training "
                "(an image's own entrypoint cannot be put under the launcher)",
            ),
            rule(template_rules.VARIABLES_CEL, f"containers[0].env: {template_rules.OWN_VARIABLES}", ".containers"),
            *_checked(template_rules.POD_RULES),
        ),
    )

    containers: Annotated[tuple[Container, ...], Field(strict=False, min_length=1, max_length=16)]
    """Containers of a training pod; the first one runs the training."""
    init_containers: Annotated[tuple[Container, ...], Field(strict=False, max_length=16)] | None = None
    """Containers that run before them, after the operator's own."""
    volumes: Annotated[tuple[Volume, ...], Field(strict=False, max_length=128)] | None = None
    """Volumes of the template's own."""
    image_pull_secrets: Annotated[tuple[SecretReference, ...], Field(strict=False, max_length=16)] | None = None
    """Secrets to pull images with; those of jobs are refused."""
    share_process_namespace: bool | None = None
    """Must be false: in /proc the trainer could read its agent's token."""
    host_pid: Annotated[bool | None, Field(alias="hostPID")] = None
    """Must be false: in /proc the trainer could read the tokens of all agents on its node."""
    restart_policy: PodRestartPolicy | None = None
    """Never, or empty: the operator replaces pods, the kubelet does not."""


class Template(Model):
    """Training pods, active and spare alike. A change applies to pods that are created after it; updatePolicy says what
    happens to running pods; pods that have not started are recreated."""

    metadata: TemplateMetadata | None = None
    """Labels and annotations of the training pods."""
    spec: TemplateSpec
    """Spec of the training pods."""
