"""Admit, defer or reject: decided from pages that are free now and pages that are promised already."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from mlxcel_paged.request import ContextLengthExceededError, InvalidRequestError, Request
from mlxcel_paged.scheduler.config import SchedulerConfig
from mlxcel_paged.scheduler.groups import PagedGroups
from mlxcel_paged.scheduler.prefix_cache import PrefixNode
from mlxcel_paged.scheduler.sequence import Sequence, SequenceStatus


def clamp_max_tokens(request: Request, config: SchedulerConfig, capacity_tokens: int | None) -> int:
    """Returns how many tokens the request may generate; pure, so any thread may ask.

    The context bounds prompt and output together. The pool bounds the tokens whose keys and values are kept: all but
    the last output token.

    Raises:
        ContextLengthExceededError: the prompt can never be served.
        InvalidRequestError: the prompt or the bias holds a token id outside the vocabulary.
    """
    num_prompt_tokens = len(request.prompt_token_ids)
    largest = max(request.prompt_token_ids)
    if largest >= config.vocab_size:
        raise InvalidRequestError("prompt", largest, f"made of token ids below {config.vocab_size}")
    bias = request.sampling.logit_bias
    if bias and bias[-1][0] >= config.vocab_size:
        raise InvalidRequestError("logit_bias", bias[-1][0], f"about token ids below {config.vocab_size}")
    wanted = request.sampling.max_tokens
    room = config.max_context - num_prompt_tokens
    if room < (1 if wanted != 0 else 0):
        raise ContextLengthExceededError(
            num_prompt_tokens, config.max_context, f"the context of {config.max_context} tokens with their output"
        )
    if capacity_tokens is not None:
        if num_prompt_tokens > capacity_tokens:
            raise ContextLengthExceededError(
                num_prompt_tokens,
                capacity_tokens,
                f"the KV pool of {capacity_tokens} tokens, less than the context of {config.max_context} "
                "(hint: raise the KV cache budget)",
            )
        room = min(room, capacity_tokens - num_prompt_tokens + 1)
    return room if wanted is None else min(wanted, room)


def can_admit(candidate: Sequence, prefix: Seq[PrefixNode], active: Seq[Sequence], groups: PagedGroups) -> bool:
    """Whether the pages of `candidate`'s tokens are free besides what was promised before. It changes nothing.

    Promised are the pages that admitted prompts still need. Some pages stay free for the growth of the sequences, one
    each (none where they cannot grow), twice as many after every preemption of the candidate: a sequence that keeps
    being preempted waits for a calmer pool instead of thrashing. Alone it is always admitted. Cached pages of its
    `prefix` cost nothing where others use them too; the rest of them are pages that would have counted as free.
    """
    if not active:
        return True
    num_groups = len(groups.groups)
    headroom = (len(active) + 1) << candidate.num_preemptions
    needed = groups.max_pages(candidate.num_tokens)
    growth = [final - now for final, now in zip(groups.max_pages(candidate.max_num_tokens), needed, strict=True)]
    num_shared = sum(node.num_users > 0 for node in prefix)
    needed = [count - num_shared for count in needed]
    for sequence in active:
        now = groups.max_pages(sequence.num_tokens)
        final = groups.max_pages(sequence.max_num_tokens)
        for index in range(num_groups):
            held = sequence.tables[index].num_pages
            if sequence.status is SequenceStatus.PREFILL:
                promised = max(0, now[index] - held)
                needed[index] += promised
                held += promised
            growth[index] += max(0, final[index] - held)
    return groups.fits(count + min(headroom, limit) for count, limit in zip(needed, growth, strict=True))
