"""Real tokenizers without weights or downloads: one whose tokens are single bytes, one with SentencePiece's habits."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('tool turns are not known') }}{% endif %}"
    "<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
EOS, TURN = "<|end|>", "<|turn|>"


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges: token ids 0-255 are the bytes in the alphabet's order, then two special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS, TURN])
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, additional_special_tokens=[TURN])
    fast.chat_template = chat_template
    return fast


def spell(tokenizer: PreTrainedTokenizerFast, data: str | bytes) -> list[int]:
    """The token ids of raw bytes, one each, whether they are valid UTF-8 or not."""
    raw = data.encode() if isinstance(data, str) else data
    from mlxcel_paged.text.byte_level import byte_alphabet

    character_of = {byte: character for character, byte in byte_alphabet().items()}
    return [tokenizer.convert_tokens_to_ids(character_of[byte]) for byte in raw]


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """BPE with the metaspace marker, byte fallback and the dropped leading space of Llama 2 and Mistral."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "▁a", "▁b", "ab", "▁ab", "é", "\n"]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "b"), ("a", "b"), ("▁a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
