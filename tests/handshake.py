"""TLS without a socket."""

import ssl


def shakes_hands(context: ssl.SSLContext, authority: str, name: str = "localhost") -> bool:
    """Return whether a client that trusts the authority (PEM) and asks for the name reaches a server in memory."""
    trusting = ssl.create_default_context(cadata=authority)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        trusting.wrap_bio(to_client, to_server, server_hostname=name),
        context.wrap_bio(to_server, to_client, server_side=True),
    ]
    for _ in range(4):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError:
                return False
    return True
