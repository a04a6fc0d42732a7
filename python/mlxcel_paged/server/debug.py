"""GET /v1/debug/plan: why the decode plans changed lately and what it cost. Off unless asked for: it tells of load."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxcel_paged.server.service import Service


class DebugPlan:
    """The ring of plan changes; the route exists only with `debug_endpoints`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def endpoint(self, _request: Request) -> Response:
        """GET /v1/debug/plan"""
        self._service.require_ready()
        engine = self._service.engine
        events = [event.body() for event in engine.plan_events()]
        return JSONResponse({"object": "plan.events", "counts": dict(engine.stats().plan_changes), "events": events})
