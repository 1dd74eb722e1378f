"""Access to the Kubernetes API: client, Secrets, and connections that close reliably. Nothing here retries."""
