"""The mutating webhook that injects the sidecar, and its certificates."""
