"""The webhook's certificates: self-signed serving certificates that all operators share in a Secret, and their renewal.

The leader creates and renews them, every operator serves the Secret's ``tls.crt``, and the API server trusts the
certificates in its ``ca.crt`` (the ``caBundle``). A serving certificate is its own trust anchor, so there is no CA, and
no key can sign a second certificate. Three rules make a renewal invisible:

- A new certificate is trusted before it is served. It joins the bundle at once as the *successor*, and replaces the
  served one only after ``Lifetimes.settle``: by then every API server has the new bundle.
- A replaced certificate is trusted until it expires. So an operator that has not read the Secret for weeks still serves
  a trusted certificate, without any coordination. (Its key is deleted at once.)
- A certificate is renewed at half of its lifetime. The other half is the reserve if the leader can't renew.
"""

import base64
import ipaddress
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from mailboat_operator.kube.client import MUTATING_WEBHOOK, Kube, SecretContent
from mailboat_operator.kube.errors import NotFound

log = logging.getLogger(__name__)

CA_BUNDLE: Final = "ca.crt"
"""Key of the Secret: the trusted certificates, the newest first."""
CERTIFICATE: Final = "tls.crt"
CERTIFICATE_KEY: Final = "tls.key"
_SUCCESSOR: Final = "next.crt"
_SUCCESSOR_KEY: Final = "next.key"


@dataclass(frozen=True, slots=True)
class Lifetimes:
    certificate: timedelta = timedelta(days=90)
    settle: timedelta = timedelta(minutes=5)
    """From the creation of a successor until it is served."""
    skew: timedelta = timedelta(minutes=10)
    """Tolerated lag of an API server's clock: certificates are valid from that long before their creation."""


@dataclass(frozen=True, slots=True)
class CertificatePair:
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def parse(cls, certificate: bytes, key: bytes) -> Self:
        """Parse PEM. Raises ``ValueError`` or ``TypeError`` if the two are unusable, or do not match."""
        private = serialization.load_pem_private_key(key, password=None)
        if not isinstance(private, ec.EllipticCurvePrivateKey):
            raise TypeError("not a key on an elliptic curve")
        pair = cls(x509.load_pem_x509_certificate(certificate), private)
        if pair.certificate.public_key() != private.public_key():
            raise ValueError("the key is of another certificate")
        return pair

    @classmethod
    def create(cls, names: Iterable[str], now: datetime, lifetimes: Lifetimes) -> Self:
        key = ec.generate_private_key(ec.SECP256R1())
        # The serial number in the name distinguishes two generations: verifiers first find an issuer by name.
        serial = x509.random_serial_number()
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"mailboat-operator {serial:x}"[:64])])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(serial)
            .not_valid_before(now - lifetimes.skew)
            .not_valid_after(now + lifetimes.certificate)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName([_general_name(each) for each in names]), critical=False)
            .sign(key, hashes.SHA256())
        )
        return cls(certificate, key)

    def pem(self) -> tuple[bytes, bytes]:
        key = self.key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return self.certificate.public_bytes(serialization.Encoding.PEM), key


@dataclass(frozen=True, slots=True)
class Certificates:
    """Parsed content of the Secret."""

    served: CertificatePair
    trusted: tuple[x509.Certificate, ...]
    successor: CertificatePair | None = None
    """Trusted, and served after ``Lifetimes.settle``."""

    @classmethod
    def parse(cls, data: Mapping[str, bytes]) -> Self | None:
        """Parse the Secret's data; None if it is unusable, for whatever reason."""
        try:
            return cls(
                served=CertificatePair.parse(data[CERTIFICATE], data[CERTIFICATE_KEY]),
                trusted=tuple(x509.load_pem_x509_certificates(data[CA_BUNDLE])),
                successor=CertificatePair.parse(data[_SUCCESSOR], data[_SUCCESSOR_KEY]) if _SUCCESSOR in data else None,
            )
        except (KeyError, ValueError, TypeError):
            return None

    def data(self) -> dict[str, bytes]:
        data = {CA_BUNDLE: self.bundle_pem()}
        data[CERTIFICATE], data[CERTIFICATE_KEY] = self.served.pem()
        if self.successor is not None:
            data[_SUCCESSOR], data[_SUCCESSOR_KEY] = self.successor.pem()
        return data

    def bundle_pem(self) -> bytes:
        return b"".join(each.public_bytes(serialization.Encoding.PEM) for each in self.trusted)


