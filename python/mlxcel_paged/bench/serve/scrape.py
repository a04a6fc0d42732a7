"""Reads from a server what the client cannot see: which path its launches took, and what model it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

_LAUNCHES = "mlxcel_paged_decode_launches_total"
_PAGES = "mlxcel_paged_kv_pages_total"


@dataclass(frozen=True, slots=True)
class ServerCounts:
    """One look at /metrics.

    Attributes:
        decode_launches: by outcome.
        num_pages: pages of the KV pools; 0 with dense storage.
    """

    decode_launches: Mapping[str, int] = field(default_factory=dict)
    num_pages: int = 0

    def launches_since(self, earlier: ServerCounts) -> dict[str, int]:
        """Launches by outcome between two looks, without outcomes that none took."""
        grown = {
            outcome: count - earlier.decode_launches.get(outcome, 0) for outcome, count in self.decode_launches.items()
        }
        return {outcome: count for outcome, count in grown.items() if count}


async def scrape_counts(client: httpx.AsyncClient) -> ServerCounts | None:
    """Reads /metrics; None when the server is not one of ours."""
    response = await client.get("/metrics")
    if response.status_code != 200:
        return None
    launches: dict[str, int] = {}
    num_pages = None
    for family in text_string_to_metric_families(response.text):
        for sample in family.samples:
            if sample.name == _LAUNCHES:
                launches[sample.labels["outcome"]] = int(sample.value)
            elif sample.name == _PAGES:
                num_pages = int(sample.value)
    return None if num_pages is None else ServerCounts(launches, num_pages)


async def scrape_model(client: httpx.AsyncClient) -> tuple[str | None, int | None]:
    """The name of the model by /v1/models, and the size of its vocabulary by /v1/status where there is one."""
    name = vocab_size = None
    models = await client.get("/v1/models")
    if models.status_code == 200 and models.json().get("data"):
        name = str(models.json()["data"][0]["id"])
    status = await client.get("/v1/status")
    if status.status_code == 200 and status.json().get("model"):
        vocab_size = int(status.json()["model"]["vocab_size"])
    return name, vocab_size
