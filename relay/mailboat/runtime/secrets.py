"""Where secrets come from: files as Kubernetes mounts them, or the environment. Never from a manifest, never into a log.

A secret is asked for anew whenever it is needed, and nothing is kept, so that a rotated password is in use from the next
connection on. Errors say where was looked, and never what was found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from mailboat.errors import ConfigError
from mailboat_spec import OutboxRelay, full_name

DIRECTORY_VARIABLE: Final = "MAILBOAT_SECRETS_DIR"
VARIABLE_PREFIX: Final = "MAILBOAT_SECRET"

_LARGEST: Final = 1024 * 1024
"""Bytes; Kubernetes allows no larger Secret either."""


class Secrets(Protocol):
    """Gives out secrets by the names that manifests use for them."""

    def read(self, name: str, key: str) -> str:
        """One value. Raises ``ConfigError`` that says where it was looked for."""
        ...

    def all(self, name: str) -> dict[str, str]:
        """Every key of a secret. Raises ``ConfigError`` when there is none of it."""
        ...


class SecretFiles:
    """``<folder>/<secret>/<key>``, the way a Secret is mounted into a pod."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, name: str, key: str) -> str:
        path = self._path(name, key)
        try:
            if path.stat().st_size > _LARGEST:
                raise ConfigError(
                    f"{path} is larger than 1 MiB: that is no secret. Check what --secrets-dir points to."
                )
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(_missing(name, key, [self.place(name, key)])) from None
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not text in UTF-8. Write the secret's {key} into it as plain text.") from None
        except OSError as error:
            raise ConfigError(f"{path} can't be read: {error.strerror}. Check its rights.") from error
        return text.removesuffix("\n").removesuffix("\r")

    def all(self, name: str) -> dict[str, str]:
        folder = self._path(name)
        try:
            # Kubernetes keeps its own links beside the keys, all of them beginning with two dots.
            keys = sorted(
                entry.name for entry in folder.iterdir() if entry.is_file() and not entry.name.startswith("..")
            )
        except (FileNotFoundError, NotADirectoryError):
            raise ConfigError(_missing(name, None, [self.place(name, None)])) from None
        except OSError as error:
            raise ConfigError(f"{folder} can't be read: {error.strerror}. Check its rights.") from error
        return {key: self.read(name, key) for key in keys}

    def place(self, name: str, key: str | None) -> str:
        """Where it looks, for messages."""
        return str(self._path(name, key))

    def _path(self, name: str, key: str | None = None) -> Path:
        for part in (name, key or ""):
            if "/" in part or "\\" in part or part.startswith(".."):
                raise ConfigError(
                    f"{part!r} can't be the name of a secret or of a key in one: it leads out of the folder."
                )
        return self._folder / name / key if key else self._folder / name


class SecretVariables:
    """``MAILBOAT_SECRET_<NAME>_<KEY>``, in capitals, with ``_`` for what a variable's name can't hold."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = environment

    def read(self, name: str, key: str) -> str:
        try:
            return self._environment[variable(name, key)]
        except KeyError:
            raise ConfigError(_missing(name, key, [self.place(name, key)])) from None

    def all(self, name: str) -> dict[str, str]:
        """The keys come out in small letters with dots (``sasl.password``): how they were spelled is not known here."""
        prefix = variable(name) + "_"
        found = {
            each.removeprefix(prefix).lower().replace("_", "."): value
            for each, value in self._environment.items()
            if each.startswith(prefix)
        }
        if not found:
            raise ConfigError(_missing(name, None, [self.place(name, None)]))
        return found

    def place(self, name: str, key: str | None) -> str:
        """Where it looks, for messages."""
        return f"${variable(name, key) if key else variable(name) + '_...'}"


class SecretPlaces:
    """Several places, the first one that has it wins."""

    def __init__(self, places: Sequence[SecretFiles | SecretVariables]) -> None:
        self._places = places

    def read(self, name: str, key: str) -> str:
        return self._first(name, key, lambda place: place.read(name, key))

    def all(self, name: str) -> dict[str, str]:
        return self._first(name, None, lambda place: place.all(name))

    def _first[Found](self, name: str, key: str | None, ask: Callable[[SecretFiles | SecretVariables], Found]) -> Found:
        for place in self._places:
            try:
                return ask(place)
            except ConfigError as error:
                if error.__cause__ is not None or not str(error).startswith(_missing(name, key, [])[:20]):
                    raise
        raise ConfigError(_missing(name, key, [place.place(name, key) for place in self._places]))
