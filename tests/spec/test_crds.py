"""The CRDs match the models and fit an API server's rules. ``tests/api`` tests them on a server."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mailboat_spec import read_documents
from mailboat_spec.crds import definitions
from mailboat_spec.redaction import (
    NOT_THE_SECRET_ITSELF,
    PASSWORD_IN_URL,
    SECRET_NAME,
    contains_password,
    is_secret_setting,
)
from mailboat_spec.scalars import Duration
from mailboat_spec.validation_errors import field_at
from support.bad_manifests import CONSUMED, RELAY, SUBSCRIPTION

Schema = dict[str, Any]
ROOT = Path(__file__).parents[2]
DEFINITIONS = {definition.kind: definition for definition in definitions()}


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "crds" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", generator().files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_files_are_generated_from_the_models(path: Path) -> None:
    assert path.read_text() == generator().files()[path], "run `make crds`"


def fields(schema: Schema, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Schema]]:
    """Yield every field of a schema with its path."""
    for name, field in schema.get("properties", {}).items():
        yield (*path, name), field
        yield from fields(field, (*path, name))
    for inside in ("items", "additionalProperties"):
        if inside in schema:
            yield from fields(schema[inside], (*path, inside))


def all_parts(schema: Schema) -> Iterator[Schema]:
    yield schema
    for field in schema.get("properties", {}).values():
        yield from all_parts(field)
    for inside in ("items", "additionalProperties"):
        if inside in schema:
            yield from all_parts(schema[inside])


FIELDS = [
    (kind, path, field) for kind, definition in DEFINITIONS.items() for path, field in fields(definition.schema())
]
PARTS = [part for definition in DEFINITIONS.values() for part in all_parts(definition.schema())]


def test_every_field_has_a_description() -> None:
    silent = [(kind, path) for kind, path, field in FIELDS if not field.get("description", "").endswith(".")]
    assert silent == [(kind, path) for kind in DEFINITIONS for path in (("metadata",), ("metadata", "name"))]


def test_schemas_are_structural() -> None:
    for part in PARTS:
        assert not part.keys() & {"$ref", "$defs", "title", "const", "oneOf", "allOf", "not", "nullable"}
        assert "type" in part or part["x-kubernetes-int-or-string"]
        assert not ("properties" in part and "additionalProperties" in part)
        assert "anyOf" not in part or "x-kubernetes-int-or-string" in part


def test_fields_read_by_a_rule_are_bounded() -> None:
    """Without limits the API server rejects the CRD, because the estimated cost of a rule is unbounded."""
    for _, path, field in FIELDS:
        if field.get("type") == "string" and path[0] == "spec" and "enum" not in field:
            assert "maxLength" in field, path
        if field.get("type") == "array" and path[0] == "spec":
            assert "maxItems" in field, path


def test_a_status_is_never_refused_and_never_filled_in() -> None:
    for _, path, field in FIELDS:
        if path[0] == "status":
            assert not field.keys() & {"x-kubernetes-validations", "default", "pattern", "maxLength", "minimum"}, path


def test_defaults_are_the_models_defaults() -> None:
    compared = 0
    for kind, path, field in FIELDS:
        if "default" not in field or field["type"] == "object" or "items" in path:
            continue
        found = field_at(DEFINITIONS[kind].model, path)
        assert found is not None
        default = Duration.parse(field["default"]) if isinstance(found.default, Duration) else field["default"]
        assert default == found.default, path
        compared += 1
    assert compared > 25


def test_the_default_of_replicas_is_the_operators_business() -> None:
    """A default in the CRD would also set replicas of a Sidecar, which must have none."""
    (field,) = (field for _, path, field in FIELDS if path == ("spec", "replicas"))
    assert "default" not in field


@pytest.mark.parametrize("body", [RELAY, SUBSCRIPTION, CONSUMED], ids=["relay", "subscription", "consumer"])
def test_a_manifest_means_the_same_with_the_servers_defaults(body: Schema) -> None:
    filled = {**body, "spec": with_defaults(DEFINITIONS[body["kind"]].schema()["properties"]["spec"], body["spec"])}
    assert len(filled["spec"]) > len(body["spec"])
    beside = [] if body is RELAY else [("relay", RELAY)]
    assert read_documents([*beside, ("body", filled)]) == read_documents([*beside, ("body", body)])


def with_defaults(schema: Schema, value: Any) -> Any:
    """Return the value with the defaults that the API server sets."""
    if not isinstance(value, dict):
        return value
    filled = dict(value)
    for name, field in schema.get("properties", {}).items():
        if name not in filled and "default" in field:
            filled[name] = field["default"]
        if name in filled:
            filled[name] = with_defaults(field, filled[name])
    return filled


def test_lists_declare_how_they_are_merged() -> None:
    kinds = {
        path[-1]: (field.get("x-kubernetes-list-type"), field.get("x-kubernetes-list-map-keys"))
        for _, path, field in FIELDS
        if field.get("type") == "array"
    }
    assert kinds["conditions"] == ("map", ["type"])
    assert kinds["partitions"] == ("map", ["partition"])
    assert kinds["bootstrapServers"] == kinds["eventTypes"] == kinds["noneOf"] == ("set", None)
    assert kinds["env"] == ("map", ["name"])


@pytest.mark.parametrize("kind", DEFINITIONS)
def test_columns_lead_to_fields(kind: str) -> None:
    known = {path for of, path, _ in FIELDS if of == kind}
    for column in DEFINITIONS[kind].columns:
        path = tuple(re.sub(r"\[.*?\]", ".items", column["jsonPath"]).strip(".").split("."))
        assert path in known or path == ("metadata", "creationTimestamp"), column["jsonPath"]


# ---- names that the CRD rules take for secrets are secrets for the models as well -----

WORDS = st.sampled_from(
    ["sasl", "password", "Password", "PASSWORD", "secret", "token", "TOKEN", "key", "Key", "ssl", "pem", "access",
     "private", "id", "Ref", "location", "url", "cookie", "credentials", "apikey", "x", "9", "ary", "S"]
)  # fmt: skip


@given(st.lists(st.tuples(WORDS, st.sampled_from(["", ".", "-", "_"])), min_size=1, max_size=4))
def test_rules_and_models_agree_on_secrets(words: list[tuple[str, str]]) -> None:
    name = "".join(word + separator for word, separator in words)
    if re.search(SECRET_NAME, name) and not re.search(NOT_THE_SECRET_ITSELF, name):
        assert is_secret_setting(name)


@given(st.lists(st.sampled_from(["u", ":", "pw", "@", "h", "/", "?", "&", "password=", "PassWd=", "x=1", "#"])))
def test_rules_and_models_agree_on_passwords_in_urls(parts: list[str]) -> None:
    url = f"postgresql://{''.join(parts)}"
    if re.search(PASSWORD_IN_URL, url):
        assert contains_password(url)


@pytest.mark.parametrize(
    "name",
    ["sasl.password", "ssl.key.password", "ssl.key.pem", "sasl.jaas.config", "Authorization", "X-Api-Key", "Cookie",
     "PGPASSWORD", "DB_PASSWORD", "CLIENT_SECRET", "auth.token", "X-Auth-Token", "aws-access-key", "clientSecret"],
)  # fmt: skip
def test_common_names_of_secrets_are_caught_by_the_rule(name: str) -> None:
    caught = re.search(SECRET_NAME, name) is not None and re.search(NOT_THE_SECRET_ITSELF, name) is None
    assert caught
    assert is_secret_setting(name)


@pytest.mark.parametrize(
    "name", ["linger.ms", "ssl.key.location", "ssl.ca.location", "sasl.username", "client.id", "X-Secret-Name", "key"]
)
def test_names_of_other_settings_are_not(name: str) -> None:
    assert re.search(SECRET_NAME, name) is None or re.search(NOT_THE_SECRET_ITSELF, name) is not None
