"""The pydantic models of OutboxRelay and EventSubscription."""
