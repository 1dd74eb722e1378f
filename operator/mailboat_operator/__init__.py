"""The Kubernetes operator of Mailboat: OutboxRelays and EventSubscriptions become relays with a configuration.

Layers, each importing only from those below:

    __main__ -> process -> controller | webhook | leader_election -> status -> relays -> resources
    -> kube | metrics | http_server -> settings

Life cycle of a process (``process``):

    candidate   serves the webhook and the health endpoints, and waits for the Lease
    leader      also runs the controller, and rotates certificates and signing keys
    stopping    unready; the controller has ended and the Lease is released; the webhook answers a few seconds longer,
                until the API server has stopped calling it

A leader that loses the Lease or fails never becomes a candidate again: the process exits, and the pod restarts it.
"""
