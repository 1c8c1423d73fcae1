"""Guard: the small process between this program and a child, so that no child outlives the program.

Run as a script (`python -I -S guard.py PARENT_PID COMMAND…`), in a session of its own; imports nothing
of ours. Its standard input is a pipe from the parent:

    end of file      the parent wants the child stopped, or has died, be it by SIGKILL: SIGTERM, and
                     SIGKILL after GRACE_SECONDS
    the byte K       SIGKILL at once

It ends with its child's exit code, after the child has ended and been reaped. The main thread waits for
the child; a second one watches the pipe.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import time

# More than an instance gives itself to stop. Its own constant is out of reach here.
GRACE_SECONDS = 11.0
KILL = b"K"


def main(parent: int, command: list[str]) -> int:
    """Run `command` until it ends, or until the parent says so or is gone; its exit code."""
    # A SIGTERM to the whole session must end the child alone: the guard goes after it.
    signal.signal(signal.SIGTERM, lambda *_: None)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_watch, args=(parent, child), daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


def _watch(parent: int, child: subprocess.Popen[bytes]) -> None:
    # A process that the parent forked may hold the pipe open after the parent's death: hence getppid.
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
