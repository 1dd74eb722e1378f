"""Only waits of the shop for locks of relays are found in the log of Postgres."""

from __future__ import annotations

from lock_waits import sessions, waits_behind

STARTING = "2026-01-01 00:00:00.000 UTC [1] LOG:  starting PostgreSQL 18.0 on x86_64"


def connected(pid: int, name: str) -> str:
    session = f"user=shop database=shop application_name={name}"
    return f"2026-01-01 00:00:01.000 UTC [{pid}] LOG:  connection authorized: {session}"


def waits(pid: int, *holders: int) -> list[str]:
    held = (
        f"Process holding the lock: {holders[0]}"
        if len(holders) == 1
        else f"Processes holding the lock: {holders[0]}, {holders[1]}"
    )
    prefix = f"2026-01-01 00:00:02.000 UTC [{pid}]"
    return [
        f"{prefix} LOG:  process {pid} still waiting for ShareLock on transaction 7 after 1000.1 ms",
        f"{prefix} DETAIL:  {held}. Wait queue: {pid}.",
    ]


def test_a_writer_behind_a_relay_is_found():
    [found] = waits_behind(
        "mailboat", "shop", [STARTING, connected(20, "shop"), connected(30, "mailboat reader"), *waits(20, 30)]
    )
    assert "process 20 still waiting" in found
    assert "behind mailboat reader" in found


def test_a_relay_among_several_holders_is_found():
    log = [connected(20, "shop"), connected(21, "shop"), connected(30, "mailboat main"), *waits(20, 21, 30)]
    assert len(list(waits_behind("mailboat", "shop", log))) == 1


def test_writers_behind_writers_and_relays_behind_writers_are_not_reported():
    log = [connected(20, "shop"), connected(21, "shop"), connected(30, "mailboat main"), *waits(20, 21), *waits(30, 20)]
    assert list(waits_behind("mailboat", "shop", log)) == []


def test_process_ids_of_a_previous_server_are_ignored():
    log = [connected(20, "shop"), connected(30, "mailboat main"), STARTING, connected(20, "shop"), *waits(20, 30)]
    assert list(waits_behind("mailboat", "shop", log)) == []


def test_application_names_of_all_servers_are_listed():
    log = [STARTING, connected(20, "shop"), STARTING, connected(20, "mailboat main"), *waits(20, 30)]
    assert sessions(log) == {"shop", "mailboat main"}
