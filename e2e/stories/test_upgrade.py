"""Story 7: an upgrade from an earlier chart under load, CRDs and images included; then the uninstall."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import Cluster
from helm_release import CHART, DOCS, NAMESPACE, Installed
from inventory import Object, inventory
from mailboat_devservers.kubernetes_commands import Answer
from namespace import STORY, StoryNamespace, staying, violations
from previous_release import earlier_version, revisions
from provider import Provider
from readme import ROOT
from support.markdown import blocks
from support.wait import wait_until

CRDS = ("eventsubscriptions.mailboat.dev", "outboxrelays.mailboat.dev")
NEW_FIELD, NEW_COLUMN = "state", "Oldest"
"""Of an EventSubscription. If both charts have the same CRDs, these are removed from the earlier one."""
WITH_NEW_FIELD = f"""\
apiVersion: mailboat.dev/v1alpha1
kind: EventSubscription
metadata: {{name: with-new-field}}
spec:
  relayRef: {{name: orders}}
  {NEW_FIELD}: Paused
  sink: {{log: {{}}}}
"""
KEPT = {
    *(Object("CustomResourceDefinition", "", name) for name in CRDS),
    Object("APIService", "", "v1alpha1.mailboat.dev"),  # created by the API server for the CRDs
    Object("Lease", NAMESPACE, "mailboat-operator"),
    Object("Secret", NAMESPACE, "mailboat-signing-keys"),
    Object("Secret", NAMESPACE, "mailboat-webhook-cert"),
    # The namespace of `--create-namespace`, with the objects of every namespace.
    Object("Namespace", "", NAMESPACE),
    Object("ServiceAccount", NAMESPACE, "default"),
    Object("ConfigMap", NAMESPACE, "kube-root-ca.crt"),
}
"""Objects that an uninstall leaves according to docs/kubernetes.md."""
STORY_OBJECTS = {"Secret orders-db", "Pod trader"}
"""Objects that the story creates in its namespace, without the custom resources."""
MIGRATIONS = "relay/mailboat/store/schema/migrations"


@dataclass(frozen=True, slots=True)
class Installable:
    """The version to upgrade from."""

    name: str
    chart: Path
    images: Mapping[str, str]
    migrations: Path
    lacks_new_field: bool
    """Whether its CRDs are the current ones without ``NEW_FIELD`` and ``NEW_COLUMN``."""


@pytest.fixture(scope="module")
def bare(cluster: Cluster, mailboat: Installed, pristine: set[Object], story: StoryNamespace) -> Iterator[Cluster]:
    """The cluster without the release. The next story installs it again."""
    mailboat.uninstall()
    cluster.kubectl("delete", "crd", *CRDS)
    cluster.kubectl("delete", "namespace", NAMESPACE)
    kinds = ("api-resources", "--api-group=mailboat.dev", "--output=name")
    wait_until(lambda: cluster.kubectl(*kinds).split(), 120, "no kinds of mailboat.dev", met=lambda left: not left)
    wait_until(lambda: left(story, pristine), 180, "no objects of Mailboat", met=lambda left: not left)
    yield cluster
    mailboat.uninstall()


@pytest.fixture(scope="module")
def before(bare: Cluster) -> set[Object]:
    """All objects before the story begins."""
    return inventory(bare)


@pytest.fixture(scope="module")
def earlier(bare: Cluster, provider: Provider, tmp_path_factory: pytest.TempPathFactory) -> Installable:
    """The last release, or the first installable commit, with its own images.

    If nothing installed has changed since, or the checkout has no history (a shallow clone, an archive), it is the
    current version under another tag. In CI, a checkout without history fails.
    """
    found = earlier_version()
    if found is not None:
        name, root = found.name, found.folder
        built = provider.earlier_images(found)
        for image in built.values():
            bare.load(image.archive)
        images = {each: image.tag for each, image in built.items()}
    elif not revisions() and os.environ.get("CI") == "true":
        pytest.fail("this checkout has no earlier commit to upgrade from: clone it with its history (fetch-depth: 0)")
    else:
        why = "nothing has changed since" if revisions() else "this checkout has no history"
        name, root = f"itself, since {why}", ROOT
        images = {each: f"{bare.images[each].rpartition(':')[0]}:earlier" for each in ("operator", "relay")}
        for each, tag in images.items():
            bare.tag(bare.images[each], tag)
    chart = tmp_path_factory.mktemp("earlier") / "mailboat"
    shutil.copytree(root / "charts" / "mailboat", chart)
    lacks_new_field = crds_of(chart) == crds_of(CHART)
    if lacks_new_field:
        remove_new_field(chart / "files" / "crds" / "eventsubscriptions.yaml")
    return Installable(name, chart, images, root / MIGRATIONS, lacks_new_field)


@pytest.mark.usefixtures("before")
def test_an_upgrade_under_load_replaces_pods_and_crds_and_loses_nothing(
    bare: Cluster,
    story: StoryNamespace,
    mailboat: Installed,
    earlier: Installable,
    record_property: Any,
) -> None:
    mailboat.install(earlier.chart, earlier.images)
    assert changed_crds(bare), "the upgrade changes no CRD"
    story.apply("relay", "to-kafka")
    story.until_ready("orders-to-kafka")
    operators, relays = mailboat.operators(), story.relay_pods()
    assert images_of(operators) == {earlier.images["operator"]}
    assert images_of(relays) == {earlier.images["relay"]}
    schema = known_migrations(earlier.migrations)
    assert applied_migrations(story) == schema
    identities = uids(story)
    if earlier.lacks_new_field:
        assert f'unknown field "spec.{NEW_FIELD}"' in apply_new_field(story).err
        assert NEW_COLUMN.upper() not in printed_columns(story)

    with story.trading():
        mailboat.upgrade()
        wait_until(
            lambda: images_of([*staying(mailboat.operators()), *story.relay_pods()]),
            240,
            "all pods to have the new images",
            met=lambda now: now == {bare.images["operator"], bare.images["relay"]},
        )
        story.kubectl("rollout", "status", "deployment/orders-relay", "--timeout=120s")
        story.until_ready("orders-to-kafka")
        arrived = story.arrived()
        wait_until(story.arrived, 180, "200 more events", met=lambda now: (now or 0) > (arrived or 0) + 200)
    present = known_migrations(ROOT / MIGRATIONS)
    record_property("upgraded from", f"{earlier.name}; schema {schema[-1]} to {present[-1]}")
    assert applied_migrations(story) == present, "no new relay has migrated the database"
    assert not names(operators) & names(staying(mailboat.operators()))
    assert len(staying(mailboat.operators())) == len(operators), "the upgrade lost values of the release"
    assert not names(relays) & names(story.relay_pods())
    story.until_lag("orders-to-kafka")
    proof = story.audit("orders")
    assert violations(proof) == {}
    assert proof["numbers_left_out"] == 0
    assert proof["duplicates"] == 0, "a relay stopped without a release of its partitions (G9)"
    assert changed_crds(bare) == []
    assert uids(story) == identities, "resources or CRDs were deleted and created again"
    if earlier.lacks_new_field:
        wait_until(
            lambda: apply_new_field(story), 60, "the new field to be accepted", met=lambda answer: answer.status == 0
        )
        wait_until(
            lambda: printed_columns(story), 60, "the new column", met=lambda columns: NEW_COLUMN.upper() in columns
        )


def test_the_docs_name_the_objects_that_an_uninstall_leaves() -> None:
    section = uninstall_section()
    named = {each.name for each in KEPT if each.kind in ("CustomResourceDefinition", "Secret", "Lease")}
    assert {name for name in named if not re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", section)} == set()


def test_uninstall_leaves_the_crds_and_running_relays_and_no_other_objects(
    story: StoryNamespace, mailboat: Installed, pristine: set[Object]
) -> None:
    mailboat.uninstall()
    until_left(story, pristine)
    # Relays deliver without an operator.
    story.trade(100)
    assert violations(story.audit("orders")) == {}


def test_without_an_operator_a_resource_can_be_deleted_with_its_children(
    story: StoryNamespace, pristine: set[Object], before: set[Object]
) -> None:
    assert "Deployment orders-relay" in children(story, before)
    story.kubectl("delete", "eventsubscriptions,outboxrelays", "--all", "--timeout=180s")
    until_no_children(story, before)
    until_left(story, pristine)


def test_the_documented_uninstall_leaves_no_objects_in_the_namespaces_of_applications(
    bare: Cluster, story: StoryNamespace, mailboat: Installed, pristine: set[Object], before: set[Object]
) -> None:
    mailboat.ensure(defaults=True)
    [_] = mailboat.operators()  # the chart's default
    story.apply("relay", "to-kafka")
    story.until_ready("orders-to-kafka")
    story.trade(100)
    story.until_lag("orders-to-kafka")
    assert "Deployment orders-relay" in children(story, before)
    commands, *_ = blocks(uninstall_section(), "")
    for line in commands.splitlines():
        program, *arguments = shlex.split(line, comments=True)
        {"kubectl": bare.kubectl, "helm": bare.helm}[program](*arguments)
    until_no_children(story, before)
    until_left(story, pristine)


def uninstall_section() -> str:
    section = re.search(r"^## Uninstall$(.*?)(?=^## |\Z)", DOCS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert section, f"{DOCS} has no section `Uninstall`"
    return section[1]


def until_left(story: StoryNamespace, pristine: set[Object]) -> None:
    """Wait until only the documented objects are left."""
    wait_until(lambda: left(story, pristine), 180, f"only {KEPT} to be left", met=lambda now: now == KEPT)


def left(story: StoryNamespace, pristine: set[Object]) -> set[Object]:
    """Objects that the cluster did not have before the first install, without those of stories."""
    found = story.cluster.kubectl("get", "namespaces", f"--selector={STORY}", "--output=name").split()
    stories = {name.removeprefix("namespace/") for name in found}
    new = inventory(story.cluster) - pristine
    own = {Object("Namespace", "", name) for name in stories}
    return {each for each in new - own if each.namespace not in stories}


def until_no_children(story: StoryNamespace, before: set[Object]) -> None:
    wait_until(lambda: children(story, before), 180, "no children of the relay", met=lambda left: not left)


def children(story: StoryNamespace, before: set[Object]) -> set[str]:
    """New objects in the story's namespace, without those of the story itself."""
    new = {each for each in inventory(story.cluster) - before if each.namespace == story.namespace}
    return {f"{each.kind} {each.name}" for each in new} - STORY_OBJECTS


