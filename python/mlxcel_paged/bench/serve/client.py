"""Sends one streaming completion and notes when its chunks arrive."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx

from mlxcel_paged.bench.serve.record import BenchRequest, RequestRecord

# The server sends a comment to a silent stream far more often.
_SILENCE_TIMEOUT_S = 600.0
_MAX_ERROR_CHARACTERS = 300


def new_client(base_url: str, api_key: str | None = None) -> httpx.AsyncClient:
    """Makes a client of a server that sends the key, if any, with every request, and goes through no proxy."""
    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    return httpx.AsyncClient(
        base_url=base_url,
        headers=headers,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        timeout=httpx.Timeout(_SILENCE_TIMEOUT_S, pool=None),
        trust_env=False,
    )


async def complete(client: httpx.AsyncClient, request: BenchRequest, model: str | None = None) -> RequestRecord:
    """Runs a request greedily to its full length. Whatever fails is told by the record, never raised."""
    fields: dict[str, Any] = {
        "prompt": request.prompt_token_ids,
        "max_tokens": request.output_len,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if model is not None:
        fields["model"] = model
    body = json.dumps(fields).encode()
    record = RequestRecord(len(request.prompt_token_ids), time.perf_counter())
    try:
        async with client.stream(
            "POST", "/v1/completions", content=body, headers={"content-type": "application/json"}
        ) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode("utf-8", "replace")
                record.error = f"HTTP {response.status_code}: {text[:_MAX_ERROR_CHARACTERS]}"
            else:
                record.error = await _read(response, record)
    except httpx.HTTPError as error:
        record.error = f"{type(error).__name__}: {error}"
    if record.error is None and record.num_output_tokens != request.output_len:
        record.error = f"{record.num_output_tokens} tokens came, {request.output_len} were asked for"
    return record


async def _read(response: httpx.Response, record: RequestRecord) -> str | None:
    """Fills the record from a stream; returns what is wrong with it."""
    async for data, arrived_at in _events(response):
        if data == b"[DONE]":
            return None if record.chunk_times else "a stream without a chunk"
        try:
            chunk = json.loads(data)
            if "error" in chunk:
                return f"error event: {json.dumps(chunk['error'])[:_MAX_ERROR_CHARACTERS]}"
            if chunk["choices"]:
                record.chunk_times.append(arrived_at)
                record.text += chunk["choices"][0]["text"]
            if chunk.get("usage"):
                record.num_output_tokens = int(chunk["usage"]["completion_tokens"])
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            return f"an event that is no chunk ({type(error).__name__}: {error}): {data[:80]!r}"
    return "the stream ended without [DONE]"


async def _events(response: httpx.Response) -> AsyncIterator[tuple[bytes, float]]:
    """The data of each server-sent event, and when its last byte came."""
    buffered = b""
    async for part in response.aiter_bytes():
        arrived_at = time.perf_counter()
        *events, buffered = (buffered + part).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    yield line[5:].strip(), arrived_at
