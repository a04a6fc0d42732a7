"""What an engine is asked to be. Checked once, on construction, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from mlxcel_paged.errors import InvalidFieldError
from mlxcel_paged.field_checks import check_choice, check_range, check_switch

Device = Literal["auto", "cpu", "gpu"]
DecodeStorage = Literal["auto", "paged", "dense"]
Arm = Literal["auto", "fused", "gather"]
DType = Literal["float32", "float16", "bfloat16"]

PAGE_SIZES = (8, 16, 32, 64, 128)
DEFAULT_PAGE_SIZE = 32
MAX_PARALLEL = 1024
CPU_PREFILL_CHUNK = 512
GPU_PREFILL_CHUNK = 2048
CPU_BATCHED_PROMPT_TOKENS = 64
"""Prompt tokens in a step beside running sequences on the CPU: against 512 these wait a fifth as long, and the prompt
half as long again (ADR 0007)."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Settings of one engine.

    Attributes:
        model: `embedded`, a local directory, a `.gguf` file or a Hugging Face repository id.
        device: `auto` takes MLX's default device.
        decode_storage: `auto` is paged when several sequences are batched and every attention layer can be paged.
        parallel: Sequences that decode together at most.
        no_batch: One sequence at a time (`parallel` counts as 1).
        page_size: Tokens in a page.
        kv_cache_budget: Bytes for KV pages and the kernel workspace; None derives it from the free memory.
        max_context: Tokens of prompt and output of one request at most; None takes the model's.
        prefill_chunk: Prompt tokens that one step computes at most; None takes 512 on the CPU and 2048 on a GPU.
        max_num_batched_tokens: Tokens that one step computes at most while sequences decode, their own included; it
            bounds how long a prompt holds them up. None is `CPU_BATCHED_PROMPT_TOKENS` and one per sequence on the CPU,
            and prefill_chunk alone elsewhere.
        prefix_cache: Keep full pages of prompts and answers for later prompts that start alike; they are given up
            before anybody waits for pages.
        dtype: Dtype of weights and pages; None takes float32 on the CPU and the model's own elsewhere.
        keep_quantized: Keep quantized weights instead of dequantizing them at load; None keeps them on a GPU.
        arm: `fused` and `gather` pin the attention path; `auto` follows the dispatch policy.

    Raises:
        InvalidFieldError: A field is out of range or of another type, or contradicts another.
    """

    model: str = "embedded"
    device: Device = "auto"
    decode_storage: DecodeStorage = "auto"
    parallel: int = 4
    no_batch: bool = False
    page_size: int = DEFAULT_PAGE_SIZE
    kv_cache_budget: int | None = None
    max_context: int | None = None
    prefill_chunk: int | None = None
    max_num_batched_tokens: int | None = None
    prefix_cache: bool = True
    dtype: DType | None = None
    keep_quantized: bool | None = None
    arm: Arm = "auto"

    def __post_init__(self) -> None:
        if not self.model:
            raise InvalidFieldError("model", self.model, "embedded, a path or a repository id")
        for name in ("no_batch", "prefix_cache"):
            check_switch(name, getattr(self, name))
        if self.keep_quantized is not None:
            check_switch("keep_quantized", self.keep_quantized)
        check_choice("device", self.device, get_args(Device))
        check_choice("decode_storage", self.decode_storage, get_args(DecodeStorage))
        check_choice("arm", self.arm, get_args(Arm))
        check_choice("dtype", self.dtype, (None, *get_args(DType)))
        check_choice("page_size", self.page_size, PAGE_SIZES)
        check_range("parallel", self.parallel, 1, MAX_PARALLEL)
        if self.prefill_chunk is not None:
            check_range("prefill_chunk", self.prefill_chunk, 1, 1 << 20)
        if self.max_num_batched_tokens is not None:
            # One token beside a full batch is what a prompt needs to advance.
            beside = ("no_batch", True) if self.no_batch else ("parallel", self.parallel)
            low = self.max_batch + 1
            check_range("max_num_batched_tokens", self.max_num_batched_tokens, low, 1 << 20, beside)
        if self.max_context is not None:
            check_range("max_context", self.max_context, 2, 1 << 24)
        if self.kv_cache_budget is not None:
            check_range("kv_cache_budget", self.kv_cache_budget, 0, 1 << 62)
        if self.no_batch and self.decode_storage == "paged":
            raise InvalidFieldError("decode_storage", "paged", "auto or dense", beside=("no_batch", True))
        if self.decode_storage == "dense" and self.arm != "auto":
            raise InvalidFieldError("arm", self.arm, "auto", beside=("decode_storage", "dense"))

    @property
    def max_batch(self) -> int:
        """Sequences that decode together at most."""
        return 1 if self.no_batch else self.parallel

    def chunk_tokens(self, *, on_cpu: bool) -> int:
        """Resolves `prefill_chunk` for a device."""
        if self.prefill_chunk is not None:
            return self.prefill_chunk
        return CPU_PREFILL_CHUNK if on_cpu else GPU_PREFILL_CHUNK

    def batched_tokens(self, *, on_cpu: bool, max_batch: int) -> int | None:
        """Resolves `max_num_batched_tokens` for a device and the sequences that decode together there."""
        if self.max_num_batched_tokens is not None or not on_cpu:
            return self.max_num_batched_tokens
        return CPU_BATCHED_PROMPT_TOKENS + max_batch
