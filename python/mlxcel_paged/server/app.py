"""Wires the endpoints into one ASGI app."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from mlxcel_paged.server.access_log import AccessLog
from mlxcel_paged.server.auth import RequireApiKey
from mlxcel_paged.server.cache_stats import CacheStats
from mlxcel_paged.server.chat import ChatCompletions
from mlxcel_paged.server.completions import Completions
from mlxcel_paged.server.config import ServerConfig
from mlxcel_paged.server.debug import Debug
from mlxcel_paged.server.drain import QuietCancellation
from mlxcel_paged.server.engine_api import Engine
from mlxcel_paged.server.errors import ApiError, UnexpectedErrors, answer_api_error, answer_http_exception
from mlxcel_paged.server.health import Health
from mlxcel_paged.server.models import Models
from mlxcel_paged.server.service import Service
from mlxcel_paged.server.status.endpoint import Status
from mlxcel_paged.server.status.page import page_routes


def create_app(engine: Engine, config: ServerConfig) -> Starlette:
    """The server as an ASGI app. The engine may still be loading; it is neither started nor stopped here."""
    service = Service(engine, config)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        try:
            yield
        finally:
            service.close()

    models, health = Models(service), Health(service)
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", ChatCompletions(service), methods=["POST"]),
            Route("/v1/completions", Completions(service), methods=["POST"]),
            Route("/v1/models", models.list, methods=["GET"]),
            Route("/v1/models/{model:path}", models.retrieve, methods=["GET"]),
            Route("/v1/cache/stats", CacheStats(service).endpoint, methods=["GET"]),
            Route("/health", health.ready, methods=["GET"]),
            Route("/health/ready", health.ready, methods=["GET"]),
            Route("/health/live", health.live, methods=["GET"]),
            Route("/metrics", service.metrics.endpoint, methods=["GET"]),
            Route("/v1/status", Status(service).endpoint, methods=["GET"]),
            *page_routes(),
            *(debug_routes(service) if config.debug_endpoints else []),
        ],
        middleware=[
            Middleware(QuietCancellation, service=service),
            Middleware(AccessLog),
            Middleware(UnexpectedErrors),
            *access_rules(service),
        ],
        exception_handlers={ApiError: answer_api_error, HTTPException: answer_http_exception},
        lifespan=lifespan,
    )
    # A redirect to the path without the slash would be neither the answer nor an error of OpenAI's shape.
    app.router.redirect_slashes = False
    app.state.service = service
    return app


def access_rules(service: Service) -> list[Middleware]:
    """Who may ask: pages of other origins and holders of keys. CORS is outside, so that a page can see a 401."""
    config = service.config
    rules = []
    if config.cors_origins:
        rules.append(
            Middleware(
                CORSMiddleware,
                allow_origins=config.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    if config.api_keys:
        keys, on_refusal = config.api_keys, service.metrics.rejected
        rules.append(Middleware(RequireApiKey, keys=keys, open_metrics=config.open_metrics, on_refusal=on_refusal))
    return rules


def debug_routes(service: Service) -> list[Route]:
    """What `--debug-endpoints` adds."""
    debug = Debug(service)
    return [
        Route("/v1/debug/plan", debug.plan, methods=["GET"]),
        Route("/v1/debug/state", debug.state, methods=["GET"]),
    ]
