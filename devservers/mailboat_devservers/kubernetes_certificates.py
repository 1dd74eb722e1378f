"""The certificates of a Kubernetes cluster for tests: one trusted authority and the certificates it signs.

A client's name and groups are in its certificate, so that a test can act as any user without a request to the server.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFE = datetime.timedelta(days=30)
_SKEW = datetime.timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A certificate and its key, both as PEM."""

    certificate: str
    key: str


@dataclass(frozen=True, slots=True)
class Authority:
    """Certificate authority for servers and clients."""

    _key: ec.EllipticCurvePrivateKey
    _certificate: x509.Certificate

    @classmethod
    def create(cls, name: str = "mailboat-devservers") -> Self:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        usage = x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=True,
            crl_sign=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            encipher_only=False,
            decipher_only=False,
        )
        certificate = (
            _builder(subject, subject, key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .sign(key, hashes.SHA256())
        )
        return cls(key, certificate)

    @property
    def pair(self) -> KeyPair:
        return KeyPair(_pem(self._certificate), private_pem(self._key))

    @property
    def bundle(self) -> str:
        """The authority's certificate for fields like ``caBundle``: PEM in base64."""
        return _base64(_pem(self._certificate))

    def for_client(self, user: str, groups: Sequence[str] = ()) -> KeyPair:
        """Issue a client certificate for a user in these groups."""
        names = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        return self._issue([*names, x509.NameAttribute(NameOID.COMMON_NAME, user)], ExtendedKeyUsageOID.CLIENT_AUTH)

    def for_server(self, name: str, hosts: Sequence[str], groups: Sequence[str] = ()) -> KeyPair:
        """Issue a server certificate for these host names and addresses."""
        alternatives = x509.SubjectAlternativeName([_host(host) for host in hosts])
        names = [x509.NameAttribute(NameOID.ORGANIZATION_NAME, group) for group in groups]
        names.append(x509.NameAttribute(NameOID.COMMON_NAME, name))
        return self._issue(names, ExtendedKeyUsageOID.SERVER_AUTH, alternatives)

    def _issue(
        self,
        names: list[x509.NameAttribute[str]],
        usage: x509.ObjectIdentifier,
        alternatives: x509.SubjectAlternativeName | None = None,
    ) -> KeyPair:
        key = ec.generate_private_key(ec.SECP256R1())
        builder = _builder(x509.Name(names), self._certificate.subject, key)
        builder = builder.add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
        if alternatives is not None:
            builder = builder.add_extension(alternatives, critical=False)
        return KeyPair(_pem(builder.sign(self._key, hashes.SHA256())), private_pem(key))


def new_signing_key() -> tuple[str, str]:
    """Return a private key and its public key as PEM, for service account tokens."""
    key = ec.generate_private_key(ec.SECP256R1())
    public = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    return private_pem(key), public


def kubeconfig(server: str, authority: KeyPair, *, client: KeyPair | None = None, token: str | None = None) -> str:
    """Return a self-contained kubeconfig file as JSON, which is valid YAML."""
    user = {}
    if client is not None:
        user = {"client-certificate-data": _base64(client.certificate), "client-key-data": _base64(client.key)}
    if token is not None:
        user["token"] = token
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "mailboat",
                    "cluster": {"server": server, "certificate-authority-data": _base64(authority.certificate)},
                }
            ],
            "users": [{"name": "user", "user": user}],
            "contexts": [{"name": "mailboat", "context": {"cluster": "mailboat", "user": "user"}}],
            "current-context": "mailboat",
        },
        indent=2,
    )


def private_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + _LIFE)
    )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
