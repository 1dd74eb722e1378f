"""Command lines and configuration files for the programs of a one-node cluster. Pure.

A comment explains each line that differs from a production cluster.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cluster.network import Network
from mailboat_devservers.kubernetes_certificates import Authority, KeyPair, kubeconfig, new_signing_key

NODE_NAME = "node"
_DOMAIN = "cluster.local"


@dataclass(frozen=True, slots=True)
class Plan:
    """Folder, network and programs of a cluster."""

    run: Path
    network: Network
    program: Callable[[str], Path]
    """Path of a program, by name."""
    cgroup: str
    pause_image: str

    def pki(self, name: str) -> Path:
        return self.run / "pki" / name

    def kubeconfig(self, user: str) -> Path:
        return self.run / "kubeconfigs" / user


def certificates(plan: Plan) -> dict[Path, str]:
    """Every key, certificate and kubeconfig file; the one called ``admin`` is for the stories."""
    authority = Authority.create()
    network, node = plan.network, f"system:node:{NODE_NAME}"
    api_names = [f"kubernetes{rest}" for rest in ("", ".default", ".default.svc", f".default.svc.{_DOMAIN}")]
    api_hosts = [*api_names, "localhost", "127.0.0.1", network.node, network.api_service]
    signing, checking = new_signing_key()
    files = {plan.pki("service-accounts.key"): signing, plan.pki("service-accounts.pub"): checking}
    pairs: dict[str, KeyPair] = {
        "ca": authority.pair,
        "apiserver": authority.for_server("kube-apiserver", api_hosts),
        "kubelet-serving": authority.for_server(node, [NODE_NAME, network.node], ["system:nodes"]),
        "apiserver-to-kubelet": authority.for_client("kube-apiserver-kubelet-client", ["system:masters"]),
    }
    for name, pair in pairs.items():
        files[plan.pki(f"{name}.crt")], files[plan.pki(f"{name}.key")] = pair.certificate, pair.key
    users: dict[str, tuple[str, list[str]]] = {
        "admin": ("admin", ["system:masters"]),
        "kubelet": (node, ["system:nodes"]),
        "controller-manager": ("system:kube-controller-manager", []),
        "scheduler": ("system:kube-scheduler", []),
        "proxy": ("system:kube-proxy", []),
        "coredns": ("coredns", []),
    }
    for name, (user, groups) in users.items():
        client = authority.for_client(user, groups)
        files[plan.kubeconfig(name)] = kubeconfig(network.api, authority.pair, client=client)
    return files


def configuration(plan: Plan) -> dict[Path, str]:
    """Configuration files, and the commands that node.sh keeps running, one file each."""
    config = plan.run / "config"
    files = {
        config / "containerd.toml": _containerd(plan),
        plan.run / "cni" / "10-bridge.conflist": json.dumps(_cni(plan)),
        config / "kubelet.yaml": json.dumps(_kubelet(plan)),
        config / "proxy.yaml": json.dumps(_proxy(plan)),
        config / "resolv.conf": f"nameserver {plan.network.dns_service}\n",
        config / "Corefile": _corefile(plan),
    }
    for name, command in _control_plane(plan).items():
        files[plan.run / "control-plane" / name] = shlex.join(command)
    for name, command in _node(plan).items():
        files[plan.run / "node" / name] = shlex.join(command)
    sysctl = {
        "vm/overcommit_memory": "1",
        "vm/panic_on_oom": "0",
        "kernel/panic": "10",
        "kernel/panic_on_oops": "1",
        "kernel/keys/root_maxkeys": "1000000",
        "kernel/keys/root_maxbytes": "25000000",
    }
    files |= {plan.run / "sysctl" / name: f"{value}\n" for name, value in sysctl.items()}
    return files


def first_objects(plan: Plan) -> str:
    """Objects that an installer would create: cluster DNS, which here is a program on the node."""
    node, ports = plan.network.node, [("dns", "UDP"), ("dns-tcp", "TCP")]
    dns_ports = [{"name": name, "port": 53, "protocol": protocol} for name, protocol in ports]
    rules = [
        {
            "apiGroups": [""],
            "resources": ["endpoints", "services", "pods", "namespaces"],
            "verbs": ["list", "watch"],
        },
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["list", "watch"]},
    ]
    rbac = "rbac.authorization.k8s.io"
    items: list[dict[str, object]] = [
        {"apiVersion": f"{rbac}/v1", "kind": "ClusterRole", "metadata": {"name": "coredns"}, "rules": rules},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": "coredns"},
            "roleRef": {"apiGroup": rbac, "kind": "ClusterRole", "name": "coredns"},
            "subjects": [{"kind": "User", "name": "coredns", "apiGroup": rbac}],
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "kube-dns", "namespace": "kube-system"},
            "spec": {"clusterIP": plan.network.dns_service, "ports": dns_ports},
        },
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": "kube-dns",
                "namespace": "kube-system",
                "labels": {"kubernetes.io/service-name": "kube-dns"},
            },
            "addressType": "IPv4",
            "endpoints": [{"addresses": [node], "conditions": {"ready": True}}],
            "ports": dns_ports,
        },
    ]
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": items})


def _control_plane(plan: Plan) -> dict[str, list[str]]:
    etcd = "http://127.0.0.1:2379"
    return {
        "containerd": ["containerd", "--config", str(plan.run / "config" / "containerd.toml"), "--log-level", "warn"],
        "etcd": [
            str(plan.program("etcd")),
            *_flags(
                {
                    "name": NODE_NAME,
                    "data-dir": "/var/lib/etcd",
                    "listen-client-urls": etcd,
                    "advertise-client-urls": etcd,
                    "log-level": "warn",
                    "unsafe-no-fsync": "true",  # it is on a tmpfs anyway
                }
            ),
        ],
        "apiserver": [
            str(plan.program("kube-apiserver")),
            *_flags(
                {
                    "etcd-servers": etcd,
                    "bind-address": "0.0.0.0",
                    "advertise-address": plan.network.node,
                    "secure-port": "6443",
                    "cert-dir": plan.run / "pki",
                    "tls-cert-file": plan.pki("apiserver.crt"),
                    "tls-private-key-file": plan.pki("apiserver.key"),
                    "client-ca-file": plan.pki("ca.crt"),
                    "service-account-key-file": plan.pki("service-accounts.pub"),
                    "service-account-signing-key-file": plan.pki("service-accounts.key"),
                    "service-account-issuer": f"https://kubernetes.default.svc.{_DOMAIN}",
                    "service-cluster-ip-range": plan.network.services,
                    "authorization-mode": "Node,RBAC",
                    "enable-admission-plugins": "NodeRestriction",
                    "allow-privileged": "true",
                    "kubelet-client-certificate": plan.pki("apiserver-to-kubelet.crt"),
                    "kubelet-client-key": plan.pki("apiserver-to-kubelet.key"),
                    "kubelet-certificate-authority": plan.pki("ca.crt"),
                    "kubelet-preferred-address-types": "InternalIP",
                }
            ),
        ],
    }


def _node(plan: Plan) -> dict[str, list[str]]:
    def client_flags(user: str) -> dict[str, object]:
        own = plan.kubeconfig(user)
        kubeconfigs = ("kubeconfig", "authentication-kubeconfig", "authorization-kubeconfig")
        return {**dict.fromkeys(kubeconfigs, own), "bind-address": "127.0.0.1", "leader-elect": "false"}

    config = plan.run / "config"
    return {
        "controller-manager": [
            str(plan.program("kube-controller-manager")),
            *_flags(
                {
                    **client_flags("controller-manager"),
                    "cert-dir": plan.run / "pki",
                    "use-service-account-credentials": "true",
                    "service-account-private-key-file": plan.pki("service-accounts.key"),
                    "root-ca-file": plan.pki("ca.crt"),
                    # The default of 20 a second would make a new namespace wait for its service account.
                    "kube-api-qps": "500",
                    "kube-api-burst": "1000",
                }
            ),
        ],
        "scheduler": [
            str(plan.program("kube-scheduler")),
            *_flags({**client_flags("scheduler"), "cert-dir": plan.run / "pki"}),
        ],
        "kubelet": [
            str(plan.program("kubelet")),
            *_flags(
                {
                    "config": config / "kubelet.yaml",
                    "kubeconfig": plan.kubeconfig("kubelet"),
                    "hostname-override": NODE_NAME,
                    "node-ip": plan.network.node,
                }
            ),
        ],
        "proxy": [str(plan.program("kube-proxy")), *_flags({"config": config / "proxy.yaml"})],
        "coredns": [str(plan.program("coredns")), "-conf", str(config / "Corefile")],
    }


def _containerd(plan: Plan) -> str:
    return f"""\
