"""A certificate authority for tests."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID


class Authority:
    """Issuer of certificates for servers on this machine."""

    def __init__(self, name: str) -> None:
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        builder = _dated(self._name, self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self._certificate = builder.sign(self._key, hashes.SHA256())

    @property
    def certificate(self) -> str:
        """Certificate that clients trust, in PEM."""
        return self._certificate.public_bytes(Encoding.PEM).decode()

    def keystore(self, host: str = "127.0.0.1") -> str:
        """Return a private key and its certificate, in PEM."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(host))])
        builder = _dated(name, self._name, key.public_key()).add_extension(address, critical=False)
        certificate = builder.sign(self._key, hashes.SHA256())
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
        return private + certificate.public_bytes(Encoding.PEM).decode()


def _dated(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
    )
