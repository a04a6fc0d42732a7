"""What a caller asks for and what it gets back: the only types that cross from a server or a command to the engine.

Pure data, checked once when it is made; no MLX and no Rust core is imported here.
"""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from mlxcel_paged.errors import InvalidFieldError, PagedError
from mlxcel_paged.field_checks import is_number, is_whole
from mlxcel_paged.grammar import Grammar

_MAX_TOKEN_ID = 2**31 - 1
_SEED_RANGE = range(-(2**63), 2**64)
# OpenAI's bound of top_logprobs, and vLLM's default one.
MAX_LOGPROBS = 20


class InvalidRequestError(InvalidFieldError):
    """A field of a request has a value that cannot be honoured.

    Attributes:
        param: name of the field.
        value: what was given.
    """

    slug = "invalid_request"

    def __init__(self, param: str, value: object, expected: str) -> None:
        super().__init__(param, value, expected)
        self.param = param


class ContextLengthExceededError(InvalidRequestError):
    """A prompt can never be served: it does not fit the context, or the whole KV pool.

    Attributes:
        num_prompt_tokens: tokens of the prompt.
        limit_tokens: tokens that the context or the pool holds.
    """

    slug = "context_length_exceeded"

    def __init__(self, num_prompt_tokens: int, limit_tokens: int, holder: str) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.limit_tokens = limit_tokens
        self._holder = holder
        super().__init__("prompt", num_prompt_tokens, f"at most {limit_tokens} tokens")

    def message(self, names: Mapping[str, str]) -> str:
        return f"the prompt's {self.num_prompt_tokens} tokens do not fit {self._holder}"


class QueueFullError(PagedError, RuntimeError):
    """As many requests, or prompt tokens, wait as may; try again later.

    Attributes:
        num_waiting: requests that wait.
        num_waiting_tokens: their prompt tokens, if those are what is too many.
    """

    slug = "queue_full"

    def __init__(self, num_waiting: int, num_waiting_tokens: int | None = None) -> None:
        tokens = "" if num_waiting_tokens is None else f" with {num_waiting_tokens} prompt tokens"
        super().__init__(f"{num_waiting} requests{tokens} are waiting already (hint: try again later)")
        self.num_waiting = num_waiting
        self.num_waiting_tokens = num_waiting_tokens


