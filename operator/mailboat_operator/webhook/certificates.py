"""The webhook's certificates: one CA and one serving certificate that all operators share, and when to renew which.

They are stored in one Secret of the operator's namespace. The leader creates and renews them, every operator serves the
Secret's certificate, and the API server trusts its ``ca.crt`` (the ``caBundle``). Three rules make a renewal invisible:

- A new CA is trusted before it signs. It joins the bundle at once, and the serving certificate moves to it only after
  ``Lifetimes.settle``: by then every API server has the new bundle.
- An old CA is trusted as long as a certificate that it signed is valid. So an operator that has not read the Secret for
  weeks still serves a trusted certificate, without any coordination. (The old CA's key is deleted at once.)
- Everything is renewed at half of its lifetime. The other half is the reserve if the leader can't renew.

Decisions are pure, and time is an argument. Only ``Lifetimes`` defines lifetimes.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from typing import Final

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

CA_BUNDLE: Final = "ca.crt"
"""Key of the Secret: the trusted CAs, the signing one first."""
CA_KEY: Final = "ca.key"
CERTIFICATE: Final = "tls.crt"
CERTIFICATE_KEY: Final = "tls.key"

_CA_NAME: Final = "Mailboat webhook CA"


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Lifetimes of certificates."""

    ca: timedelta = timedelta(days=730)
    leaf: timedelta = timedelta(days=90)
    settle: timedelta = timedelta(minutes=5)
    """From the creation of a CA to its first signature."""
    skew: timedelta = timedelta(minutes=10)
    """Tolerated lag of an API server's clock: certificates are valid from that long before their creation."""


DEFAULT_LIFETIMES: Final = Lifetimes()


class Decision(StrEnum):
    """Action for the leader."""

    KEEP = "Keep"
    NEW_LEAF = "NewLeaf"
    NEW_CA = "NewCA"


@dataclass(frozen=True, slots=True)
class Certificates:
    """Parsed content of the Secret."""

    bundle: tuple[x509.Certificate, ...]
    ca_key: ec.EllipticCurvePrivateKey
    leaf: x509.Certificate
    leaf_key: ec.EllipticCurvePrivateKey

    @property
    def ca(self) -> x509.Certificate:
        """The signing CA."""
        return self.bundle[0]

    @classmethod
    def parse(cls, data: Mapping[str, bytes]) -> Certificates | None:
        """Parse the Secret's data; None if it is unusable, for whatever reason."""
        try:
            found = cls(
                bundle=tuple(x509.load_pem_x509_certificates(data[CA_BUNDLE])),
                ca_key=_key(data[CA_KEY]),
                leaf=x509.load_pem_x509_certificate(data[CERTIFICATE]),
                leaf_key=_key(data[CERTIFICATE_KEY]),
            )
        except (KeyError, ValueError, TypeError):
            return None
        pairs = ((found.ca, found.ca_key), (found.leaf, found.leaf_key))
        if any(certificate.public_key() != key.public_key() for certificate, key in pairs):
            return None
        return found

    def data(self) -> dict[str, bytes]:
        """Return the data of the Secret."""
        return {
            CA_BUNDLE: self.bundle_pem(),
            CA_KEY: _pem(self.ca_key),
            CERTIFICATE: self.leaf.public_bytes(serialization.Encoding.PEM),
            CERTIFICATE_KEY: _pem(self.leaf_key),
        }

    def bundle_pem(self) -> bytes:
        """Return the caBundle."""
        return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in self.bundle)


def what_to_do(
    found: Certificates | None, names: Iterable[str], now: datetime, lifetimes: Lifetimes = DEFAULT_LIFETIMES
) -> Decision:
    """Decide on a renewal; the caller performs it with ``renewed``."""
    if found is None or _is_past(found.ca, now) or now >= _middle(found.ca, lifetimes):
        return Decision.NEW_CA
    if _is_past(found.leaf, now) or _names_of(found.leaf) != _spelled(names) or not _signed_by(found):
        return Decision.NEW_LEAF  # the API server can't connect with this certificate, so there is no reason to wait
    if not _is_from(found.leaf, found.ca):
        trusted_since = _born(found.ca, lifetimes) + lifetimes.settle
        return Decision.NEW_LEAF if now >= trusted_since else Decision.KEEP
    if now >= _middle(found.leaf, lifetimes):
        return Decision.NEW_LEAF
    return Decision.KEEP


