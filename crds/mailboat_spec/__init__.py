"""The pydantic models of OutboxRelay and EventSubscription: syntax and meaning of the manifests.

Contains the two resources with spec and status, their field types (durations, patterns, sizes, references), names
shared with the cluster, conditions and reasons, and ``read_documents``, which turns parsed YAML into validated
resources or a list of all problems. YAML parsing, files, databases and Kubernetes clients live elsewhere. The only
dependency is pydantic.
"""

from mailboat_spec.documents import Manifests, read_documents
from mailboat_spec.names import API_VERSION, FIELD_MANAGER, RELAY_KIND
from mailboat_spec.patterns import Pattern
from mailboat_spec.references import Connection, SecretKeyRef
from mailboat_spec.resources.delivery import Backoff, Delivery, NoHandler, OnExhausted
from mailboat_spec.resources.relay import (
    Columns,
    ColumnsPreset,
    Database,
    Durability,
    Notify,
    OutboxRelay,
    OutboxRelaySpec,
    Pooler,
    Retention,
    RetentionPolicy,
    Runtime,
)
from mailboat_spec.resources.resource import Metadata, Resource, full_name
from mailboat_spec.resources.sinks import CustomSink, KafkaSink, PubSubSink, Sink
from mailboat_spec.resources.sources import Idempotency, IdempotencyPostgres, KafkaSource, OnUnavailable, PubSubSource
from mailboat_spec.resources.status import (
    Condition,
    ConditionStatus,
    ConditionType,
    EventSubscriptionStatus,
    OutboxRelayStatus,
    Reason,
    ResourceStatus,
)
from mailboat_spec.resources.subscription import (
    EventSubscription,
    EventSubscriptionSpec,
    Filter,
    Format,
    Ordering,
    StartFrom,
    State,
)
from mailboat_spec.resources.template import PodTemplate, Toleration
from mailboat_spec.scalars import Duration, Size
from mailboat_spec.validation_errors import Problem, SpecError

__all__ = [
    "API_VERSION", "FIELD_MANAGER", "RELAY_KIND", "Backoff", "Columns", "ColumnsPreset", "Condition", "ConditionStatus",
    "ConditionType", "Connection", "CustomSink", "Database", "Delivery", "Durability", "Duration", "EventSubscription",
    "EventSubscriptionSpec", "EventSubscriptionStatus", "Filter", "Format", "Idempotency", "IdempotencyPostgres",
    "KafkaSink", "KafkaSource", "Manifests", "Metadata", "NoHandler", "Notify", "OnExhausted", "OnUnavailable",
    "Ordering", "OutboxRelay", "OutboxRelaySpec", "OutboxRelayStatus", "Pattern", "PodTemplate", "Pooler", "Problem",
    "PubSubSink", "PubSubSource", "Reason", "Resource", "ResourceStatus", "Retention", "RetentionPolicy", "Runtime",
    "SecretKeyRef", "Sink", "Size", "SpecError", "StartFrom", "State", "Toleration", "full_name",
    "read_documents",
]  # fmt: skip
