"""Manifests from files, in the same YAML that ``kubectl apply`` takes.

This module owns reading and its limits; ``mailboat_spec`` validates the content. All problems are reported together,
with file, line or field, and remedy. Manifests are untrusted input, so the cost of reading one must stay proportional
to its length: sizes are bounded, and multiplying aliases and deep nesting are refused.
"""

import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Final

import yaml

from mailboat.errors import ConfigError
from mailboat_spec import EventSubscription, Manifests, SpecError, full_name, read_documents
from mailboat_spec.wire_format import unpack

LARGEST_FILE: Final = 1024 * 1024
"""In bytes. A manifest has a few thousand, and a ConfigMap holds at most this many. The operator compresses larger
configurations (``mailboat_spec.wire_format``) as JSON, since YAML of that size would take minutes to parse."""

STANDARD_INPUT: Final = Path("-")
_SUFFIXES: Final = (".yaml", ".yml", ".json")
_MOST_NODES: Final = 100_000
"""In one document, with every alias expanded."""
_MOST_MARKS: Final = 400_000
"""Maximum number of commas and brackets in JSON. Each may cost a hundred bytes of memory; eight thousand subscriptions
have fewer."""

_PATTERN_PROBLEMS: Final = (
    (re.compile(r"^\s|\s$"), "begins or ends with a space, so it matches no ordinary type"),
    (re.compile(r",\s"), "has a comma in it: write one list entry per pattern"),
    (re.compile(r"^\.[*+]"), "looks like a regular expression and matches only types that begin with a dot: write *"),
    (
        re.compile(r"^\^|\$$|\\|\||\(|\+$|\.\.\*"),
        "looks like a regular expression; patterns know only * (any characters) and ? (one character)",
    ),
    (re.compile(r"%"), "has a %, which stands for itself: write * for any characters"),
)

Documents = list[tuple[str, object]]
"""Parsed documents, each with a label that names its origin."""


def load(paths: Sequence[Path], *, needs_relay: bool = True) -> Manifests:
    """Load the resources of all files and folders. Raise ``ConfigError`` with all problems."""
    documents: Documents = []
    for file in (file for path in paths for file in _files(path)):
        source = "standard input" if file == STANDARD_INPUT else str(file)
        documents += _parsed(source, _text(file), is_json=file.suffix.lower() == ".json")
    return _checked(documents, ", ".join(map(str, paths)), needs_relay)


def load_body(body: bytes, source: str) -> Manifests:
    """Load the resources of a request body: YAML or JSON, compressed or not."""
    return _checked(_parsed(source, _decoded(source, body)), source)


def _parsed(source: str, text: str, *, is_json: bool = False) -> Documents:
    try:
        documents = [_json(source, text)] if is_json or len(text) > LARGEST_FILE else _yaml(source, text)
    except RecursionError:
        raise ConfigError(f"{source} is nested too deeply: that is no manifest.") from None
    if len(documents) == 1:
        return [(source, documents[0])]
    return [(f"{source}, document {number}", document) for number, document in enumerate(documents, start=1)]


def _checked(documents: Documents, source: str, needs_relay: bool = True) -> Manifests:
    try:
        manifests = read_documents(documents)
    except SpecError as error:
        raise ConfigError(str(error)) from error
    if needs_relay and not manifests.relays:
        raise ConfigError(f"there is no OutboxRelay in {source}: without one there is no outbox to work on.")
    return manifests


def is_missing(path: Path) -> bool:
    """Return whether the path does not exist. An unreadable path counts as existing; reading it reports the error."""
    try:
        path.stat()
    except OSError as error:
        return isinstance(error, FileNotFoundError | NotADirectoryError)
    return False


def _files(path: Path) -> list[Path]:
    if path == STANDARD_INPUT:
        return [path]
    if is_missing(path):
        raise ConfigError(f"{path} does not exist. Give -f the path of a manifest, or of a folder with manifests.")
    try:
        if not path.is_dir():
            return [path]
        found = sorted(file for file in path.iterdir() if file.suffix.lower() in _SUFFIXES and file.is_file())
    except OSError as error:
        raise _unreadable(path, error) from error
    if not found:
        raise ConfigError(f"folder {path} holds no manifest ({', '.join('*' + suffix for suffix in _SUFFIXES)}).")
    return found


def _unreadable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"{path} can't be read: {error.strerror}. Check what it is, and its rights.")


def _text(file: Path) -> str:
    try:
        if file == STANDARD_INPUT:
            content = _standard_input(sys.stdin.buffer)
        else:
            with file.open("rb") as opened:
                content = opened.read(LARGEST_FILE + 1)
    except OSError as error:
        raise _unreadable(file, error) from error
    if len(content) > LARGEST_FILE:
        raise ConfigError(f"{file} is larger than 1 MiB: that is no manifest. Check the path given to -f.")
    return _decoded(str(file), content)


