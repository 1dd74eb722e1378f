"""Secrets from files as Kubernetes mounts them, or from the environment; never from a manifest, never in a log.

A secret is read each time it is needed and never cached, so the next connection uses a rotated password. Errors name
the places searched, never the values found.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from mailboat.errors import ConfigError, SecretMissing
from mailboat_spec import OutboxRelay, full_name

DIRECTORY_VARIABLE: Final = "MAILBOAT_SECRETS_DIR"

_LARGEST: Final = 1024 * 1024
"""In bytes; Kubernetes has the same limit for a Secret."""


class Secrets:
    """Secrets by the names used in manifests.

    A folder, if there is one, has precedence: ``<folder>/<secret>/<key>``, the way a Secret is mounted into a pod. Then
    follow variables: ``MAILBOAT_SECRET_<NAME>_<KEY>``, in capitals, with ``_`` for characters not allowed in a name.
    """

    def __init__(self, folder: Path | None, environment: Mapping[str, str]) -> None:
        self._folder = folder
        self._environment = environment

    def read(self, name: str, key: str) -> str:
        """Return one value. Raise ``ConfigError`` with the places searched."""
        variable = _variable(name, key)
        places, remedy = f"${variable}", f"it, or into {name}/{key} of a folder that --secrets-dir names"
        if self._folder is not None:
            path = _path(self._folder, name, key)
            if (found := _read_file(path)) is not None:
                return found
            places, remedy = f"{path} and {places}", "one of them"
        if (found := self._environment.get(variable)) is not None:
            return found
        raise SecretMissing(
            f"key {key} of secret {name} was not found. Looked for {places}. Put the value into {remedy}."
        )

    def all(self, name: str) -> dict[str, str]:
        """Return all keys of a secret. Raise ``ConfigError`` if there are none.

        Keys from variables are in lower case with dots (``sasl.password``): variables lose the spelling.
        """
        prefix = _variable(name, "")
        places, remedy = f"${prefix}...", f"it, or into {name}/ of a folder that --secrets-dir names"
        if self._folder is not None:
            path = _path(self._folder, name)
            if found := _read_folder(path):
                return found
            places, remedy = f"{path}{os.sep} and {places}", "one of them"
        found = {
            variable.removeprefix(prefix).lower().replace("_", "."): value
            for variable, value in self._environment.items()
            if variable.startswith(prefix)
        }
        if not found:
            raise SecretMissing(f"secret {name} was not found. Looked for {places}. Put its keys into {remedy}.")
        return found


def _path(folder: Path, *parts: str) -> Path:
    for part in parts:
        if not part or "/" in part or "\\" in part or part.startswith(".."):
            raise ConfigError(f"{part!r} can't name a secret, nor a key of one: use letters, digits, '-', '_', '.'.")
    return folder.joinpath(*parts)


def _read_file(path: Path) -> str | None:
    try:
        if path.stat().st_size > _LARGEST:
            raise ConfigError(f"{path} is larger than 1 MiB: that is no secret. Check what --secrets-dir names.")
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not text in UTF-8. Write the secret's value into it as plain text.") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}. Check what it is, and its rights.") from error
    return text.removesuffix("\n").removesuffix("\r")  # added by an editor or echo, not part of the value


def _read_folder(folder: Path) -> dict[str, str]:
    try:
        # Kubernetes keeps internal links beside the keys; their names begin with two dots.
        # A missing optional Secret is an empty folder.
        files = sorted(file for file in folder.iterdir() if file.is_file() and not file.name.startswith(".."))
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ConfigError(f"{folder} can't be read: {error.strerror}. Check its rights.") from error
    return {file.name: value for file in files if (value := _read_file(file)) is not None}


def _variable(name: str, key: str) -> str:
    return re.sub(r"[^A-Z0-9]", "_", f"MAILBOAT_SECRET_{name}_{key}".upper())


def secrets_folder(directory: Path | None, environment: Mapping[str, str], *, must_exist: bool = False) -> Path | None:
    """Return the secrets folder. ``must_exist``: raise ``ConfigError`` if it is missing, which is probably a typo."""
    folder = directory or (Path(named) if (named := environment.get(DIRECTORY_VARIABLE)) else None)
    if must_exist and folder is not None and not folder.is_dir():
        named = "--secrets-dir" if directory is not None else f"${DIRECTORY_VARIABLE}"
        raise ConfigError(f"{named}: there is no folder {folder}. Create it, or name the one that has the secrets.")
    return folder


def find_secrets(directory: Path | None, environment: Mapping[str, str]) -> Secrets:
    return Secrets(secrets_folder(directory, environment), environment)


def database_url(relay: OutboxRelay, secrets: Secrets) -> str:
    """Return the URL of a relay's database, as the manifest or the secret has it now."""
    database = relay.spec.database
    if database.url is not None:
        _refuse_foreign_scheme(database.url, f"OutboxRelay {full_name(relay)}: spec.database.url")
        return database.url
    assert database.url_secret_ref is not None, "the spec demands one of the two"
    reference, field = database.url_secret_ref, f"OutboxRelay {full_name(relay)}: spec.database.urlSecretRef"
    try:
        found = secrets.read(reference.name, reference.key).strip()
    except ConfigError as error:
        raise type(error)(f"{field}: {error}") from error
    where = f"{field}: key {reference.key} of secret {reference.name}"
    if not found:  # libpq would connect to the local server
        raise ConfigError(
            f"{where} is empty. Write the database's URL into it: postgresql://user:password@host:5432/dbname"
        )
    _refuse_foreign_scheme(found, where)
    return found


def _refuse_foreign_scheme(url: str, where: str) -> None:
    """Raise ``ConfigError`` for a URL of SQLAlchemy, JDBC or another database, without repeating it."""
    scheme = url.partition("://")[0].lower()
    if scheme.startswith("jdbc:"):
        raise ConfigError(f"{where} is a URL of JDBC. Write it without jdbc:, with user and password before the host.")
    if "+" in scheme and scheme.startswith(("postgresql+", "postgres+")):
        raise ConfigError(f"{where} is a URL of SQLAlchemy. Leave out +{scheme.partition('+')[2]}: postgresql://...")
    if "://" in url and scheme.isalnum() and scheme not in ("postgresql", "postgres"):
        raise ConfigError(f"{where} begins with {scheme}://, and Mailboat works on PostgreSQL: postgresql://...")
