"""GET /v1/models and /v1/models/{model}: the one model that is served."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxcel_paged.server.service import Service


class Models:
    """OpenAI's model objects."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def list(self, _request: Request) -> Response:
        """GET /v1/models"""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def retrieve(self, request: Request) -> Response:
        """GET /v1/models/{model}, where a name may hold slashes"""
        self._service.text().require_name(request.path_params["model"])
        return JSONResponse(self._model())

    def _model(self) -> dict[str, Any]:
        name = self._service.text().name
        return {"id": name, "object": "model", "created": self._service.created_s, "owned_by": "mlxcel-paged"}
