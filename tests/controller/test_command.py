"""The operator's command line: messages and exit codes for wrong usage."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from click.testing import CliRunner, Result

from mailboat_operator.__main__ import main

NEEDED = ("--operator-namespace=system", "--relay-image=mailboat-relay:1")


def answer(*arguments: str, env: dict[str, str | None] | None = None) -> Result:
    nothing = {"POD_NAMESPACE": None, "POD_NAME": None, "KUBECONFIG": None}
    result = CliRunner(env={**nothing, **(env or {})}).invoke(main, arguments, terminal_width=100)
    assert "Traceback" not in result.output
    return result


def test_all_missing_settings_are_reported_at_once() -> None:
    result = answer("run")
    assert result.exit_code == 2
    assert [line.split(": ")[1] for line in result.stderr.splitlines()] == ["--operator-namespace", "--relay-image"]


def test_a_flag_that_does_not_exist_is_refused_with_the_one_that_was_meant() -> None:
    result = answer("run", "--namespaces=shop")
    assert result.exit_code == 2
    assert "--namespace" in result.stderr


def test_a_wrong_value_is_refused_with_a_remedy() -> None:
    result = answer("run", *NEEDED, "--namespace=Shop")
    assert result.exit_code == 2
    assert "lower-case letters" in result.stderr
    assert result.stderr.startswith("mailboat-operator: --")


def test_settings_come_from_the_environment_too() -> None:
    env: dict[str, str | None] = {"POD_NAMESPACE": "system", "MAILBOAT_RELAY_IMAGE": "x", "MAILBOAT_LOG_LEVEL": "loud"}
    assert (
        answer("run", env=env).stderr == "mailboat-operator: --log-level: must be one of debug, info, warning, error\n"
    )


def test_a_missing_cluster_is_reported(tmp_path: Path) -> None:
    result = run(*NEEDED, f"--kubeconfig={tmp_path / 'none'}")
    assert result.returncode == 5
    assert "No cluster to connect to" in result.stderr
    assert "Traceback" not in result.stderr


def test_an_address_in_use_is_reported(tmp_path: Path) -> None:
    kubeconfig = tmp_path / "kubeconfig"
    kubeconfig.write_text(
        "apiVersion: v1\nkind: Config\ncurrent-context: a\ncontexts: [{name: a, context: {cluster: a, user: a}}]\n"
        "clusters: [{name: a, cluster: {server: 'http://127.0.0.1:1'}}]\nusers: [{name: a, user: {}}]\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = run(*NEEDED, f"--kubeconfig={kubeconfig}", f"--health-listen={address}", "--webhook-certs=off")
    assert result.returncode == 1
    assert f"can't listen on {address}" in result.stderr
    assert "--health-listen" in result.stderr
    assert "Traceback" not in result.stderr


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    """Run the operator in a separate process until the process ends."""
    command = [sys.executable, "-m", "mailboat_operator", "run", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_help_lists_every_setting_with_its_variable() -> None:
    result = answer("run", "--help")
    assert result.exit_code == 0
    assert "--relay-image" in result.stdout
    assert "$MAILBOAT_RELAY_IMAGE" in result.stdout


def test_the_version_is_printed() -> None:
    assert answer("version").stdout.strip()
