"""`mlxcel-paged doctor`: what this installation is, and which storage and attention path a model would get, and why."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from mlxcel_paged import _core, blas, env
from mlxcel_paged.bench.environment import environment
from mlxcel_paged.byte_size import format_bytes
from mlxcel_paged.cli import options
from mlxcel_paged.cli.main import MLX_EXTRAS
from mlxcel_paged.cli.output import console, json_document
from mlxcel_paged.config import EngineConfig
from mlxcel_paged.errors import PagedError

EXIT_PROBLEM = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_engine_flags(parser)
    options.add_json_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    config = options.engine_config(arguments)
    with json_document(arguments.json) as write:
        document = examine(config, arguments.flags)
        write(document)
    if not arguments.json:
        for name, value in _flat(document):
            print(f"{name:32} {value}")
    return EXIT_PROBLEM if document["problems"] else 0


def examine(config: EngineConfig, flags: Mapping[str, str]) -> dict[str, Any]:
    """Collects everything a bug report needs. What does not work becomes an entry of `problems`, not an exception.

    Args:
        config: what an engine would be asked to be.
        flags: names for its fields in `problems`, see `options.flag_names`.
    """
    problems: list[str] = []
    document: dict[str, Any] = {
        **environment(),
        "num_threads": _core.num_threads(),
        "attention_switch": {
            "variable": env.NATIVE_ATTENTION,
            "value": os.environ.get(env.NATIVE_ATTENTION),
            "meaning": env.native_attention().value,
        },
    }
    try:
        import mlx.core as mx

        document["backend"] = {
            "default_device": str(mx.default_device()),
            "blas": {name: value for name, value in asdict(blas.status()).items() if value is not None},
        }
    except ImportError as error:
        document["backend"] = None
        problems.append(f"MLX does not import: {error} (hint: pip install {MLX_EXTRAS})")
    document["model"] = None if problems else _model(config, flags, problems)
    document["problems"] = problems
    return document


def _model(config: EngineConfig, flags: Mapping[str, str], problems: list[str]) -> dict[str, Any]:
    from mlxcel_paged.attention.dispatch import choose_path, fused_backend
    from mlxcel_paged.engine.build import choose_device, max_context_of, plan_model_memory
    from mlxcel_paged.engine.storage import storage_for_model
    from mlxcel_paged.models.kv_groups import kv_layout
    from mlxcel_paged.models.loader import load_model

    report: dict[str, Any] = {"spec": config.model}
    try:
        with console.status(f"loading {config.model}"):
            loaded = load_model(
                config.model,
                device=choose_device(config),
                dtype=config.dtype,
                keep_quantized=config.keep_quantized,
            )
        report |= {
            "name": loaded.name,
            "device": loaded.device,
            "dtype": str(loaded.dtype).removeprefix("mlx.core."),
            "max_context": max_context_of(config, loaded),
        }
        storage = storage_for_model(config, loaded.model, on_cpu=loaded.device == "cpu")
        report |= {"storage": storage.storage, "storage_reason": storage.reason, "max_batch": storage.max_batch}
        if storage.storage == "paged":
            layout = kv_layout(loaded.model)
            memory = plan_model_memory(config, loaded, layout, storage, report["max_context"])
            report |= {
                "decode_path": [
                    choose_path(
                        arm=config.arm,
                        backend=fused_backend(loaded.device),
                        dtype=layout.dtype,
                        num_qo_heads=group.num_qo_heads,
                        num_kv_heads=group.num_kv_heads,
                        head_dim=group.head_dim,
                        page_size=config.page_size,
                    ).outcome
                    for group in layout.groups
                ],
                "page_size": config.page_size,
                "num_pages": list(memory.num_pages),
                "kv_budget": format_bytes(memory.budget_bytes),
                "workspace": format_bytes(memory.workspace_bytes),
            }
        else:
            report["decode_path"] = ["dense"]
    except (PagedError, ValueError) as error:
        problems.append(options.message(error, flags))
    return report


def _flat(document: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    rows: list[tuple[str, Any]] = []
    for name, value in document.items():
        if isinstance(value, dict):
            rows += _flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            rows += [(f"{prefix}{name}", item) for item in value] or [(f"{prefix}{name}", "none")]
        else:
            rows.append((f"{prefix}{name}", value))
    return rows
