"""Certificates: verified by real TLS handshakes, through every renewal, at every moment of their lives."""

from __future__ import annotations

import socket
import ssl
import threading
from datetime import UTC, datetime, timedelta

import pytest
from cryptography import x509

from mailboat_operator.webhook.certificates import (
    CA_KEY,
    CERTIFICATE_KEY,
    Certificates,
    Decision,
    Lifetimes,
    renewed,
    what_to_do,
)
from mailboat_operator.webhook.serving_cert import CertificateUnusable, ServedCertificate

NAMES = ("hook.system.svc", "127.0.0.1")
START = datetime.now(UTC).replace(microsecond=0)
LIVES = Lifetimes()


def first(now: datetime = START) -> Certificates:
    return renewed(None, Decision.NEW_CA, NAMES, now, LIVES)


def decided(found: Certificates | None, now: datetime) -> Decision:
    return what_to_do(found, NAMES, now, LIVES)


def handshake(served: ServedCertificate, bundle: bytes, name: str = NAMES[0]) -> x509.Certificate:
    """What a client that trusts the bundle is shown; raises what the client would see."""
    trusting = ssl.create_default_context(cadata=bundle.decode())
    ours, theirs = socket.socketpair()

    def serve() -> None:
        try:
            served.context.wrap_socket(ours, server_side=True).close()
        except OSError:  # the client's side says it better
            ours.close()

    server = threading.Thread(target=serve)
    server.start()
    try:
        with trusting.wrap_socket(theirs, server_hostname=name) as connection:
            shown = connection.getpeercert(binary_form=True)
    finally:
        theirs.close()
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
    assert handshake(serving(made), made.bundle_pem(), name) == made.leaf


def test_another_name_or_another_ca_is_not_trusted() -> None:
    made = first()
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(serving(made), made.bundle_pem(), "elsewhere.system.svc")
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(serving(made), first().bundle_pem())


def test_what_is_written_is_read_again() -> None:
    made = first()
    again = Certificates.parse(made.data())
    assert again is not None
    assert again.data() == made.data()


@pytest.mark.parametrize("spoil", ["missing", "garbage", "other key", "empty"])
@pytest.mark.parametrize("key", ["ca.crt", CA_KEY, "tls.crt", CERTIFICATE_KEY])
def test_a_damaged_secret_is_made_anew(spoil: str, key: str) -> None:
    data = first().data()
    match spoil:
        case "missing":
            del data[key]
        case "garbage":
            data[key] = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"
        case "other key":
            data[key] = first().data()[key]
        case "empty":
            data[key] = b""
    found = Certificates.parse(data)
    decision = decided(found, START)
    assert decision is Decision.NEW_CA
    mended = renewed(found, decision, NAMES, START, LIVES)
    assert handshake(serving(mended), mended.bundle_pem()) == mended.leaf


def test_a_fresh_one_is_kept_and_renewed_at_half_of_its_life() -> None:
    made = first()
    assert decided(made, START) is Decision.KEEP
    assert decided(made, START + LIVES.leaf / 2 - timedelta(seconds=1)) is Decision.KEEP
    assert decided(made, START + LIVES.leaf / 2) is Decision.NEW_LEAF
    assert decided(made, START + LIVES.ca / 2) is Decision.NEW_CA
    assert decided(made, START + LIVES.ca * 2) is Decision.NEW_CA


def test_other_names_need_another_serving_certificate_of_the_same_ca() -> None:
    made = first()
    assert what_to_do(made, ("elsewhere",), START, LIVES) is Decision.NEW_LEAF
    after = renewed(made, Decision.NEW_LEAF, ("elsewhere",), START, LIVES)
    assert after.bundle == made.bundle
    assert handshake(serving(after), made.bundle_pem(), "elsewhere") == after.leaf


@pytest.mark.parametrize("host", ["2001:DB8:0:0::1", "::ffff:127.0.0.1", "hook.example.com"])
def test_a_name_in_another_spelling_is_the_same_name(host: str) -> None:
    names = (*NAMES, host)
    made = renewed(None, Decision.NEW_CA, names, START, LIVES)
    assert what_to_do(made, names, START, LIVES) is Decision.KEEP


def test_a_new_ca_is_trusted_before_it_signs_and_the_old_one_while_what_it_signed_is_valid() -> None:
    born = first()
    time = START + LIVES.ca / 2
    # The leaf that is served in the middle of the CA's life is a later one.
    old = renewed(born, Decision.NEW_LEAF, NAMES, time - LIVES.leaf / 4, LIVES)

    assert decided(old, time) is Decision.NEW_CA
    between = renewed(old, Decision.NEW_CA, NAMES, time, LIVES)
    assert between.leaf == old.leaf
    assert len(between.bundle) == 2
    assert decided(between, time) is Decision.KEEP

    time += LIVES.settle
    assert decided(between, time) is Decision.NEW_LEAF
    after = renewed(between, Decision.NEW_LEAF, NAMES, time, LIVES)
    assert after.bundle == between.bundle
    after.leaf.verify_directly_issued_by(after.ca)
    assert decided(after, time) is Decision.KEEP

    time += LIVES.leaf / 2
    assert decided(after, time) is Decision.NEW_LEAF
    later = renewed(after, Decision.NEW_LEAF, NAMES, time, LIVES)
    assert len(later.bundle) == 2  # an operator may still serve the leaf from before

    time += LIVES.leaf / 2
    last = renewed(later, decided(later, time), NAMES, time, LIVES)
    assert last.bundle == (after.ca,)


def test_over_ten_years_whatever_was_served_is_trusted_by_the_bundle_of_the_moment() -> None:
    """A leader looks once a week; an operator read the Secret up to two months ago, and serves what it read."""
    found: Certificates | None = None
    served: list[tuple[datetime, Certificates]] = []
    cas = set()
    for week in range(520):
        now = START + timedelta(weeks=week)
        decision = decided(found, now)
        if decision is not Decision.KEEP:
            found = renewed(found, decision, NAMES, now, LIVES)
        assert found is not None
        cas.add(found.ca)
        served.append((now, found))
        for read, each in served[-8:]:
            still_valid = each.leaf.not_valid_after_utc > now
            trusted = [ca for ca in found.bundle if ca.subject == each.leaf.issuer and ca.not_valid_after_utc > now]
            assert not still_valid or trusted, f"what was read at {read} is not trusted at {now}"
        assert found.leaf.not_valid_after_utc > now
        assert len(found.bundle) <= 2
    assert len(cas) >= 9


def test_a_certificate_is_changed_under_a_live_context() -> None:
    old = first()
    served = serving(old)
    assert handshake(served, old.bundle_pem()) == old.leaf
    new = renewed(old, Decision.NEW_LEAF, NAMES, START, LIVES)
    assert served.load(new.data()["tls.crt"], new.data()["tls.key"])
    assert served.ends == new.leaf.not_valid_after_utc.timestamp()
    assert not served.load(new.data()["tls.crt"], new.data()["tls.key"])
    assert handshake(served, old.bundle_pem()) == new.leaf


def test_a_pair_that_does_not_fit_leaves_the_old_certificate_in_service() -> None:
    old, other = first(), first()
    served = serving(old)
    with pytest.raises(CertificateUnusable):
        served.load(other.data()["tls.crt"], old.data()["tls.key"])
    with pytest.raises(CertificateUnusable):
        served.load(b"", b"")
    assert handshake(served, old.bundle_pem()) == old.leaf


def test_private_keys_are_in_no_repr() -> None:
    made = first()
    assert "PRIVATE KEY" not in repr(made)