def renewed(
    found: Certificates | None, names: Iterable[str], now: datetime, lifetimes: Lifetimes
) -> Certificates | None:
    """Return the next content of the Secret; None if nothing is to be changed."""
    names = tuple(names)
    unexpired = [each for each in found.trusted if now < each.not_valid_after_utc] if found is not None else []
    if found is not None and found.successor is not None:
        created = found.successor.certificate.not_valid_before_utc + lifetimes.skew
        if now < created + lifetimes.settle and _is_usable(found, names, now):
            return None
        return replace(found, served=found.successor, successor=None)
    if found is not None and _is_usable(found, names, now):
        if now < found.served.certificate.not_valid_after_utc - lifetimes.certificate / 2:
            return None
        successor = CertificatePair.create(names, now, lifetimes)
        return Certificates(found.served, (successor.certificate, *unexpired), successor)
    # The API server can't connect with the served certificate, so there is no reason to wait.
    served = CertificatePair.create(names, now, lifetimes)
    return Certificates(served, (served.certificate, *unexpired))


def _is_usable(found: Certificates, names: Iterable[str], now: datetime) -> bool:
    """Return whether the API server can connect with the served certificate: trusted, not expired, for all names."""
    served = found.served.certificate
    expected = {str(_general_name(name).value) for name in names}  # an IPv6 address has several spellings
    return served in found.trusted and now < served.not_valid_after_utc and _names_of(served) == expected


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _names_of(certificate: x509.Certificate) -> set[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return set()
    return {str(each.value) for each in names}


@dataclass(frozen=True, slots=True)
class CertificateRotation:
    """Maintain the certificates in their Secret, and the matching caBundle.

    The bundle is published before any decision: it must reach every API server before the successor in it is served.
    Writes are conditional on the version read, and nothing is written unless something changes.
    """

    kube: Kube
    namespace: str
    secret: str
    webhook_config: str
    names: tuple[str, ...]
    lifetimes: Lifetimes = Lifetimes()
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    async def rotate(self) -> None:
        """Publish, decide, act. Safe to interrupt at any point."""
        content = await self.kube.read_secret(self.namespace, self.secret)
        found = Certificates.parse(content.data) if content is not None else None
        try:
            just_published = found is not None and await self._publish(found)
        except NotFound:
            await self._renew(content, found, False)  # operators are not ready without a certificate
            raise
        await self._renew(content, found, just_published)

    async def _renew(self, content: SecretContent | None, found: Certificates | None, just_published: bool) -> None:
        after = renewed(found, self.names, self.now(), self.lifetimes)
        if after is None:
            return
        if just_published and found is not None and after.served is found.successor:
            return  # some API servers may not trust the successor yet; wait for the next run
        if content is not None and found is None:
            log.warning("Webhook Secret unusable, recreated", extra={"secret": self.secret})
        await self.kube.write_secret(self.namespace, self.secret, content, after.data())
        valid_until = after.served.certificate.not_valid_after_utc.isoformat()
        log.info("Webhook certificates renewed", extra={"secret": self.secret, "valid_until": valid_until})
        await self._publish(after)

    async def _publish(self, certificates: Certificates) -> bool:
        """Update the caBundle. Return True if it was changed."""
        try:
            configuration = await self.kube.get(MUTATING_WEBHOOK, None, self.webhook_config)
        except NotFound as error:
            raise NotFound(
                f"there is no MutatingWebhookConfiguration {self.webhook_config}: nothing is injected. Install the "
                "chart's, name yours with --webhook-config-name, or turn the webhook off with --webhook-certs off"
            ) from error
        bundle = base64.b64encode(certificates.bundle_pem()).decode()
        webhooks = configuration.get("webhooks") or []
        if all(each["clientConfig"].get("caBundle") == bundle for each in webhooks):
            return False
        for each in webhooks:
            each["clientConfig"]["caBundle"] = bundle
        # The patch replaces the whole list, so it is conditional on the version read.
        metadata = {"resourceVersion": configuration["metadata"]["resourceVersion"]}
        body = {"metadata": metadata, "webhooks": webhooks}
        await self.kube.patch(MUTATING_WEBHOOK, None, self.webhook_config, body)
        log.info("Updated caBundle", extra={"configuration": self.webhook_config})
        return True
