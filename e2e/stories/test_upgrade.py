"""Story 7: from an earlier chart to this one under load, CRDs and images included; then uninstall, and what is left."""

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
from namespace import STORY, Stage, staying, wrong_in
from previous_release import earlier_version, revisions
from provider import Provider
from readme import ROOT
from support.markdown import blocks
from support.wait import wait_until

CRDS = ("eventsubscriptions.mailboat.dev", "outboxrelays.mailboat.dev")
NEW_FIELD, NEW_COLUMN = "schemas", "Oldest"
"""Of an EventSubscription: where both charts have the same CRDs, the earlier one loses these."""
WITH_NEW_FIELD = f"""\
apiVersion: mailboat.dev/v1alpha1
kind: EventSubscription
metadata: {{name: with-new-field}}
spec:
  relayRef: {{name: orders}}
  {NEW_FIELD}: {{configMapRef: {{name: order-schemas}}}}
  sink: {{log: {{}}}}
"""
KEPT = {
    *(Object("CustomResourceDefinition", "", name) for name in CRDS),
    Object("APIService", "", "v1alpha1.mailboat.dev"),  # the API server's own way to serve them
    Object("Lease", NAMESPACE, "mailboat-operator"),
    Object("Secret", NAMESPACE, "mailboat-signing-keys"),
    Object("Secret", NAMESPACE, "mailboat-webhook-cert"),
    # The namespace that `--create-namespace` made, with what Kubernetes puts into each.
    Object("Namespace", "", NAMESPACE),
    Object("ServiceAccount", NAMESPACE, "default"),
    Object("ConfigMap", NAMESPACE, "kube-root-ca.crt"),
}
"""What docs/kubernetes.md says that an uninstall leaves."""
MINE = {"Secret orders-db", "Pod trader"}
"""What the story puts into its namespace beside the resources."""
MIGRATIONS = "relay/mailboat/store/schema/migrations"


@dataclass(frozen=True, slots=True)
class Installable:
    """What is upgraded from."""

    name: str
    chart: Path
    images: Mapping[str, str]
    migrations: Path
    lacks_new_field: bool
    """Whether its CRDs are the present ones without ``NEW_FIELD`` and ``NEW_COLUMN``."""


@pytest.fixture(scope="module")
def bare(cluster: Cluster, mailboat: Installed, pristine: set[Object], stage: Stage) -> Iterator[Cluster]:
    """A cluster that has nothing of Mailboat; the next story finds none either, and installs it."""
    mailboat.uninstall()
    cluster.kubectl("delete", "crd", *CRDS)
    cluster.kubectl("delete", "namespace", NAMESPACE)
    kinds = ("api-resources", "--api-group=mailboat.dev", "--output=name")
    wait_until(lambda: cluster.kubectl(*kinds).split(), 120, "its kinds to be forgotten", met=lambda left: not left)
    wait_until(lambda: left(stage, pristine), 180, "nothing of Mailboat to be left", met=lambda left: not left)
    yield cluster
    mailboat.uninstall()


@pytest.fixture(scope="module")
def before(bare: Cluster) -> set[Object]:
    """All there is before the story begins."""
    return inventory(bare)


