"""The mutating webhook that injects the sidecar, and its certificates.

Every replica serves the webhook. The leader maintains the certificates, all replicas poll them:

    cert_rotation (leader)  ->  Secret, caBundle  ->  serving_cert (every replica)  ->  server

Life of a serving certificate: issued by the CA in the Secret, served by every replica within ten seconds, renewed long
before it expires. Life of a CA: created, published in the caBundle, then used for the next serving certificate; the old
CA stays in the caBundle until nothing that it signed is served.

A pod is never blocked by its sidecar: if the webhook fails, the pod starts without one and gets an event.
"""
