"""A certificate authority for one run of the API server, and the server's certificate. kubectl sends a token over HTTPS
only."""

import base64
import ssl
from collections.abc import Sequence
from dataclasses import dataclass

import trustme


@dataclass(frozen=True, slots=True)
class Identity:
    """The server's certificate with its key, and the authority that clients trust; all PEM."""

    authority: str
    certificate: str
    key: str
    server_context: ssl.SSLContext
    """What serves with this certificate."""

    def authority_base64(self) -> str:
        """Return the authority as kubeconfigs hold it."""
        return base64.b64encode(self.authority.encode()).decode()


def new_identity(addresses: Sequence[str]) -> Identity:
    """Return a fresh identity for a server at these IP addresses, and at localhost."""
    authority = trustme.CA(organization_name="unbroken local")
    issued = authority.issue_cert("localhost", *dict.fromkeys(addresses))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    issued.configure_cert(context)
    chain = "".join(blob.bytes().decode() for blob in issued.cert_chain_pems)
    return Identity(authority.cert_pem.bytes().decode(), chain, issued.private_key_pem.bytes().decode(), context)
