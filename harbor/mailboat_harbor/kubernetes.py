"""A real Kubernetes API server without a node: what can be stored, refused, watched, defaulted and admitted is real.

Nothing runs pods here. A pod is an object, and a test that needs it ready writes its status, as a kubelet would. With
``controllers=True`` Kubernetes' own controllers act as well: Deployments get pods, what has lost its owner is
collected, a deleted namespace goes, each namespace has its default service account.

Everything listens on the loopback interface and needs no rights on the machine. A webhook that a test serves there is
reached by its ``clientConfig.url``.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from mailboat_harbor.answering import says_ok
from mailboat_harbor.etcd import EtcdServer, start_etcd
from mailboat_harbor.kubernetes_audit import POLICY, Request, read_requests
from mailboat_harbor.kubernetes_certificates import Authority, KeyPair, kubeconfig, new_signing_key
from mailboat_harbor.kubernetes_commands import Answer, CommandFailed, Commands
from mailboat_harbor.kubernetes_programs import kubernetes_program
from mailboat_harbor.ports import free_port
from mailboat_harbor.processes import Child

__all__ = ["Answer", "ApiServer", "CommandFailed", "Request", "start_api_server"]

_ADMIN, _ADMINS = "admin", "system:masters"
_ISSUER = "https://kubernetes.default.svc.cluster.local"

# Those that a namespace full of objects needs. Controllers of nodes are left out: they would remove pods from nodes
# that tests made up.
_CONTROLLERS = (
    "deployment-controller",
    "replicaset-controller",
    "statefulset-controller",
    "job-controller",
    "disruption-controller",
    "endpointslice-controller",
    "garbage-collector-controller",
    "namespace-controller",
    "serviceaccount-controller",
    "root-ca-certificate-publisher-controller",
    "clusterrole-aggregation-controller",
)


class ApiServer(Child):
    """kube-apiserver, with an etcd and perhaps controllers of its own beside it.

    ``stop``, ``kill``, ``suspend`` and ``restart`` are about kube-apiserver alone: etcd stays, and so does the port.
    ``close``, which also ends a ``with`` block, is the end of all.
    """

    def __init__(self, directory: Path, etcd: EtcdServer, *, controllers: bool, audit: bool) -> None:
        self.directory = directory
        self.port = free_port()
        self.url = f"https://127.0.0.1:{self.port}"
        self.etcd = etcd
        self.controllers: Child | None = None
        self._authority = Authority.create()
        self._audit_log = directory / "audit.log" if audit else None
        self._trust = ssl.create_default_context(cadata=self._authority.pair.certificate)
        command = [str(kubernetes_program("kube-apiserver")), *self._prepare(controllers)]
        super().__init__(
            f"kube-apiserver on port {self.port}",
            command,
            log=directory / "apiserver.log",
            ready=self._answers,
            start_timeout=120.0,
        )
        self.kubeconfig = self.kubeconfig_for(_ADMIN, [_ADMINS])

    # ---- who one is ----

    def kubeconfig_for(self, user: str, groups: Sequence[str] = ()) -> Path:
        """A kubeconfig file of that user, who may do nothing until a role is bound to the name or to a group."""
        client = self._authority.for_client(user, groups)
        return self._write_kubeconfig(user, client=client)

    def kubeconfig_for_service_account(self, namespace: str, name: str) -> Path:
        """A kubeconfig file with a token of that service account, which must exist."""
        token = self.kubectl("create", "token", name, "--namespace", namespace, "--duration", "24h").strip()
        return self._write_kubeconfig(f"{namespace}-{name}", token=token)

    def kubectl(self, *arguments: str, input: str | None = None, kubeconfig: Path | None = None) -> str:
        """What kubectl printed, as the administrator if no other kubeconfig is given; raises ``CommandFailed``."""
        return self.commands(kubeconfig).kubectl(*arguments, input=input)

    def try_kubectl(self, *arguments: str, input: str | None = None, kubeconfig: Path | None = None) -> Answer:
        """The same for a command that may be refused: its status and all it printed."""
        return self.commands(kubeconfig).try_kubectl(*arguments, input=input)

    def helm(self, *arguments: str, input: str | None = None, kubeconfig: Path | None = None) -> str:
        """What helm printed; raises ``CommandFailed``."""
        return self.commands(kubeconfig).helm(*arguments, input=input)

    def commands(self, kubeconfig: Path | None = None) -> Commands:
        return Commands(kubeconfig or self.kubeconfig, self.directory / "commands")

    # ---- what was asked of it ----

    def bookmark(self) -> int:
        """A place in the list of requests: ``requests(after=…)`` are those that came since."""
        log = self._audited()
        return log.stat().st_size if log.exists() else 0

    def requests(self, *, user: str | None = None, after: int = 0) -> list[Request]:
        """What was asked of the server, in order, by everybody or by one user; needs ``audit=True``."""
        found = read_requests(self._audited(), after)
        return [request for request in found if user is None or request.user == user]

    # ---- its end ----

    def close(self) -> None:
        """End everything. Safe to call twice."""
        if self.controllers is not None:
            self.controllers.kill()
        # Its graceful end waits for watches that nobody will end; nothing is lost, as etcd has everything.
        self.kill()
        self.etcd.kill()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- how it starts ----

    def launch_controllers(self) -> None:
        """Start kube-controller-manager beside the server, which must be up."""
        pki, port = self.directory / "pki", free_port()
        own = self._write_kubeconfig(
            "controller-manager", client=self._authority.for_client("system:kube-controller-manager")
        )
        options = {
            "kubeconfig": own,
            "authentication-kubeconfig": own,
            "authorization-kubeconfig": own,
            "bind-address": "127.0.0.1",
            "secure-port": port,
            "cert-dir": pki / "controller-manager",
            "leader-elect": "false",
            "use-service-account-credentials": "true",
            "service-account-private-key-file": pki / "service-accounts.key",
            "root-ca-file": pki / "ca.crt",
            "controllers": ",".join(_CONTROLLERS),
            # The defaults are for a server that many share, and make a lone test wait.
            "kube-api-qps": 500,
            "kube-api-burst": 1000,
            "concurrent-gc-syncs": 5,
        }
        # Its certificate is its own; and what it says there without a name is nothing but whether it lives.
        anything = ssl._create_unverified_context()
        self.controllers = Child(
            f"kube-controller-manager on port {port}",
            [str(kubernetes_program("kube-controller-manager")), *_flags(options)],
            log=self.directory / "controller-manager.log",
            start_timeout=120.0,
            ready=lambda: says_ok(f"https://127.0.0.1:{port}/healthz", anything),
        )
        self.controllers.launch()

    def _prepare(self, controllers: bool) -> list[str]:
        pki = self.directory / "pki"
        pki.mkdir(parents=True, exist_ok=True)
        serving = self._authority.for_server("kube-apiserver", ["127.0.0.1", "localhost", "kubernetes.default.svc"])
        signing, checking = new_signing_key()
        _write(pki / "ca.crt", self._authority.pair.certificate)
        _write(pki / "apiserver.crt", serving.certificate)
        _write(pki / "apiserver.key", serving.key)
        _write(pki / "service-accounts.key", signing)
        _write(pki / "service-accounts.pub", checking)
        options: dict[str, object] = {
            "etcd-servers": self.etcd.url,
            "bind-address": "127.0.0.1",
            "advertise-address": "127.0.0.1",
            "secure-port": self.port,
            # The Service `kubernetes` would point at the loopback interface, which Kubernetes refuses to store.
            "endpoint-reconciler-type": "none",
            "cert-dir": pki,
            "tls-cert-file": pki / "apiserver.crt",
            "tls-private-key-file": pki / "apiserver.key",
            "client-ca-file": pki / "ca.crt",
            "authorization-mode": "RBAC",
            "service-account-key-file": pki / "service-accounts.pub",
            "service-account-signing-key-file": pki / "service-accounts.key",
            "service-account-issuer": _ISSUER,
            "service-cluster-ip-range": "10.96.0.0/16",
            "allow-privileged": "true",
        }
        if not controllers:
            # It refuses pods until a controller has made the namespace's default service account.
            options["disable-admission-plugins"] = "ServiceAccount"
        if self._audit_log is not None:
            _write(self.directory / "audit-policy.yaml", POLICY)
            options["audit-policy-file"] = self.directory / "audit-policy.yaml"
            options["audit-log-path"] = self._audit_log
            options["audit-log-maxsize"] = 4000  # megabytes: never a second file, so that bookmarks stay true
        return _flags(options)

    def _answers(self) -> bool:
        return says_ok(f"{self.url}/readyz", self._trust)

    def _audited(self) -> Path:
        if self._audit_log is None:
            raise RuntimeError("this API server writes no audit log: start it with audit=True")
        return self._audit_log

    def _write_kubeconfig(self, name: str, *, client: KeyPair | None = None, token: str | None = None) -> Path:
        file = self.directory / "kubeconfigs" / name.replace("/", "-").replace(":", "-")
        file.parent.mkdir(parents=True, exist_ok=True)
        _write(file, kubeconfig(self.url, self._authority.pair, client=client, token=token))
        return file


def start_api_server(directory: Path, *, controllers: bool = False, audit: bool = False) -> ApiServer:
    """An empty API server on a folder of its own; with Kubernetes' controllers, with a record of all requests."""
    etcd = start_etcd(directory / "etcd")
    server = ApiServer(directory, etcd, controllers=controllers, audit=audit)
    try:
        server.launch()
        if controllers:
            server.launch_controllers()
    except BaseException:
        server.close()
        raise
    return server


def _flags(options: dict[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items()]


def _write(file: Path, content: str) -> None:
    file.touch(mode=0o600)
    file.write_text(content)
