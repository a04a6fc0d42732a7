"""Runs `mlxcel-paged` for a parent that holds the other end of its standard input, and ends when the parent does.

Run as a program: `python -m mlxcel_paged.bench.serve.child serve ...`.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

from mlxcel_paged.cli.main import main


def _end_with_the_parent() -> None:
    # The pipe closes however the parent ends, SIGKILL included.
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    sys.exit(main(sys.argv[1:]))
