"""The leader's controller: watch, cache, queue, and reconcile."""
