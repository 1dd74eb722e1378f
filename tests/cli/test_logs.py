"""Log lines: a message, its fields, and no secrets in either."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mailboat_spec.redaction import redact
from mailboat_spec.structured_logs import LogFormat, configure


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """An empty stream for log lines. The logging configuration is restored after the test."""
    root, ours = logging.getLogger(), logging.getLogger("mailboat")
    before = root.handlers[:], root.level, ours.level
    yield io.StringIO()
    root.handlers[:], root.level = before[0], before[1]
    ours.setLevel(before[2])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


log = logging.getLogger("mailboat.test")


def test_elsewhere_than_on_a_terminal_a_line_is_json(stream):
    configure("mailboat", "info", LogFormat.AUTO, stream)
    log.info("took over %d partitions", 2, extra={"relay": "a", "partitions": (1, 2)})
    line = json.loads(stream.getvalue())
    assert line["message"] == "took over 2 partitions"
    assert (line["level"], line["logger"]) == ("info", "mailboat.test")
    assert (line["relay"], line["partitions"]) == ("a", [1, 2])
    assert line["time"].endswith("Z")


def test_on_a_terminal_it_is_readable_and_in_colours(stream):
    terminal = Terminal()
    configure("mailboat", "info", LogFormat.AUTO, terminal)
    log.warning("the sink is away", extra={"error": "no broker", "tries": 3})
    line = terminal.getvalue()
    assert "the sink is away" in line
    assert 'error="no broker" tries=3' in line
    assert "\x1b[33mwarning" in line


def test_text_without_a_terminal_has_no_colours(stream):
    configure("mailboat", "info", LogFormat.TEXT, stream)
    log.info("what the server said: \x1b[31mred", extra={"x": "\x07"})
    assert "\x1b" not in stream.getvalue()
    assert "\x07" not in stream.getvalue()


def test_a_second_configuration_replaces_the_first(stream):
    configure("mailboat", "info", LogFormat.JSON, stream)
    configure("mailboat", "warning", LogFormat.JSON, stream)
    log.info("not heard")
    log.warning("heard")
    assert len(stream.getvalue().splitlines()) == 1


def test_secrets_are_redacted_everywhere(stream):
    configure("mailboat", "info", LogFormat.JSON, stream)
    try:
        raise OSError("no route to postgresql://me:hunter2@db/shop")
    except OSError:
        log.exception(
            "failed for %s",
            "amqp://u:hunter2@h",
            extra={"url": "redis://:hunter2@r", "deep": {"a": ["password=hunter2"]}},
        )
    assert "hunter2" not in stream.getvalue()
    assert json.loads(stream.getvalue())["url"] == "redis://:***@r"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("postgresql://me:p@ss/w?rd@db:5432/x", "postgresql://me:***@db:5432/x"),
        ("host=db password=hunter2 user=me", "host=db password=*** user=me"),
        ("password='two words' user=me", "password=*** user=me"),
        ('{"sasl.password": "x y"}', '{"sasl.password": ***}'),
        ("Authorization: Bearer abcdefghijklmnop", "Authorization: Bearer ***"),
        ("http://host:8080/path and me@example.com", "http://host:8080/path and me@example.com"),
        ("the password is wrong: check the Secret", "the password is wrong: check the Secret"),
        ("write Authorization: Bearer <token>", "write Authorization: Bearer <token>"),
    ],
)
def test_names_of_secrets(text, expected):
    assert redact(text) == expected


@given(st.text(st.characters(exclude_categories=["Cs", "Cc", "Zs", "Zl", "Zp"]), min_size=1))
def test_no_password_in_a_url_survives(password):
    assert redact(f"x postgresql://me:{password}@db/shop y") == "x postgresql://me:***@db/shop y"


@pytest.mark.parametrize(
    "text",
    [
        "-----BEGIN PRIVATE KEY-----\nhunter2\n-----END PRIVATE KEY-----",
        "got eyJhbGciOiJIUzI1NiJ9.hunter2.hunter2",
    ],
)
def test_keys_and_tokens_are_redacted_as_in_the_operator(text: str) -> None:
    assert "hunter2" not in redact(text)
