"""A virtual environment for each peer, under .cache/peers:  python experiments/peers/environments.py [peer ...]

What cannot be installed is told with pip's own words, and does not stop the others.  A complete one stays as it is.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reporting import command_line

HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".cache" / "peers"
PEERS = tuple(sorted(path.stem for path in (HERE / "requirements").glob("*.txt")))


def python_of(peer: str) -> Path:
    """The Python of a peer's environment."""
    return CACHE / peer / "bin" / "python"


def install(peer: str) -> str | None:
    """Makes the environment, unless it is there with just these requirements; None, or why it cannot be."""
    requirements = HERE / "requirements" / f"{peer}.txt"
    stamp = CACHE / peer / "installed.txt"
    if stamp.is_file() and stamp.read_text() == requirements.read_text():
        return None
    shutil.rmtree(CACHE / peer, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(CACHE / peer)], check=True)
    # Their compilers' output fills screens; the last lines are the reason.
    done = subprocess.run(
        [str(python_of(peer)), "-m", "pip", "install", "-q", "--no-compile", "-r", str(requirements)],
        capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        return "\n".join(errors[-5:])
    stamp.write_text(requirements.read_text())
    return None


def main() -> int:
    """Installs the named peers, or all; 1 if one of them cannot be."""
    parser = command_line(__doc__)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"of {', '.join(PEERS)} (default: all)")
    peers = parser.parse_args().peers
    if unknown := [peer for peer in peers if peer not in PEERS]:
        parser.error(f"{unknown[0]}: allowed: {', '.join(PEERS)}")
    failed = 0
    for peer in peers or PEERS:
        error = install(peer)
        print(f"{peer}: {'ready' if error is None else error}", flush=True)
        failed += error is not None
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
