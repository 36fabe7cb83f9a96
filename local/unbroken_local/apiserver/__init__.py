"""A Kubernetes API server in one process: storage in memory, an optional snapshot file, plain HTTP semantics.

Here belongs what a client of the API can see. Scheduling, running pods and load balancing are other parts, and talk to
this one over HTTP like anybody else.

    server      HTTP: routes, authentication, content types            (aiohttp)
    operations  create, update, patch, delete on the store             (no I/O)
    collector   owner references, finalizers, namespaces               (no I/O)
    store       objects, revisions, the history that watches read      (no I/O)
    schema, constraints, rules, patches, ownership, defaults, checks, tables, openapi: pure functions on documents
"""

from unbroken_local.apiserver.server import ApiServer

__all__ = ["ApiServer"]
