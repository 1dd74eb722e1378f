"""The API server of the tests is a real one: it refuses, remembers, calls webhooks, and can be taken away."""

from __future__ import annotations

import http.server
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mailboat_harbor.kubernetes import ApiServer, CommandFailed, start_api_server
from mailboat_harbor.kubernetes_certificates import Authority
from mailboat_harbor.ports import free_port
from support.wait import wait_until

pytestmark = pytest.mark.api


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, or_skip: Callable[..., ApiServer]) -> Iterator[ApiServer]:
    """An API server with controllers, which this file may kill."""
    with or_skip(lambda: start_api_server(tmp_path_factory.mktemp("api"), controllers=True, audit=True)) as server:
        # Controllers that lose the server while they start are gone for good; none acts before all have started.
        wait_until(lambda: server.try_kubectl("get", "serviceaccount", "default").status == 0, what="the controllers")
        yield server


def test_client_and_server_are_the_pinned_version(server: ApiServer) -> None:
    versions = json.loads(server.kubectl("version", "--output=json"))
    assert versions["clientVersion"]["gitVersion"] == versions["serverVersion"]["gitVersion"]
    assert versions["serverVersion"]["minor"] == "34"


def test_helm_speaks_to_it(server: ApiServer) -> None:
    assert json.loads(server.helm("list", "--all-namespaces", "--output=json")) == []


def test_a_failed_command_says_what_the_server_said(server: ApiServer) -> None:
    with pytest.raises(CommandFailed, match=r'(?s)`kubectl get pod nobody` ended with status 1:.*"nobody" not found'):
        server.kubectl("get", "pod", "nobody")


def test_what_was_stored_survives_a_kill(server: ApiServer) -> None:
    server.kubectl("create", "configmap", "kept", "--from-literal=a=1")
    url = server.url
    server.kill()
    assert "refused" in server.try_kubectl("get", "configmap", "kept").err
    server.restart()
    assert server.url == url
    assert server.kubectl("get", "configmap", "kept", "--output=jsonpath={.data.a}") == "1"


def test_a_user_may_do_what_a_role_allows_and_nothing_else(server: ApiServer) -> None:
    jane = server.kubeconfig_for("jane", ["readers"])
    server.kubectl("create", "clusterrole", "read-secrets", "--verb=get,list", "--resource=secrets")
    server.kubectl("create", "clusterrolebinding", "readers", "--clusterrole=read-secrets", "--group=readers")
    wait_until(lambda: server.try_kubectl("get", "secrets", kubeconfig=jane).status == 0, what="the role to be known")
    refused = server.try_kubectl("create", "configmap", "x", kubeconfig=jane)
    assert 'User "jane" cannot create resource "configmaps"' in refused.err


def test_a_service_account_is_known_by_its_token(server: ApiServer) -> None:
    server.kubectl("create", "serviceaccount", "robot")
    robot = server.kubeconfig_for_service_account("default", "robot")
    assert "system:serviceaccount:default:robot" in server.kubectl("auth", "whoami", kubeconfig=robot)


def test_controllers_make_pods_and_collect_orphans(server: ApiServer) -> None:
    server.kubectl("create", "deployment", "web", "--image=web", "--replicas=2")

    def pods() -> int:
        return len(server.kubectl("get", "pods", "--selector=app=web", "--output=name").split())

    # After a restart of the API server, controllers come back to it with pauses of up to half a minute.
    wait_until(lambda: pods() == 2, timeout=120, what="two pods of the deployment")
    server.kubectl("delete", "deployment", "web")
    wait_until(lambda: pods() == 0, timeout=120, what="the pods to go with their deployment")


def test_requests_are_counted_by_user(server: ApiServer) -> None:
    carl = server.kubeconfig_for("carl", ["system:masters"])
    server.kubectl("create", "configmap", "counted", kubeconfig=carl)
    here = server.bookmark()
    server.kubectl("get", "configmap", "counted")
    server.kubectl("annotate", "configmap", "counted", "a=1", kubeconfig=carl)
    found = [(request.verb, request.resource, request.name) for request in server.requests(user="carl", after=here)]
    assert found == [("get", "configmaps", "counted"), ("patch", "configmaps", "counted")]


def test_a_watch_counts_once(server: ApiServer) -> None:
    dora = server.kubeconfig_for("dora", ["system:masters"])
    server.kubectl("get", "namespaces", kubeconfig=dora)  # and asks what there is in the first place, which takes time
    wait_until(lambda: server.requests(user="dora"), what="the request to be counted")
    here = server.bookmark()
    server.kubectl("get", "namespaces", "--watch", "--request-timeout=10s", kubeconfig=dora)
    assert [request.verb for request in server.requests(user="dora", after=here)] == ["list", "watch"]


@contextmanager
def labelling_webhook(directory: Path, authority: Authority) -> Iterator[str]:
    """A webhook on the loopback interface that labels what it is shown; its address."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            # base64 of [{"op": "add", "path": "/metadata/labels", "value": {"seen": "yes"}}]
            patch = "W3sib3AiOiAiYWRkIiwgInBhdGgiOiAiL21ldGFkYXRhL2xhYmVscyIsICJ2YWx1ZSI6IHsic2VlbiI6ICJ5ZXMifX1d"
            response = {"uid": review["request"]["uid"], "allowed": True, "patchType": "JSONPatch", "patch": patch}
            body = json.dumps({"apiVersion": review["apiVersion"], "kind": review["kind"], "response": response})
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    pair = authority.for_server("webhook", ["127.0.0.1"])
    file = directory / "webhook.pem"
    file.write_text(pair.certificate + pair.key)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    with http.server.ThreadingHTTPServer(("127.0.0.1", free_port()), Handler) as listener:
        listener.daemon_threads = True
        listener.socket = context.wrap_socket(listener.socket, server_side=True)
        thread = threading.Thread(target=listener.serve_forever)
        thread.start()
        yield f"https://127.0.0.1:{listener.server_port}/"
        listener.shutdown()
        thread.join()


def test_a_webhook_of_this_process_is_called(server: ApiServer, tmp_path: Path) -> None:
    authority = Authority.create()
    with labelling_webhook(tmp_path, authority) as url:
        webhook = {
            "name": "label.mailboat.test",
            "clientConfig": {"url": url, "caBundle": authority.bundle},
            "rules": [
                {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}
            ],
            "objectSelector": {"matchExpressions": [{"key": "seen", "operator": "DoesNotExist"}]},
            "admissionReviewVersions": ["v1"],
            "sideEffects": "None",
        }
        configuration = {
            "apiVersion": "admissionregistration.k8s.io/v1",
            "kind": "MutatingWebhookConfiguration",
            "metadata": {"name": "label"},
            "webhooks": [webhook],
        }
        server.kubectl("create", "--filename=-", input=json.dumps(configuration))

        def answer() -> str:
            template = "--output=jsonpath={.metadata.labels.seen}"
            return server.kubectl("create", "configmap", "seen", "--dry-run=server", template)

        try:
            wait_until(lambda: answer() == "yes", what="the API server to know the webhook")
        finally:
            server.kubectl("delete", "mutatingwebhookconfiguration", "label")
