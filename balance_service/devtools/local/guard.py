"""The guard process between a program and a child process, which ends the child when the program ends.

Runs as a script (`python -I -S guard.py PARENT_PID COMMAND…`) in its own session, without other modules of this
package. Standard input is a pipe from the parent:

    end of file      the parent stops the child, or has ended, even by SIGKILL: the guard sends SIGTERM, and SIGKILL
                     after GRACE_SECONDS
    the byte K       the guard sends SIGKILL

The guard exits with the exit code of the child. The main thread waits for the child; another thread reads the pipe.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time

# Longer than an instance takes to stop; its own constant cannot be imported here.
GRACE_SECONDS = 11.0
KILL = b"K"


def main(parent: int, command: list[str]) -> int:
    """Run `command` until it ends or the parent ends it; returns its exit code."""
    # A SIGTERM to the session ends the child, and then the guard exits.
    signal.signal(signal.SIGTERM, lambda *_: None)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_watch, args=(parent, child), daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


def _watch(parent: int, child: subprocess.Popen[bytes]) -> None:
    # A process that the parent forked can keep the pipe open after the parent's end, hence getppid.
    while os.getppid() == parent:
        if select.select([0], [], [], 1.0)[0]:
            if os.read(0, 1) == KILL:
                child.kill()
            break
    child.terminate()
    time.sleep(GRACE_SECONDS)
    child.kill()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
