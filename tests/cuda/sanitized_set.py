"""The launches that compute-sanitizer sees: few, and each way through the kernels among them."""

from __future__ import annotations

from dataclasses import dataclass

from decode_shapes import Case, random_case


@dataclass(frozen=True, slots=True)
class PageWrite:
    """New tokens of 16-bit elements, written to scattered places; every third is left out, as padded rows are."""

    head_dim: int
    page_size: int
    num_kv_heads: int = 2
    num_tokens: int = 37
    num_pages: int = 9
    seed: int = 0
    label: str = ""


CHOSEN: tuple[Case | PageWrite, ...] = (
    Case([1, 8, 300], head_dim=64, group_size=1, page_size=8, label="D64, group 1, page 8"),
    Case([300, 17], "bfloat16", head_dim=80, group_size=4, page_size=16, label="D80, group 4, page 16, bf16"),
    Case([700, 65], head_dim=96, group_size=8, page_size=64, label="D96, group 8, page 64"),
    Case([700, 129], "bfloat16", group_size=4, page_size=128, label="D128, group 4, page 128, bf16"),
    Case([257, 16], "bfloat16", head_dim=256, group_size=1, num_workers=1, label="D256, group 1, no splits, bf16"),
    PageWrite(128, 16, label="page write, 16 bytes a thread"),
    Case([3000, 700], num_workers=33, label="merge of many splits"),
    Case([17, 16, 1, 300], append=True, layout="NHD", label="append, also of a page's first token, NHD"),
    Case([0, 129, 0, 17], append=True, label="empty rows"),
    Case([700, 33], window=100, label="window that begins inside a page"),
    Case([300, 5], with_sinks=True, label="sinks"),
    Case([300, 5], logits_soft_cap=30.0, logit_gain=8.0, label="soft cap"),
    Case([5, 1, 16], num_workers=66, label="more workers than work, padded slots and items"),
    Case([0, 0], with_sinks=True, append=True, label="nothing but empty rows, sinks"),
    Case([3000, 33], "bfloat16", offsets=[5, 15], append=True, num_workers=16, label="offsets, append, splits, bf16"),
    Case([2000, 700], "bfloat16", head_dim=64, num_splits=7, num_workers=16, label="seven splits at most, bf16"),
    Case([3000, 700], head_dim=80, group_size=3, num_workers=33, label="merge whose vectors fill no warp"),
    Case([300, 17], group_size=16, num_workers=3, label="two tiles of heads"),
    Case([700, 64], "bfloat16", group_size=8, page_size=64, window=64, label="window of one page, bf16"),
    Case([700, 100, 0], "bfloat16", window=300, with_sinks=True, logits_soft_cap=50.0, label="all three, bf16"),
    Case([1999, 255], page_size=8, layout="NHD", window=1000, append=True, label="window, append, page 8, NHD"),
    Case([2000] * 4, head_dim=256, group_size=8, num_kv_heads=1, num_workers=12, label="D256, group 8, splits"),
    Case([16] * 7, group_size=1, num_kv_heads=8, page_size=128, append=True, label="rows of one slice, append"),
    PageWrite(3, 5, label="page write, 2 bytes a thread"),
)


def sanitized(num_cases: int) -> list[Case | PageWrite]:
    """The first of the chosen ones; random decode launches follow where more are asked for."""
    return [*CHOSEN[:num_cases], *map(random_case, range(num_cases - len(CHOSEN)))]
