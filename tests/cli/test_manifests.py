"""Manifests from files: search, limits, and errors with file, line or field."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from mailboat.errors import ConfigError
from mailboat.runtime.manifest_files import LARGEST_FILE, load
from support.cli import relay_manifest, subscription_manifest

URL = "postgresql://db/shop"


def written(folder: Path, text: str | bytes, name: str = "m.yaml") -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def manifest(*documents: object) -> str:
    return yaml.safe_dump_all(documents or [relay_manifest(URL), subscription_manifest()])


def refusal(*paths: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load(paths)
    return str(caught.value)


def test_files_and_folders_are_read_in_order_and_only_manifests_of_them(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    written(folder, manifest(subscription_manifest("b")), "2.yml")
    written(folder, json.dumps(subscription_manifest("a")), "1.json")
    written(folder, "not a manifest", "README.md")
    relay = written(tmp_path, manifest(relay_manifest(URL)))
    found = load([folder, relay])
    assert [each.metadata.name for each in found.subscriptions] == ["a", "b"]
    assert [each.metadata.name for each in found.relays] == ["orders"]


def test_empty_documents_and_a_byte_order_mark_do_not_matter(tmp_path):
    path = written(tmp_path, b"\xef\xbb\xbf---\n---\n" + manifest().encode() + b"\n---\n")
    assert len(load([path]).relays) == 1


def test_a_list_as_kubectl_prints_it_is_a_manifest(tmp_path):
    items = {"apiVersion": "v1", "kind": "List", "items": [relay_manifest(URL), subscription_manifest()]}
    assert len(load([written(tmp_path, json.dumps(items), "m.json")]).subscriptions) == 1


@pytest.mark.parametrize(
    ("text", "place", "complaint"),
    [
        ("a: [1, 2", "m.yaml, line 1, column 9", "not YAML: expected ',' or ']'"),
        ("a: 1\n\tb: 2", "m.yaml, line 2, column 1", "YAML wants spaces, not tabs"),
        ("a: *nobody", "m.yaml, line 1, column 4", "undefined alias"),
        ("a: !!python/object/apply:os.system [ls]", "m.yaml, line 1, column 4", "could not determine a constructor"),
        ("kind: a\nkind: b", "m.yaml, line 2, column 1", "kind is there twice"),
        ("a: &a [*a]", "m.yaml, line 1, column 4", "an alias refers to itself"),
        ("a: 2026-02-31", "m.yaml", "a value can't be read"),
        ("[" * 5000, "m.yaml", "nested too deeply"),
        (b"a: \x01", "m.yaml", "not YAML"),
        (b"\xff\xfe", "m.yaml", "not text in UTF-8"),
        ("# " + "x" * LARGEST_FILE, "m.yaml", "larger than 1 MiB"),
        ("just words", "m.yaml", "is not a resource"),
        (gzip.compress(bytes(100_000_000), 1, mtime=0), "m.yaml", "can't be read: it has more than 4096 KiB"),
        (gzip.compress(b"a: 1", mtime=0)[:-9], "m.yaml", "can't be read: it is gzip that ends too early"),
        (gzip.compress(b"x: " + b"y" * 2_000_000, mtime=0), "m.yaml, line 1, column 1", "not JSON"),
        (gzip.compress(b"[" + b"{}," * 1_000_000 + b"{}]", mtime=0), "m.yaml", "has more values than 400000"),
    ],
)
def test_an_unreadable_manifest_is_reported_with_its_position(tmp_path, text, place, complaint):
    message = refusal(written(tmp_path, text))
    assert f"{tmp_path}/{place}" in message
    assert complaint in message


def test_broken_json_is_reported_with_its_position(tmp_path):
    assert "m.json, line 2, column 6: not JSON" in refusal(written(tmp_path, '{\n"a": }', "m.json"))


def test_aliases_that_multiply_are_refused_before_they_do(tmp_path):
    layers = "\n".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 10)}]" for n in range(1, 12))
    assert "more than 100000 values" in refusal(written(tmp_path, f"l0: &l0 [x]\n{layers}\n"))


def test_short_aliases_are_accepted(tmp_path):
    relay, subscription = yaml.safe_dump(relay_manifest(URL)), yaml.safe_dump(subscription_manifest())
    text = subscription.replace("namespace: shop", "namespace: &ns shop\n  labels: {team: *ns}")
    assert len(load([written(tmp_path, f"{relay}---\n{text}")]).subscriptions) == 1


def test_all_problems_of_all_files_are_reported(tmp_path):
    first = written(tmp_path, manifest(relay_manifest(URL, tabel="x")), "1.yaml")
    second = written(
        tmp_path, manifest(subscription_manifest(partitions=0), subscription_manifest("x", sinc={})), "2.yaml"
    )
    message = refusal(first, second)
    assert "1.yaml: spec.outbox.tabel" in message
    assert "2.yaml, document 1: spec.partitions" in message
    assert "2.yaml, document 2: spec.sinc" in message


def test_a_file_name_over_the_limit_is_reported(tmp_path):
    assert "can't be read: File name too long" in refusal(tmp_path / ("x" * 300))


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    """A folder without any permission. If the test runs as root, its effective user is changed."""
    folder = tmp_path / "locked"
    folder.mkdir()
    written(folder, manifest())
    folder.chmod(0)
    user = os.geteuid()
    if user == 0:
        for above in (tmp_path, *tmp_path.parents[:2]):
            above.chmod(0o755)
        os.seteuid(65534)
    yield folder
    os.seteuid(user)
    folder.chmod(0o700)


def test_an_unreadable_folder_or_file_is_reported(locked):
    assert f"{locked} can't be read: Permission denied" in refusal(locked)
    assert f"{locked}/m.yaml can't be read: Permission denied" in refusal(locked / "m.yaml")


def test_a_folder_without_manifests_is_reported(tmp_path):
    assert "holds no manifest (*.yaml, *.yml, *.json)" in refusal(tmp_path)


def test_without_a_relay_there_is_nothing_to_do(tmp_path):
    assert "there is no OutboxRelay" in refusal(written(tmp_path, ""))
