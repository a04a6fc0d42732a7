"""Command line flags that several subcommands share, and the `EngineConfig` they describe."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any, get_args

from mlxcel_paged import config
from mlxcel_paged.byte_size import parse_bytes
from mlxcel_paged.config import EngineConfig
from mlxcel_paged.errors import BudgetTooSmallError, InvalidFieldError


def flag_names(parser: argparse.ArgumentParser) -> dict[str, str]:
    """The flag that sets a field, by the field's name: it is declared as the flag's `dest` where they differ."""
    # argparse has no public list of what a parser takes.
    return {action.dest: action.option_strings[0] for action in parser._actions if action.option_strings}


def message(error: BaseException, flags: Mapping[str, str]) -> str:
    """What `error` says, in terms of what was typed.

    Args:
        error: anything; an engine that could not start says what its cause does.
        flags: see `flag_names`.
    """
    for raised in (error, error.__cause__):
        if isinstance(raised, InvalidFieldError):
            return raised.message(flags)
        if isinstance(raised, BudgetTooSmallError) and (flag := flags.get("kv_cache_budget")):
            return f"{flag}: {raised}"
    return str(error)


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout and nothing else there")


def add_model_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that say which model is loaded and how."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        default="embedded",
        help="embedded, a model directory, a .gguf file of the llama family or a Hugging Face repository id "
        "(default: %(default)s)",
    )
    group.add_argument("--device", choices=get_args(config.Device), default="auto", help="(default: %(default)s)")
    group.add_argument(
        "--dtype",
        choices=get_args(config.DType),
        help="dtype of weights and KV pages (default: float32 on the CPU, the model's own elsewhere)",
    )
    group.add_argument(
        "--keep-quantized",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="keep quantized weights instead of dequantizing them at load (default: on a GPU, not on the CPU)",
    )


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Flags that size the engine; includes the model's."""
    add_model_flags(parser)
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--decode-storage",
        choices=get_args(config.DecodeStorage),
        default="auto",
        help="auto is paged when several sequences are batched and every attention layer can be paged "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--parallel", type=int, default=4, metavar="N", help="sequences that decode together (default: %(default)s)"
    )
    group.add_argument("--no-batch", action="store_true", help="decode one sequence at a time, on dense storage")
    group.add_argument(
        "--page-size",
        type=int,
        choices=config.PAGE_SIZES,
        default=config.DEFAULT_PAGE_SIZE,
        help="tokens in a KV page (default: %(default)s)",
    )
    group.add_argument(
        "--kv-cache-budget",
        type=_budget,
        default=None,
        metavar="auto|BYTES",
        help="bytes for KV pages and the kernel workspace, plain or with KiB, MiB or GiB (default: auto)",
    )
    group.add_argument(
        "--max-context",
        type=int,
        metavar="TOKENS",
        help="prompt and output tokens of one request at most (default: the model's)",
    )
    group.add_argument(
        "--prefill-chunk",
        type=int,
        default=None,
        metavar="TOKENS",
        help="prompt tokens that one step computes at most (default: 512 on the CPU, 2048 on a GPU)",
    )
    group.add_argument(
        "--max-num-batched-tokens",
        type=positive_int,
        metavar="TOKENS",
        help="tokens that one step computes at most while sequences decode, theirs included: it bounds how long a "
        f"prompt holds them up (default: on the CPU {config.CPU_BATCHED_PROMPT_TOKENS} and one per sequence, else the "
        "chunk)",
    )
    group.add_argument(
        "--no-prefix-cache",
        dest="prefix_cache",
        action="store_false",
        help="compute every prompt anew; else pages of prompts and answers are kept for prompts that start alike",
    )


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """Builds the configuration that the parsed flags describe.

    Raises:
        InvalidFieldError: A flag is out of range or contradicts another; `message` names it.
    """
    fields = {name: getattr(arguments, name) for name in EngineConfig.__dataclass_fields__ if hasattr(arguments, name)}
    return EngineConfig(**fields)


def comma_list(choices: tuple[str, ...]) -> Any:
    """Makes an argparse type for a comma-separated list of `choices` without repetition."""

    def parse(text: str) -> tuple[str, ...]:
        items = tuple(item.strip() for item in text.split(","))
        for item in items:
            if item not in choices:
                raise argparse.ArgumentTypeError(f"{item!r} is not one of {', '.join(choices)}")
        if len(set(items)) != len(items):
            raise argparse.ArgumentTypeError(f"an item is given twice: {text!r}")
        return items

    return parse


def positive_int(text: str) -> int:
    """An argparse type: an integer from 1 to 2^31 - 1."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"not an integer: {text!r}") from None
    if not 1 <= value < 1 << 31:
        raise argparse.ArgumentTypeError(f"must be between 1 and {(1 << 31) - 1}: {value}")
    return value


def _budget(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
