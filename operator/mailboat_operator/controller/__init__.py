"""The controller of the leader: watch, cache, queue, reconcile.

One direction of data:

    API server -> kopf_feed -> cache -> workqueue -> reconcile -> API server and relays

An event only names the relay that it concerns. The reconcile reads the whole current state, so lost, repeated and
reordered events do no harm. Writes of the controller come back as events; the cache drops those that change nothing but
a status, so an idle cluster stays silent.

States of a key (namespace and name of a relay) in the work queue:

    absent      no work; an event or a due time adds it
    due         waits for a worker
    busy        one worker reconciles it; an event meanwhile makes it due again afterwards
    delayed     the last reconcile named the next run (seconds), or failed (back-off, at most a minute)

Deletion needs no finalizer. Kubernetes removes the children by their owner references. A relay that is deleted while
its reconcile runs is noticed before the first write.
"""
