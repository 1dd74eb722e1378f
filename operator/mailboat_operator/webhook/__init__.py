"""The mutating webhook that injects the sidecar, and its certificates.

Every replica serves the webhook. The leader maintains the certificates, all replicas poll them:

    certificates (leader)  ->  Secret, caBundle  ->  serving_cert (every replica)  ->  server

A certificate is first a successor in the caBundle, served some minutes later, replaced at half of its lifetime, and
trusted until it expires. A pod is never blocked: if the webhook fails, it starts without a sidecar and gets an event.
"""
