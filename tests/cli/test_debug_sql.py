"""``mailboat debug sql``: the statements of a relay, ready for psql."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from mailboat.store.sql import statements
from mailboat_devservers.postgres import find_postgres
from mailboat_devservers.postgres_binaries import NEWEST
from support.cli import Place, relay_manifest, subscription_manifest
from support.manifests import Manifest

FILTER = {"eventTypes": ["order.*", "50%.'off'"], "tags": {"anyOf": ["eu"]}}


def printed(place: Place, *subscriptions: Manifest) -> str:
    place.write(relay_manifest("postgresql://nobody@127.0.0.1:1/nothing"), *subscriptions)
    return place.ok("debug", "sql")


def psql(place: Place, script: str) -> str:
    binaries = find_postgres(NEWEST)
    command = [binaries.tool("psql"), "--quiet", "--no-psqlrc", "-v", "ON_ERROR_STOP=1", place.database.url]
    ran = subprocess.run(command, input=script, env=binaries.env, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.parametrize("count", [1, 2])
def test_each_statement_runs_and_has_a_plan(place: Place, count: int) -> None:
    subscriptions = [subscription_manifest(f"s{n}", filter=FILTER) for n in range(count)]
    script = printed(place, *subscriptions)
    names = {name.partition(",")[0] for name in re.findall(r"^-- name: (.*)$", script, re.MULTILINE)}
    assert names == set(statements("windows")) - {"head", "this_window", "late_arm", "occupied", "stray"}
    psql(place, f"begin;\n{script}\nrollback;")

    explained = re.sub(r"^(-- name: .*\n(?:--.*\n)*)", r"\1explain ", script, flags=re.MULTILINE)
    plans = psql(place, f"begin;\n{explained}\nrollback;")
    assert plans.count("QUERY PLAN") == script.count("-- name: ")


def test_pulled_subscriptions_have_no_statements_of_a_relay(place: Place) -> None:
    pulled = subscription_manifest("view", sink={"pull": {}})
    assert printed(place, pulled).endswith(": no subscription that a relay delivers\n")


def test_the_documentation_shows_the_printed_output(place: Place) -> None:
    script = printed(place, subscription_manifest())
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    shown = page.partition("## debug sql")[2].partition("```sql\n")[2].partition("```")[0]
    variables, _, statement = shown.partition("\n\n")
    assert statement in f"{script}\n"
    assert set(variables.splitlines()) <= set(script.splitlines())
