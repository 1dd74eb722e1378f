"""The mutating webhook that injects the sidecar, and its certificates.

Every replica serves the webhook. The leader maintains the certificates, all replicas poll them:

    certificates (leader)  ->  Secret, caBundle  ->  serving_cert (every replica)  ->  server
"""