version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
disabled_plugins = [
  "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper",
  "io.containerd.snapshotter.v1.aufs", "io.containerd.tracing.processor.v1.otlp", "io.containerd.internal.v1.tracing",
]
[grpc]
  address = "{plan.run}/containerd.sock"
[plugins."io.containerd.internal.v1.opt"]
  path = "/var/lib/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{plan.pause_image}"
  disable_apparmor = true
  restrict_oom_score_adj = true # a virtual machine may lack the right to lower it
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{plan.run}/cni"
"""


def _cni(plan: Plan) -> dict[str, object]:
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "isDefaultGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {"type": "host-local", "ranges": [[{"subnet": plan.network.pods}]]},
    }
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}, "snat": True}
    return {"cniVersion": "0.4.0", "name": "pods", "plugins": [bridge, portmap]}


def _kubelet(plan: Plan) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(plan.pki("ca.crt"))},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(plan.pki("kubelet-serving.crt")),
        "tlsPrivateKeyFile": str(plan.pki("kubelet-serving.key")),
        "containerRuntimeEndpoint": f"unix://{plan.run}/containerd.sock",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{plan.cgroup}",
        "failSwapOn": False,
        "failCgroupV1": False,
        "clusterDNS": [plan.network.dns_service],
        "clusterDomain": _DOMAIN,
        "resolvConf": str(plan.run / "config" / "resolv.conf"),
        # A removed image could not be pulled again: there is no registry.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        # Not by free disk space: on a shared disk it drops for moments, and kubelet would evict every pod.
        "evictionHard": {"memory.available": "200Mi"},
        "address": plan.network.node,
        "healthzBindAddress": "127.0.0.1",
        "shutdownGracePeriod": "0s",
        # Update the volumes of changed Secrets and ConfigMaps within seconds, not a minute.
        "syncFrequency": "5s",
        "nodeStatusUpdateFrequency": "5s",
        "crashLoopBackOff": {"maxContainerRestartPeriod": "2s"},
        "featureGates": {"KubeletCrashLoopBackOffMax": True},
    }


def _proxy(plan: Plan) -> dict[str, object]:
    return {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(plan.kubeconfig("proxy"))},
        "mode": "iptables",
        "hostnameOverride": NODE_NAME,
        "bindAddress": plan.network.node,
        "clusterCIDR": plan.network.pods,
        # These belong to the machine; a network namespace may not set them.
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
    }


def _corefile(plan: Plan) -> str:
    # No `forward`: a lookup of a name outside the cluster fails at once.
    return f"""\
.:53 {{
  bind {plan.network.node}
  errors
  health 127.0.0.1:8080
  ready 127.0.0.1:8181
  kubernetes {_DOMAIN} in-addr.arpa ip6.arpa {{
    kubeconfig {plan.kubeconfig("coredns")} mailboat
    pods insecure
    fallthrough in-addr.arpa ip6.arpa
    ttl 5
  }}
  cache 5
}}
"""


def _flags(options: Mapping[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items()]
