"""Settings: valid values, and the messages for invalid ones."""

from __future__ import annotations

import pytest

from mailboat_operator.settings import Address, SettingsError, options, read_settings

NEEDED = {"operator_namespace": "mailboat-system", "relay_image": "mailboat-relay:1"}


def test_two_settings_are_enough() -> None:
    settings = read_settings(NEEDED)
    assert settings.webhook_certs == "self"
    assert settings.namespaces == ()
    assert settings.status_interval.seconds == 5


def test_every_setting_has_its_flag_variable_and_help() -> None:
    flags = [each.opts[0] for each in options()]
    variables = [name for each in options() for name in each.envvar or ()]
    assert len(set(flags)) == len(flags)
    assert len(set(variables)) == len(variables)
    texts = [(each.help or "").partition(" [$")[0] for each in options()]
    assert all(text.endswith(".") for text in texts)
    assert all("Required." in text or "Default:" in text or "for --webhook-certs" in text for text in texts)


def test_all_problems_are_reported_at_once_by_flag() -> None:
    given = {"status_interval": "5", "webhook_certs": "slef", "namespaces": ("Shop!",), "relay_image": "a b"}
    with pytest.raises(SettingsError) as refused:
        read_settings(given)
    lines = str(refused.value).splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "--namespace",
        "--operator-namespace",
        "--relay-image",
        "--status-interval",
        "--webhook-certs",
    ]
    assert "$POD_NAMESPACE" in lines[1]
    assert 'write "5s"' in lines[3]
    assert "self, external, off" in lines[4]


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ({"webhook_certs": "external"}, "needs --cert-dir"),
        ({"cert_dir": "certificates"}, "add that or remove it"),
        ({"webhook_listen": "9443"}, 'write ":9443"'),
        ({"health_listen": ":70000"}, 'write ":9443"'),
        ({"log_level": "loud"}, "debug, info, warning, error"),
        ({"status_interval": "10ms"}, "between 1s and 1h"),
        ({"webhook_hosts": ("no host",)}, "neither a host name nor an IP address"),
        ({"identity": "me and you"}, "is no identity"),
    ],
)
def test_a_wrong_setting_is_refused_with_a_remedy(given: dict[str, object], remedy: str) -> None:
    with pytest.raises(SettingsError) as refused:
        read_settings({**NEEDED, **given})
    assert remedy in str(refused.value)


def test_the_certificate_is_for_the_service_and_for_further_hosts() -> None:
    settings = read_settings({**NEEDED, "webhook_service": "hook", "webhook_hosts": ("127.0.0.1",)})
    assert settings.certificate_names == (
        "hook.mailboat-system.svc",
        "hook.mailboat-system.svc.cluster.local",
        "hook.mailboat-system",
        "hook",
        "127.0.0.1",
    )


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [(":9443", None, 9443), ("127.0.0.1:0", "127.0.0.1", 0), ("[::1]:80", "::1", 80)],
)
def test_addresses_are_read_and_written_alike(text: str, host: str | None, port: int) -> None:
    address = Address.parse(text)
    assert (address.host, address.port, str(address)) == (host, port, text)
