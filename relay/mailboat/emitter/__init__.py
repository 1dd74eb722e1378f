"""The emitter: writes events to the outbox in the application's own transaction.

The package has no dependencies. Its name is not ``emit``, because ``mailboat.emit`` is the function.
"""
