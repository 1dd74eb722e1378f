"""Kubernetes' own programs, etcd, Helm and kind, built from their Go modules.

The registries that provide all other parts have no binaries of Kubernetes, but its Go modules. The pinned versions are
in ``go/kubernetes``, ``go/etcd``, ``go/helm`` and ``go/kind``. All tests use these versions and ignore installed ones.
"""

from __future__ import annotations

from pathlib import Path

from mailboat_devservers.golang import Tool, built_program, built_tool

_STAMP = " ".join(
    f"-X k8s.io/component-base/version.{name}={value}"
    for name, value in {"gitVersion": "{version}", "gitMajor": "{major}", "gitMinor": "{minor}"}.items()
)


def _kubernetes(name: str) -> Tool:
    return Tool("kubernetes", f"k8s.io/kubernetes/cmd/{name}", "k8s.io/kubernetes", _STAMP)


_TOOLS = {
    "etcd": Tool("etcd", "go.etcd.io/etcd/server/v3", "go.etcd.io/etcd/server/v3"),
    "kube-apiserver": _kubernetes("kube-apiserver"),
    "kube-controller-manager": _kubernetes("kube-controller-manager"),
    "kubectl": _kubernetes("kubectl"),
    "helm": Tool(
        "helm", "helm.sh/helm/v3/cmd/helm", "helm.sh/helm/v3", "-X helm.sh/helm/v3/internal/version.version={version}"
    ),
    "kube-scheduler": _kubernetes("kube-scheduler"),
    "kubelet": _kubernetes("kubelet"),
    "kube-proxy": _kubernetes("kube-proxy"),
    "kind": Tool("kind", "sigs.k8s.io/kind", "sigs.k8s.io/kind"),
}
_OURS = ("coredns", "pause")

API_PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kubectl", "helm")
"""Programs of a control plane without nodes, sufficient for all tests that run no pods."""

NODE_PROGRAMS = ("kube-scheduler", "kubelet", "kube-proxy", *_OURS)
"""Additional programs for a node."""


def kubernetes_program(name: str) -> Path:
    """Return the binary of one of the programs above, built on first use."""
    return built_program(name) if name in _OURS else built_tool(name, _TOOLS[name])
