"""GET /health, /health/ready and /health/live.

| | loading | ready | a step has stalled | draining | engine failed |
|---|---|---|---|---|---|
| `/health`, `/health/ready` | 503 | 200 | 503 | 503 | 503 |
| `/health/live` | 200 | 200 | 503 | 200 | 503 |

Ready tells a load balancer whether to send requests; live tells a supervisor whether to start the process anew.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxcel_paged.server.engine_api import FAILED
from mlxcel_paged.server.errors import ApiError, engine_failed
from mlxcel_paged.server.service import Service

_OK = {"status": "ok"}


class Health:
    """The two questions that are asked about a server."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def ready(self, _request: Request) -> Response:
        """GET /health and /health/ready: 200 exactly while requests can be served."""
        self._service.require_ready()
        self._require_progress()
        return JSONResponse(_OK)

    async def live(self, _request: Request) -> Response:
        """GET /health/live: 200 unless only a new process can help."""
        if self._service.engine.state == FAILED:
            raise engine_failed()
        self._require_progress()
        return JSONResponse(_OK)

    def _require_progress(self) -> None:
        if self._service.engine.is_stalled:
            raise ApiError(503, "engine_stalled", "a step of the engine does not end; the server's log says where")
