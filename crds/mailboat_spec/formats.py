"""Strings with a required format: names of Kubernetes, Postgres, Kafka and Pub/Sub, hosts and ports.

Values are validated this early because most of them are used in file paths, SQL or environment variables.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Final

from pydantic.json_schema import JsonSchemaValue

from mailboat_spec.rules import Rule, ValueCheck, listed, rule, text


@dataclass(frozen=True, slots=True)
class Form(ValueCheck):
    """Annotation for ``str``: the required format and the error message."""

    pattern: str
    message: str
    max_length: int = 253
    never: frozenset[str] = frozenset()
    """Refused strings, although they match the pattern."""
    never_begins: str | None = None
    """A refused prefix (RE2, which evaluates the CRDs, has no lookahead)."""

    def check(self, value: str) -> str:
        if len(value) > self.max_length:
            raise ValueError(f"is too long: at most {self.max_length} characters")
        reserved = value in self.never or (self.never_begins is not None and value.startswith(self.never_begins))
        if reserved or not re.fullmatch(self.pattern, value):
            raise ValueError(self.message)
        return value

    def condition(self, subject: str = "self") -> str:
        """Return the same check in CEL, without the length, which the schema limits."""
        parts = [f"{subject}.matches({text(f'^(?:{self.pattern})$')})"]
        if self.never:
            parts.append(f"!({subject} in {listed(self.never)})")
        if self.never_begins is not None:
            parts.append(f"!{subject}.startsWith({text(self.never_begins)})")
        return " && ".join(parts)

    def limits(self) -> JsonSchemaValue:
        return {"pattern": f"^(?:{self.pattern})$", "maxLength": self.max_length}

    def rules(self) -> Iterator[Rule]:
        yield rule(self.condition(), self.message)


_LABEL: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_HOST_AND_PORT: Final = r"([A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\]):[0-9]{1,5}"
_DOTS: Final = frozenset({".", ".."})

NonEmpty = Annotated[str, Form(r"[^\x00]+", "must not be empty (or hold the NUL character)", max_length=4096)]

DNS_LABEL: Final = Form(
    _LABEL,
    "is not a valid name: use lower-case letters, digits and -, beginning and ending with a letter or digit",
    max_length=63,
)
DnsLabel = Annotated[str, DNS_LABEL]
"""Names of Mailboat resources and of namespaces: they become label values and parts of the names of children."""

_DNS_SUBDOMAIN: Final = Form(
    rf"{_LABEL}(\.{_LABEL})*",
    "is not a valid name: use lower-case letters, digits, - and ., beginning and ending with a letter or digit",
)
DnsSubdomain = Annotated[str, _DNS_SUBDOMAIN]
"""Names of Secrets, ConfigMaps and service accounts."""

SecretKey = Annotated[
    str, Form(r"[-._a-zA-Z0-9]+", "is not a key of a Secret: use letters, digits, -, _ and .", never=_DOTS)
]
"""A key of a Secret; also a file name if the Secret is mounted."""

KAFKA_TOPIC: Final = Form(
    r"[a-zA-Z0-9._-]+",
    "is not a valid Kafka topic: use letters, digits, ., _ and -, at most 249 of them",
    max_length=249,
    never=_DOTS,
)
KafkaTopic = Annotated[str, KAFKA_TOPIC]

KafkaGroup = Annotated[
    str, Form(r"[^\s\x00]+", "is not the name of a consumer group: 1 to 249 characters without blanks", max_length=249)
]

RedisPrefix = Annotated[
    str, Form(r"[^\s\x00]+", "is not a prefix of keys: 1 to 128 characters without blanks", max_length=128)
]


def _pubsub_name(kind: str) -> Form:
    return Form(
        r"[A-Za-z][A-Za-z0-9._~+%-]{2,254}",
        f"is not a valid Pub/Sub {kind}: 3 to 255 letters, digits and - . _ ~ + %, beginning with a letter and not "
        f'with "goog"; without "projects/.../{kind}s/"',
        max_length=255,
        never_begins="goog",
    )


PUBSUB_TOPIC: Final = _pubsub_name("topic")
PubSubTopic = Annotated[str, PUBSUB_TOPIC]
PubSubSubscription = Annotated[str, _pubsub_name("subscription")]

_PUBSUB_PROJECT: Final = Form(
    r"[a-z][a-z0-9.:-]*[a-z0-9]",
    "is not a project id: use lower-case letters, digits and -, beginning with a letter (the id, not its display name)",
    max_length=100,
)
PubSubProject = Annotated[str, _PUBSUB_PROJECT]

HostAndPort = Annotated[
    str,
    Form(_HOST_AND_PORT, 'must be host:port, without a protocol before it: write it like "kafka:9092"', max_length=280),
]

_TABLE_NAME: Final = Form(
    r"[a-z_][a-z0-9_]*\.[a-z_][a-z0-9_]*",
    'must be schema.table, like "public.outbox", in lower-case letters, digits and _',
    max_length=117,
)
TableName = Annotated[str, _TABLE_NAME]

_COLUMN_NAME: Final = Form(
    r'[^"\x00]+',
    "is not a column name: 1 to 63 characters without double quotes, spelled as Postgres shows it",
    max_length=63,
)
ColumnName = Annotated[str, _COLUMN_NAME]

_ENV_NAME: Final = Form(
    r"[A-Za-z_][A-Za-z0-9_]*",
    "is not the name of an environment variable: use letters, digits and _, not beginning with a digit",
)
EnvName = Annotated[str, _ENV_NAME]

_ENTRY_POINT_NAME: Final = Form(
    r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?",
    'is not the name of a sink: use the name that its package registers under "mailboat.sinks"',
)
EntryPointName = Annotated[str, _ENTRY_POINT_NAME]
