"""A real Kubernetes API server without nodes: storage, validation, watches, defaulting and admission are real.

No pods run. A test that needs a ready pod writes the pod's status, as a kubelet would. With ``controllers=True``
Kubernetes' own controllers run too: Deployments get pods, orphans are garbage-collected, deleted namespaces are
finalized, and each namespace has its default service account.

All servers listen on the loopback interface and need no privileges on the machine. The API server calls a test's
webhook by ``clientConfig.url``.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from mailboat_devservers.etcd import EtcdServer, start_etcd
from mailboat_devservers.kubernetes_audit import POLICY, Request, read_requests
from mailboat_devservers.kubernetes_certificates import Authority, KeyPair, kubeconfig, new_signing_key
from mailboat_devservers.kubernetes_commands import Answer, CommandFailed, Commands
from mailboat_devservers.kubernetes_programs import kubernetes_program
from mailboat_devservers.ports import free_port
from mailboat_devservers.processes import Child
from mailboat_devservers.readiness import answers_ok

__all__ = ["Answer", "ApiServer", "CommandFailed", "Request", "start_api_server"]

_ADMIN, _ADMINS = "admin", "system:masters"
_ISSUER = "https://kubernetes.default.svc.cluster.local"

# Controllers for namespaced objects. Node controllers are left out: they would remove pods from the fictitious nodes of
# tests.
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
    """kube-apiserver with its own etcd and, optionally, controllers.

    ``stop``, ``kill``, ``suspend`` and ``restart`` affect only kube-apiserver: etcd keeps running, and the port stays
    the same. ``close``, also called at the end of a ``with`` block, ends all processes.
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

    # ---- identities and commands ----

    def kubeconfig_for(self, user: str, groups: Sequence[str] = ()) -> Path:
        """Return a kubeconfig file for a user, without permissions until a role is bound to the name or a group."""
        client = self._authority.for_client(user, groups)
        return self._write_kubeconfig(user, client=client)

    def kubeconfig_for_service_account(self, namespace: str, name: str) -> Path:
        """Return a kubeconfig file with a token of an existing service account."""
        token = self.kubectl("create", "token", name, "--namespace", namespace, "--duration", "24h").strip()
        return self._write_kubeconfig(f"{namespace}-{name}", token=token)

    def kubectl(self, *arguments: str, input: str | None = None, kubeconfig: Path | None = None) -> str:
        """Run kubectl, by default as administrator, and return its output; raise ``CommandFailed``."""
        return self.commands(kubeconfig).kubectl(*arguments, input=input)

    def try_kubectl(self, *arguments: str, input: str | None = None, kubeconfig: Path | None = None) -> Answer:
        """Run a kubectl command that may fail; return its status and output."""
        return self.commands(kubeconfig).try_kubectl(*arguments, input=input)

    def helm(self, *arguments: str, input: str | None = None, kubeconfig: Path | None = None) -> str:
        """Run helm and return its output; raise ``CommandFailed``."""
        return self.commands(kubeconfig).helm(*arguments, input=input)

    def commands(self, kubeconfig: Path | None = None) -> Commands:
        return Commands(kubeconfig or self.kubeconfig, self.directory / "commands")

    # ---- audit log ----

    def bookmark(self) -> int:
        """Return the current position in the audit log; ``requests(after=…)`` returns later requests."""
        log = self._audited()
        return log.stat().st_size if log.exists() else 0

    def requests(self, *, user: str | None = None, after: int = 0) -> list[Request]:
        """Return the logged requests in order, of all users or of one; needs ``audit=True``."""
        found = read_requests(self._audited(), after)
        return [request for request in found if user is None or request.user == user]

    # ---- shutdown ----

    def close(self) -> None:
        """End all processes. Idempotent."""
        if self.controllers is not None:
            self.controllers.kill()
        # A graceful shutdown would wait for open watches. Killing loses nothing: etcd has all objects.
        self.kill()
        self.etcd.kill()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- startup ----

    def launch_controllers(self) -> None:
        """Start kube-controller-manager. The API server must be running."""
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
            # The default rate limits are for a shared server and would slow down a test.
            "kube-api-qps": 500,
            "kube-api-burst": 1000,
            "concurrent-gc-syncs": 5,
        }
        # The certificate is self-signed. Unverified TLS is fine here: anonymous requests only get the health status.
        anything = ssl._create_unverified_context()
        self.controllers = Child(
            f"kube-controller-manager on port {port}",
            [str(kubernetes_program("kube-controller-manager")), *_flags(options)],
            log=self.directory / "controller-manager.log",
            start_timeout=120.0,
            ready=lambda: answers_ok(f"https://127.0.0.1:{port}/healthz", anything),
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
            # The endpoint of Service `kubernetes` would be a loopback address, which Kubernetes refuses to store.
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
            # This plugin refuses pods until a controller has created the namespace's default service account.
            options["disable-admission-plugins"] = "ServiceAccount"
        if self._audit_log is not None:
            _write(self.directory / "audit-policy.yaml", POLICY)
            options["audit-policy-file"] = self.directory / "audit-policy.yaml"
            options["audit-log-path"] = self._audit_log
            options["audit-log-maxsize"] = 4000  # megabytes; no rotation, so that bookmarks stay valid
        return _flags(options)

    def _answers(self) -> bool:
        return answers_ok(f"{self.url}/readyz", self._trust)

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
    """Start an empty API server with its own folder; optionally with Kubernetes' controllers and an audit log."""
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