@lru_cache(maxsize=1)
def _standard_input(stream: BinaryIO) -> bytes:
    """Read standard input, which can be read only once, for commands that load their manifests twice."""
    return stream.read(LARGEST_FILE + 1)


def _decoded(source: str, content: bytes) -> str:
    try:
        content = unpack(content)
    except ValueError as error:
        raise ConfigError(f"{source} can't be read: {error}.") from error
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{source} is not text in UTF-8 (byte {error.start}): save it as UTF-8.") from error


def _json(source: str, text: str) -> object:
    if sum(map(text.count, ",[{")) > _MOST_MARKS:
        raise ConfigError(f"{source} has more values than {_MOST_MARKS}: that is no manifest.")
    try:
        return json.loads(text) if text.strip() else None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{source}, line {error.lineno}, column {error.colno}: not JSON: {error.msg}.") from error


def _yaml(source: str, text: str) -> list[object]:
    if text.startswith("{"):  # JSON is valid YAML, and the JSON parser is a hundred times faster
        with suppress(json.JSONDecodeError, RecursionError):  # YAML flow style, or invalid: the YAML parser decides
            return [json.loads(text)]
    try:
        return list(_constructed(source, text))
    except yaml.MarkedYAMLError as error:
        raise ConfigError(f"{source}{_at(error.problem_mark)}: not YAML: {_yaml_problem(error)}.") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not YAML: {' '.join(str(error).split())}.") from error
    except ValueError as error:  # for example a date that does not exist
        raise ConfigError(f"{source}: a value can't be read: {error}. Put it in quotes.") from error


def _constructed(source: str, text: str) -> Iterator[object]:
    loader = yaml.SafeLoader(text)  # not the C loader: deep nesting crashes it and the process
    try:
        while loader.check_node():
            node = loader.get_node()
            if node is not None:
                _refuse_traps(source, node, {})
            yield None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _yaml_problem(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "it can't be read"
    if "'\\t'" in problem:
        problem += "; YAML wants spaces, not tabs"
    return f"{problem} ({error.context})" if error.context and error.context_mark else problem


def _at(mark: Any) -> str:
    return f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""


def _refuse_traps(source: str, node: yaml.Node, sizes: dict[int, int | None]) -> int:
    """Refuse duplicate fields, of which one would silently win, and aliases that expand beyond the limit.

    Return the number of values in the node. ``sizes`` has those of visited nodes, None while a node is counted.
    """
    counted = sizes.get(id(node), 0)
    if counted is None:
        raise ConfigError(f"{source}{_at(node.start_mark)}: an alias refers to itself: write the value out.")
    if counted:
        return counted
    sizes[id(node)] = None
    total = 1
    for child in _children(source, node):
        total += _refuse_traps(source, child, sizes)
        if total > _MOST_NODES:
            raise ConfigError(
                f"{source}{_at(node.start_mark)}: more than {_MOST_NODES} values, aliases written out: that is no"
                " manifest."
            )
    sizes[id(node)] = total
    return total


def _children(source: str, node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.SequenceNode):
        yield from node.value
    elif isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                    raise ConfigError(f"{source}{_at(key.start_mark)}: {key.value} is there twice: remove one of them.")
                seen.add(key.value)
            yield key
            yield value


def warnings(manifests: Manifests) -> list[str]:
    """Return a sentence per probable mistake in valid manifests, with resource and field."""
    found = [each for subscription in manifests.subscriptions for each in subscription_warnings(subscription)]
    served = {f"{each.metadata.namespace}/{each.spec.relay}" for each in manifests.subscriptions}
    unserved = (full_name(relay) for relay in manifests.relays if full_name(relay) not in served)
    nothing = "no EventSubscription refers to it, so nothing is delivered from its outbox"
    return found + [f"OutboxRelay {name}: {nothing}" for name in unserved]


def subscription_warnings(subscription: EventSubscription) -> Iterator[str]:
    where, spec = f"EventSubscription {full_name(subscription)}", subscription.spec
    for field, patterns in (("eventTypes", spec.filter.event_types), ("aggregateTypes", spec.filter.aggregate_types)):
        for pattern in patterns:
            problems = (problem for shape, problem in _PATTERN_PROBLEMS if shape.search(str(pattern)))
            if problem := next(problems, None):
                yield f'{where}: spec.filter.{field}: "{pattern}" {problem}'
    if spec.delivery.on_exhausted == "Block" and spec.delivery.dead_letter is not None:
        yield f"{where}: spec.delivery.deadLetter has no effect with onExhausted: Block"
