"""Selection of the cluster's provider: kind and its engine's builder, or a node from source and buildah."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from cluster import Cluster
from cluster.from_source import ClusterFromSource, check_machine
from cluster.kind import KindCluster, container_engine
from container_images import RECIPES, built_by, built_image, recipes_of_checkout
from container_images.engines import Buildah, ContainerEngine, Engine, Image
from mailboat_devservers.errors import PartMissing
from mailboat_devservers.kubernetes_programs import API_PROGRAMS, NODE_PROGRAMS
from previous_release import Earlier

CHOICE = "E2E_CLUSTER"
"""Environment variable that selects the provider."""
_PAUSE = "pause"


@dataclass(frozen=True, slots=True)
class Provider:
    """Starts clusters, and builds images for them."""

    name: str
    engine: Engine
    container_engine: str | None

    @property
    def programs(self) -> tuple[str, ...]:
        """Programs to build before a cluster can start."""
        return ("kubectl", "helm", "kind") if self.container_engine else (*API_PROGRAMS, *NODE_PROGRAMS)

    @property
    def images(self) -> list[str]:
        """Images to build: those of the stories, and the pause image for a node from source."""
        used = [name for name, recipe in RECIPES.items() if recipe.on_node]
        return used if self.container_engine else [_PAUSE, *used]

    def image(self, name: str) -> Image:
        return built_image(name, self.engine)

    def earlier_images(self, earlier: Earlier) -> dict[str, Image]:
        """Operator and relay of an earlier version, under names that differ from the current ones."""
        recipes = recipes_of_checkout(earlier.folder)
        return {name: built_by(recipe, f"earlier-{name}", self.engine) for name, recipe in recipes.items()}

    def start(self, failed: Path) -> Cluster:
        """Start a cluster. If it fails, the logs of its programs are in ``failed``."""
        if self.container_engine is not None:
            return KindCluster(self.container_engine, failed)
        pause = self.image(_PAUSE)
        return ClusterFromSource(pause.tag, pause.archive, failed)

    def load_images(self, cluster: Cluster) -> None:
        """Build missing images, and load all of them into the node."""
        images = {name: self.image(name) for name, recipe in RECIPES.items() if recipe.on_node}
        for image in images.values():
            cluster.load(image.archive)
        cluster.images = {name: image.tag for name, image in images.items()}


def pick_provider() -> Provider:
    """Select a provider. If the machine supports neither, raise ``PartMissing`` with the remedy."""
    wanted = os.environ.get(CHOICE, "")
    if wanted not in ("", "kind", "source"):
        raise PartMissing(f"{CHOICE} is {wanted!r}: set it to kind or to source, or leave it out")
    engine = container_engine() if wanted != "source" else None
    if engine is not None:
        return Provider(f"kind on {engine} ({CHOICE}=source for a node from source)", ContainerEngine(engine), engine)
    if wanted == "kind":
        raise PartMissing(f"{CHOICE} is kind, which needs docker or podman, and neither answers: start one")
    check_machine()
    return Provider("one node from source", Buildah(), None)
