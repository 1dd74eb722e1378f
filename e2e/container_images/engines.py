"""The programs that turn a Dockerfile into an image: docker or podman where one runs, else buildah, a plain program.

buildah pulls nothing: it builds on a base made here from Debian's packages (``debian_base``), so that a machine without
a registry builds the same Dockerfiles.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from container_images.debian_base import debian_base
from mailboat_devservers.cache import cache_dir
from programs import run

# An attestation makes an index of an image, which a node can't load from a file; and a builder of its user's own keeps
# what it builds to itself, so that there would be nothing to save.
_PLAIN_IMAGES = {"BUILDX_NO_DEFAULT_ATTESTATIONS": "1", "BUILDX_BUILDER": "default"}
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


@dataclass(frozen=True, slots=True)
class Image:
    """A name that pods can use once the archive is loaded into their node."""

    tag: str
    archive: Path


class Engine(Protocol):
    def base(self, dockerfile: Path) -> Image | None:
        """What stands in for the Dockerfile's BASE; None: the Dockerfile's own choice, which is pulled."""
        ...

    def build(self, tag: str, context: Path, arguments: Mapping[str, Image], archive: Path) -> None:
        """Build the context's Dockerfile, with these images for its arguments, and write it to the archive."""
        ...

    def forget(self, tag: str) -> None:
        """Let go of an image, if it has it."""


@dataclass(frozen=True, slots=True)
class ContainerEngine:
    """docker or podman."""

    program: str

    def base(self, dockerfile: Path) -> Image | None:
        return None

    def build(self, tag: str, context: Path, arguments: Mapping[str, Image], archive: Path) -> None:
        for image in arguments.values():
            run(self.program, "load", "--input", str(image.archive))
        run(self.program, "build", "--tag", tag, *_build_arguments(arguments), str(context), env=_PLAIN_IMAGES)
        run(self.program, "save", "--output", str(archive), tag)

    def forget(self, tag: str) -> None:
        subprocess.run([self.program, "rmi", tag], capture_output=True, check=False)


class Buildah:
    """buildah with a store of its own in the cache, so that layers are built once. ``check_machine`` asks for it."""

    def __init__(self) -> None:
        store = cache_dir() / "buildah"
        self._buildah = ["buildah", "--root", str(store / "root"), "--runroot", str(store / "run")]

    def base(self, dockerfile: Path) -> Image | None:
        if "FROM scratch" in dockerfile.read_text():
            return None
        tag, archive = debian_base(self._buildah)
        return Image(tag, archive)

    def build(self, tag: str, context: Path, arguments: Mapping[str, Image], archive: Path) -> None:
        for image in arguments.values():
            self._have(image)
        # runc: buildah's default runtime refuses machines with both versions of control groups.
        options = ["--pull-never", "--network=host", "--layers", "--force-rm", f"--runtime={shutil.which('runc')}"]
        if _CERTIFICATES.exists():
            # The machine's own authorities, while building only: its way out may be signed by one of them.
            options += ["--volume", f"{_CERTIFICATES}:{_CERTIFICATES}:ro"]
        run(*self._buildah, "bud", *options, *_build_arguments(arguments), "--tag", tag, str(context))
        run(*self._buildah, "push", "--quiet", tag, f"docker-archive:{archive}:{tag}")

    def forget(self, tag: str) -> None:
        subprocess.run([*self._buildah, "rmi", tag], capture_output=True, check=False)

    def _have(self, image: Image) -> None:
        known = subprocess.run(
            [*self._buildah, "inspect", "--type", "image", image.tag], capture_output=True, check=False
        )
        if known.returncode != 0:
            run(*self._buildah, "pull", "--quiet", f"docker-archive:{image.archive}")


def _build_arguments(images: Mapping[str, Image]) -> list[str]:
    return [f"--build-arg={name}={image.tag}" for name, image in images.items()]
