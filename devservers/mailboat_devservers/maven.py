"""Fetch jars through Maven, for the parts that are published only there."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from mailboat_devservers.errors import PartMissing

_PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1"


def copy_artifact(coordinates: str, into: Path) -> Path:
    """Copy one artifact without its dependencies into the folder and return its path."""
    _maven(coordinates, f"{_PLUGIN}:copy", f"-Dartifact={coordinates}", f"-DoutputDirectory={into}")
    return next(into.glob(f"{coordinates.split(':')[1]}-*.jar"))


def copy_with_dependencies(pom: Path, into: Path) -> None:
    """Copy all runtime dependencies of a pom into the folder."""
    # The pom lies outside of `into`, which receives only the jars.
    arguments = ("-f", str(pom), f"{_PLUGIN}:copy-dependencies", f"-DoutputDirectory={into}", "-DincludeScope=runtime")
    _maven(pom.stem, *arguments)


def _maven(what: str, *arguments: str) -> None:
    program = shutil.which("mvn")
    if program is None:
        raise PartMissing(f"{what} is fetched by Maven, and there is no mvn on the PATH: install Maven (and a JDK 17+)")
    done = subprocess.run(
        [program, "-q", "-B", *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    if done.returncode != 0:
        reason = "\n".join(done.stdout.splitlines()[:5])
        raise PartMissing(f"Maven could not fetch {what}; is the network there?\n{reason}")
