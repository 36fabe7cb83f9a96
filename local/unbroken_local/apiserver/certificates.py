"""A certificate authority for one run, and the server's certificate: P-256 keys, made at start, never reused.

kubectl sends a token over HTTPS only, and Python's standard library cannot make a certificate. The keys live as long as
the process, so signing in variable time tells nobody anything.
"""

import base64
import hashlib
import os
import secrets
import ssl
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from ipaddress import ip_address
from pathlib import Path

# The curve NIST P-256 (FIPS 186-4, D.1.2.3).
_P = 2**256 - 2**224 + 2**192 + 2**96 - 1
_A = -3
_N = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_G = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
_Point = tuple[int, int] | None
_DAYS = 3650


def _add(one: _Point, two: _Point) -> _Point:
    if one is None or two is None:
        return two if one is None else one
    if one[0] == two[0]:
        if (one[1] + two[1]) % _P == 0:
            return None
        slope = (3 * one[0] * one[0] + _A) * pow(2 * one[1], -1, _P) % _P
    else:
        slope = (two[1] - one[1]) * pow(two[0] - one[0], -1, _P) % _P
    x = (slope * slope - one[0] - two[0]) % _P
    return x, (slope * (one[0] - x) - one[1]) % _P


def _times(factor: int, point: _Point) -> tuple[int, int]:
    result: _Point = None
    while factor:
        if factor & 1:
            result = _add(result, point)
        point = _add(point, point)
        factor >>= 1
    if result is None:
        raise ValueError("want a factor between 1 and the order of the curve")
    return result


# -- DER


def _der(tag: int, *content: bytes) -> bytes:
    body = b"".join(content)
    if len(body) < 0x80:
        return bytes([tag, len(body)]) + body
    size = len(body).to_bytes((len(body).bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(size)]) + size + body


def _sequence(*content: bytes) -> bytes:
    return _der(0x30, *content)


def _integer(value: int) -> bytes:
    return _der(0x02, value.to_bytes(value.bit_length() // 8 + 1, "big"))


def _bits(body: bytes, unused: int = 0) -> bytes:
    return _der(0x03, bytes([unused]), body)


def _oid(text: str) -> bytes:
    first, second, *rest = (int(part) for part in text.split("."))
    body = bytes([first * 40 + second])
    for number in rest:
        group = [number & 0x7F]
        while number := number >> 7:
            group.append(number & 0x7F | 0x80)
        body += bytes(reversed(group))
    return _der(0x06, body)


def _time(moment: datetime) -> bytes:
    return _der(0x17, moment.strftime("%y%m%d%H%M%SZ").encode())


def _name(common: str) -> bytes:
    return _sequence(_der(0x31, _sequence(_oid("2.5.4.3"), _der(0x0C, common.encode()))))


def _extension(oid: str, value: bytes, critical: bool = False) -> bytes:
    return _sequence(_oid(oid), *([_der(0x01, b"\xff")] if critical else []), _der(0x04, value))


_CURVE = "1.2.840.10045.3.1.7"
_SIGNATURE = _sequence(_oid("1.2.840.10045.4.3.2"))


class _Key:
    def __init__(self) -> None:
        self._secret = secrets.randbelow(_N - 1) + 1
        x, y = _times(self._secret, _G)
        self.public = b"\x04" + x.to_bytes(32, "big") + y.to_bytes(32, "big")

    @property
    def identifier(self) -> bytes:
        return hashlib.sha1(self.public).digest()

    def info(self) -> bytes:
        return _sequence(_sequence(_oid("1.2.840.10045.2.1"), _oid(_CURVE)), _bits(self.public))

    def pem(self) -> str:
        secret = _der(0x04, self._secret.to_bytes(32, "big"))
        body = _sequence(_integer(1), secret, _der(0xA0, _oid(_CURVE)), _der(0xA1, _bits(self.public)))
        return _pem("EC PRIVATE KEY", body)

    def sign(self, message: bytes) -> bytes:
        """Return an ECDSA signature with SHA-256 (FIPS 186-4, 6.4)."""
        digest = int.from_bytes(hashlib.sha256(message).digest(), "big")
        while True:
            nonce = secrets.randbelow(_N - 1) + 1
            r = _times(nonce, _G)[0] % _N
            s = pow(nonce, -1, _N) * (digest + r * self._secret) % _N
            if r and s:
                return _sequence(_integer(r), _integer(s))


def _pem(kind: str, body: bytes) -> str:
    text = base64.encodebytes(body).decode().replace("\n", "")
    lines = [text[start : start + 64] for start in range(0, len(text), 64)]
    return "\n".join([f"-----BEGIN {kind}-----", *lines, f"-----END {kind}-----", ""])


def _certificate(
    subject: str, key: _Key, issuer: str, issuer_key: _Key, *, now: datetime, extensions: Sequence[bytes]
) -> str:
    validity = _sequence(_time(now - timedelta(days=1)), _time(now + timedelta(days=_DAYS)))
    body = _sequence(
        _der(0xA0, _integer(2)),
        _integer(secrets.randbits(120) | 1),
        _SIGNATURE,
        _name(issuer),
        validity,
        _name(subject),
        key.info(),
        _der(0xA3, _sequence(*extensions)),
    )
    return _pem("CERTIFICATE", _sequence(body, _SIGNATURE, _bits(issuer_key.sign(body))))


@dataclass(frozen=True, slots=True)
class Identity:
    """The server's certificate with its key, and the authority that clients trust; all PEM."""

    authority: str
    certificate: str
    key: str

    def authority_base64(self) -> str:
        """Return the authority as kubeconfigs hold it."""
        return base64.b64encode(self.authority.encode()).decode()

    def server_context(self) -> ssl.SSLContext:
        """Return a context that serves with this certificate."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # The ssl module reads keys from files only; this one is gone before anybody can connect.
        descriptor, path = tempfile.mkstemp()
        try:
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(self.certificate + self.key)
            context.load_cert_chain(path)
        finally:
            Path(path).unlink()
        return context


def new_identity(now_s: float, addresses: Sequence[str]) -> Identity:
    """Return a fresh identity for a server at these IP addresses. `now_s`: seconds since the epoch."""
    now = datetime.fromtimestamp(now_s, timezone.utc)
    root, leaf = _Key(), _Key()
    common = f"unbroken-local-{secrets.token_hex(4)}"
    root_extensions = [
        _extension("2.5.29.19", _sequence(_der(0x01, b"\xff")), critical=True),
        _extension("2.5.29.15", _bits(b"\x06", 1), critical=True),
        _extension("2.5.29.14", _der(0x04, root.identifier)),
    ]
    names = [_der(0x82, b"localhost"), *(_der(0x87, ip_address(text).packed) for text in dict.fromkeys(addresses))]
    leaf_extensions = [
        _extension("2.5.29.19", _sequence(), critical=True),
        _extension("2.5.29.15", _bits(b"\x80", 7), critical=True),
        _extension("2.5.29.37", _sequence(_oid("1.3.6.1.5.5.7.3.1"))),
        _extension("2.5.29.17", _sequence(*names)),
        _extension("2.5.29.14", _der(0x04, leaf.identifier)),
        _extension("2.5.29.35", _sequence(_der(0x80, root.identifier))),
    ]
    return Identity(
        authority=_certificate(common, root, common, root, now=now, extensions=root_extensions),
        certificate=_certificate("unbroken-local-apiserver", leaf, common, root, now=now, extensions=leaf_extensions),
        key=leaf.pem(),
    )