def crds_of(chart: Path) -> list[Any]:
    files = sorted((chart / "files" / "crds").glob("*.yaml"))
    return [yaml.safe_load(file.read_text(encoding="utf-8")) for file in files]


def remove_new_field(file: Path) -> None:
    crd = yaml.safe_load(file.read_text(encoding="utf-8"))
    [version] = crd["spec"]["versions"]
    del version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"][NEW_FIELD]
    columns = version["additionalPrinterColumns"]
    version["additionalPrinterColumns"] = [each for each in columns if each["name"] != NEW_COLUMN]
    file.write_text(yaml.safe_dump(crd, sort_keys=False), encoding="utf-8")


def changed_crds(cluster: Cluster) -> list[str]:
    """CRDs of the current chart that differ from those of the cluster."""
    changed = []
    for file in sorted((CHART / "files" / "crds").glob("*.yaml")):
        command = ("diff", "--server-side", "--force-conflicts", "--filename", str(file))
        answer = cluster.commands.try_kubectl(*command)
        assert answer.status in (0, 1), answer.err
        changed += [file.name] * answer.status
    return changed


def apply_new_field(story: StoryNamespace) -> Answer:
    """Answer of the API server to a dry run with the new field."""
    command = ("apply", "--dry-run=server", "--validate=strict", "--filename=-")
    return story.cluster.commands.try_kubectl("--namespace", story.namespace, *command, input=WITH_NEW_FIELD)


