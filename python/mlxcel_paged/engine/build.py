"""From a configuration to a scheduler and a runner over a loaded, checked model. Runs on the engine's thread."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import mlx.core as mx

from mlxcel_paged.attention.cuda.decode import workspace_bytes as cuda_workspace_bytes
from mlxcel_paged.attention.cuda.library import cuda_kernels
from mlxcel_paged.config import EngineConfig
from mlxcel_paged.engine.activations import StepShape, activation_bytes
from mlxcel_paged.engine.available import available_device_bytes, available_host_bytes
from mlxcel_paged.engine.core import EngineCore, EngineModel
from mlxcel_paged.engine.decode_tokens import DecodeTokens
from mlxcel_paged.engine.dense_runner import DenseRunner
from mlxcel_paged.engine.memory import GroupShape, MemoryPlan, plan_memory
from mlxcel_paged.engine.paged_runner import PagedRunner
from mlxcel_paged.engine.runner import Runner
from mlxcel_paged.engine.storage import StorageChoice, storage_for_model
from mlxcel_paged.engine.token_reader import new_token_reader
from mlxcel_paged.errors import InvalidFieldError
from mlxcel_paged.models.dense_model import DenseModel
from mlxcel_paged.models.kv_groups import kv_layout
from mlxcel_paged.models.loader import LoadedModel, load_model
from mlxcel_paged.models.paged_model import PagedModel, new_decode_plan
from mlxcel_paged.models.self_check import self_check
from mlxcel_paged.scheduler import PagedGroup, Scheduler, SchedulerConfig

if TYPE_CHECKING:
    from mlxcel_paged.kvcache.layout import KVGroup, KVLayout

logger = logging.getLogger("mlxcel_paged")


def build_core(config: EngineConfig) -> EngineCore:
    """Loads the model and everything around it.

    Raises:
        ModelNotFoundError, InvalidModelError, UnsupportedModelError: the model cannot be loaded or not be paged.
        BudgetTooSmallError: the KV cache budget holds no page; it names the smallest usable one.
        SelfCheckError: paged decode and the model's own cache disagree.
        InvalidFieldError: max_context is beyond the model's.
    """
    loaded = load_model(
        config.model, device=choose_device(config), dtype=config.dtype, keep_quantized=config.keep_quantized
    )
    return build_core_over(config, loaded)


def choose_device(config: EngineConfig) -> Literal["cpu", "gpu"]:
    """Resolves the device `auto` to MLX's default."""
    if config.device != "auto":
        return config.device
    return "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu"


def build_core_over(config: EngineConfig, loaded: LoadedModel) -> EngineCore:
    """As `build_core`, over a model that is loaded."""
    max_context = max_context_of(config, loaded)
    on_cpu = loaded.device == "cpu"
    storage = storage_for_model(config, loaded.model, on_cpu=on_cpu)
    reader = None if on_cpu else new_token_reader(cuda_kernels(), storage.max_batch)
    tokens = DecodeTokens(mx, on_cpu=on_cpu, reader=reader)
    runner: Runner
    memory: MemoryPlan | None = None
    groups: list[PagedGroup] = []
    if storage.storage == "paged":
        layout = kv_layout(loaded.model)
        report = self_check(
            loaded,
            page_size=config.page_size,
            arm=config.arm,
            layout=layout,
            max_slots=storage.max_batch,
            max_context=max_context,
        )
        logger.info("self-check: largest logit difference %.2g, %s", report.largest_difference, report.outcomes)
        memory = plan_model_memory(config, loaded, layout, storage, max_context)
        model = PagedModel(
            loaded,
            num_pages=memory.num_pages,
            page_size=config.page_size,
            max_slots=storage.max_batch,
            max_context=max_context,
            arm=config.arm,
            layout=layout,
        )
        groups = [
            PagedGroup(pool, plan, config.page_size, group.window)
            for pool, plan, group in zip(model.page_pools, model.plans, layout.groups, strict=True)
        ]
        runner = PagedRunner(model, tokens)
    else:
        runner = DenseRunner(DenseModel(loaded), tokens)
    scheduler = Scheduler(
        SchedulerConfig(
            max_batch_size=storage.max_batch,
            max_context=max_context,
            vocab_size=loaded.vocab_size,
            prefill_chunk=config.chunk_tokens(on_cpu=on_cpu),
            max_num_batched_tokens=config.batched_tokens(on_cpu=on_cpu, max_batch=storage.max_batch),
            prefix_cache=config.prefix_cache,
            eos_token_ids=frozenset(loaded.tokenizer.eos_token_ids),
            pipeline_depth=_pipeline_depth(on_cpu, writes_in_place=not groups or cuda_kernels() is not None),
        ),
        groups,
    )
    model_view = EngineModel(
        loaded.name, loaded.tokenizer, loaded.vocab_size, max_context, loaded.device, storage, memory
    )
    logger.info("%s on %s storage: %s", loaded.name, storage.storage, storage.reason)
    return EngineCore(model_view, scheduler, runner, mlx_memory_bytes)


