"""Prepare a child process and exec the server: the steps that must run between fork and exec.

Run as a script in a separate interpreter, never imported: ``preexec_fn`` is unsafe in a process with threads.

    launcher.py PARENT DEATH_SIGNAL UID GID COMMAND...

- The kernel sends DEATH_SIGNAL when the parent dies, so that no server outlives a killed test run.
- UID and GID (-1: unchanged) are for servers that refuse to run as root. The process keeps one capability of root,
  access to folders of other users: the programs may be in root's home, the data in a private temporary folder.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG, _PR_SET_SECUREBITS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE = 1, 28, 47, 2
_SECBIT_NO_SETUID_FIXUP = 1 << 2
_CAPABILITY_VERSION_3, _CAP_DAC_OVERRIDE = 0x20080522, 1

_libc = ctypes.CDLL(None, use_errno=True)


def become(uid: int, gid: int) -> None:
    """Drop root except CAP_DAC_OVERRIDE; if that capability is not available, drop everything."""
    # Decouple capabilities from the user id, both in setuid(2) and in access(2), which Postgres calls.
    _libc.prctl(_PR_SET_SECUREBITS, _SECBIT_NO_SETUID_FIXUP, 0, 0, 0)
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
    only = 1 << _CAP_DAC_OVERRIDE
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    effective_permitted_inheritable = (ctypes.c_uint32 * 6)(only, only, only, 0, 0, 0)
    if _libc.capset(header, effective_permitted_inheritable) == 0:
        _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_RAISE, _CAP_DAC_OVERRIDE, 0, 0)


def main() -> None:
    parent, death_signal, uid, gid = (int(argument) for argument in sys.argv[1:5])
    command = sys.argv[5:]
    if uid >= 0:
        become(uid, gid)
    # After the change of user, which clears the parent-death signal.
    _libc.prctl(_PR_SET_PDEATHSIG, death_signal, 0, 0, 0)
    if parent and os.getppid() != parent:
        sys.exit("the parent died before its server started")
    # Python ignores these two signals, and an ignored signal stays ignored across exec.
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(ignored, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"can't run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main()