def printed_columns(story: StoryNamespace) -> list[str]:
    return story.kubectl("get", "eventsubscriptions").splitlines()[0].split()


def uids(story: StoryNamespace) -> dict[str, str]:
    """UIDs of the story's custom resources and of their CRDs."""
    each = "{range .items[*]}{.kind}/{.metadata.name} {.metadata.uid}{'\\n'}{end}"
    found = [
        story.kubectl("get", "outboxrelays,eventsubscriptions", f"--output=jsonpath={each}"),
        story.kubectl("get", "crd", *CRDS, f"--output=jsonpath={each}"),
    ]
    identities = dict(line.split(" ") for lines in found for line in lines.splitlines())
    assert len(identities) == 2 + len(CRDS), identities
    return identities


def known_migrations(folder: Path) -> list[str]:
    return sorted(step.name for step in folder.glob("[0-9]*"))


def applied_migrations(story: StoryNamespace) -> list[str]:
    return story.in_postgres("select name from mailboat.migrations order by version", "shop").split()


def images_of(pods: list[dict[str, Any]]) -> set[str]:
    return {container["image"] for pod in pods for container in pod["spec"]["containers"]}


def names(pods: list[dict[str, Any]]) -> set[str]:
    return {pod["metadata"]["name"] for pod in pods}
