"""The pydantic models of OutboxRelay and EventSubscription: syntax and meaning of the manifests.

``read_documents`` turns parsed YAML into validated resources or a list of all problems. YAML parsing, files, databases
and Kubernetes clients live elsewhere. The only dependency is pydantic.
"""

from mailboat_spec.documents import Manifests, read_documents
from mailboat_spec.names import API_VERSION, FIELD_MANAGER, RELAY_KIND
from mailboat_spec.references import Connection, SecretKeyRef
from mailboat_spec.resources.delivery import NoHandler
from mailboat_spec.resources.relay import Columns, Notify, OutboxRelay, OutboxRelaySpec, Pooler, Retention, Runtime
from mailboat_spec.resources.resource import Resource, full_name
from mailboat_spec.resources.sinks import CustomSink, KafkaSink, PubSubSink, Sink
from mailboat_spec.resources.sources import Idempotency, IdempotencyPostgres, KafkaSource, PubSubSource
from mailboat_spec.resources.status import ConditionStatus, ConditionType, Reason
from mailboat_spec.resources.subscription import EventSubscription, EventSubscriptionSpec, Filter, Format, State
from mailboat_spec.resources.template import PodTemplate
from mailboat_spec.scalars import Duration, Pattern
from mailboat_spec.validation_errors import SpecError

__all__ = [
    "API_VERSION", "FIELD_MANAGER", "RELAY_KIND", "Columns", "ConditionStatus", "ConditionType",
    "Connection", "CustomSink", "Duration", "EventSubscription", "EventSubscriptionSpec", "Filter",
    "Format", "Idempotency", "IdempotencyPostgres", "KafkaSink", "KafkaSource", "Manifests", "NoHandler", "Notify",
    "OutboxRelay", "OutboxRelaySpec", "Pattern", "PodTemplate", "Pooler",
    "PubSubSink", "PubSubSource", "Reason", "Resource", "Retention", "Runtime", "SecretKeyRef",
    "Sink", "SpecError", "State", "full_name", "read_documents",
]  # fmt: skip
