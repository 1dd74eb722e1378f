"""Certificates: verified by real TLS handshakes, through every renewal, at every moment of their lives."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509

from mailboat_operator.webhook.certificates import Certificates, Lifetimes, renewed
from mailboat_operator.webhook.serving_cert import CertificateUnusable, ServedCertificate

NAMES = ("hook.system.svc", "127.0.0.1")
START = datetime.now(UTC).replace(microsecond=0)
LIFETIMES = Lifetimes()


def after(found: Certificates | None, now: datetime, names: Iterable[str] = NAMES) -> Certificates:
    """Return the content of the Secret after a renewal that is due."""
    changed = renewed(found, names, now, LIFETIMES)
    assert changed is not None
    return changed


def first(now: datetime = START) -> Certificates:
    return after(None, now)


def is_kept(found: Certificates, now: datetime, names: Iterable[str] = NAMES) -> bool:
    return renewed(found, names, now, LIFETIMES) is None


def handshake(served: ServedCertificate, bundle: bytes, name: str = NAMES[0]) -> x509.Certificate:
    """Return the certificate that a client with this bundle receives. Raise the client's error."""
    context = ssl.create_default_context(cadata=bundle.decode())
    server_socket, client_socket = socket.socketpair()

    def serve() -> None:
        try:
            served.context.wrap_socket(server_socket, server_side=True).close()
        except OSError:  # the client raises the more precise error
            server_socket.close()

    server = threading.Thread(target=serve)
    server.start()
    try:
        with context.wrap_socket(client_socket, server_hostname=name) as connection:
            shown = connection.getpeercert(binary_form=True)
    finally:
        client_socket.close()
        server.join()
    assert shown is not None
    return x509.load_der_x509_certificate(shown)


def serving(certificates: Certificates) -> ServedCertificate:
    served = ServedCertificate()
    served.load(certificates.data()["tls.crt"], certificates.data()["tls.key"])
    return served


@pytest.mark.parametrize("name", NAMES)
def test_a_client_that_trusts_the_bundle_connects_by_every_name(name: str) -> None:
    made = first()
    assert handshake(serving(made), made.bundle_pem(), name) == made.served.certificate


def test_another_name_or_another_certificate_is_not_trusted() -> None:
    made = first()
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(serving(made), made.bundle_pem(), "elsewhere.system.svc")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(serving(made), first().bundle_pem())


def test_certificates_survive_a_round_trip() -> None:
    made = first()
    again = Certificates.parse(made.data())
    assert again is not None
    assert again.data() == made.data()


@pytest.mark.parametrize("spoil", ["missing", "garbage", "of another one", "empty"])
@pytest.mark.parametrize("key", ["ca.crt", "tls.crt", "tls.key", "next.crt", "next.key"])
def test_a_damaged_secret_is_repaired_at_once(spoil: str, key: str) -> None:
    created = START - LIFETIMES.certificate / 2
    data = after(first(created), START).data()
    match spoil:
        case "missing":
            del data[key]
        case "garbage":
            data[key] = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
        case "of another one":
            data[key] = after(first(created), START).data()[key]
        case "empty":
            data[key] = b""
    found = Certificates.parse(data)
    if (key, spoil) == ("next.crt", "missing"):
        assert found is not None, "the served certificate is usable"
        assert found.successor is None
        return
    repaired = after(found, START)
    while (again := renewed(repaired, NAMES, START, LIFETIMES)) is not None:
        repaired = again
    assert handshake(serving(repaired), repaired.bundle_pem()) == repaired.served.certificate


def test_a_certificate_is_kept_for_half_of_its_life() -> None:
    made = first()
    assert is_kept(made, START)
    assert is_kept(made, START + LIFETIMES.certificate / 2 - timedelta(seconds=1))
    assert not is_kept(made, START + LIFETIMES.certificate / 2)


