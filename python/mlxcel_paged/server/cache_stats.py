"""GET /v1/cache/stats: the KV pages, the budget that they come from, and the prefix cache."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxcel_paged.server.service import Service


class CacheStats:
    """Numbers of one snapshot; 503 while there is no loaded model."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def endpoint(self, _request: Request) -> Response:
        """GET /v1/cache/stats"""
        self._service.require_ready()
        stats = self._service.engine.stats()
        kv = stats.kv
        body: dict[str, Any] = {
            "object": "cache.stats",
            "budget_bytes": kv.budget_bytes,
            "is_auto_budget": kv.is_auto_budget,
            "workspace_bytes": kv.workspace_bytes,
            "pool_bytes": kv.pool_bytes,
            "groups": [
                {
                    "index": index,
                    "pages_total": group.num_pages,
                    "pages_used": group.num_used,
                    "pages_cached": group.num_cached,
                    "pages_free": group.num_free,
                    "pages_reserved": group.num_reserved,
                    "pages_peak": group.num_peak,
                }
                for index, group in enumerate(kv.groups)
            ],
            "prefix_cache": {
                "queried_tokens": kv.num_prefix_queries,
                "hit_tokens": kv.num_prefix_hits,
                "evicted_pages": kv.num_evicted_pages,
            },
            "memory_bytes": dict(stats.memory_bytes),
            "num_preemptions": stats.num_preemptions,
        }
        return JSONResponse(body)