@pytest.fixture(scope="module")
def earlier(bare: Cluster, provider: Provider, tmp_path_factory: pytest.TempPathFactory) -> Installable:
    """The last release, or the first commit that could be installed, with images of its own.

    Where nothing of what is installed has changed since, and where there is no history (a clone without depth, an
    archive), it is the present one under another name. Without history that is good enough on somebody's machine, but
    not where the project is judged.
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
        why = "nothing has changed since" if revisions() else "this checkout has no history: it proves less"
        name, root = f"itself, since {why}", ROOT
        images = {each: f"{bare.images[each].rpartition(':')[0]}:earlier" for each in ("operator", "relay")}
        for each, tag in images.items():
            bare.tag(bare.images[each], tag)
    chart = tmp_path_factory.mktemp("earlier") / "mailboat"
    shutil.copytree(root / "charts" / "mailboat", chart)
    lacks_new_field = crds_of(chart) == crds_of(CHART)
    if lacks_new_field:
        take_from_crd(chart / "files" / "crds" / "eventsubscriptions.yaml")
    return Installable(name, chart, images, root / MIGRATIONS, lacks_new_field)


@pytest.mark.usefixtures("before")
def test_an_upgrade_under_load_replaces_all_pods_and_brings_the_new_crds_and_loses_nothing(
    bare: Cluster,
    stage: Stage,
    mailboat: Installed,
    earlier: Installable,
    record_property: Any,
) -> None:
    mailboat.install(earlier.chart, earlier.images)
    assert changed_crds(bare), "there is a change of the CRDs in every upgrade"
    stage.apply("relay", "to-kafka")
    stage.until_ready("orders-to-kafka")
    operators, relays = mailboat.operators(), stage.relay_pods()
    assert images_of(operators) == {earlier.images["operator"]}
    assert images_of(relays) == {earlier.images["relay"]}
    schema = known_migrations(earlier.migrations)
    assert applied_migrations(stage) == schema
    identities = uids(stage)
    if earlier.lacks_new_field:
        assert f'unknown field "spec.{NEW_FIELD}"' in said_to_new_field(stage).err
        assert NEW_COLUMN.upper() not in printed_columns(stage)

    with stage.trading():
        mailboat.upgrade()
        wait_until(
            lambda: images_of([*staying(mailboat.operators()), *stage.relay_pods()]),
            240,
            "all pods to be new ones",
            met=lambda now: now == {bare.images["operator"], bare.images["relay"]},
        )
        stage.kubectl("rollout", "status", "deployment/orders-relay", "--timeout=120s")
        stage.until_ready("orders-to-kafka")
        arrived = stage.arrived()
        wait_until(stage.arrived, 180, "events to flow", met=lambda now: (now or 0) > (arrived or 0) + 200)
    present = known_migrations(ROOT / MIGRATIONS)
    record_property("upgraded from", f"{earlier.name}; schema {schema[-1]} to {present[-1]}")
    assert applied_migrations(stage) == present, "the first of the new relays has migrated the database"
    assert not names(operators) & names(staying(mailboat.operators()))
    assert len(staying(mailboat.operators())) == len(operators), "settings of the release are kept"
    assert not names(relays) & names(stage.relay_pods())
    stage.until_lag("orders-to-kafka")
    proof = stage.audit("orders")
    assert wrong_in(proof) == {}
    assert proof["numbers_left_out"] == 0
    assert proof["duplicates"] == 0, "every relay that went has handed over in order (G9)"
    assert changed_crds(bare) == []
    assert uids(stage) == identities, "resources and their kinds are the same ones as before, not others in their place"
    if earlier.lacks_new_field:
        wait_until(
            lambda: said_to_new_field(stage), 60, "the new field to be taken", met=lambda answer: answer.status == 0
        )
        wait_until(
            lambda: printed_columns(stage), 60, "the new column to be shown", met=lambda now: NEW_COLUMN.upper() in now
        )


def test_what_an_uninstall_leaves_is_named_in_the_docs() -> None:
    section = uninstall_section()
    named = {each.name for each in KEPT if each.kind in ("CustomResourceDefinition", "Secret", "Lease")}
    assert {name for name in named if not re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", section)} == set()


def test_uninstall_leaves_the_kinds_and_the_relays_and_nothing_else(
    stage: Stage, mailboat: Installed, pristine: set[Object]
) -> None:
    mailboat.uninstall()
    until_left(stage, pristine)
    # The relays go on by themselves: they need no operator to move events.
    stage.trade(100)
    assert wrong_in(stage.audit("orders")) == {}


def test_a_resource_can_be_deleted_with_the_operator_gone_and_takes_its_children_along(
    stage: Stage, pristine: set[Object], before: set[Object]
) -> None:
    assert "Deployment orders-relay" in children(stage, before)
    stage.kubectl("delete", "eventsubscriptions,outboxrelays", "--all", "--timeout=180s")
    until_no_children(stage, before)
    until_left(stage, pristine)


def test_the_documented_way_leaves_nothing_in_the_namespaces_of_applications(
    bare: Cluster, stage: Stage, mailboat: Installed, pristine: set[Object], before: set[Object]
) -> None:
    mailboat.ensure(defaults=True)
    [_] = mailboat.operators()  # of the chart's own accord
    stage.apply("relay", "to-kafka")
    stage.until_ready("orders-to-kafka")
    stage.trade(100)
    stage.until_lag("orders-to-kafka")
    assert "Deployment orders-relay" in children(stage, before)
    commands, *_ = blocks(uninstall_section(), "")
    for line in commands.splitlines():
        program, *arguments = shlex.split(line, comments=True)
        {"kubectl": bare.kubectl, "helm": bare.helm}[program](*arguments)
    until_no_children(stage, before)
    until_left(stage, pristine)


def uninstall_section() -> str:
    section = re.search(r"^## Uninstall$(.*?)(?=^## |\Z)", DOCS.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert section, "the docs say how"
    return section[1]


def until_left(stage: Stage, pristine: set[Object]) -> None:
    """Until nothing but what the docs name is there: pods and what hangs on them take a moment to go."""
    wait_until(lambda: left(stage, pristine), 180, f"nothing to be left but {KEPT}", met=lambda now: now == KEPT)


def left(stage: Stage, pristine: set[Object]) -> set[Object]:
    """Whatever the cluster did not have before Mailboat was installed for the first time, stories aside."""
    found = stage.cluster.kubectl("get", "namespaces", f"--selector={STORY}", "--output=name").split()
    stories = {name.removeprefix("namespace/") for name in found}
    new = inventory(stage.cluster) - pristine
    own = {Object("Namespace", "", name) for name in stories}
    return {each for each in new - own if each.namespace not in stories}


def until_no_children(stage: Stage, before: set[Object]) -> None:
    wait_until(lambda: children(stage, before), 180, "what belonged to the relay to be gone", met=lambda left: not left)


def children(stage: Stage, before: set[Object]) -> set[str]:
    """What is new in the story's namespace, but for what the story has put there."""
    new = {each for each in inventory(stage.cluster) - before if each.namespace == stage.namespace}
    return {f"{each.kind} {each.name}" for each in new} - MINE


