"""The decode kernel on a real GPU against the f64 oracle. Skipped where there is no CUDA GPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs a GPU host: torch is not installed")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from decode_case import build, check, compare, is_fresh, kernel  # noqa: E402
from decode_shapes import HEAD_DIMS, Case, random_case  # noqa: E402


@pytest.mark.parametrize("seed", range(40))
def test_random_cases(seed: int) -> None:
    for part in range(10):
        check(random_case(1000 * seed + part))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_group_size(dtype: str, head_dim: int) -> None:
    for group_size in range(1, 17):
        check(Case(lengths=[300, 17], dtype=dtype, head_dim=head_dim, group_size=group_size))


def test_long_rows_with_many_splits() -> None:
    for num_splits in (1, 2, 3, 7, 16, 33, 64, None):
        check(Case(lengths=[16384, 4096, 1], num_workers=66, num_splits=num_splits))


def test_no_two_threads_merge_the_same_dims() -> None:
    """Who merges a word takes it back, so a second reader of it would wait without end: vectors that fill no warp."""
    for head_dim, group_size in ((80, 1), (80, 3), (96, 7), (64, 1), (80, 11)):
        check(Case(lengths=[9000, 700], head_dim=head_dim, group_size=group_size, num_workers=33))


def test_one_dtype_after_the_other_in_one_process() -> None:
    for dtype in ("float16", "bfloat16", "float16"):
        for head_dim in (64, 128, 64):
            check(Case(lengths=[129], dtype=dtype, head_dim=head_dim))


def test_zero_keys_give_the_exact_mean_and_lse() -> None:
    for length in range(1, 34):
        built = build(Case(lengths=[length], offsets=[3]))
        built.k[built.k == built.k] = 0.0
        built.v[built.v == built.v] = 1.0
        built.launch()
        assert (built.out == 1.0).all()
        assert (built.lse - float(np.log2(length))).abs().max() <= 2e-6 * max(1.0, np.log2(length))


@pytest.mark.parametrize("window", [1, 15, 16, 17, 99, 100, 101, None])
def test_exactly_the_visible_tokens_count(window: int | None) -> None:
    length = 100
    case = Case(lengths=[length], group_size=1, num_kv_heads=1, head_dim=128, window=window, num_workers=3)
    built = build(case)
    built.k[built.k == built.k] = 0.0
    rows = built.nhd(built.v)
    for token in range(length):
        page, slot = built.page_ids[0][token // 16], token % 16
        if not rows[page, slot].isnan().any():
            rows[page, slot] = torch.nn.functional.one_hot(torch.tensor(token), 128).to(rows)
    built.launch()
    visible = min(window or length, length)
    wanted = torch.zeros(128)
    wanted[length - visible : length] = 1.0 / visible
    assert (built.out[0, 0].float().cpu() - wanted).abs().max() <= 1e-3 / visible


def test_extreme_logits() -> None:
    for gain in (1e-4, 1e3, 1e4):
        check(Case(lengths=[500, 3], logit_gain=gain, logits_soft_cap=30.0))
        check(Case(lengths=[500, 3], logit_gain=gain, dtype="bfloat16"))


def test_lengths_advance_under_one_work_list() -> None:
    """The list stays as planned while the device lengths grow past it, over page and slice borders."""
    case = Case(lengths=[1, 120, 300], append=False)
    built = build(Case(lengths=[200, 320, 500], append=False))
    planned = build(case)
    # The seed is the same, so the planned slots are the built ones.
    assert planned.slots == built.slots
    built.items, built.work = planned.items, planned.work
    built.partial_out, built.partial_state = planned.partial_out, planned.partial_state
    for growth in (0, 1, 7, 8, 15, 16, 17, 100, 199):
        built.set_lengths([length + growth for length in case.lengths])
        built.launch()
        worst_out, worst_lse = compare(built)
        assert worst_out <= 1.0
        assert worst_lse <= 1.0


@pytest.mark.parametrize("group_size", [1, 4, 16])
def test_a_thousand_repeats_give_the_same_bits(group_size: int) -> None:
    built = build(Case(lengths=[3000, 1, 517, 8192], group_size=group_size, num_workers=33))
    built.launch()
    first = built.out.clone()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        built.out_guarded.fill_(float("nan"))
        built.launch()
        different += (built.out.view(torch.int16) != first.view(torch.int16)).sum()
    assert int(different) == 0


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_offsets_past_four_gibi_elements(layout: str) -> None:
    pages = (2**32) // (16 * 2 * 128) + 5
    check(Case(lengths=[700, 33], layout=layout, first_page=pages, append=True))


def test_values_that_are_not_numbers_do_not_hang_the_merge() -> None:
    """A split's partial whose bits are those of a word that nobody has written would be waited for without end."""
    for query_bits in (-1, 0x7E00):
        built = build(Case(lengths=[3000, 700], num_workers=33))
        built.q.view(torch.int16).fill_(query_bits)
        built.launch()
        torch.cuda.synchronize()
        assert built.out.isnan().all()
        assert is_fresh(built.partial_out)
        assert is_fresh(built.partial_state)


@pytest.mark.parametrize("lengths", [[3000, 1, 517, 8192], [16] * 7, [40000]])
def test_overlapping_launches_give_the_same_bits(lengths: list[int]) -> None:
    """A chain of launches, each of whose queries are the result of the one before, and which all append."""
    results = []
    for overlaps in (False, True):
        built = build(Case(lengths=lengths, num_workers=16, append=True))
        buffers = [built.q.clone().contiguous(), torch.full_like(built.out, float("nan"))]
        launched = kernel(128, 1, "float16")
        for index in range(200):
            source, target = buffers[index % 2], buffers[1 - index % 2]
            arguments = dataclasses.replace(
                built.arguments(), q=source.data_ptr(), q_row_stride=source.stride(0), out=target.data_ptr()
            )
            launched.launch(arguments, torch.cuda.current_stream().cuda_stream, overlaps_previous=overlaps)
        torch.cuda.synchronize()
        assert is_fresh(built.partial_out)
        assert not buffers[0].isnan().any()
        results.append(buffers[0].view(torch.int16).clone())
    assert torch.equal(*results)