def mlx_memory_bytes() -> dict[str, int]:
    """What MLX holds: in arrays, in its buffer cache, and at most so far in arrays."""
    return {"active": mx.get_active_memory(), "cache": mx.get_cache_memory(), "peak": mx.get_peak_memory()}


def _pipeline_depth(on_cpu: bool, *, writes_in_place: bool) -> int:
    """Steps in flight: one ahead on a GPU.

    MLX's functional page writes copy a whole pool whenever a step in flight still reads it.
    """
    return 0 if on_cpu or not writes_in_place else 1


def plan_model_memory(
    config: EngineConfig, loaded: LoadedModel, layout: KVLayout, storage: StorageChoice, max_context: int
) -> MemoryPlan:
    """Plans the pages of a loaded model.

    Raises:
        BudgetTooSmallError: the budget holds no page of every group beside the workspace.
        InvalidFieldError: the budget asks for more memory than is left.
    """
    on_cpu = loaded.device == "cpu"
    prefill_chunk = config.chunk_tokens(on_cpu=on_cpu)
    shapes = [
        GroupShape(group.page_bytes(config.page_size, layout.dtype.size), group.window) for group in layout.groups
    ]
    return plan_memory(
        shapes,
        budget_bytes=config.kv_cache_budget,
        available_bytes=available_host_bytes() if on_cpu else available_device_bytes(mx),
        workspace_bytes=decode_workspace_bytes(
            layout.groups,
            page_size=config.page_size,
            max_batch=storage.max_batch,
            max_context=max_context,
            on_cpu=on_cpu,
        ),
        page_size=config.page_size,
        max_batch=storage.max_batch,
        max_context=max_context,
        prefill_chunk=prefill_chunk,
        activation_bytes=activation_bytes(
            loaded.config,
            layout,
            StepShape(
                min(prefill_chunk, max_context),
                storage.max_batch,
                storage.max_batch * max_context if config.arm == "gather" else 0,
            ),
            loaded.vocab_size,
        ),
    )


def decode_workspace_bytes(
    groups: Sequence[KVGroup], *, page_size: int, max_batch: int, max_context: int, on_cpu: bool
) -> int:
    """Bytes that decode launches need beside the pages.

    On the CPU one group's launch runs at a time and needs its partial results: per work item and query head an f32
    output row and its LSE. On an NVIDIA GPU every group keeps its workspace and its plan in device memory.
    """
    kernels = None if on_cpu else cuda_kernels()
    sizes = []
    for group in groups:
        plan = new_decode_plan(
            group,
            num_pages=max_context // page_size + 2,  # as many as one row may hold
            page_size=page_size,
            max_slots=max_batch,
            max_context=max_context,
            on_cpu=on_cpu,
        )
        if kernels is None:
            sizes.append(int(plan.num_work_items) * group.num_qo_heads * (group.head_dim + 1) * 4)
        else:
            sizes.append(cuda_workspace_bytes(plan, kernels.num_workers(group.num_kv_heads)))
    return max(sizes) if kernels is None else sum(sizes)


def max_context_of(config: EngineConfig, loaded: LoadedModel) -> int:
    if config.max_context is None:
        return loaded.max_context
    if config.max_context > loaded.max_context:
        expected = f"at most {loaded.max_context}, what {loaded.name} was trained for"
        raise InvalidFieldError("max_context", config.max_context, expected)
    return config.max_context
