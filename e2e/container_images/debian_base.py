"""A substitute for python:3.12-slim and debian:bookworm-slim, made from Debian's packages if there is no registry.

It has Debian's Python 3.11 under the paths of the official image. Published images are built from the official one.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

from mailboat_devservers.cache import made_once
from mailboat_devservers.errors import PartMissing, ServerFailed
from programs import run

_SUITE = "bookworm"
_PACKAGES = ("ca-certificates", "netbase", "tzdata", "python3", "python3-venv", "python3-pip")
_NOT_NEEDED = ("usr/share/doc", "usr/share/man", "usr/share/info", "usr/share/locale", "var/cache/apt/archives")
_SCRIPT = """\
set -eu
# Debian's pip refuses to change the system's Python. An image has no other packages to protect.
rm -f /usr/lib/python3*/EXTERNALLY-MANAGED
for name in python python3; do ln -s /usr/bin/python3 "/usr/local/bin/$name"; done
ln -s /usr/bin/pip3 /usr/local/bin/pip
rm -rf /var/lib/apt/lists/* /var/log/*.log
"""
_ENVIRONMENT = ("PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG=C.UTF-8")


def debian_base(buildah: list[str]) -> tuple[str, Path]:
    """Tag and archive of the base, built on first use, which takes minutes."""
    recipe = repr((_SUITE, _PACKAGES, _NOT_NEEDED, _SCRIPT, _ENVIRONMENT))
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:16]
    tag = f"localhost/mailboat-base:{digest}"
    try:
        made = made_once(f"image-base-{digest}", lambda into: _make(buildah, tag, into))
    except ServerFailed as error:
        raise PartMissing(f"the base of all images could not be built; is the network up? {error}") from error
    return tag, made / "image.tar"


def _make(buildah: list[str], tag: str, into: Path) -> None:
    root = into / "root"
    run("debootstrap", "--variant=minbase", f"--include={','.join(_PACKAGES)}", _SUITE, str(root))
    run("chroot", str(root), "sh", "-c", _SCRIPT)
    for folder in _NOT_NEEDED:
        shutil.rmtree(root / folder, ignore_errors=True)
        (root / folder).mkdir(parents=True)
    container = run(*buildah, "from", "scratch").strip()
    run(*buildah, "copy", "--quiet", container, str(root), "/")
    environment = [argument for variable in _ENVIRONMENT for argument in ("--env", variable)]
    run(*buildah, "config", *environment, "--cmd", "python3", container)
    run(*buildah, "commit", "--quiet", "--rm", container, tag)
    run(*buildah, "push", "--quiet", tag, f"docker-archive:{into / 'image.tar'}:{tag}")
    shutil.rmtree(root)
