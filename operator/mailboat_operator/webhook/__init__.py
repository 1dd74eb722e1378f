"""The mutating webhook that injects the sidecar, and its certificates.

Every replica serves the webhook. The leader maintains the certificates, all replicas poll them:

    certificates (leader)  ->  Secret, caBundle  ->  serving_cert (every replica)  ->  server

Life of a serving certificate: created as the successor and published in the caBundle, served by every replica some
minutes later, replaced at half of its lifetime, trusted until it expires.

A pod is never blocked by its sidecar: if the webhook fails, the pod starts without one and gets an event.
"""
