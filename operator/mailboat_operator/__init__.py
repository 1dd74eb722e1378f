"""The Kubernetes operator of Mailboat: resources in, relays out."""
