"""Children of a relay: one pure function per kind, from the resource to the complete object.

No function reads the cluster or the clock. All children of a relay share a name and labels, and have the relay as
controller in their owner reference, so that Kubernetes garbage collection removes them with it.
"""
