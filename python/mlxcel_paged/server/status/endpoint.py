"""GET /v1/status: the server's state, its model and everything of /metrics, as JSON. Answers in every state."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mlxcel_paged import _core
from mlxcel_paged.errors import PagedError
from mlxcel_paged.server.engine_api import READY
from mlxcel_paged.server.engine_metrics import PREFIX
from mlxcel_paged.server.errors import ApiError
from mlxcel_paged.server.service import Service


class Status:
    """The endpoint."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._started_at = time.monotonic()

    async def endpoint(self, _request: Request) -> Response:
        """GET /v1/status"""
        return JSONResponse(self._body(), headers={"cache-control": "no-store"})

    def _body(self) -> dict[str, Any]:
        message = None
        try:
            self._service.require_ready()
        except ApiError as error:
            message = error.message
        return {
            "state": self._state(),
            "message": message,
            "version": _core.__version__,
            "uptime_s": round(time.monotonic() - self._started_at, 3),
            "model": self._model(),
            "metrics": metrics_object(self._service.metrics.families()),
        }

    def _state(self) -> str:
        """The engine's state, or what keeps a ready one from serving: `draining`, `stalled`."""
        engine = self._service.engine
        if engine.state != READY:
            return str(engine.state)
        if self._service.is_draining:
            return "draining"
        return "stalled" if engine.is_stalled else READY

    def _model(self) -> dict[str, Any] | None:
        if self._service.engine.state != READY:
            return None
        try:
            model = self._service.engine.model
        except PagedError:  # it has ended in between
            return None
        return {
            "name": self._service.config.served_model_name or model.name,
            "vocab_size": model.vocab_size,
            "max_context": model.max_context,
            "device": model.device,
            "decode_storage": model.storage.storage,
            "decode_storage_reason": model.storage.reason,
            "max_batch": model.storage.max_batch,
        }


def metrics_object(families: list[Metric]) -> dict[str, Any]:
    """Metrics by their names without the prefix.

    A number, or an object by label value for those with one label; a histogram is `{"count", "sum", "buckets"}` with
    `[upper bound or null, cumulative count]` each.
    """
    values: dict[str, Any] = {}
    for family in families:
        if not family.name.startswith(PREFIX):
            continue
        name = family.name.removeprefix(PREFIX)
        if family.type == "histogram":
            values[name] = _histogram(family.samples)
            continue
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            key = sample.name.removeprefix(PREFIX)
            if sample.labels:
                values.setdefault(key, {})[",".join(sample.labels.values())] = sample.value
            else:
                values[key] = sample.value
    return values


def _histogram(samples: list[Sample]) -> dict[str, Any]:
    histogram: dict[str, Any] = {"count": 0, "sum": 0.0, "buckets": []}
    for sample in samples:
        if sample.name.endswith("_bucket"):
            bound = sample.labels["le"]
            histogram["buckets"].append([None if bound == "+Inf" else float(bound), int(sample.value)])
        elif sample.name.endswith("_count"):
            histogram["count"] = int(sample.value)
        elif sample.name.endswith("_sum"):
            histogram["sum"] = sample.value
    return histogram
