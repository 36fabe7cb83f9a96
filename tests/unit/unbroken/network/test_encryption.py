"""Certificates and authorities in files that change while a job trains."""

from pathlib import Path

import pytest
from tests.handshake import shakes_hands

from unbroken.network.authority import GRACE_S, AuthorityFile
from unbroken.network.certificate import ServerCertificate
from unbroken.run.certificates import write_certificates
from unbroken_core.conventions.tls import server_name
from unbroken_core.vocabulary.errors import InputError
from unbroken_operator.adapters.certificates import make_certificates
from unbroken_operator.decisions.objects.credentials import Certificates

NAME = "digits-rendezvous.ml.svc"


def put(folder: Path, made: Certificates, *keys: str) -> None:
    """Write the files, or these of them, as a kubelet does: what was there stays whole until it is replaced."""
    texts = {"ca.crt": made.authority, "tls.crt": made.certificate, "tls.key": made.key}
    for key in keys or texts:
        fresh = folder / f"{key}.new"
        fresh.write_text(texts[key])
        fresh.replace(folder / key)


def served(folder: Path) -> ServerCertificate:
    """Return what serves with the folder's files."""
    return ServerCertificate(folder / "tls.crt", folder / "tls.key")


def test_each_new_connection_is_served_with_the_newest_certificate(tmp_path: Path) -> None:
    """Files that do not belong together yet take nothing away."""
    first, second = make_certificates([NAME]), make_certificates([NAME])
    put(tmp_path, first)
    certificate = served(tmp_path)
    put(tmp_path, second, "tls.crt")
    assert shakes_hands(certificate.context, first.authority, NAME)
    (tmp_path / "tls.key").unlink()
    assert shakes_hands(certificate.context, first.authority, NAME)
    put(tmp_path, second, "tls.key")
    assert not shakes_hands(certificate.context, first.authority, NAME)
    assert shakes_hands(certificate.context, second.authority, NAME)


def test_what_is_no_certificate_is_named(tmp_path: Path) -> None:
    put(tmp_path, make_certificates([NAME]))
    (tmp_path / "tls.key").write_text("no key")
    with pytest.raises(InputError, match=r"tls\.crt, .*tls\.key: want a certificate and its key in PEM"):
        served(tmp_path)
    (tmp_path / "tls.key").unlink()
    with pytest.raises(InputError, match=r"tls\.key: No such file or directory"):
        served(tmp_path)
    authority = AuthorityFile(tmp_path / "ca.crt")
    (tmp_path / "ca.crt").write_text("nobody")
    with pytest.raises(InputError, match=r"authority file .*ca\.crt: want certificates of authorities in PEM, got 6"):
        authority.context()
    (tmp_path / "ca.crt").unlink()
    with pytest.raises(InputError, match=r"authority file .*ca\.crt: want certificates in PEM, got .*No such file"):
        authority.context()


def test_an_agent_trusts_the_former_authority_until_all_pods_have_the_new_one(tmp_path: Path) -> None:
    """Kubelets bring a changed Secret to the pods up to two minutes apart: either side may be the first."""
    first, second = make_certificates([NAME]), make_certificates([NAME])
    now_s = 0.0
    put(tmp_path, first)
    authority = AuthorityFile(tmp_path / "ca.crt", lambda: now_s)
    assert trusted(authority) == 1
    put(tmp_path, second)
    assert trusted(authority) == 2
    (tmp_path / "ca.crt").write_text("half")
    with pytest.raises(InputError):
        authority.context()
    put(tmp_path, second)
    assert trusted(authority) == 2
    now_s = GRACE_S
    assert trusted(authority) == 1
    assert authority.context() is authority.context(), "sessions are kept by it"


@pytest.mark.parametrize("job", ["digits", "a--b", "ab--c", "xn--a", "x" * 52])
def test_a_run_vouches_for_the_address_and_the_name_of_its_rendezvous(tmp_path: Path, job: str) -> None:
    files = write_certificates(tmp_path, "127.0.7.1", job, "default")
    context = ServerCertificate(files.certificate, files.key).context
    authority = files.authority.read_text()
    assert shakes_hands(context, authority, "127.0.7.1"), "the run itself and `unbroken page`"
    assert shakes_hands(context, authority, server_name(job, "default")), "agents"
    assert not shakes_hands(context, authority, "127.0.7.2")
    assert not shakes_hands(context, make_certificates([NAME]).authority, "127.0.7.1")


def test_a_run_keeps_the_key_of_its_rendezvous_to_its_user_and_writes_no_other(tmp_path: Path) -> None:
    files = write_certificates(tmp_path, "127.0.7.1", "digits", "default")
    assert files.key.stat().st_mode & 0o777 == 0o600
    assert [path for path in tmp_path.iterdir() if "PRIVATE KEY" in path.read_text()] == [files.key]
    assert files.key.read_text().count("BEGIN") == 1


def trusted(authority: AuthorityFile) -> int:
    """Return how many authorities are trusted."""
    return len(authority.context().get_ca_certs())
