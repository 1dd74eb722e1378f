"""PgBouncer in front of a Postgres server, for tests of the limitations of transaction mode.

PgBouncer comes from the system's packages: the registries that provide all other parts have no build of it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from urllib.parse import quote

from mailboat_devservers.errors import PartMissing
from mailboat_devservers.ports import free_port
from mailboat_devservers.postgres import PostgresServer
from mailboat_devservers.processes import Child, unprivileged
from mailboat_devservers.proxy import Proxy
from mailboat_devservers.readiness import takes_connections

__all__ = ["PgBouncer", "start_pgbouncer"]

# Users are read from Postgres, so that any role can log in under its own name. Startup parameters are refused, not
# ignored, which is PgBouncer's default: a client that sends some must fail in tests.
_CONFIG = """\
[databases]
* = host=127.0.0.1 port={server_port} auth_user=postgres

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = trust
auth_file = {users}
auth_user = postgres
admin_users = postgres
pool_mode = {pool_mode}
max_client_conn = 500
default_pool_size = 20
ignore_startup_parameters = extra_float_digits
"""


class PgBouncer(Child):
    """One pooler for all databases of a server."""

    def __init__(self, program: str, directory: Path, port: int) -> None:
        self.port = port
        super().__init__(
            f"PgBouncer on port {port}",
            [program, str(directory / "pgbouncer.ini")],
            log=directory / "pgbouncer.log",
            ready=self._answers,
            account=unprivileged(),
        )

    def url(self, dbname: str = "postgres", user: str = "postgres") -> str:
        """Return a libpq URL through the pooler."""
        return f"postgresql://{quote(user, safe='')}@127.0.0.1:{self.port}/{quote(dbname, safe='')}"

    def _answers(self) -> bool:
        return takes_connections(self.url())


def start_pgbouncer(directory: Path, server: PostgresServer | Proxy, pool_mode: str = "transaction") -> PgBouncer:
    """Start a pooler in front of a server, or of a proxy's target, with its own folder."""
    program = find_pgbouncer()
    port = free_port()
    directory.mkdir(parents=True, exist_ok=True)
    users = directory / "users.txt"
    users.write_text('"postgres" ""\n')
    config = _CONFIG.format(server_port=server.port, port=port, users=users, pool_mode=pool_mode)
    (directory / "pgbouncer.ini").write_text(config)
    bouncer = PgBouncer(program, directory, port)
    bouncer.launch()
    return bouncer


def find_pgbouncer() -> str:
    # Debian installs it into /usr/sbin, which only root's PATH contains.
    found = shutil.which("pgbouncer", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"]))
    if found is None:
        raise PartMissing("PgBouncer is not installed: on Debian and Ubuntu, `apt-get install pgbouncer`")
    return found
