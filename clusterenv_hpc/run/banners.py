"""Takes an MPI launcher's own words on a crash out of what the ranks print.

They name the wrong rank (Hydra), or an exit code that is several in one, in half a screen; ours replace them.
Everything else passes byte for byte, and at once: a progress bar ends in a carriage return, not in a newline.  Only
what may yet turn out to be a banner is held back: a run of dashes or equals signs, or a line that begins like one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

RULE = re.compile(rb"\n?(?:-{40,}|={40,})\r?\n")
RULE_BEGUN = re.compile(rb"\n?(?:-{20,}|={20,})\r?\Z")

AFTER_RULE = tuple(
    text.encode()
    for text in (
        "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES",
        "Primary job  terminated normally, but",
        "mpirun noticed that ",
        "prterun noticed that ",
        "mpirun detected that one or more processes exited",
        "prterun detected that one or more processes exited",
        "MPI_ABORT was invoked on rank",
        "mpirun has exited due to process rank",
        "prterun has exited due to process rank",
    )
)
LONE_LINES = tuple(
    text.encode()
    for text in (
        "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: ",
        "This typically refers to a problem with your application.",
        "Please see the FAQ page for debugging suggestions",
        "[mpiexec@",
        "[proxy:",
        "[warn] Epoll ",
    )
)
ABORT = re.compile(rb"Abort\(-?\d+\) on node \d+ \(rank \d+ in comm \w+\): application called MPI_Abort")
LAST_KEPT = 8192  # bytes


@dataclass
class Banners:
    """One stream's filter: ``feed`` bytes, print what comes back.

    ``text`` is what was taken out, ``last`` the end of what was passed on.
    """

    text: bytes = b""
    last: bytes = b""
    _held: bytes = field(default=b"", repr=False)
    _at_start: bool = field(default=True, repr=False)

    @property
    def undecided(self) -> bool:
        """Whether bytes are held back that may or may not be part of a banner."""
        rule = RULE.match(self._held)
        inside = self._held.startswith(AFTER_RULE, rule.end()) if rule else self._held.startswith(LONE_LINES)
        return bool(self._held) and not inside

    def feed(self, data: bytes, *, end: bool = False) -> bytes:
        """The bytes to print now.  ``end``: hold nothing back any longer."""
        self._held += data
        out = bytearray()
        while self._held:
            size, banner = self._next(end)
            if size == 0:
                break
            piece, self._held = self._held[:size], self._held[size:]
            if banner:
                self.text += piece
            else:
                out += piece
            self._at_start = piece.endswith(b"\n")
        self.last = (self.last + bytes(out))[-LAST_KEPT:]
        return bytes(out)

    def _next(self, end: bool) -> tuple[int, bool]:
        """How many bytes of what is held are decided, and whether they are a banner's; 0: wait for more."""
        held = self._held
        if rule := RULE.match(held):
            rest = held[rule.end() : rule.end() + 80]
            if rest.startswith(AFTER_RULE):
                closing = RULE.search(held, rule.end())
                return (closing.end(), True) if closing else (len(held) * end, True)
            undecided = not end and any(text.startswith(rest) for text in AFTER_RULE)
            return (0, False) if undecided else (rule.end(), False)
        if RULE_BEGUN.match(held) and not end:
            return 0, False
        line_end = held.find(b"\n") + 1
        if self._at_start:
            if held.startswith(LONE_LINES) or ABORT.match(held):
                return (line_end or len(held) * end), True
            begun = not end and not line_end and (held[:6] == b"Abort("[: len(held)] or _begins(held, LONE_LINES))
            if begun:
                return 0, False
        stop = line_end or len(held)
        inside = RULE.search(held, 1, stop) if line_end or end else RULE_BEGUN.search(held, 1)
        return (inside.start() if inside else stop), False


def _begins(held: bytes, texts: tuple[bytes, ...]) -> bool:
    return any(text.startswith(held) for text in texts)