class FinishReason(Enum):
    """Why a request ended. The values are the ones metrics use as label."""

    STOP = "stop"  # the model sampled a stop token
    LENGTH = "length"  # max_tokens, the context or the pool is used up
    ABORT = "abort"  # the caller withdrew it, or the engine is stopping
    ERROR = "error"  # a step failed; the event carries the exception


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are chosen; mlx-lm's sampler semantics, vLLM's penalties.

    What changes logits comes in the order of both: bias, repetition, presence and frequency, then the grammar.

    Args:
        max_tokens: most tokens to generate, at least 0; None means as many as the context holds.
        temperature: 0 takes the most likely token; finite, not negative.
        top_p: nucleus mass in [0, 1]; 1 is off, 0 keeps the most likely token alone.
        top_k: number of most likely tokens kept; 0 is off.
        min_p: least probability relative to the most likely token, in [0, 1]; 0 is off.
        seed: start of the request's own random stream; None draws one.
        stop_token_ids: tokens that end the request besides the model's end-of-sequence tokens.
        ignore_eos: keep generating past the model's end-of-sequence tokens.
        presence_penalty: taken off the logit of every token that was generated, in [-2, 2].
        frequency_penalty: the same once per time that it was generated, in [-2, 2].
        repetition_penalty: divides positive, multiplies negative logits of all tokens so far, the prompt too; 1 is off.
        logit_bias: added to the logits of tokens; a mapping, or pairs of token id and finite number.
        num_logprobs: how many of the most likely tokens are reported beside the sampled one; None reports nothing.
        grammar: what the output must match; it ends with the model's end-of-sequence token.

    Attributes:
        edits_logits: whether logits are changed before a token is sampled.
        needs_history: whether that depends on the tokens so far, so that they must be known in host memory.

    Raises:
        InvalidRequestError: a value is out of its range or of another type.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    grammar: Grammar | None = None
    edits_logits: bool = field(init=False, default=False)
    needs_history: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, minimum=0)
        _check_float("temperature", self.temperature, maximum=math.inf)
        _check_float("top_p", self.top_p, maximum=1.0)
        _check_int("top_k", self.top_k, minimum=0)
        _check_float("min_p", self.min_p, maximum=1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, minimum=_SEED_RANGE.start)
            if self.seed >= _SEED_RANGE.stop:
                raise InvalidRequestError("seed", self.seed, "a 64-bit integer")
        object.__setattr__(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError("ignore_eos", self.ignore_eos, "true or false")
        _check_float("presence_penalty", self.presence_penalty, minimum=-2.0, maximum=2.0)
        _check_float("frequency_penalty", self.frequency_penalty, minimum=-2.0, maximum=2.0)
        _check_float("repetition_penalty", self.repetition_penalty, maximum=math.inf)
        if self.repetition_penalty == 0.0:
            raise InvalidRequestError("repetition_penalty", self.repetition_penalty, "above 0")
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        if self.num_logprobs is not None:
            _check_int("num_logprobs", self.num_logprobs, minimum=0)
            if self.num_logprobs > MAX_LOGPROBS:
                raise InvalidRequestError("num_logprobs", self.num_logprobs, f"at most {MAX_LOGPROBS}")
        if self.grammar is not None and self.ignore_eos:
            raise InvalidRequestError("ignore_eos", self.ignore_eos, "false with a grammar, which ends the output")
        object.__setattr__(self, "needs_history", self.has_penalties or self.grammar is not None)
        object.__setattr__(self, "edits_logits", self.needs_history or bool(self.logit_bias))

    @property
    def has_penalties(self) -> bool:
        """Whether a penalty is on."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken, so that no random number is drawn."""
        return self.temperature == 0.0


@dataclass(slots=True)
class Request:
    """One prompt to be continued.

    Args:
        request_id: name that events and `abort` use; unique among the requests that are alive.
        prompt_token_ids: at least one token id.
        sampling: how to choose tokens.
        arrival_time: seconds on the monotonic clock.

    Raises:
        InvalidRequestError: the prompt is empty or holds something that is no token id.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    arrival_time: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if not isinstance(self.request_id, str) or not self.request_id:
            raise InvalidRequestError("request_id", self.request_id, "a string that is not empty")
        self.prompt_token_ids = list(_token_ids("prompt", self.prompt_token_ids))
        if not self.prompt_token_ids:
            raise InvalidRequestError("prompt", self.prompt_token_ids, "at least one token")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one step, of the model's own distribution: before temperature, penalties and filters.

    Attributes:
        logprob: of the token that was sampled; may be -inf, where a bias forced what the model rules out.
        top: the most likely tokens and theirs, most likely first, as many as were asked for.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class RequestStart:
    """How a request came to its first token.

    Attributes:
        queue_s: from its arrival to its first admission.
        prefill_s: from there to its first token.
        num_cached_tokens: prompt tokens whose keys and values were there already.
    """

    queue_s: float
    prefill_s: float
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One step of a request's life, delivered in order; the last one has a finish_reason.

    `token_id` is the token generated in this step, or None when the request ended without one (abort, error,
    max_tokens 0). An event with LENGTH usually carries the last token. An event with STOP carries the stop
    token itself: it counts as generated, and it is not part of the text. `logprobs` comes with every token if the
    request asked for it.
    """

    request_id: str
    token_id: int | None = None
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    logprobs: TokenLogprobs | None = None
    start: RequestStart | None = None  # with a request's first token


def _check_int(param: str, value: object, *, minimum: int) -> None:
    if not is_whole(value):
        raise InvalidRequestError(param, value, "an integer")
    if value < minimum:
        raise InvalidRequestError(param, value, f"at least {minimum}")


def _check_float(param: str, value: object, *, maximum: float, minimum: float = 0.0) -> None:
    if not is_number(value):
        raise InvalidRequestError(param, value, "a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and minimum <= number <= maximum):
        expected = f"between {minimum:g} and {maximum:g}" if maximum < math.inf else f"finite and at least {minimum:g}"
        raise InvalidRequestError(param, value, expected)


def _token_ids(param: str, values: object) -> tuple[int, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise InvalidRequestError(param, values, "a sequence of token ids")
    token_ids = tuple(values)
    if all(type(token_id) is int for token_id in token_ids):
        if token_ids and (min(token_ids) < 0 or max(token_ids) > _MAX_TOKEN_ID):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id <= _MAX_TOKEN_ID)
            raise InvalidRequestError(param, wrong, f"made of token ids between 0 and {_MAX_TOKEN_ID}")
        return token_ids
    for token_id in token_ids:
        if isinstance(token_id, bool) or not hasattr(token_id, "__index__"):
            raise InvalidRequestError(param, token_id, "made of integer token ids")
    return _token_ids(param, [operator.index(token_id) for token_id in token_ids])


def _logit_bias(values: object) -> tuple[tuple[int, float], ...]:
    pairs = tuple(values.items()) if isinstance(values, Mapping) else values
    if not isinstance(pairs, tuple) or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        raise InvalidRequestError("logit_bias", values, "a mapping of token ids to numbers")
    _token_ids("logit_bias", [token_id for token_id, _ in pairs])
    for _, bias in pairs:
        _check_float("logit_bias", bias, minimum=-math.inf, maximum=math.inf)
    if len({token_id for token_id, _ in pairs}) != len(pairs):
        raise InvalidRequestError("logit_bias", values, "free of repeated token ids")
    return tuple(sorted(pairs))