def renewed(
    found: Certificates | None,
    decision: Decision,
    names: Iterable[str],
    now: datetime,
    lifetimes: Lifetimes = DEFAULT_LIFETIMES,
) -> Certificates:
    """Return the content of the Secret after a decision."""
    if decision is Decision.NEW_CA:
        key = ec.generate_private_key(ec.SECP256R1())
        ca = _new_ca(key, now, lifetimes)
        if found is None or _is_past(found.ca, now) or _is_past(found.leaf, now) or not _signed_by(found):
            return _with_new_leaf((ca,), key, names, now, lifetimes)
        # Keep the serving certificate of the old CA until every API server trusts the new one.
        return Certificates((ca, *_still_needed(found.bundle, now)), key, found.leaf, found.leaf_key)
    if decision is Decision.NEW_LEAF and found is not None:
        moved_on = now >= _born(found.ca, lifetimes) + lifetimes.leaf
        bundle = (found.ca,) if moved_on else (found.ca, *_still_needed(found.bundle[1:], now))
        return _with_new_leaf(bundle, found.ca_key, names, now, lifetimes)
    if found is None:
        raise ValueError(f"{decision} needs certificates to begin with")
    return found


def _with_new_leaf(
    bundle: tuple[x509.Certificate, ...],
    ca_key: ec.EllipticCurvePrivateKey,
    names: Iterable[str],
    now: datetime,
    lifetimes: Lifetimes,
) -> Certificates:
    key = ec.generate_private_key(ec.SECP256R1())
    return Certificates(bundle, ca_key, _new_leaf(key, bundle[0], ca_key, tuple(names), now, lifetimes), key)


def _new_ca(key: ec.EllipticCurvePrivateKey, now: datetime, lifetimes: Lifetimes) -> x509.Certificate:
    # The serial number in the name distinguishes two generations: verifiers first find an issuer by name.
    serial = x509.random_serial_number()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{_CA_NAME} {serial:x}"[:64])])
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(serial)
        .not_valid_before(_utc(now - lifetimes.skew))
        .not_valid_after(_utc(now + lifetimes.ca))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )


def _new_leaf(
    key: ec.EllipticCurvePrivateKey,
    ca: x509.Certificate,
    ca_key: ec.EllipticCurvePrivateKey,
    names: tuple[str, ...],
    now: datetime,
    lifetimes: Lifetimes,
) -> x509.Certificate:
    issuer = ca.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "mailboat-operator")]))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_utc(max(now - lifetimes.skew, ca.not_valid_before_utc)))
        .not_valid_after(_utc(min(now + lifetimes.leaf, ca.not_valid_after_utc)))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_general_name(each) for each in names]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer), critical=False)
        .sign(ca_key, hashes.SHA256())
    )


def _usage(digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        encipher_only=False,
        decipher_only=False,
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _spelled(names: Iterable[str]) -> frozenset[str]:
    """Normalize names to the form read from a certificate: an IPv6 address has several spellings."""
    return frozenset(str(_general_name(name).value) for name in names)


def _names_of(certificate: x509.Certificate) -> frozenset[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return frozenset()
    hosts = names.get_values_for_type(x509.DNSName)
    return frozenset(hosts) | {str(each) for each in names.get_values_for_type(x509.IPAddress)}


def _is_from(leaf: x509.Certificate, ca: x509.Certificate) -> bool:
    try:
        leaf.verify_directly_issued_by(ca)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _signed_by(found: Certificates) -> bool:
    """Return whether a trusted CA signed the serving certificate."""
    return any(_is_from(found.leaf, ca) for ca in found.bundle)


def _still_needed(bundle: Iterable[x509.Certificate], now: datetime) -> tuple[x509.Certificate, ...]:
    return tuple(each for each in bundle if not _is_past(each, now))


def _born(certificate: x509.Certificate, lifetimes: Lifetimes) -> datetime:
    return certificate.not_valid_before_utc + lifetimes.skew


def _middle(certificate: x509.Certificate, lifetimes: Lifetimes) -> datetime:
    born = _born(certificate, lifetimes)
    return born + (certificate.not_valid_after_utc - born) / 2


def _is_past(certificate: x509.Certificate, now: datetime) -> bool:
    return now >= certificate.not_valid_after_utc


def _utc(time: datetime) -> datetime:
    """Truncate to whole seconds, the resolution of certificates."""
    return time.astimezone(UTC).replace(microsecond=0)


def _key(pem: bytes) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pem, password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError("not a key on an elliptic curve")
    return key


def _pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
