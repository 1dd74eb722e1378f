"""The emitter: writes events to the outbox in the application's own transaction.

``api`` has ``emit`` and ``emit_many``, ``validation`` the rules of an event, ``drivers`` the adapters for connections
of psycopg, asyncpg, SQLAlchemy and DB-API drivers. The package has no dependencies. Its name is not ``emit``, because
``mailboat.emit`` is the function.
"""
