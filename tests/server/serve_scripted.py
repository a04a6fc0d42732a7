"""Run as a program: `serve` with a scripted engine, as the command line does it. Arguments: port, outcome."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mlxcel_paged.server.config import ServerConfig
from mlxcel_paged.server.serve import ListenError, serve
from server.scripted_engine import ScriptedEngine


class LoadingEngine(ScriptedEngine):
    """Loads for a moment, then is ready or fails."""

    outcome = "ready"

    def start(self) -> None:
        threading.Thread(target=self._load).start()

    def stop(self, *, timeout_s: float | None = None) -> bool:
        has_ended = super().stop(timeout_s=timeout_s)
        print("engine stopped", flush=True)
        return has_ended

    def _load(self) -> None:
        time.sleep(0.3)
        if self.outcome == "failed":
            self.failure = FileNotFoundError("no such model: /nowhere")
        self.state = self.outcome


def main() -> int:
    engine = LoadingEngine(state="loading", step_s=0.01, max_context=10**5, max_pool_tokens=10**5)
    engine.outcome = sys.argv[2]
    try:
        serve(engine, ServerConfig(port=int(sys.argv[1])))
    except (FileNotFoundError, ListenError) as error:
        print(f"error: {error}", flush=True)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
