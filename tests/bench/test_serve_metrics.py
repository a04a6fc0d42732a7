"""The keys and numbers of a serving benchmark, and the decode window, over answers made by hand."""

from __future__ import annotations

import statistics

import pytest

from mlxcel_paged.bench.serve.decode_window import decode_window
from mlxcel_paged.bench.serve.metrics import serving_metrics
from mlxcel_paged.bench.serve.record import RequestRecord

# As vLLM's `bench serve` writes them, percentile 99 alone.
VLLM_KEYS = {
    *("duration", "completed", "failed", "request_throughput", "output_throughput", "total_token_throughput"),
    *("total_input", "total_output", "total_input_tokens", "total_output_tokens"),
    *(f"{s}_{name}_ms" for s in ("mean", "median", "std", "p99") for name in ("ttft", "tpot", "itl", "e2el")),
}


def record(*chunk_times: float, sent_at: float = 0.0, num_output_tokens: int | None = None) -> RequestRecord:
    num_output_tokens = len(chunk_times) if num_output_tokens is None else num_output_tokens
    return RequestRecord(10, sent_at, list(chunk_times), num_output_tokens)


def failed() -> RequestRecord:
    return RequestRecord(10, 0.0, [0.1], error="HTTP 500")


def test_keys_are_those_of_vllm() -> None:
    assert set(serving_metrics([record(1.0, 2.0)], duration_s=2.0)) == VLLM_KEYS
    with_goodput = serving_metrics([record(1.0)], duration_s=2.0, goodput_ms={"ttft": 1.0})
    assert set(with_goodput) == VLLM_KEYS | {"request_goodput"}


def test_throughput_counts_complete_requests_alone() -> None:
    metrics = serving_metrics([record(1.0, 2.0), record(1.0, 2.0, 3.0), failed()], duration_s=4.0)
    assert (metrics["completed"], metrics["failed"]) == (2, 1)
    assert (metrics["total_input"], metrics["total_output"]) == (20, 5)
    assert metrics["request_throughput"] == 0.5
    assert metrics["output_throughput"] == 1.25
    assert metrics["total_token_throughput"] == 6.25


def test_latencies_are_milliseconds_from_sending() -> None:
    first, second = record(1.5, 1.75, 2.5, sent_at=1.0), record(3.0, 3.5, sent_at=1.0)
    metrics = serving_metrics([first, second], duration_s=1.0)
    assert metrics["mean_ttft_ms"] == pytest.approx((500 + 2000) / 2)
    assert metrics["mean_tpot_ms"] == pytest.approx((1000 / 2 + 500) / 2)
    assert metrics["mean_itl_ms"] == pytest.approx((250 + 750 + 500) / 3)
    assert metrics["std_itl_ms"] == pytest.approx(statistics.pstdev([250, 750, 500]))
    assert metrics["median_itl_ms"] == pytest.approx(500)
    assert metrics["median_e2el_ms"] == pytest.approx((1500 + 2500) / 2)


def test_99th_percentile_is_interpolated() -> None:
    records = [record(index / 1000, sent_at=0.0) for index in range(1, 102)]
    assert serving_metrics(records, duration_s=1.0)["p99_ttft_ms"] == pytest.approx(100)


def test_output_token_time_counts_tokens_not_chunks() -> None:
    metrics = serving_metrics([record(1.0, 2.0, num_output_tokens=5)], duration_s=1.0)
    assert metrics["mean_tpot_ms"] == pytest.approx(250)
    assert metrics["mean_itl_ms"] == pytest.approx(1000)


def test_statistics_without_samples_are_absent_rather_than_zero() -> None:
    metrics = serving_metrics([failed()], duration_s=1.0)
    assert metrics["completed"] == 0
    assert metrics["mean_ttft_ms"] is None
    assert metrics["p99_itl_ms"] is None
    assert serving_metrics([record(1.0)], duration_s=1.0)["median_tpot_ms"] is None


def test_goodput_counts_requests_within_every_bound() -> None:
    records = [record(0.1, 0.2), record(0.1, 0.9), record(0.5, 0.6), failed()]
    for bounds, num_good in (
        ({"ttft": 200}, 2),
        ({"ttft": 200, "tpot": 200}, 1),
        ({"e2el": 1}, 0),
        ({"tpot": 100.1}, 2),
    ):
        metrics = serving_metrics(records, duration_s=2.0, goodput_ms=bounds)
        assert metrics["request_goodput"] == num_good / 2, bounds


def steps(first: float, step_s: float, num_tokens: int) -> RequestRecord:
    return record(*(first + step_s * index for index in range(num_tokens)))


def test_window_of_clients_that_decode_in_step() -> None:
    window = decode_window([steps(1.0, 0.5, 11) for _ in range(4)], 4)
    assert window is not None
    assert window.tokens_per_s == pytest.approx(4 / 0.5)
    assert window.seconds == pytest.approx(5.0)


def test_window_leaves_out_what_happens_while_others_prefill() -> None:
    # The first client decodes slowly while the second prefills, up to second 10, and quickly from then on.
    first = record(1.0, 4.0, 7.0, 10.0, 10.5, 11.0, 11.5, 12.0)
    second = steps(10.0, 0.5, 5)
    window = decode_window([first, second], 2)
    assert window is not None
    assert window.tokens_per_s == pytest.approx(4.0)
    assert window.seconds == pytest.approx(2.0)


def test_window_ends_with_the_first_client_that_is_done() -> None:
    short, long = steps(0.0, 0.5, 5), record(0.0, 0.5, 1.0, 1.5, 2.0, 12.0, 22.0)
    window = decode_window([short, long], 2)
    assert window is not None
    assert window.tokens_per_s == pytest.approx(4.0)
    assert window.seconds == pytest.approx(2.0)


def test_windows_are_weighted_by_their_length() -> None:
    # One client stays; the other place is taken twice, for 1 s at 2 tokens/s and for 3 s at 2 tokens/s beside 4/s.
    stays = record(*(index / 2 for index in range(3)), *(2 + index / 4 for index in range(13)))
    window = decode_window([stays, steps(0.0, 0.5, 3), steps(2.0, 0.5, 7)], 2)
    assert window is not None
    assert window.tokens_per_s == pytest.approx((4 * 1 + 6 * 3) / 4)
    assert window.seconds == pytest.approx(4.0)


def test_window_counts_tokens_that_came_in_one_chunk() -> None:
    window = decode_window([record(0.0, 1.0, 2.0, num_output_tokens=9)], 1)
    assert window is not None
    assert window.tokens_per_s == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("records", "num_clients"),
    [
        ([], 1),
        ([steps(0.0, 1.0, 1)], 1),
        ([steps(0.0, 1.0, 3), steps(5.0, 1.0, 3)], 2),
        ([steps(0.0, 1.0, 3), steps(2.0, 1.0, 3)], 2),
        ([steps(0.0, 1.0, 5), failed()], 2),
        ([steps(0.0, 1.0, 5)] * 3, 4),
    ],
)
def test_no_window_where_not_all_clients_decode(records: list[RequestRecord], num_clients: int) -> None:
    assert decode_window(records, num_clients) is None
