"""Readiness probes for started servers, over the protocols that their clients use."""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request

import psycopg


def takes_connections(url: str) -> bool:
    """Return whether Postgres, or a pooler in front of it, accepts connections."""
    try:
        psycopg.connect(url, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


def answers_ok(url: str, trust: ssl.SSLContext | None = None) -> bool:
    """Return whether an HTTP health endpoint responds with 200."""
    try:
        with urllib.request.urlopen(url, timeout=5, context=trust) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError, http.client.HTTPException):
        return False
