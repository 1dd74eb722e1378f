"""Models of the two resources, OutboxRelay and EventSubscription, and of the parts of their specs."""
