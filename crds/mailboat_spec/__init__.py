"""The pydantic models of OutboxRelay and EventSubscription: syntax and meaning of the manifests.

Contains the two resources with spec and status, their field types (durations, patterns, sizes, references), names
shared with the cluster, conditions and reasons, and ``read_documents``, which turns parsed YAML into validated
resources or a list of all problems. YAML parsing, files, databases and Kubernetes clients live elsewhere. The only
dependency is pydantic.
"""

from mailboat_spec.base import Model, StatusModel
from mailboat_spec.conditions import Condition, ConditionStatus, ConditionType, Reason
from mailboat_spec.constraints import Refusal, Refused
from mailboat_spec.documents import Manifests, read_documents
from mailboat_spec.durations import Duration, DurationBounds
from mailboat_spec.names import (
    API_VERSION,
    DEFAULT_NAMESPACE,
    FIELD_MANAGER,
    GROUP,
    RELAY_KIND,
    SUBSCRIPTION_KIND,
    VERSION,
)
from mailboat_spec.patterns import Pattern
from mailboat_spec.references import ConfigMapRef, RelayRef, SecretKeyRef, SecretRef
from mailboat_spec.resources.connections import Connection
from mailboat_spec.resources.delivery import Backoff, DeadLetter, Delivery, NoHandler, OnExhausted, StopAt
from mailboat_spec.resources.idempotency import Idempotency, IdempotencyPostgres, IdempotencyRedis, OnUnavailable
from mailboat_spec.resources.metadata import Metadata
from mailboat_spec.resources.relay import (
    Columns,
    ColumnsPreset,
    Database,
    Durability,
    Notify,
    Outbox,
    OutboxRelay,
    OutboxRelaySpec,
    Pooler,
    Retention,
    RetentionPolicy,
    Runtime,
    Tracking,
    Wake,
)
from mailboat_spec.resources.resource import Resource, full_name
from mailboat_spec.resources.sinks import (
    AnySink,
    CustomSink,
    HttpSink,
    KafkaSink,
    LogSink,
    PostgresSink,
    PubSubSink,
    PullSink,
    RedisSink,
    Sink,
)
from mailboat_spec.resources.sources import GroupProtocol, KafkaSource, PubSubSource, Source
from mailboat_spec.resources.status import Assignment, EventSubscriptionStatus, OutboxRelayStatus, ResourceStatus
from mailboat_spec.resources.subscription import (
    ConsumerRuntime,
    EventSubscription,
    EventSubscriptionSpec,
    Filter,
    Format,
    Ordering,
    Schemas,
    Start,
    StartFrom,
    State,
    Tags,
)
from mailboat_spec.resources.template import EnvVar, PodTemplate, Resources, TaintEffect, Toleration, TolerationOperator
from mailboat_spec.sizes import Size
from mailboat_spec.validation_errors import Problem, SpecError

__all__ = [
    "API_VERSION",
    "DEFAULT_NAMESPACE",
    "FIELD_MANAGER",
    "GROUP",
    "RELAY_KIND",
    "SUBSCRIPTION_KIND",
    "VERSION",
    "AnySink",
    "Assignment",
    "Backoff",
    "Columns",
    "ColumnsPreset",
    "Condition",
    "ConditionStatus",
    "ConditionType",
    "ConfigMapRef",
    "Connection",
    "ConsumerRuntime",
    "CustomSink",
    "Database",
    "DeadLetter",
    "Delivery",
    "Durability",
    "Duration",
    "DurationBounds",
    "EnvVar",
    "EventSubscription",
    "EventSubscriptionSpec",
    "EventSubscriptionStatus",
    "Filter",
    "Format",
    "GroupProtocol",
    "HttpSink",
    "Idempotency",
    "IdempotencyPostgres",
    "IdempotencyRedis",
    "KafkaSink",
    "KafkaSource",
    "LogSink",
    "Manifests",
    "Metadata",
    "Model",
    "NoHandler",
    "Notify",
    "OnExhausted",
    "OnUnavailable",
    "Ordering",
    "Outbox",
    "OutboxRelay",
    "OutboxRelaySpec",
    "OutboxRelayStatus",
    "Pattern",
    "PodTemplate",
    "Pooler",
    "PostgresSink",
    "Problem",
    "PubSubSink",
    "PubSubSource",
    "PullSink",
    "Reason",
    "RedisSink",
    "Refusal",
    "Refused",
    "RelayRef",
    "Resource",
    "ResourceStatus",
    "Resources",
    "Retention",
    "RetentionPolicy",
    "Runtime",
    "Schemas",
    "SecretKeyRef",
    "SecretRef",
    "Sink",
    "Size",
    "Source",
    "SpecError",
    "Start",
    "StartFrom",
    "State",
    "StatusModel",
    "StopAt",
    "Tags",
    "TaintEffect",
    "Toleration",
    "TolerationOperator",
    "Tracking",
    "Wake",
    "full_name",
    "read_documents",
]
