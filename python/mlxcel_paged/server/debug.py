"""GET /v1/debug/plan and /v1/debug/state. Off unless asked for: they tell of load.

`plan` says why the decode plans changed lately and what it cost. `state` counts everything that a request leaves
something in while it is alive, so that a leak shows as a number that does not return to what it was.
"""

from __future__ import annotations

import asyncio
import threading

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxcel_paged.server.service import Service


class Debug:
    """The routes exist only with `debug_endpoints`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def plan(self, _request: Request) -> Response:
        """GET /v1/debug/plan"""
        self._service.require_ready()
        engine = self._service.engine
        events = [event.body() for event in engine.plan_events()]
        return JSONResponse({"object": "plan.events", "counts": dict(engine.stats().plan_changes), "events": events})

    async def state(self, _request: Request) -> Response:
        """GET /v1/debug/state; its own request counts among the tasks."""
        body = {
            "object": "server.state",
            **self._service.counts(),
            **self._service.engine.counts(),
            "tasks": len(asyncio.all_tasks()),
            "threads": threading.active_count(),
        }
        return JSONResponse(body)
