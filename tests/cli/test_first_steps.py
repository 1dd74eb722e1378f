"""Commands that need no server: no database, no Secret, no broker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from jsonschema import Draft202012Validator

from mailboat.cli.main import main
from support.cli import relay_manifest, subscription_manifest

ROOT = Path(__file__).parents[2]
RELAY = relay_manifest("postgresql://db/shop")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MAILBOAT_MANIFESTS", raising=False)
    return tmp_path


def mailboat(*arguments: str, **settings: str) -> Result:
    given = settings.pop("input", None)
    return CliRunner(env=settings).invoke(main, arguments, input=given, prog_name="mailboat")


@pytest.mark.parametrize("sink", ["log", "kafka", "pubsub", "pull"])
def test_a_first_manifest_is_valid_and_never_overwrites(here: Path, sink: str) -> None:
    told = mailboat("init", "--name", "billing", "--sink", sink)
    assert "export MAILBOAT_SECRET_BILLING_DB_URL=postgresql://" in told.stdout
    written = (here / "mailboat.yaml").read_text()
    checked = mailboat("check", "--strict")
    assert checked.stdout.splitlines() == [
        "OutboxRelay default/billing: ok",
        f"EventSubscription default/billing-to-{sink}: ok",
    ]
    assert (checked.exit_code, mailboat("init").exit_code) == (0, 3)
    assert (here / "mailboat.yaml").read_text() == written


def test_manifests_come_from_the_option_then_the_variable_then_this_folder(here: Path) -> None:
    assert "no manifest: give -f FILE" in mailboat("check").stderr
    texts = {name: yaml.safe_dump_all([RELAY, subscription_manifest(name)]) for name in ("given", "named", "here")}
    (here / "named.yaml").write_text(texts["named"])
    (here / "mailboat.yaml").write_text(texts["here"])
    assert "EventSubscription shop/here: ok" in mailboat("check").stdout
    assert "EventSubscription shop/named: ok" in mailboat("check", MAILBOAT_MANIFESTS="named.yaml").stdout
    given = mailboat("check", "-f", "-", MAILBOAT_MANIFESTS="named.yaml", input=texts["given"])
    assert "EventSubscription shop/given: ok" in given.stdout
    nowhere = texts["given"].replace("//db/", "//127.0.0.1:9/")
    assert mailboat("status", "-f", "-", input=nowhere).exit_code == 5, "loaded twice, and read once"
    wrong = mailboat("check", "-f", "-", input="kind: [")
    assert (wrong.exit_code, "standard input, line 1" in wrong.stderr) == (3, True)
    assert mailboat("run", "--follow", "-f", "-").exit_code == 2


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"filter": {"eventTypes": ["^order"]}}, 'eventTypes: "^order" looks like a regular expression'),
        ({"filter": {"eventTypes": [r"order\..*"]}}, "looks like a regular expression"),
        ({"filter": {"eventTypes": [".*"]}}, "only types that begin with a dot: write *"),
        ({"filter": {"eventTypes": ["order.%"]}}, "has a %"),
        ({"filter": {"eventTypes": ["order.a, order.b"]}}, "one list entry per pattern"),
        ({"filter": {"aggregateTypes": [" order"]}}, "begins or ends with a space"),
        ({"filter": {"eventTypes": ["order.*", "*.paid", "a?c"]}}, None),
    ],
)
def test_a_filter_that_matches_nothing_is_warned_about(
    here: Path, changes: dict[str, Any], complaint: str | None
) -> None:
    (here / "mailboat.yaml").write_text(yaml.safe_dump_all([RELAY, subscription_manifest(**changes)]))
    checked = mailboat("check")
    assert checked.exit_code == 0
    assert (complaint or "") in checked.stderr
    assert mailboat("check", "--strict").exit_code == (3 if complaint else 0)


@pytest.mark.parametrize(
    ("event", "why_not"),
    [
        (["order.placed", "--aggregate-type", "order", "--tag", "eu"], None),
        (["invoice.sent", "--aggregate-type", "order", "--tag", "eu"], "eventTypes: order.*"),
        (["order.placed", "--tag", "eu"], "aggregateTypes: order"),
        (["order.placed", "--aggregate-type", "order"], "tags.allOf: eu missing"),
        (["order.placed", "--aggregate-type", "order", "--tag", "eu", "--tag", "test"], "tags.noneOf: has test"),
    ],
)
def test_match_reports_which_subscriptions_match_an_event_and_why_not(
    here: Path, event: list[str], why_not: str | None
) -> None:
    wanted = {"eventTypes": ["order.*"], "aggregateTypes": ["order"], "tags": {"allOf": ["eu"], "noneOf": ["test"]}}
    (here / "mailboat.yaml").write_text(yaml.safe_dump_all([RELAY, subscription_manifest(filter=wanted)]))
    result = mailboat("match", *event)
    cells = result.stdout.splitlines()[1].split(maxsplit=2)
    assert cells == (["shop/to-log", "no", why_not] if why_not else ["shop/to-log", "yes"])
    assert result.exit_code == bool(why_not)


def test_the_schema_for_editors_takes_the_examples_and_finds_a_wrong_field() -> None:
    schema = json.loads(mailboat("schema").stdout)
    Draft202012Validator.check_schema(schema)
    editor = Draft202012Validator(schema)
    for path in sorted((ROOT / "examples").rglob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text()):
            if str(document.get("apiVersion")).startswith("mailboat.dev/"):
                editor.validate(document)
    wrong = subscription_manifest(partitons=4, partitions=0)
    found = {error.message for error in editor.iter_errors(wrong)}
    assert any("'partitons' was unexpected" in message for message in found), found
    assert any("0 is less than the minimum" in message for message in found), found


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands(shell: str) -> None:
    script = mailboat("completion", shell).stdout
    assert f"_MAILBOAT_COMPLETE={shell}_complete" in script
    if shell == "bash":
        program = Path(sys.executable).with_name("mailboat")
        asked = f'COMP_WORDS=(mailboat sta); COMP_CWORD=1; _mailboat_completion {program}; echo "${{COMPREPLY[@]}}"'
        done = subprocess.run(
            ["bash", "-c", f"{script}\n{asked}"], capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stdout.split() == ["status"]
