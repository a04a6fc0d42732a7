"""Rebuilds a Hugging Face fast tokenizer from the metadata of a GGUF file.

Two kinds occur in the llama family: byte-level BPE with an explicit merge list (`gpt2`) and SentencePiece BPE, whose
merges follow from the pieces' scores (`llama`). The pre-tokenizers are those that `tokenizer.ggml.pre` names.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer, TokenizerWrapper
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from mlxcel_paged.errors import InvalidModelError, UnsupportedModelError

_SPECIAL_NAMES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "\u2581"

# Texts that end a turn or a document wherever they are control tokens, whatever `eos_token_id` says.
_END_TEXTS = frozenset(
    {"<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>", "<|end|>", "</s>"}
)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "qwen2": _QWEN2}
_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r"})
_PLAIN = frozenset({"default", "gpt-2", "gpt2", "olmo"})


def tokenizer_from_gguf(metadata: dict[str, Any], max_context: int) -> TokenizerWrapper:
    """Builds the tokenizer that `metadata` describes, with its special tokens, chat template and end-of-sequence ids.

    Raises:
        InvalidModelError: A key is missing or inconsistent.
        UnsupportedModelError: The tokenizer model or the pre-tokenizer is not known.
    """
    kind = metadata.get("tokenizer.ggml.model")
    tokens: list[str] | None = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise InvalidModelError("the GGUF file holds no tokenizer: tokenizer.ggml.tokens is missing")
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise InvalidModelError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    if kind == "gpt2":
        tokenizer, detokenizer = _byte_level(metadata, tokens), BPEStreamingDetokenizer
    elif kind == "llama":
        tokenizer = _sentence_piece(metadata, tokens, types)
        detokenizer = partial(SPMStreamingDetokenizer, trim_space=_adds_space_prefix(metadata))
    else:
        raise UnsupportedModelError(f"tokenizer.ggml.model {kind!r} is not supported; gpt2 and llama are")
    special_ids = _special_ids(metadata, len(tokens))
    _add_special_tokens(tokenizer, tokens, types)
    _add_template(tokenizer, metadata, tokens, special_ids)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=max_context,
        clean_up_tokenization_spaces=False,
        **{name: tokens[special_ids[key]] for key, name in _SPECIAL_NAMES.items() if key in special_ids},
    )
    fast.chat_template = metadata.get("tokenizer.chat_template")
    ends = {index for index, token in enumerate(tokens) if types[index] == _CONTROL and token in _END_TEXTS}
    ends |= {special_ids[key] for key in ("eos", "eot", "eom") if key in special_ids}
    return TokenizerWrapper(fast, detokenizer, eos_token_ids=sorted(ends))


def _special_ids(metadata: dict[str, Any], num_tokens: int) -> dict[str, int]:
    found = {}
    for key in (*_SPECIAL_NAMES, "eot", "eom"):
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is None:
            continue
        if not 0 <= index < num_tokens:
            raise InvalidModelError(f"tokenizer.ggml.{key}_token_id is outside the vocabulary: {index}")
        found[key] = int(index)
    return found


def _bpe(vocab: dict[str, int], merges: Any, **options: Any) -> Tokenizer:
    try:
        return Tokenizer(BPE(vocab, merges, **options))
    except Exception as error:
        raise InvalidModelError(f"the GGUF file's vocabulary and merges do not make a tokenizer: {error}") from error


def _byte_level(metadata: dict[str, Any], tokens: list[str]) -> Tokenizer:
    pre = metadata.get("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", ())]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = _bpe(vocab, merges, ignore_merges=pre in ("llama-bpe", "llama3"))
    if pre in _SPLITS:
        split = pre_tokenizers.Split(Regex(_SPLITS[pre]), behavior="isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    elif pre in _DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    elif pre in _PLAIN:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        known = ", ".join(sorted(_DIGITS | _PLAIN | set(_SPLITS)))
        raise UnsupportedModelError(f"tokenizer.ggml.pre {pre!r} is not supported; known: {known}")
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(metadata: dict[str, Any], tokens: list[str], types: list[int]) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(tokens):
        raise InvalidModelError("tokenizer.ggml.scores is missing or has another length than the vocabulary")
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    merges = _merges_from_scores(vocab, scores, types)
    tokenizer = _bpe(vocab, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    steps: list[Any] = [normalizers.Replace(" ", _SPACE)]
    undo: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if _adds_space_prefix(metadata):
        steps.insert(0, normalizers.Prepend(_SPACE))
        undo.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(undo)
    return tokenizer


def _merges_from_scores(vocab: dict[str, int], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """SentencePiece joins the pair whose result scores best; a merge list states the same order."""
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, index in vocab.items():
        if types[index] != _NORMAL:
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-scores[index], vocab[left], vocab[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]


def _adds_space_prefix(metadata: dict[str, Any]) -> bool:
    return bool(metadata.get("tokenizer.ggml.add_space_prefix", True))


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


def _add_template(
    tokenizer: Tokenizer, metadata: dict[str, Any], tokens: list[str], special_ids: dict[str, int]
) -> None:
    sentence_piece = metadata.get("tokenizer.ggml.model") == "llama"
    starts = sentence_piece or metadata.get("tokenizer.ggml.pre") in ("llama-bpe", "llama3")
    pieces, special = ["$A"], []
    for key, default, at in (("bos", starts, 0), ("eos", False, 2)):
        if key in special_ids and metadata.get(f"tokenizer.ggml.add_{key}_token", default):
            index = special_ids[key]
            pieces.insert(at, tokens[index])
            special.append((tokens[index], index))
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=special)