def crds_of(chart: Path) -> list[Any]:
    files = sorted((chart / "files" / "crds").glob("*.yaml"))
    return [yaml.safe_load(file.read_text(encoding="utf-8")) for file in files]


def take_from_crd(file: Path) -> None:
    crd = yaml.safe_load(file.read_text(encoding="utf-8"))
    [version] = crd["spec"]["versions"]
    del version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"][NEW_FIELD]
    columns = version["additionalPrinterColumns"]
    version["additionalPrinterColumns"] = [each for each in columns if each["name"] != NEW_COLUMN]
    file.write_text(yaml.safe_dump(crd, sort_keys=False), encoding="utf-8")


def changed_crds(cluster: Cluster) -> list[str]:
    """Those of the present chart that the cluster has otherwise."""
    changed = []
    for file in sorted((CHART / "files" / "crds").glob("*.yaml")):
        command = ("diff", "--server-side", "--force-conflicts", "--filename", str(file))
        answer = cluster.commands.try_kubectl(*command)
        assert answer.status in (0, 1), answer.err
        changed += [file.name] * answer.status
    return changed


def said_to_new_field(stage: Stage) -> Answer:
    """By the API server, to somebody who would use it; nothing is made."""
    command = ("apply", "--dry-run=server", "--validate=strict", "--filename=-")
    return stage.cluster.commands.try_kubectl("--namespace", stage.namespace, *command, input=WITH_NEW_FIELD)


def printed_columns(stage: Stage) -> list[str]:
    return stage.kubectl("get", "eventsubscriptions").splitlines()[0].split()


def uids(stage: Stage) -> dict[str, str]:
    """Of the story's resources, and of their kinds."""
    each = "{range .items[*]}{.kind}/{.metadata.name} {.metadata.uid}{'\\n'}{end}"
    found = [
        stage.kubectl("get", "outboxrelays,eventsubscriptions", f"--output=jsonpath={each}"),
        stage.kubectl("get", "crd", *CRDS, f"--output=jsonpath={each}"),
    ]
    identities = dict(line.split(" ") for lines in found for line in lines.splitlines())
    assert len(identities) == 2 + len(CRDS), identities
    return identities


def known_migrations(folder: Path) -> list[str]:
    return sorted(step.name for step in folder.glob("[0-9]*"))


def applied_migrations(stage: Stage) -> list[str]:
    return stage.in_postgres("select name from mailboat.migrations order by version", "shop").split()


def images_of(pods: list[dict[str, Any]]) -> set[str]:
    return {container["image"] for pod in pods for container in pod["spec"]["containers"]}


def names(pods: list[dict[str, Any]]) -> set[str]:
    return {pod["metadata"]["name"] for pod in pods}
