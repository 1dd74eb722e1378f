"""Secrets: their sources, and that no message contains one."""

from __future__ import annotations

from pathlib import Path

import pytest

from mailboat.errors import ConfigError
from mailboat.runtime.secrets import find_secrets


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "orders-db").mkdir()
    (tmp_path / "orders-db" / "url").write_text("postgresql://from-a-file\n")
    return tmp_path


def test_a_file_as_kubernetes_mounts_it(folder):
    assert find_secrets(folder, {}).read("orders-db", "url") == "postgresql://from-a-file"


def test_the_folder_may_come_from_the_environment(folder):
    environment = {"MAILBOAT_SECRETS_DIR": str(folder)}
    assert find_secrets(None, environment).read("orders-db", "url") == "postgresql://from-a-file"


def test_a_variable_stands_in_for_a_file_and_a_file_comes_first(folder):
    environment = {"MAILBOAT_SECRET_ORDERS_DB_URL": "variable", "MAILBOAT_SECRET_KAFKA_SASL_PASSWORD": "p"}
    secrets = find_secrets(folder, environment)
    assert secrets.read("orders-db", "url") == "postgresql://from-a-file"
    assert secrets.read("kafka", "sasl.password") == "p"
    assert find_secrets(None, environment).read("orders-db", "url") == "variable"


def test_a_rotated_secret_is_found_by_the_next_poll(folder):
    secrets = find_secrets(folder, {})
    secrets.read("orders-db", "url")
    (folder / "orders-db" / "url").write_text("rotated")
    assert secrets.read("orders-db", "url") == "rotated"


def test_all_keys_of_a_secret_are_read_without_the_links_of_kubernetes(folder):
    (folder / "orders-db" / "..data").mkdir()
    (folder / "orders-db" / "..version").write_text("x")
    (folder / "orders-db" / "user").write_text("me")
    assert find_secrets(folder, {}).all("orders-db") == {"url": "postgresql://from-a-file", "user": "me"}


def test_all_keys_from_the_environment_are_spelled_as_settings_are():
    environment = {"MAILBOAT_SECRET_KAFKA_SASL_PASSWORD": "p", "MAILBOAT_SECRET_OTHER_X": "y"}
    assert find_secrets(None, environment).all("kafka") == {"sasl.password": "p"}


def test_a_missing_secret_is_reported_with_all_sources(folder):
    secrets = find_secrets(folder, {})
    with pytest.raises(ConfigError) as caught:
        secrets.read("orders-db", "password")
    assert f"{folder}/orders-db/password and $MAILBOAT_SECRET_ORDERS_DB_PASSWORD" in str(caught.value)
    with pytest.raises(ConfigError, match=r"kafka/ and \$MAILBOAT_SECRET_KAFKA_\.\.\."):
        secrets.all("kafka")


def test_without_a_folder_the_error_names_the_option():
    with pytest.raises(ConfigError) as caught:
        find_secrets(None, {}).read("orders-db", "url")
    assert str(caught.value) == (
        "key url of secret orders-db was not found. Looked for $MAILBOAT_SECRET_ORDERS_DB_URL. Put the value into it,"
        " or into orders-db/url of a folder that --secrets-dir names."
    )


@pytest.mark.parametrize("name", ["../orders-db", "a/b", "..", ""])
def test_no_name_refers_to_a_path_outside_the_folder(folder, name):
    with pytest.raises(ConfigError, match="can't name a secret"):
        find_secrets(folder, {}).read(name, "url")


def test_a_binary_file_is_reported_without_its_content(folder):
    (folder / "orders-db" / "url").write_bytes(b"hunter2\xff")
    with pytest.raises(ConfigError, match="not text in UTF-8") as caught:
        find_secrets(folder, {}).read("orders-db", "url")
    assert "hunter2" not in str(caught.value)


def test_a_folder_in_place_of_a_key_is_reported(folder):
    (folder / "orders-db" / "deep").mkdir()
    with pytest.raises(ConfigError, match="can't be read: Is a directory"):
        find_secrets(folder, {}).read("orders-db", "deep")
