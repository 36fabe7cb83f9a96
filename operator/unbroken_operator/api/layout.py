"""Names, labels, ports and paths of a job's objects: the one place for all of them (docs/architecture.md)."""

from unbroken_core.conventions.tls import server_name

GROUP = "unbroken.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
KIND = "ResilientTrainingJob"
PLURAL = "resilienttrainingjobs"
SINGULAR = "resilienttrainingjob"
SHORT_NAME = "rtj"
CRD_NAME = f"{PLURAL}.{GROUP}"

JOB_LABEL = f"{GROUP}/job"
COMPONENT_LABEL = f"{GROUP}/component"
ROLE_LABEL = f"{GROUP}/role"
GANG_LABEL = "scheduling.x-k8s.io/pod-group"
"""The coscheduling plug-in's: the name of the PodGroup that a pod belongs to."""
TOPOLOGY_ANNOTATION = f"{GROUP}/topology"
SETTINGS_ANNOTATION = f"{GROUP}/settings"
MADE_FROM_ANNOTATION = f"{GROUP}/made-from"
"""Of a rendezvous pod: digest of what else it was made from, such as its image and where it may run."""
STANDBY_ANNOTATION = f"{GROUP}/standby"
"""Of a rendezvous pod that was not told to lead yet."""
TEMPLATE_ANNOTATION = f"{GROUP}/template"
LEAVING_ANNOTATION = f"{GROUP}/leaving"
QUARANTINE = f"{GROUP}/quarantine"
"""Of nodes: key of the taint, annotation with time and reason, and label with which one is exempted."""
OFFENDER_CONDITION = "UnbrokenRepeatOffender"
"""Of nodes, told to others: jobs have failed there again and again."""
AVOIDS_ANNOTATION = f"{GROUP}/avoids"
JOB_UID_ANNOTATION = f"{GROUP}/job-uid"
"""Says whose an object is when somebody has taken its owner reference away."""
HOSTNAME_LABEL = "kubernetes.io/hostname"
RENDEZVOUS = "rendezvous"
STANDBY = "rendezvous-standby"
"""Component of a rendezvous pod that does not lead yet, which keeps it out of the Service."""
TRAINER = "trainer"

LOCALHOST = "localhost"
"""What `kubectl port-forward` makes of a rendezvous' address."""
API_PORT = 29600
METRICS_PORT = 29601
AGENT_METRICS_PORT = 29602
COPIES_PORT = 29603
"""At which keepers of checkpoints in memory reach each other."""

INSTALL_CONTAINER = "unbroken-install"
AGENT_CONTAINER = "unbroken-agent"
LIB_VOLUME, LIB_PATH = "unbroken-lib", "/opt/unbroken/lib"
RUN_VOLUME, RUN_PATH = "unbroken-run", "/var/run/unbroken"
PRIVATE_VOLUME, PRIVATE_PATH = "unbroken-private", "/var/lib/unbroken"
"""What only the agent may write, since it believes it; mounted into no other container."""
STATE_VOLUME, STATE_PATH = "unbroken-state", "/var/lib/unbroken-state"
"""Checkpoints in memory, in jobs that have some: the keeper allocates there, and the trainer writes."""
TOKEN_VOLUME, TOKEN_PATH = "unbroken-token", "/etc/unbroken"
TERMINATION_LOG = "/dev/termination-log"
TOKEN_KEY = "token"
"""Of readers; of all callers in jobs of an earlier release."""
JOB_KEY_KEY = "job-key"
TOKENS = "tokens"
"""Component of the Secrets with the tokens of pods."""
TOKENS_PER_SECRET = 64
"""Of so many ordinals: what a node's kubelet reads for its pod stays small however many pods the job has."""
TOKENS_AHEAD = 16
"""So many ordinals before they are used up the next ones are made: a replacement does not wait for them."""
TOKEN_BYTES = 32
AUTHORITY_KEY, CERTIFICATE_KEY, PRIVATE_KEY_KEY = "ca.crt", "tls.crt", "tls.key"

RESERVED_NAMES = frozenset((INSTALL_CONTAINER, AGENT_CONTAINER, LIB_VOLUME, RUN_VOLUME, PRIVATE_VOLUME, TOKEN_VOLUME))
SECRET_SUFFIX = f"-{RENDEZVOUS}"
"""Of the names of jobs' Secrets. A job `x-rendezvous` would have pods named as the rendezvous pods of a job `x`."""
OWN_USER = 65532
"""Uid and gid of our own containers, whatever the template says of the whole pod."""
RESERVED_VARIABLE_PREFIX = "UNBROKEN_"
RESERVED_KEYS = f"keys under {GROUP}/ and its subdomains are the operator's: remove them"
"""Of labels and annotations in a template: by them the operator knows its pods, and what it decided about each."""
IS_RESERVED_KEY_CEL = f"key.startsWith('{GROUP}/') || key.contains('.{GROUP}/')"
"""`is_reserved_key` as the API server checks it."""

MAX_JOB_NAME = 46
"""A pod's name is its host name, at most 63 characters: <job>-rendezvous-<up to 5 digits>."""


def is_reserved_key(key: str) -> bool:
    """Return whether only the operator may put a label or an annotation with this key on a pod."""
    return key.startswith(f"{GROUP}/") or f".{GROUP}/" in key


def keepers_policy_name(job: str) -> str:
    """Return the name of the NetworkPolicy of the job's keepers."""
    return f"{job}-keepers"


def rendezvous_name(job: str) -> str:
    """Return the name of the job's Secret and Service."""
    return f"{job}-{RENDEZVOUS}"


def rendezvous_pod_name(job: str, ordinal: int) -> str:
    """Return the name of the job's nth rendezvous pod."""
    return f"{rendezvous_name(job)}-{ordinal}"


def tokens_name(job: str, block: int) -> str:
    """Return the name of the Secret with the nth block of tokens.

    No name of a job has a dot, so no other Secret is called so. By its end templates that mount it are refused.
    """
    return f"{job}.agents-{block}{SECRET_SUFFIX}"


def token_block(ordinal: int) -> int:
    """Return the number of the Secret in which the nth training pod finds its token."""
    return ordinal // TOKENS_PER_SECRET


def rendezvous_host(job: str, namespace: str) -> str:
    """Return the DNS name by which pods reach the job's rendezvous."""
    return server_name(job, namespace)


def training_pod_name(job: str, ordinal: int) -> str:
    """Return the name of the job's nth training pod."""
    return f"{job}-{ordinal}"


def pod_ordinal(name: str) -> int:
    """Return the number at the end of a pod's name, or -1 when there is none."""
    tail = name.rpartition("-")[2]
    return int(tail) if tail.isdecimal() else -1
