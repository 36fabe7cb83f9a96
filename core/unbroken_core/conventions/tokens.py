"""Who shows which token. A job has one key; each pod, the operator and readers have a token that follows from it.

    token = KIND/NAME/MAC        MAC = HMAC-SHA256(job key, "unbroken token 1" NUL KIND NUL uid of the job NUL NAME)

A token says whose it is, so whoever has the key checks it without a list, and nobody makes another from it. Before
there were job keys, a job had one plain token for all: it has no slash (docs/design/0019-identity.md).
"""

import hashlib
import hmac
from collections.abc import Mapping
from enum import Enum

from unbroken_core.vocabulary.errors import InputError

MIN_CHARACTERS = 16
MAX_CHARACTERS = 512
"""Of a job key or a token: longer than the longest token of a pod."""
SHARED_SECRET = "UNBROKEN_SECRET"
"""Variable with what hosts have in common that no launcher of ours has started."""
OUTGOING_HEADER = "Unbroken-Token"
OUTGOING = "replaced"
"""Value of this header in an answer: the token of the request was replaced, and is accepted for a few minutes only."""
_CONTEXT = "unbroken token 1"


class Kind(str, Enum):
    """What the bearer of a token is; values are a part of the token."""

    AGENT = "agent"
    """One pod's agent: it joins the job as this pod, and does nothing else."""
    OPERATOR = "operator"
    """Sends observations, and reads."""
    READER = "reader"
    """Reads the status, the topology and the live page."""

    __str__ = str.__str__


def derive_token(job_key: str, kind: Kind, uid: str, pod: str = "") -> str:
    """Return a token; `uid` is the job's, `pod` the name of the pod of an agent, "" for other kinds."""
    text = "\0".join((_CONTEXT, kind.value, uid, pod))
    mac = hmac.new(job_key.encode(), text.encode(errors="replace"), hashlib.sha256).hexdigest()
    return f"{kind.value}/{pod}/{mac}"


def claim_of(token: str) -> tuple[Kind, str] | None:
    """Return of which kind and pod a token claims to be, None when it is not of this form. Proves nothing."""
    kind, _, rest = token.partition("/")
    pod, _, mac = rest.partition("/")
    try:
        return (Kind(kind), pod) if mac and bool(pod) is (kind == Kind.AGENT) else None
    except ValueError:
        return None


def checked_secret(content: bytes | str, what: str) -> str:
    """Return a job key or token without the white space around it.

    Raises InputError that begins with `what`, and never shows the content: one line of printable ASCII without blanks
    is all that an HTTP header may carry.
    """
    text = content if isinstance(content, str) else content.decode("latin-1")
    text = text.strip(" \t\r\n")
    if len(text) > MAX_CHARACTERS:
        # Files are read up to a limit, so how many there are is not known.
        raise InputError(f"{what}: want a token of at most {MAX_CHARACTERS} characters, got more")
    if not all("!" <= character <= "~" for character in text):
        raise InputError(f"{what}: want a token in one line of ASCII characters without blanks, got other characters")
    if len(text) < MIN_CHARACTERS:
        raise InputError(f"{what}: want a token of at least {MIN_CHARACTERS} characters, got {len(text)}")
    return text


def read_shared_secret(environment: Mapping[str, str]) -> str:
    """Return `UNBROKEN_SECRET` without the white space around it, "" when it is not set.

    Keys follow from it alone, so a short one could be guessed from what a host says in the clear. Raises InputError,
    which never shows the content.
    """
    given = environment.get(SHARED_SECRET, "")
    text = given.strip()
    if given and len(text) < MIN_CHARACTERS:
        raise InputError(
            f"{SHARED_SECRET}: want at least {MIN_CHARACTERS} characters, the same on all hosts, such as those of "
            f"`openssl rand -hex 32`, got {len(text)}"
        )
    if not text.isprintable():
        raise InputError(f"{SHARED_SECRET}: want printable text in UTF-8, got other characters")
    return text
