"""All objects in one file, so that a cluster that was taken down comes up as it was."""

import json
import os
import tempfile
from pathlib import Path

from unbroken_core.vocabulary.errors import InputError
from unbroken_local.apiserver.documents import encode
from unbroken_local.apiserver.store import Store

_FORMAT = 1


def save(path: Path, store: Store) -> None:
    """Replace the file by the store's present objects, at once or not at all. Raises OSError."""
    content = {
        "format": _FORMAT,
        "revision": store.revision,
        "objects": [
            [list(place), list(key), stored.revision, stored.document]
            for place in store.places()
            for key, stored in store.current(place)
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    with os.fdopen(descriptor, "wb") as file:
        file.write(encode(content))
    Path(partial).replace(path)


def load(path: Path, store: Store) -> None:
    """Fill an empty store from the file; a file that is not there leaves it empty. Raises InputError."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return
    except (OSError, ValueError) as problem:
        raise InputError(f"{path}: want a snapshot of the local cluster, got {problem}") from problem
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise InputError(f"{path}: want a snapshot of format {_FORMAT}")
    for (group, plural), (namespace, name), revision, document in content["objects"]:
        store.restore((group, plural), (namespace, name), document, revision)
    store.revision = max(store.revision, int(content["revision"]))
    for place in store.places():
        # What happened before the snapshot is forgotten: older watches must list again.
        store.compact(place)
