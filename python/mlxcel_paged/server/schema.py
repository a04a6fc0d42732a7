"""The fields that both generating endpoints share: sampling, stop strings, streaming, and what is ignored."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeVar

from mlxcel_paged.grammar import Grammar
from mlxcel_paged.request import SamplingParams
from mlxcel_paged.server.config import ServerConfig
from mlxcel_paged.server.errors import bad_request
from mlxcel_paged.server.fields import Fields, checked_string, wrong_type
from mlxcel_paged.server.response_format import JsonFormat, read_response_format

_T = TypeVar("_T")

# They change neither the tokens nor their meaning: bookkeeping, billing, caching and speed.
IGNORED_FIELDS = frozenset(
    {
        "metadata",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

_MAX_BIAS = 100.0
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


@dataclass(frozen=True, slots=True)
class GenerationFields:
    """What one request asks for, apart from its prompt.

    Attributes:
        model: the name that was asked for, or None.
        max_tokens: as asked for; None means the endpoint's default.
        stream, include_usage: how the answer is delivered.
        stops: stop strings.
        num_choices: answers per prompt.
        json_format: what the answer must be; None is text.
    """

    model: str | None
    max_tokens: int | None
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int | None
    ignore_eos: bool
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    num_choices: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    json_format: JsonFormat | None

    def sampling(
        self,
        *,
        max_tokens: int | None,
        stop_token_ids: tuple[int, ...],
        num_logprobs: int | None,
        grammar: Grammar | None,
    ) -> SamplingParams:
        """The engine's parameters; it clamps max_tokens to what fits.

        Raises:
            InvalidRequestError: fields that exclude each other.
        """
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            seed=self.seed,
            stop_token_ids=stop_token_ids,
            ignore_eos=self.ignore_eos,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=self.logit_bias,
            num_logprobs=num_logprobs,
            grammar=grammar,
        )


def read_generation(fields: Fields, config: ServerConfig) -> GenerationFields:
    """Takes the shared fields out of a request.

    Raises:
        ApiError: 400, names the field.
    """
    fields.ignore(IGNORED_FIELDS)
    stream = fields.boolean("stream") or False
    return GenerationFields(
        model=fields.string("model"),
        max_tokens=_read_max_tokens(fields),
        temperature=_or(fields.number("temperature", minimum=0, maximum=2), 1.0),
        top_p=_or(fields.number("top_p", minimum=0, maximum=1), 1.0),
        top_k=_or(fields.integer("top_k", minimum=0), 0),
        min_p=_or(fields.number("min_p", minimum=0, maximum=1), 0.0),
        seed=fields.integer("seed", minimum=-(2**63), maximum=2**64 - 1),
        ignore_eos=fields.boolean("ignore_eos") or False,
        stops=_read_stops(fields, config),
        stream=stream,
        include_usage=_read_include_usage(fields, stream),
        num_choices=_or(fields.integer("n", minimum=1, maximum=config.max_choices), 1),
        presence_penalty=_or(fields.number("presence_penalty", minimum=-2, maximum=2), 0.0),
        frequency_penalty=_or(fields.number("frequency_penalty", minimum=-2, maximum=2), 0.0),
        repetition_penalty=_read_repetition_penalty(fields),
        logit_bias=_read_logit_bias(fields),
        json_format=read_response_format(fields),
    )


def _or(value: _T | None, default: _T) -> _T:
    return default if value is None else value


def _read_max_tokens(fields: Fields) -> int | None:
    max_tokens = fields.integer("max_tokens", minimum=0)
    max_completion_tokens = fields.integer("max_completion_tokens", minimum=0)
    if max_tokens is None or max_completion_tokens is None:
        return max_completion_tokens if max_tokens is None else max_tokens
    if max_tokens != max_completion_tokens:
        raise bad_request("max_completion_tokens", "max_tokens and max_completion_tokens differ; send one of them")
    return max_tokens


def _read_repetition_penalty(fields: Fields) -> float:
    penalty = fields.number("repetition_penalty", minimum=0, maximum=10)
    if penalty == 0.0:
        raise bad_request("repetition_penalty", "repetition_penalty must be above 0")
    return 1.0 if penalty is None else penalty


def _read_logit_bias(fields: Fields) -> tuple[tuple[int, float], ...]:
    """Which ids are in the vocabulary is the engine's to say."""
    biases = fields.nested("logit_bias")
    if biases is None:
        return ()
    pairs: dict[int, float] = {}
    for name in biases.names:
        if not _TOKEN_ID.fullmatch(name):
            raise bad_request("logit_bias", f"the keys of logit_bias must be token ids, got {name[:20]!r}")
        pairs[int(name)] = _or(biases.number(name, minimum=-_MAX_BIAS, maximum=_MAX_BIAS), 0.0)
    return tuple(sorted(pairs.items()))


def _read_stops(fields: Fields, config: ServerConfig) -> tuple[str, ...]:
    value = fields.take("stop")
    if value is None:
        return ()
    if not isinstance(value, (str, list)):
        raise wrong_type("stop", "a string or an array of strings", value)
    stops = [("stop", value)] if isinstance(value, str) else [(f"stop[{i}]", stop) for i, stop in enumerate(value)]
    if len(stops) > config.max_stop_strings:
        raise bad_request("stop", f"stop has {len(stops)} strings, at most {config.max_stop_strings} are allowed")
    for param, stop in stops:
        text = checked_string(param, stop)
        if not text:
            raise bad_request(param, f"{param} is an empty string")
        if len(text) > config.max_stop_characters:
            message = f"{param} has {len(text)} characters, at most {config.max_stop_characters} are allowed"
            raise bad_request(param, message)
    return tuple(dict.fromkeys(stop for _, stop in stops))


def _read_include_usage(fields: Fields, stream: bool) -> bool:
    options = fields.nested("stream_options")
    if options is None:
        return False
    if not stream:
        raise bad_request("stream_options", "stream_options is only allowed when stream is true")
    include_usage = options.boolean("include_usage") or False
    options.ignore({"include_obfuscation"})
    options.finish()
    return include_usage
