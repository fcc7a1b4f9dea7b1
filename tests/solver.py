"""The solver of solver.c as a Python program, and some that a C program would be too long for; see ``main``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def rod(n: int) -> None:
    """The line protocol of solver.c: reset, step T, state."""
    now = [0.0] * n
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "reset":
            now = [0.0] * n
        elif word == "step":
            now[0] = float(rest[0])
            now = [now[0]] + [
                now[i] + 0.25 * (now[i - 1] - 2 * now[i] + (now[i + 1] if i + 1 < n else now[i])) for i in range(1, n)
            ]
        elif word == "die":
            sys.exit(int(rest[0]))
        print(*(f"{value:.17g}" for value in now), flush=True)


def main() -> None:
    what, *rest = sys.argv[1:]
    if what == "rod":
        rod(int(rest[0]))
    elif what == "environ":
        print("\n".join(sorted(os.environ)))
    elif what == "status":  # ignored signals and open descriptors
        status = Path("/proc/self/status").read_text()
        ignored = next(line for line in status.splitlines() if line.startswith("SigIgn"))
        print(int(ignored.split()[1], 16), *sorted(os.listdir("/proc/self/fd"), key=int))
    elif what == "echo":  # everything back, a chunk at a time
        while data := sys.stdin.buffer.read1(1000):
            sys.stdout.buffer.write(data)
            sys.stdout.buffer.flush()
    elif what == "stubborn":  # with a child of its own, and neither heeds a request to end
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen([sys.executable, __file__, "sleep"])
        print(child.pid, flush=True)
        time.sleep(600)
    elif what == "sleep":
        signal.signal(signal.SIGTERM, signal.SIG_IGN if rest else signal.SIG_DFL)
        print(os.getpid(), flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main()