def test_other_names_need_another_certificate_at_once_and_the_old_one_stays_trusted() -> None:
    made = first()
    assert not is_kept(made, START, ("elsewhere",))
    moved = after(made, START, ("elsewhere",))
    assert handshake(serving(moved), moved.bundle_pem(), "elsewhere") == moved.served.certificate
    assert handshake(serving(made), moved.bundle_pem()) == made.served.certificate


@pytest.mark.parametrize("host", ["2001:DB8:0:0::1", "::ffff:127.0.0.1", "hook.example.com"])
def test_a_name_in_another_spelling_is_the_same_name(host: str) -> None:
    names = (*NAMES, host)
    assert is_kept(after(None, START, names), START, names)


def test_a_successor_is_trusted_before_it_is_served_and_the_old_one_until_it_expires() -> None:
    old = first(START - LIFETIMES.certificate / 2)
    between = after(old, START)
    assert between.served == old.served
    assert len(between.trusted) == 2
    assert is_kept(between, START + LIFETIMES.settle - timedelta(seconds=1))

    time = START + LIFETIMES.settle
    changed = after(between, time)
    assert changed.trusted == between.trusted
    assert (changed.served, changed.successor) == (between.successor, None)
    assert is_kept(changed, time)
    assert handshake(serving(changed), between.bundle_pem()) == changed.served.certificate

    last = after(changed, time + LIFETIMES.certificate / 2)
    assert old.served.certificate not in last.trusted
    assert len(last.trusted) == 2


def test_a_served_certificate_that_expired_is_replaced_by_its_successor_at_once() -> None:
    between = after(first(), START + LIFETIMES.certificate - timedelta(seconds=10))
    assert after(between, START + LIFETIMES.certificate).served == between.successor


def test_a_secret_of_a_certificate_authority_is_replaced_and_the_authority_stays_trusted() -> None:
    authority = first().served.certificate
    found = replace(first(), trusted=(authority,))
    replaced = after(found, START)
    assert replaced.trusted == (replaced.served.certificate, authority)
    assert is_kept(replaced, START)


def test_over_ten_years_whatever_was_served_is_trusted_by_the_bundle_of_the_moment() -> None:
    """The leader rotates once a week. An operator serves a certificate that it read up to two months ago."""
    found = first()
    served: list[tuple[datetime, x509.Certificate]] = []
    for week in range(520):
        now = START + timedelta(weeks=week)
        trusted_before = found.trusted
        found = renewed(found, NAMES, now, LIFETIMES) or found
        assert found.served.certificate in trusted_before, "served before the API server could trust it"
        served.append((now, found.served.certificate))
        for read, each in served[-8:]:
            still_valid = each.not_valid_after_utc > now
            assert not still_valid or each in found.trusted, f"what was read at {read} is not trusted at {now}"
        assert found.served.certificate.not_valid_after_utc > now
        assert len(found.trusted) <= 2
    assert len({certificate for _, certificate in served}) >= 70


def test_a_certificate_is_changed_under_a_live_context() -> None:
    old = first()
    served = serving(old)
    assert handshake(served, old.bundle_pem()) == old.served.certificate
    new = first()
    assert served.load(new.data()["tls.crt"], new.data()["tls.key"])
    assert served.ends == new.served.certificate.not_valid_after_utc.timestamp()
    assert not served.load(new.data()["tls.crt"], new.data()["tls.key"])
    assert handshake(served, new.bundle_pem()) == new.served.certificate


def test_a_pair_that_does_not_fit_leaves_the_old_certificate_in_service() -> None:
    old, other = first(), first()
    served = serving(old)
    with pytest.raises(CertificateUnusable):
        served.load(other.data()["tls.crt"], old.data()["tls.key"])
    with pytest.raises(CertificateUnusable):
        served.load(b"", b"")
    assert handshake(served, old.bundle_pem()) == old.served.certificate


def test_private_keys_are_in_no_repr() -> None:
    made = first()
    assert "PRIVATE KEY" not in repr(made)
