"""The Lua scripts of the Redis store: their text, their calls, and how a call is made and repeated.

A script takes many keys. On a cluster, where a call may have keys of one slot only, the same scripts are called with
one key each, in one pipeline. A call whose reply was lost is repeated once, and marked as repeated: the scripts then
recognise their own work. The scripts need Redis 7.0 or Valkey.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, Final

from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    TimeoutError,
)

from mailboat.consumer.broker.interfaces import ClaimsUnavailable

MOST_KEYS: Final = 500
"""Keys per call. A script blocks the server while it runs: 500 keys take about a millisecond."""
ERRORS: Final = (RedisError, RedisClusterException, OSError)
_REPEATED: Final = (ConnectionError, TimeoutError, OSError, ReadOnlyError)
_ROUNDS: Final = 3
"""A call, its repetition, and one more if the server has forgotten the script."""


@cache
def script(name: str) -> tuple[str, str]:
    """Return the text of a script of this package, and its hash."""
    text = files(__package__).joinpath(f"{name}.lua").read_text(encoding="utf-8")
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """One call of a script: arguments for all keys, then arguments for each key."""

    name: str
    keys: Sequence[str | bytes]
    owner: str
    common: tuple[str | int, ...]
    each: Sequence[tuple[str | int, ...]] = ()
    repeated: bool = False

    def commands(self, most_keys: int) -> list[list[str | bytes | int]]:
        """Return EVALSHA commands of at most so many keys."""
        _, sha = script(self.name)
        found: list[list[str | bytes | int]] = []
        for first in range(0, len(self.keys), most_keys):
            keys = self.keys[first : first + most_keys]
            each = [value for values in self.each[first : first + most_keys] for value in values]
            found.append(
                ["EVALSHA", sha, len(keys), *keys, self.owner, "1" if self.repeated else "0", *self.common, *each]
            )
        return found


@dataclass(frozen=True, slots=True)
class Replication:
    """Replicas that must have a write, and how long a call waits for them. No replicas: no waiting."""

    replicas: int = 0
    within: float = 0.1


NO_REPLICATION: Final = Replication()


class ScriptReplies(list[str]):
    """Answers for all keys of a call. ``replicated`` is False if too few replicas have the writes."""

    replicated = True


def run(
    client: Any, call: ScriptCall, *, cluster: bool = False, replication: Replication = NO_REPLICATION
) -> ScriptReplies:
    """Make a call with a synchronous client."""
    for _ in range(_ROUNDS):
        try:
            commands = _commands(call, cluster, replication)
            if len(commands) == 1:
                return _replies([client.execute_command(*commands[0])], replication)
            with client.pipeline(**_kind(cluster)) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                return _replies(pipeline.execute(raise_on_error=False), replication)
        except NoScriptError:
            client.script_load(script(call.name)[0])
        except _REPEATED:
            if call.repeated:
                raise
            if not cluster:  # the address may have moved to another server
                client.connection_pool.disconnect(inuse_connections=False)
        call = replace(call, repeated=True)
    raise ConnectionError("the server forgets scripts as soon as they are loaded")


async def arun(
    client: Any, call: ScriptCall, *, cluster: bool = False, replication: Replication = NO_REPLICATION
) -> ScriptReplies:
    """Make a call with an asynchronous client."""
    for _ in range(_ROUNDS):
        try:
            commands = _commands(call, cluster, replication)
            if len(commands) == 1:
                return _replies([await client.execute_command(*commands[0])], replication)
            async with client.pipeline(**_kind(cluster)) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                return _replies(await pipeline.execute(raise_on_error=False), replication)
        except NoScriptError:
            await client.script_load(script(call.name)[0])
        except _REPEATED:
            if call.repeated:
                raise
            if not cluster:
                await client.connection_pool.disconnect(inuse_connections=False)
        call = replace(call, repeated=True)
    raise ConnectionError("the server forgets scripts as soon as they are loaded")


def _kind(cluster: bool) -> dict[str, bool]:
    return {} if cluster else {"transaction": False}


def _commands(call: ScriptCall, cluster: bool, replication: Replication) -> list[list[str | bytes | int]]:
    commands = call.commands(1 if cluster else MOST_KEYS)
    if replication.replicas:
        commands.append(["WAIT", replication.replicas, int(replication.within * 1000)])
    return commands


def _replies(results: list[Any], replication: Replication) -> ScriptReplies:
    for result in results:
        if isinstance(result, Exception):
            raise result
    replicated = not replication.replicas or results.pop() >= replication.replicas
    replies = ScriptReplies()
    for result in results:  # one string per call: redis-py parses it much faster than a list
        replies += (result.decode() if isinstance(result, bytes) else result).split(",")
    replies.replicated = replicated
    return replies


def unavailable(error: Exception, where: object) -> ClaimsUnavailable:
    """Return the error for the engine: what happened, where, what to do; no password and no key."""
    match error:
        case AuthenticationError():
            reason = "refuses the user name or the password: check the URL in the Secret"
        case BusyLoadingError():
            reason = "is loading its data after a restart"
        case OutOfMemoryError():
            reason = "is full and refuses to write: raise maxmemory, or shorten the time that events are remembered"
        case ReadOnlyError():
            reason = "is a read-only replica: the URL must lead to the primary"
        case NoPermissionError():
            command = re.search(r"'([\w|]+)' command", str(error))
            denied = command[1] if command else "a key"
            reason = f"refuses {denied} to this user (NOPERM): docs/idempotency.md lists the rights that are needed"
        case _ if re.search("can't run this command|ACL failure", str(error)):  # a command inside a script
            reason = "refuses GET or SET to this user: docs/idempotency.md lists the rights that are needed"
        case TimeoutError():
            reason = "did not answer in time"
        case ConnectionError() | OSError() if "CERTIFICATE_VERIFY_FAILED" in str(error):
            reason = "has a certificate that is not trusted: name the file of its CA"
        case ConnectionError() | OSError():
            reason = "can't be reached, or closed the connection"
        case _:
            reason = f"answered with an error: {str(error).partition(' script:')[0][:200]}"
    return ClaimsUnavailable(f"Redis at {where} {reason}")
