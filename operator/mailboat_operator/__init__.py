"""Kubernetes operator of Mailboat: reconciles OutboxRelays and EventSubscriptions, and injects sidecars."""
