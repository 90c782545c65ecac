"""How `parallax run` starts a worker: run by path, before the program; imports nothing of ours.

    python -I -S _worker.py LAUNCHER_PID COMMAND ARGUMENT...

The process ties its life to the launcher's and then *becomes* COMMAND, so the program sees what it sees when
it is started by hand: its own arguments, `__main__`, `sys.path` and tracebacks.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    launcher, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        # A launcher that is killed with SIGKILL cannot end its workers: the kernel does. This outlives exec.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher:  # it was gone before the kernel knew
            sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
