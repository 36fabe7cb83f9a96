"""The certificate authority of one run, and the certificate of its rendezvous."""

from dataclasses import dataclass
from pathlib import Path

from unbroken_core.conventions.tls import server_name


@dataclass(frozen=True)
class CertificateFiles:
    """All in PEM. Every start of a part reads them, so they stay as they are for the whole run."""

    authority: Path
    certificate: Path
    key: Path
    """The certificate's, readable by this user only."""


def write_certificates(folder: Path, address: str, job: str, namespace: str) -> CertificateFiles:
    """Write a new authority, without its key, and a certificate for a rendezvous at this IP address."""
    import trustme  # noqa: PLC0415 - an extra of its own, which --tls alone wants

    # The run and the commands check the address; agents check the name that the rendezvous of a job has in a cluster.
    # That name is a wildcard, as idna refuses some job names, such as `ab--c`; the authority signs nothing else.
    domain = server_name(job, namespace).partition(".")[2]
    authority = trustme.CA(organization_name="unbroken run")
    issued = authority.issue_cert(address, f"*.{domain}")
    files = CertificateFiles(folder / "ca.crt", folder / "tls.crt", folder / "tls.key")
    files.authority.write_bytes(authority.cert_pem.bytes())
    files.certificate.write_bytes(issued.cert_chain_pems[0].bytes())
    files.key.touch(mode=0o600)
    files.key.write_bytes(issued.private_key_pem.bytes())
    return files
