"""Secrets from files as Kubernetes mounts them, or from the environment; never from a manifest, never in a log.

A secret is read each time it is needed and never cached, so the next connection uses a rotated password. Errors name
the places searched, never the values found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from mailboat.errors import ConfigError, SecretMissing
from mailboat_spec import OutboxRelay, full_name

DIRECTORY_VARIABLE: Final = "MAILBOAT_SECRETS_DIR"
VARIABLE_PREFIX: Final = "MAILBOAT_SECRET"

_LARGEST: Final = 1024 * 1024
"""In bytes; Kubernetes has the same limit for a Secret."""


class Secrets(Protocol):
    """Access to secrets by the names used in manifests."""

    def read(self, name: str, key: str) -> str:
        """Return one value. Raise ``ConfigError`` with the places searched."""
        ...

    def all(self, name: str) -> dict[str, str]:
        """Return all keys of a secret. Raise ``ConfigError`` if there are none."""
        ...


class SecretSource(Protocol):
    """A source of secrets. Returns None for a missing secret; raises for an unusable one."""

    def find(self, name: str, key: str) -> str | None: ...

    def find_all(self, name: str) -> dict[str, str] | None: ...

    def where(self, name: str, key: str | None) -> str:
        """Return the exact place searched, for messages."""
        ...


class SecretSources:
    """``Secrets`` from several places; the first place that has the secret wins."""

    def __init__(self, *places: SecretSource) -> None:
        self._places = places

    def read(self, name: str, key: str) -> str:
        for place in self._places:
            if (found := place.find(name, key)) is not None:
                return found
        raise SecretMissing(
            f"key {key} of secret {name} was not found. Looked for {self._where(name, key)}. Put the value into"
            f" {self._there(f'{name}/{key}')}."
        )

    def all(self, name: str) -> dict[str, str]:
        for place in self._places:
            if (found := place.find_all(name)) is not None:
                return found
        raise SecretMissing(
            f"secret {name} was not found. Looked for {self._where(name, None)}. Put its keys into"
            f" {self._there(f'{name}/')}."
        )

    def _where(self, name: str, key: str | None) -> str:
        return " and ".join(place.where(name, key) for place in self._places)

    def _there(self, path: str) -> str:
        """Return where to put the secret, including a secrets folder if none was configured and searched."""
        return "one of them" if len(self._places) > 1 else f"it, or into {path} of a folder that --secrets-dir names"


class SecretFolder:
    """``<folder>/<secret>/<key>``, the way a Secret is mounted into a pod."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, name: str, key: str) -> str | None:
        path = self._path(name, key)
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

    def find_all(self, name: str) -> dict[str, str] | None:
        folder = self._path(name)
        try:
            # Kubernetes keeps internal links beside the keys; their names begin with two dots.
            keys = sorted(file.name for file in folder.iterdir() if file.is_file() and not file.name.startswith(".."))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise ConfigError(f"{folder} can't be read: {error.strerror}. Check its rights.") from error
        found = {key: self.find(name, key) for key in keys}
        # A missing optional Secret is mounted as an empty folder.
        return {key: value for key, value in found.items() if value is not None} or None

    def where(self, name: str, key: str | None) -> str:
        return f"{self._path(name, key)}{'' if key else os.sep}"

    def _path(self, name: str, key: str | None = None) -> Path:
        for part in (name, *([key] if key is not None else [])):
            if not part or "/" in part or "\\" in part or part.startswith(".."):
                raise ConfigError(
                    f"{part!r} can't name a secret, nor a key of one: use letters, digits, '-', '_', '.'."
                )
        return self._folder / name / key if key is not None else self._folder / name


class SecretVariables:
    """``MAILBOAT_SECRET_<NAME>_<KEY>``, in capitals, with ``_`` for characters not allowed in a variable name."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def find(self, name: str, key: str) -> str | None:
        return self._environment.get(_variable(name, key))

    def find_all(self, name: str) -> dict[str, str] | None:
        """Return keys in lower case with dots (``sasl.password``), since variables lose the original spelling."""
        prefix = _variable(name, "")
        found = {
            variable.removeprefix(prefix).lower().replace("_", "."): value
            for variable, value in self._environment.items()
            if variable.startswith(prefix)
        }
        return found or None

    def where(self, name: str, key: str | None) -> str:
        return f"${_variable(name, key or '')}{'' if key else '...'}"


def _variable(name: str, key: str) -> str:
    return re.sub(r"[^A-Z0-9]", "_", f"{VARIABLE_PREFIX}_{name}_{key}".upper())


def secrets_folder(directory: Path | None, environment: Mapping[str, str]) -> Path | None:
    """Return the secrets folder if the argument or the environment names one."""
    return directory or (Path(named) if (named := environment.get(DIRECTORY_VARIABLE)) else None)


def existing_secrets_folder(directory: Path | None, environment: Mapping[str, str]) -> Path | None:
    """Return the secrets folder. Raise ``ConfigError`` if it is named but missing: probably a typo."""
    folder = secrets_folder(directory, environment)
    if folder is not None and not folder.is_dir():
        named = "--secrets-dir" if directory is not None else f"${DIRECTORY_VARIABLE}"
        raise ConfigError(f"{named}: there is no folder {folder}. Create it, or name the one that has the secrets.")
    return folder


def find_secrets(directory: Path | None, environment: Mapping[str, str]) -> Secrets:
    """Return the default places: the folder, if there is one, then the environment."""
    folder = secrets_folder(directory, environment)
    places: Sequence[SecretSource] = [SecretFolder(folder)] if folder is not None else []
    return SecretSources(*places, SecretVariables(environment))


def database_url(relay: OutboxRelay, secrets: Secrets) -> Callable[[], str]:
    """Return a function that reads the URL of a relay's database; it is called for every connection."""
    database = relay.spec.database

    def url() -> str:
        if database.url is not None:
            refuse_foreign_scheme(database.url, f"OutboxRelay {full_name(relay)}: spec.database.url")
            return database.url
        assert database.url_secret_ref is not None, "the spec demands one of the two"
        reference = database.url_secret_ref
        try:
            found = secrets.read(reference.name, reference.key).strip()
        except ConfigError as error:
            raise type(error)(f"OutboxRelay {full_name(relay)}: spec.database.urlSecretRef: {error}") from error
        if not found:  # libpq would connect to the local server
            raise ConfigError(
                f"OutboxRelay {full_name(relay)}: spec.database.urlSecretRef: key {reference.key} of secret"
                f" {reference.name} is empty. Write the database's URL into it:"
                " postgresql://user:password@host:5432/dbname"
            )
        where = f"OutboxRelay {full_name(relay)}: spec.database.urlSecretRef: key {reference.key} of secret"
        refuse_foreign_scheme(found, f"{where} {reference.name}")
        return found

    return url


def refuse_foreign_scheme(url: str, where: str) -> None:
    """Raise ``ConfigError`` for a URL of SQLAlchemy, JDBC or another database, without repeating it."""
    scheme = url.partition("://")[0].lower()
    if scheme.startswith("jdbc:"):
        raise ConfigError(f"{where} is a URL of JDBC. Write it without jdbc:, with user and password before the host.")
    if "+" in scheme and scheme.startswith(("postgresql+", "postgres+")):
        raise ConfigError(f"{where} is a URL of SQLAlchemy. Leave out +{scheme.partition('+')[2]}: postgresql://...")
    if "://" in url and scheme.isalnum() and scheme not in ("postgresql", "postgres"):
        raise ConfigError(f"{where} begins with {scheme}://, and Mailboat works on PostgreSQL: postgresql://...")
