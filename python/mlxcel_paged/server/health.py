"""GET /health: 200 exactly while requests can be served."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxcel_paged.server.service import Service


class Health:
    """503 with the reason until the model is loaded and self-checked, and from the engine's death on."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def endpoint(self, _request: Request) -> Response:
        """GET /health"""
        self._service.require_ready()
        return JSONResponse({"status": "ok"})
