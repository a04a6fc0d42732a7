"""`mlxcel-paged generate`: continues one or several prompts as one batch and streams the text to the terminal."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

from mlxcel_paged.cli import options
from mlxcel_paged.cli.output import console, json_document
from mlxcel_paged.cli.transcript import Transcript

EXIT_FAILED = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    options.add_engine_flags(parser)
    group = parser.add_argument_group("generation")
    group.add_argument(
        "--prompt", action="append", help="repeatable; several prompts decode as one batch (default: read stdin)"
    )
    group.add_argument("--system", help="a system message in front of every prompt")
    group.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    group.add_argument("--max-tokens", type=options.positive_int, default=256, help="(default: %(default)s)")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: %(default)s)")
    group.add_argument("--top-p", type=float, default=1.0, help="(default: %(default)s)")
    group.add_argument("--top-k", type=int, default=0, help="0 is off (default: %(default)s)")
    group.add_argument("--min-p", type=float, default=0.0, help="(default: %(default)s)")
    group.add_argument("--seed", type=int, help="start of the random streams (default: drawn)")
    options.add_json_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    config, sampling = options.engine_config(arguments), _sampling(arguments)
    prompts = arguments.prompt if arguments.prompt is not None else [sys.stdin.read()]
    if not all(prompts):
        raise ValueError("a prompt is empty (hint: --prompt TEXT, or text on stdin)")
    if arguments.raw and arguments.system is not None:
        raise ValueError("--system needs the chat template; it excludes --raw")
    with json_document(arguments.json) as write:
        document = _generate(arguments, config, sampling, prompts)
        write(document)
    return EXIT_FAILED if any(completion["finish_reason"] == "error" for completion in document["completions"]) else 0


def _generate(arguments: argparse.Namespace, config: Any, sampling: Any, prompts: Sequence[str]) -> dict[str, Any]:
    from mlxcel_paged.engine.engine import Engine
    from mlxcel_paged.engine.offline import stream
    from mlxcel_paged.request import Request

    engine = Engine(config, max_queued_requests=None)
    try:
        with console.status(f"loading {config.model}"):
            engine.start()
            model = engine.wait_until_ready()
        requests = [
            Request(str(index), tokens, sampling) for index, tokens in enumerate(_encode(arguments, model, prompts))
        ]
        transcript = Transcript(model.tokenizer, prompts, shown=not arguments.json)
        start = time.perf_counter()
        for event in stream(engine, requests):
            transcript.take(event)
        seconds = time.perf_counter() - start
        launches = dict(engine.stats().decode_launches)
    finally:
        engine.stop()
    num_tokens = sum(completion["num_tokens"] for completion in transcript.completions)
    summary = {
        "num_tokens": num_tokens,
        "seconds": round(seconds, 3),
        "tok_per_s": round(num_tokens / seconds, 2),
        "storage": model.storage.storage,
        "storage_reason": model.storage.reason,
        "decode_launches": launches,
    }
    path = ", ".join(f"{outcome} ({count} launches)" for outcome, count in launches.items()) or "none"
    console.print(
        f"{num_tokens} tokens in {seconds:.2f} s ({num_tokens / seconds:.1f} tokens/s), "
        f"{model.storage.storage} storage, path: {path}"
    )
    return {"model": model.name, "completions": transcript.completions, **summary}


def _sampling(arguments: argparse.Namespace) -> Any:
    from mlxcel_paged.request import SamplingParams

    return SamplingParams(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        seed=arguments.seed,
    )


def _encode(arguments: argparse.Namespace, model: Any, prompts: Sequence[str]) -> list[list[int]]:
    from mlxcel_paged.text.prompt import PromptEncoder
    from mlxcel_paged.text.template import has_chat_template

    encoder = PromptEncoder(model.tokenizer, model.vocab_size)
    if arguments.raw or not has_chat_template(model.tokenizer):
        return [encoder.from_text(prompt) for prompt in prompts]
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    return [encoder.from_messages([*system, {"role": "user", "content": prompt}]) for prompt in prompts]
