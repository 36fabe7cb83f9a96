"""Stops torch's DNS lookups of every address that it connects to or accepts.

c10d needs the names for log lines only, but waits for them: one lost packet stalls a store and all of its clients for
five seconds. It stops looking names up, for the life of the process, once a lookup fails temporarily (pytorch#159007).
So one is made to fail, in a thread whose resolver state (the C library keeps one per thread) names no server. No packet
is sent, and the script's own lookups are untouched.
"""

import ctypes
import logging
import threading

from unbroken.inprocess.connections.endpoint import Endpoint

logger = logging.getLogger(__name__)

ADDRESS = "127.83.77.61"
"""Any loopback address that no /etc/hosts names."""
TIMEOUT_S = 10.0
_NSCOUNT_OFFSET = 16
"""Offset of `nscount` in glibc's struct __res_state, after two ints and a long."""

_is_done = False


def stop_reverse_lookups() -> None:
    """Make c10d log numbers instead of names; once a process, and where the C library is glibc."""
    global _is_done  # noqa: PLW0603 - the switch is one of the process
    if _is_done:
        return
    _is_done = True
    thread = threading.Thread(target=_fail_one_lookup, name="unbroken-names", daemon=True)
    thread.start()
    thread.join(TIMEOUT_S)


def _fail_one_lookup() -> None:
    try:
        if not _forget_name_servers():
            return
        endpoint = Endpoint(ADDRESS)
    except OSError as error:
        # No such loopback address here. Lookups stay slow, not wrong.
        logger.debug("reverse lookups stay on: error=%s", error)
        return
    endpoint.serve()
    endpoint.close()


def _forget_name_servers() -> bool:
    """Empty the calling thread's list of name servers; return whether that is possible."""
    libc = ctypes.CDLL(None)
    if not (hasattr(libc, "gnu_get_libc_version") and hasattr(libc, "__res_state") and hasattr(libc, "__res_init")):
        return False
    state = libc["__res_state"]
    state.restype = ctypes.c_void_p
    if libc["__res_init"]() != 0:
        return False
    ctypes.c_int.from_address(state() + _NSCOUNT_OFFSET).value = 0
    return True
