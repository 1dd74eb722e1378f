"""The programs that build a Dockerfile: docker or podman if one runs, else buildah.

buildah pulls nothing: it builds on a base made from Debian's packages (``debian_base``), so that a machine without a
registry builds the same Dockerfiles.
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

# With attestations the image becomes an index, which a node can't load from a file. A user's own builder does not store
# its images in the engine, so that `save` would not find them.
_PLAIN_IMAGES = {"BUILDX_NO_DEFAULT_ATTESTATIONS": "1", "BUILDX_BUILDER": "default"}
_CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


@dataclass(frozen=True, slots=True)
class Image:
    """A tag for pods, and the archive to load into their node."""

    tag: str
    archive: Path


class Engine(Protocol):
    def base(self, dockerfile: Path) -> Image | None:
        """Substitute for the Dockerfile's BASE, or None to pull the Dockerfile's default."""
        ...

    def build(self, tag: str, context: Path, arguments: Mapping[str, Image], archive: Path) -> None:
        """Build the context's Dockerfile with these images as arguments, and write the archive."""
        ...

    def forget(self, tag: str) -> None:
        """Delete an image from the engine, if it is there."""


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
    """buildah with its store in the cache, so that layers are built once. ``check_machine`` requires it."""

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
            self._load(image)
        # runc: buildah's default runtime refuses machines with both versions of control groups.
        options = ["--pull-never", "--network=host", "--layers", "--force-rm", f"--runtime={shutil.which('runc')}"]
        if _CERTIFICATES.exists():
            # The machine's certificate authorities, during the build only: a proxy's certificate may need them.
            options += ["--volume", f"{_CERTIFICATES}:{_CERTIFICATES}:ro"]
        run(*self._buildah, "bud", *options, *_build_arguments(arguments), "--tag", tag, str(context))
        run(*self._buildah, "push", "--quiet", tag, f"docker-archive:{archive}:{tag}")

    def forget(self, tag: str) -> None:
        subprocess.run([*self._buildah, "rmi", tag], capture_output=True, check=False)

    def _load(self, image: Image) -> None:
        inspect = [*self._buildah, "inspect", "--type", "image", image.tag]
        if subprocess.run(inspect, capture_output=True, check=False).returncode != 0:
            run(*self._buildah, "pull", "--quiet", f"docker-archive:{image.archive}")


def _build_arguments(images: Mapping[str, Image]) -> list[str]:
    return [f"--build-arg={name}={image.tag}" for name, image in images.items()]
