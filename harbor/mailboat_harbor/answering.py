"""Whether a server that was just started answers, asked in the way of those who will use it."""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request

import psycopg


def takes_connections(url: str) -> bool:
    """Postgres, or a pooler before it."""
    try:
        psycopg.connect(url, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


def says_ok(url: str, trust: ssl.SSLContext | None = None) -> bool:
    """A page of health over HTTP."""
    try:
        with urllib.request.urlopen(url, timeout=5, context=trust) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError, http.client.HTTPException):
        return False
