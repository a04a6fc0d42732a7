"""Reads from a server what the client cannot see: which path its launches took, and what model it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

from mlxcel_paged.errors import PagedError

_PREFIX = "mlxcel_paged_"
_LAUNCHES = f"{_PREFIX}decode_launches_total"


class ServerLostError(PagedError, RuntimeError):
    """A server cannot be reached, or is not one that can be measured."""

    slug = "server_lost"


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """One look at /metrics.

    Attributes:
        decode_launches: by outcome.
        num_pages: pages of the KV pools; 0 with dense storage.
        num_steps: steps of the engine.
        step_s: time spent on steps.
        model_s: the part of `step_s` in the model and the sampler.
    """

    decode_launches: Mapping[str, int] = field(default_factory=dict)
    num_pages: int = 0
    num_steps: int = 0
    step_s: float = 0.0
    model_s: float = 0.0

    def since(self, earlier: ServerCounts) -> ServerCounts:
        """What was counted between two looks, without outcomes that no launch had; `num_pages` is the later one's."""
        grown = {
            outcome: count - earlier.decode_launches.get(outcome, 0) for outcome, count in self.decode_launches.items()
        }
        return ServerCounts(
            {outcome: count for outcome, count in grown.items() if count},
            self.num_pages,
            self.num_steps - earlier.num_steps,
            self.step_s - earlier.step_s,
            self.model_s - earlier.model_s,
        )


async def scrape_counts(client: httpx.AsyncClient) -> ServerCounts | None:
    """Reads /metrics; None when the server is not one of ours."""
    response = await client.get("/metrics")
    if response.status_code != 200:
        return None
    launches: dict[str, int] = {}
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            if sample.name == _LAUNCHES:
                launches[sample.labels["outcome"]] = int(sample.value)
            elif not sample.labels:
                values[sample.name.removeprefix(_PREFIX)] = sample.value
    if "kv_pages_total" not in values:
        return None
    return ServerCounts(
        launches,
        int(values["kv_pages_total"]),
        int(values.get("steps_total", 0)),
        values.get("step_seconds_total", 0.0),
        values.get("model_seconds_total", 0.0),
    )


async def scrape_model(client: httpx.AsyncClient) -> tuple[str | None, int | None]:
    """The name of the model by /v1/models, and the size of its vocabulary by /v1/status where there is one.

    Raises:
        ServerLostError: the server asks for an API key, or another one.
    """
    name = vocab_size = None
    models = await client.get("/v1/models")
    if models.status_code in (401, 403):
        raise ServerLostError(f"the server at {client.base_url} asks for an API key (hint: --api-key)")
    if models.status_code == 200 and models.json().get("data"):
        name = str(models.json()["data"][0]["id"])
    status = await client.get("/v1/status")
    if status.status_code == 200 and status.json().get("model"):
        vocab_size = int(status.json()["model"]["vocab_size"])
    return name, vocab_size
