"""Each image holds its own dependencies only, in the versions of the tests.

The lists below are allow-lists: a new package in an image needs an entry here.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from support.locks import locked

ROOT = Path(__file__).parents[2]

HTTP = {"aiohttp", "aiohappyeyeballs", "aiosignal", "attrs", "frozenlist", "idna", "multidict", "propcache", "yarl"}
MODELS = {"pydantic", "pydantic-core", "annotated-types", "typing-extensions", "typing-inspection"}
TOKENS = {"pyjwt", "cryptography", "cffi", "pycparser"}
METRICS = {"prometheus-client"}
REQUESTS = {"requests", "certifi", "charset-normalizer", "idna", "urllib3"}

KUBERNETES = {
    "kopf", "kubernetes", "aiohttp-retry", "click", "durationpy", "iso8601", "jsonpatch", "jsonpointer", "oauthlib",
    "python-dateutil", "python-json-logger", "pyyaml", "requests-oauthlib", "tzdata", "websocket-client",
}  # fmt: skip
TERMINAL = {"click", "rich", "markdown-it-py", "mdurl", "pygments", "pyyaml"}
POSTGRES = {"psycopg", "psycopg-binary", "tzdata"}
KAFKA = {"confluent-kafka"}
REDIS = {"redis", "async-timeout"}
PUBSUB = {
    "google-cloud-pubsub", "google-api-core", "google-auth", "googleapis-common-protos", "grpc-google-iam-v1",
    "grpcio", "grpcio-status", "proto-plus", "protobuf", "pyasn1", "pyasn1-modules", "opentelemetry-api",
    "opentelemetry-sdk", "opentelemetry-semantic-conventions",
}  # fmt: skip

ALLOWED = {
    "operator": HTTP | MODELS | TOKENS | METRICS | REQUESTS | KUBERNETES,
    "relay": HTTP | MODELS | TOKENS | METRICS | REQUESTS | TERMINAL | POSTGRES | KAFKA | PUBSUB | REDIS,
    "build": {"hatchling", "packaging", "pathspec", "pluggy", "tomlkit", "trove-classifiers"},
}

DISTRIBUTIONS = {"operator": ("operator", "crds"), "relay": ("relay", "crds")}


def project_name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return found[0].lower().replace("_", "-")


@pytest.mark.parametrize("image", ["operator", "relay", "build"])
def test_a_lock_installs_exactly_the_allowed_packages(image: str) -> None:
    assert set(locked(image)) == ALLOWED[image]


@pytest.mark.parametrize("image", ["operator", "relay", "build"])
def test_the_versions_are_those_of_the_tests(image: str) -> None:
    assert locked(image).items() <= locked("dev").items()


@pytest.mark.parametrize("image", ["operator", "relay", "build"])
def test_every_package_of_a_lock_has_hashes(image: str) -> None:
    text = (ROOT / "locks" / f"{image}.txt").read_text(encoding="utf-8")
    packages = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)
    without = [package.splitlines()[0] for package in packages if "==" in package and "--hash=sha256:" not in package]
    assert not without


@pytest.mark.parametrize("image", ["operator", "relay"])
def test_the_list_to_lock_has_the_requirements_of_the_distributions(image: str) -> None:
    wanted: set[str] = set()
    for folder in DISTRIBUTIONS[image]:
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        requirements = list(project.get("dependencies", ()))
        for extra in project.get("optional-dependencies", {}).values():
            requirements += extra
        wanted |= {project_name(requirement) for requirement in requirements}
    listed = (ROOT / "locks" / f"{image}.in").read_text(encoding="utf-8").splitlines()
    assert {project_name(line) for line in listed if line and line[0] not in "#-"} == wanted - {"mailboat-spec"}
