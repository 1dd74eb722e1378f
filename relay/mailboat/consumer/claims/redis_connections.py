"""Clients for Redis and Valkey from one URL: a single server, a server behind Sentinel, or a cluster.

| URL | server |
|---|---|
| ``redis://[user:password@]host[:6379][/db]`` | one server, or a proxy or service in front of one |
| ``redis+sentinel://[user:password@]host[:26379][,host…]/service[/db]`` | the primary that the sentinels name |
| ``redis+cluster://[user:password@]host[:6379][,host…]`` | a cluster |

``rediss`` instead of ``redis`` uses TLS; ``valkey`` and ``valkeys`` mean the same as ``redis`` and ``rediss``.
Sentinels with a password of their own: ``?sentinelUser=…&sentinelPassword=…``. Clients never retry a command by
themselves: ``scripts`` repeats a call and marks it as repeated.
"""

import ssl
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from mailboat.errors import ConfigError

_SCHEMES: Final = {"redis": False, "rediss": True, "valkey": False, "valkeys": True}
_KINDS: Final = {"": 6379, "sentinel": 26379, "cluster": 6379}
_PARAMETERS: Final = {"sentinelUser", "sentinelPassword"}


@dataclass(frozen=True, slots=True)
class RedisAddress:
    """A parsed URL. Its text form has no password."""

    kind: str
    """Empty for one server, ``sentinel`` or ``cluster``."""
    hosts: tuple[tuple[str, int], ...]
    tls: bool = False
    service: str = ""
    db: int = 0
    credentials: dict[str, str] = field(default_factory=dict, repr=False)
    sentinel_credentials: dict[str, str] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        hosts = ",".join(f"{host}:{port}" for host, port in self.hosts)
        return f"{self.service} behind {hosts}" if self.service else hosts

    @property
    def is_cluster(self) -> bool:
        return self.kind == "cluster"


def parse_address(url: str) -> RedisAddress:
    """Return the address. Raises ConfigError without repeating the URL, which may contain a password."""
    parts = urlsplit(url)
    scheme, _, kind = parts.scheme.partition("+")
    if scheme not in _SCHEMES or kind not in _KINDS:
        raise ConfigError(
            f"the URL of Redis begins with {parts.scheme or 'nothing'}: use redis://, rediss://, redis+sentinel:// or"
            " redis+cluster://"
        )
    path = [unquote(each) for each in parts.path.split("/") if each]
    service = path.pop(0) if kind == "sentinel" and path else ""
    if kind == "sentinel" and not service:
        raise ConfigError("the URL of Redis names no service: redis+sentinel://host:26379/<service>")
    if len(path) > 1 or (path and (kind == "cluster" or not path[0].isdigit())):
        raise ConfigError("the path of the URL of Redis must be the number of a database, as in redis://host:6379/0")
    parameters = parse_qs(parts.query)
    if unknown := sorted(parameters.keys() - _PARAMETERS):
        raise ConfigError(f"the URL of Redis has unknown parameters: {', '.join(unknown)}")
    return RedisAddress(
        kind,
        _hosts(parts, _KINDS[kind]),
        tls=_SCHEMES[scheme],
        service=service,
        db=int(path[0]) if path else 0,
        credentials=_credentials(parts),
        sentinel_credentials={
            name: parameters[parameter][0]
            for name, parameter in (("username", "sentinelUser"), ("password", "sentinelPassword"))
            if parameter in parameters
        },
    )


def _hosts(parts: SplitResult, default_port: int) -> tuple[tuple[str, int], ...]:
    found = []
    for each in parts.netloc.rpartition("@")[2].split(","):
        host, bracket, rest = each[1:].partition("]") if each.startswith("[") else ("", "", "")
        if not bracket:
            host, _, rest = each.partition(":")
        port = rest.removeprefix(":")
        if not host or not (port.isdigit() or not port):
            raise ConfigError("the URL of Redis names no host, or a port that is not a number")
        found.append((host, int(port or default_port)))
    return tuple(found)


def _credentials(parts: SplitResult) -> dict[str, str]:
    user, _, password = parts.netloc.rpartition("@")[0].partition(":")
    named = (("username", user), ("password", password))
    return {name: unquote(value) for name, value in named if value}


def check_certificates(ca_pem: str, *, tls: bool) -> None:
    """Raise ConfigError if the text has no certificates, or if the URL has no use for them."""
    if not tls:
        raise ConfigError("there are CA certificates, and the URL of Redis does not use TLS: begin it with rediss")
    try:
        ssl.create_default_context(cadata=ca_pem)
    except (ssl.SSLError, ValueError):
        raise ConfigError("the CA of Redis has no certificates in PEM (-----BEGIN CERTIFICATE-----)") from None


@dataclass(frozen=True, slots=True)
class RedisConnections:
    """Makes clients for one address."""

    address: RedisAddress
    ca_pem: str | None = None
    """CA certificates in PEM; None uses those of the system."""
    timeout: float = 5.0

    def synchronous(self) -> Any:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
        from redis.sentinel import Sentinel

        return self._client(redis.Redis, redis.RedisCluster, redis.cluster.ClusterNode, Sentinel, Retry(NoBackoff(), 0))

    def asynchronous(self) -> Any:
        import redis.asyncio
        from redis.asyncio.retry import Retry
        from redis.asyncio.sentinel import Sentinel
        from redis.backoff import NoBackoff

        family = redis.asyncio
        return self._client(
            family.Redis, family.RedisCluster, family.cluster.ClusterNode, Sentinel, Retry(NoBackoff(), 0)
        )

    def _client(self, single: Any, cluster: Any, node: Any, sentinel: Any, retry: Any) -> Any:
        options: dict[str, Any] = {
            **self.address.credentials,
            **self._tls(),
            "socket_timeout": self.timeout,
            "socket_connect_timeout": self.timeout,
            "decode_responses": True,
        }
        if self.address.is_cluster:
            return cluster(startup_nodes=[node(*host) for host in self.address.hosts], retry=retry, **options)
        if self.address.kind == "sentinel":
            watchers = {**options, "username": None, "password": None, **self.address.sentinel_credentials}
            found = sentinel(self.address.hosts, sentinel_kwargs={**watchers, "retry": retry})
            return found.master_for(self.address.service, db=self.address.db, retry=retry, **options)
        ((host, port),) = self.address.hosts
        return single(host=host, port=port, db=self.address.db, retry=retry, **options)

    def _tls(self) -> dict[str, Any]:
        if not self.address.tls:
            return {}
        return {"ssl": True, "ssl_ca_data": self.ca_pem, "ssl_min_version": ssl.TLSVersion.TLSv1_2}


def clients_of(client: Any) -> list[Any]:
    """Return the client, and those of the sentinels behind it: closing the first does not close the others."""
    manager = getattr(getattr(client, "connection_pool", None), "sentinel_manager", None)
    return [client, *(manager.sentinels if manager is not None else ())]
