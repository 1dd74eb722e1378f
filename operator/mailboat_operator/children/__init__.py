"""What belongs to a relay in the cluster: one pure function per kind of child, from the resource to the whole object.

Nothing here asks the cluster or the clock. All children of a relay have the same name and labels, and point to their
relay as their controller, so that Kubernetes itself removes them with it.
"""
