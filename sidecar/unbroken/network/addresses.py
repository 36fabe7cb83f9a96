"""Addresses to listen on, and addresses of peers. `name` is the variable or option that an error names."""

import ipaddress
import socket

from unbroken_core.vocabulary.errors import InputError


def split_address(name: str, text: str) -> tuple[str, int]:
    """Split "address:port". Raises InputError."""
    host, separator, port = text.rpartition(":")
    if not separator or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise InputError(f"{name}: want address:port, got {text!r}")
    return host.strip("[]"), int(port)


def plain_address(address: str) -> str:
    """Return a numeric address without its zone; an IPv4-mapped IPv6 address as IPv4."""
    plain = ipaddress.ip_address(address.partition("%")[0])
    mapped = getattr(plain, "ipv4_mapped", None)
    return str(plain if mapped is None else mapped)


def address_to_listen_on(name: str, host: str) -> str:
    """Return the address to listen on for peers that know this machine as `host`, a name or address.

    All addresses, since `host` may be another name for the one that they use; but only `host` where that is loopback.
    Raises InputError when it cannot be resolved.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise InputError(f"{name}: want a name or address, got {host!r}: {why}") from error
    addresses = [str(info[4][0]) for info in found]
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        return addresses[0]
    return "::" if any(":" in address for address in addresses) and socket.has_dualstack_ipv6() else "0.0.0.0"


def listen(address: str, port: int) -> socket.socket:
    """Return a socket that listens. Raises OSError."""
    is_v6 = ":" in address
    return socket.create_server(
        (address, port),
        family=socket.AF_INET6 if is_v6 else socket.AF_INET,
        backlog=4096,
        dualstack_ipv6=address == "::",
    )


def listen_at(name: str, host: str, port: int) -> socket.socket:
    """Return a socket that listens at `address_to_listen_on`. Raises InputError."""
    try:
        return listen(address_to_listen_on(name, host), port)
    except OSError as error:
        raise InputError(f"{name}: port {port} on {host}: {error.strerror}") from error
