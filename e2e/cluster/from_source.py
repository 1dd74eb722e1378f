"""A cluster of one node, made of ordinary processes in their own namespaces: no container engine, no registry.

``node.sh`` is process 1 of the namespaces. When it or the test run ends, the kernel ends containers, mounts and
interfaces. A folder and empty control groups remain; ``close`` removes them. Needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from cluster import Cluster
from cluster.folders import abandoned_folders, own_folder
from cluster.network import Network, free_network
from cluster.node_files import NODE_NAME, Plan, certificates, configuration, first_objects
from mailboat_devservers.errors import PartMissing, ServerFailed
from mailboat_devservers.kubernetes_commands import Commands
from mailboat_devservers.kubernetes_programs import kubernetes_program
from mailboat_devservers.processes import Child
from programs import run
from support.wait import wait_until

_NODE = Path(__file__).with_name("node.sh")
_FOLDER = "mailboat-e2e-node-"
_CGROUPS = Path("/sys/fs/cgroup")
_CONTROLLERS = frozenset({"cpu", "cpuset", "memory", "hugetlb", "pids"})
"""Controllers that kubelet needs to limit its pods."""
_BRIDGED = Path("/proc/sys/net/bridge/bridge-nf-call-iptables")
_PACKAGES = {
    "containerd": "containerd",
    "ctr": "containerd",
    "runc": "runc",
    "ip": "iproute2",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    # For the images.
    "buildah": "buildah",
    "debootstrap": "debootstrap",
}


def check_machine() -> None:
    """Raise ``PartMissing`` with the packages to install."""
    if os.geteuid() != 0:
        raise PartMissing("a cluster from source needs root: run as root, or start a container engine for kind")
    missing = sorted({package for program, package in _PACKAGES.items() if shutil.which(program) is None})
    if missing:
        raise PartMissing(f"a cluster from source needs programs: apt-get install {' '.join(missing)}")
    if shutil.which("modprobe") is not None:  # not needed if the kernel has them built in
        subprocess.run(["modprobe", "--all", "br_netfilter", "overlay"], capture_output=True, check=False)
    if not _BRIDGED.exists():
        raise PartMissing(
            "pods of one node reach each other's services by the kernel's br_netfilter: modprobe br_netfilter"
        )


class ClusterFromSource(Cluster):
    """One node from source. If it does not start, its logs are in ``failed``."""

    def __init__(self, pause_image: str, pause_archive: Path, failed: Path) -> None:
        super().__init__()
        check_machine()
        self._end = ExitStack()
        try:
            self._start(pause_image, pause_archive)
        except BaseException:
            self.keep_logs(failed)
            self._end.close()
            raise

    @property
    def commands(self) -> Commands:
        return Commands(self._plan.kubeconfig("admin"), self._plan.run / "commands")

    def load(self, archive: Path) -> None:
        self._ctr("images", "import", str(archive))

    def tag(self, image: str, another: str) -> None:
        self._ctr("images", "tag", "--force", image, another)

    def signal_container(self, container: str, signal: str) -> None:
        self._ctr("tasks", "kill", "--signal", signal, container)

    def firewall(self, *arguments: str) -> None:
        run("nsenter", "--target", str(self._init), "--net", "--mount", "iptables", "--wait", *arguments)

    def kill_api_server(self) -> None:
        pid = (self._plan.run / "pids" / "apiserver").read_text().strip()
        run("nsenter", "--target", str(self._init), "--pid", "sh", "-c", f"kill -KILL {pid}")

    def logs(self, into: Path) -> None:
        shutil.copytree(self._plan.run / "log", into, dirs_exist_ok=True)

    def close(self) -> None:
        self._end.close()

    def _ctr(self, *arguments: str) -> None:
        run("ctr", "--address", str(self._plan.run / "containerd.sock"), "--namespace", "k8s.io", *arguments)

    def _start(self, pause_image: str, pause_archive: Path) -> None:
        network = self._end.enter_context(free_network())
        for _ in abandoned_folders(_FOLDER):
            pass  # the processes of a killed run have ended with it
        run = self._end.enter_context(own_folder(_FOLDER))
        plan = self._plan = Plan(run, network, kubernetes_program, f"mailboat-e2e-{network.number}", pause_image)
        for folder in ("log", "pids", "var-log"):
            (run / folder).mkdir()
        for file, content in {**certificates(plan), **configuration(plan)}.items():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch(mode=0o600)
            file.write_text(content)
        os.mkfifo(run / "go")
        _remove_cgroups(plan.cgroup)  # of a killed run
        _make_cgroups(plan.cgroup)
        self._end.callback(_remove_cgroups, plan.cgroup)

        # The end of this process ends process 1 of the namespaces, and the kernel ends all others.
        namespaces = ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command = [*namespaces, "bash", str(_NODE), str(run), network.node, network.services]
        node = Child("the node", command, log=run / "log" / "init.log", ready=lambda: _child_of(node.pid) is not None)
        self._end.callback(node.kill)
        node.launch()
        init = _child_of(node.pid)
        assert init is not None
        self._init = init

        _connect(network, init)
        self._go(node)
        healthy = ("get", "--raw=/readyz", "--request-timeout=5s")
        self._wait(node, lambda: self.commands.try_kubectl(*healthy).status == 0, "the API server")
        self._go(node)
        objects = first_objects(plan)
        self._wait(
            node, lambda: self.commands.try_kubectl("apply", "--filename=-", input=objects).status == 0, "its objects"
        )
        self.load(pause_archive)
        ready = ("wait", "--for=condition=Ready", f"node/{NODE_NAME}", "--timeout=5s")
        self._wait(node, lambda: self.commands.try_kubectl(*ready).status == 0, "the node to be ready")
        account = ("get", "serviceaccount", "default")
        self._wait(node, lambda: self.commands.try_kubectl(*account).status == 0, "the default service account")

    def _go(self, node: Child) -> None:
        """Let node.sh continue with its next step."""
        pipe = self._wait(node, lambda: _open_if_read(self._plan.run / "go"), "node.sh to be ready for its next step")
        os.write(pipe, b"go\n")
        os.close(pipe)

    def _wait(self, node: Child, condition: Callable[[], object], what: str) -> int:
        def met() -> object:
            if not node.running:
                raise ServerFailed(f"the node ended during the wait for {what}\n{self._log_tails()}")
            return condition()

        try:
            answer = wait_until(met, timeout=120, what=what)
        except AssertionError as error:
            raise ServerFailed(f"{error}\n{self._log_tails()}") from None
        return answer if isinstance(answer, int) else 0

    def _log_tails(self) -> str:
        words = []
        for log in sorted((self._plan.run / "log").iterdir()):
            words += [f"The end of {log.name}:", *log.read_text(errors="replace").splitlines()[-5:]]
        return "\n".join(words)


def _connect(network: Network, init: int) -> None:
    # The machine's interface goes with the node's, hence no clean-up. The kernel removes it with a delay, so the last
    # run's may still exist. No other run has it, since this run holds the lock of the network.
    subprocess.run(["ip", "link", "delete", network.interface], capture_output=True, check=False)
    run("ip", "link", "add", network.interface, "type", "veth", "peer", "name", "eth0", "netns", str(init))
    run("ip", "address", "add", f"{network.machine}/30", "dev", network.interface)
    run("ip", "link", "set", network.interface, "up")


def _make_cgroups(name: str) -> None:
    for folder in _cgroups(name):
        _enable_controllers(folder.parent)
        folder.mkdir(exist_ok=True)
        for setting in ("cpuset.cpus", "cpuset.mems"):  # cgroup v1: empty in a new group
            inherited = folder.parent / setting
            if inherited.exists():
                (folder / setting).write_text(inherited.read_text())


def _enable_controllers(parent: Path) -> None:
    """Enable kubelet's controllers for new groups below a parent. cgroup v1 has no such setting."""
    setting = parent / "cgroup.subtree_control"
    if not setting.exists():
        return
    available = _CONTROLLERS.intersection((parent / "cgroup.controllers").read_text().split())
    for controller in sorted(available.difference(setting.read_text().split())):
        try:
            setting.write_text(f"+{controller}")
        except OSError as error:
            raise PartMissing(
                f"kubelet needs the cgroup controller {controller}, which {parent} can't enable ({error}):"
                " a container may not do so; run on the machine itself, or start a container engine"
            ) from error


def _remove_cgroups(name: str) -> None:
    found = _cgroups(name)
    with suppress(AssertionError):  # leftover groups do no harm
        wait_until(lambda: all(_removed(top) for top in found), 10, "the processes of the node to be gone")


def _removed(top: Path) -> bool:
    for folder, _, _ in os.walk(top, topdown=False):
        with suppress(OSError):  # its processes are ending; the next poll finds it empty
            os.rmdir(folder)
    return not top.exists()


def _cgroups(name: str) -> list[Path]:
    if (_CGROUPS / "cgroup.controllers").exists():
        return [_CGROUPS / name]
    return [folder / name for folder in _CGROUPS.iterdir() if folder.is_dir() and not folder.is_symlink()]


def _child_of(pid: int) -> int | None:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return None
    return int(children[0]) if children else None


def _open_if_read(pipe: Path) -> int | None:
    try:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:  # no reader yet
        return None
