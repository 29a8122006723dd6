"""Options of `generate` on a real swarm: through the ring, verified at the client where only the client can, exact."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from connect_helpers import at_once
from generate_helpers import Banned, Recorder, Seen, allow_some, word_tokenizer
from swarm_helpers import ROUTES, SUFFIX, VOCAB, Knowing, client, decode, prompts, reference, respec
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    TextIteratorStreamer,
    TextStreamer,
    WatermarkingConfig,
    pipeline,
)

from bloombee_spec import SpecConfig
from bloombee_spec.client.model import UnsupportedCall
from bloombee_spec.draft.scripted import Script

pytestmark = pytest.mark.swarm
NEW = 24
PAD = 1
AT_CLIENT: dict[str, dict[str, Any]] = {
    "logits_processor": {"logits_processor": LogitsProcessorList([Banned()])},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": allow_some},
    "sequence_bias": {"sequence_bias": {(5,): -9.0, (7, 9): 4.0}},
    "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=4.0)},
    "together": {"logits_processor": [Banned()], "repetition_penalty": 1.4, "renormalize_logits": True},
}


@pytest.fixture(scope="module")
def model(swarm: Any) -> Any:
    with client(swarm, SUFFIX, ROUTES[2]) as connected:
        yield connected


@pytest.fixture(autouse=True)
def as_configured(model: Any) -> Any:
    yield
    respec(model, **vars(SUFFIX))


def left_padded(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    rows = prompts(n, VOCAB, seed=seed)
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


def both(model: Any, local: Any, ids: torch.Tensor, **kwargs: Any) -> tuple[Any, Any]:
    kwargs = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": PAD, **kwargs}
    kwargs.setdefault("attention_mask", torch.ones_like(ids))
    return model.generate(ids, **kwargs), local.generate(ids, **kwargs)


# --- verified at the client ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", AT_CLIENT)
def test_processors_that_only_the_client_has_are_exact(model: Any, toy_local: Any, name: str) -> None:
    options, rows = AT_CLIENT[name], prompts(2, VOCAB, seed=40)
    expected = [reference(toy_local, ids, NEW, **options) for ids in rows]
    texts = [[*ids, *out] for ids, out in zip(rows, expected)]
    for drafter in ("suffix", lambda: Knowing(texts, VOCAB, Script(0.7, siblings=(0.2,)))):
        respec(model, drafter=drafter)
        for ids, out in zip(rows, expected):
            assert decode(model, ids, NEW, **options) == out
            assert model.last_stats.mode == "ring" and model.last_stats.tokens == NEW
    assert model.last_stats.hits > NEW // 3  # speculation goes on


def test_the_relay_verifies_with_the_same_rules(model: Any, toy_local: Any) -> None:
    (ids,) = prompts(1, VOCAB, seed=41)
    respec(model, mode="relay")
    assert decode(model, ids, 12, **AT_CLIENT["together"]) == reference(toy_local, ids, 12, **AT_CLIENT["together"])
    assert model.last_stats.mode == "relay"


def test_a_session_moves_verification_to_the_client_when_a_turn_needs_it(model: Any, toy_local: Any) -> None:
    (first,) = prompts(1, VOCAB, seed=42)
    options = AT_CLIENT["together"]
    with model.inference_session(max_length=128) as session:
        one = model.generate(torch.tensor([first]), max_new_tokens=10)[0].tolist()
        assert session._ring.verifies
        two = model.generate(torch.tensor([[7, 8]]), max_new_tokens=10, **options)[0].tolist()
        assert not session._ring.verifies
        three = model.generate(None, max_new_tokens=10)[0].tolist()
        session.output_ids = torch.tensor([[*one, 7]])  # the user edits the history
        four = model.generate(None, max_new_tokens=10, **options)[0].tolist()
        assert model.last_stats.bytes_up > 0 and model.last_stats.bytes_down > 0
    assert one == [*first, *reference(toy_local, first, 10)]
    assert two == [7, 8, *reference(toy_local, [*one, 7, 8], 10, **options)]
    assert three == reference(toy_local, [*one, *two], 10)
    assert four == reference(toy_local, [*one, 7], 10, **options)


def test_sampling_at_client_and_last_stage_is_the_same(model: Any) -> None:
    (ids,) = prompts(1, VOCAB, seed=43)
    respec(model, seed=9)
    options = {"do_sample": True, "temperature": 0.9, "top_k": 60, "repetition_penalty": 1.2}
    at_stage = decode(model, ids, NEW, **options)
    assert decode(model, ids, NEW, logits_processor=[lambda _, scores: scores], **options) == at_stage


def test_padded_rows_with_options_that_look_at_the_prompt(model: Any, toy_local: Any) -> None:
    ids, mask = left_padded(3, seed=44)
    for options in ({"repetition_penalty": 2.0}, {"no_repeat_ngram_size": 1, "logits_processor": [Banned()]}):
        mine, theirs = both(model, toy_local, ids, attention_mask=mask, **options)
        assert mine.tolist() == theirs.tolist()
        assert model.last_stats.mode == "ring"


def test_a_session_remembers_padding(model: Any, toy_local: Any) -> None:
    ids, mask = left_padded(3, seed=58)
    more = torch.tensor([[4, 5], [6, 7], [8, 9]])
    with model.inference_session(max_length=96) as session:
        one = model.generate(ids, attention_mask=mask, max_new_tokens=6)
        two = model.generate(more, attention_mask=torch.ones_like(more), max_new_tokens=6)
        three = model.generate(None, max_new_tokens=4)
        session.output_ids = torch.cat([one, more], dim=1)
        four = model.generate(None, max_new_tokens=3)
    for row, seen, *turns in zip(ids.tolist(), mask.tolist(), one.tolist(), two.tolist(), three.tolist()):
        prompt = row[seen.index(1) :]
        first, second, third = turns
        assert first == [*row, *reference(toy_local, prompt, 6)]
        history = [*prompt, *first[len(row) :], *second[:2]]
        assert [*second[2:], *third] == reference(toy_local, history, 10)
    assert four.tolist() == [row[2:5] for row in two.tolist()]


def test_scores_and_logits(model: Any, toy_local: Any) -> None:
    ids, mask = left_padded(2, seed=45)
    options = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    mine, theirs = both(model, toy_local, ids, attention_mask=mask, repetition_penalty=1.3, **options)
    assert type(mine) is type(theirs) and mine.sequences.tolist() == theirs.sequences.tolist()
    for which in ("scores", "logits"):
        assert len(getattr(mine, which)) == NEW
        for x, y in zip(getattr(mine, which), getattr(theirs, which)):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)
    mine.sequences[0, 0] = mine.sequences[0, 0] * 1  # results are ordinary tensors
    assert model.last_stats.mode == "ring"


def test_guidance_has_a_session_of_its_own(swarm: Any, model: Any, toy_local: Any) -> None:
    (ids,) = prompts(1, VOCAB, seed=56)
    assert decode(model, ids, 8, guidance_scale=2.0) == reference(toy_local, ids, 8, guidance_scale=2.0)
    negative = {"guidance_scale": 1.5, "negative_prompt_ids": torch.tensor([[7, 5, 9]])}
    expected = reference(toy_local, ids, 8, **negative)
    padded = {**negative, "negative_prompt_ids": torch.tensor([[PAD, 7, 5, 9]])}
    mask = {"negative_prompt_attention_mask": torch.tensor([[0, 1, 1, 1]])}
    with model.inference_session(max_length=64):
        out = model.generate(torch.tensor([ids]), max_new_tokens=8, **padded, **mask)[0].tolist()
    assert out == [*ids, *expected]
    assert expected != reference(toy_local, ids, 8)
    ids, mask = left_padded(2, seed=57)
    mine, theirs = both(model, toy_local, ids, attention_mask=mask, guidance_scale=2.0)
    assert mine.tolist() == theirs.tolist() and model.last_stats.mode == "ring"


def test_a_broken_session_of_the_second_prompt_is_replaced_and_all_are_closed(
    model: Any, toy_local: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ids,) = prompts(1, VOCAB, seed=59)
    host, opened, closed = model._spec_host, [], []
    new_session, close_session = host.new_session, host.close_session

    def opening(*args: Any, **kwargs: Any) -> Any:
        session, steps = new_session(*args, **kwargs), []
        step = session.step

        def stepping(rows: torch.Tensor) -> torch.Tensor:
            steps.append(rows)
            if len(opened) == 1 and len(steps) == 3:
                raise ConnectionError("cut")
            return step(rows)

        session.step = stepping
        opened.append(session)
        return session

    monkeypatch.setattr(host, "new_session", opening)
    monkeypatch.setattr(host, "close_session", lambda session: (closed.append(session), close_session(session)))
    options = {"guidance_scale": 2.0, "negative_prompt_ids": torch.tensor([[7, 5, 9]])}
    assert decode(model, ids, 6, **options) == reference(toy_local, ids, 6, **options)
    assert len(opened) == 2 and closed == opened


def test_a_failing_processor_leaves_the_model_usable(model: Any, toy_local: Any) -> None:
    (ids,) = prompts(1, VOCAB, seed=46)

    def fails(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > len(ids) + 4:
            raise KeyError("the caller's own mistake")
        return scores

    with model.inference_session(max_length=96):
        with pytest.raises(KeyError, match="own mistake"):
            model.generate(torch.tensor([ids]), max_new_tokens=NEW, logits_processor=[fails])
        assert model.generate(torch.tensor([ids]), max_new_tokens=8)[0].tolist()[len(ids) :] == reference(
            toy_local, ids, 8
        )
    assert decode(model, ids, 8) == reference(toy_local, ids, 8)


# --- rows, drafters -----------------------------------------------------------------------------------------------


def test_num_return_sequences(model: Any, toy_local: Any) -> None:
    (ids,) = prompts(1, VOCAB, seed=47)
    respec(model, seed=3)
    options = {"do_sample": True, "top_k": 0}
    out = model.generate(torch.tensor([ids]), max_new_tokens=12, num_return_sequences=3, **options)
    assert out.shape == (3, len(ids) + 12) and len({tuple(row) for row in out.tolist()}) == 3
    assert out[0, len(ids) :].tolist() == decode(model, ids, 12, **options)
    peaked = model.generate(torch.tensor([ids]), max_new_tokens=6, num_return_sequences=2, do_sample=True, top_k=1)
    assert peaked[:, len(ids) :].tolist() == [reference(toy_local, ids, 6)] * 2


def test_an_assistant_is_the_drafter(model: Any, toy_local: Any) -> None:
    (ids,) = prompts(1, VOCAB, seed=48)
    expected = reference(toy_local, ids, NEW)
    respec(model, drafter="none")
    assert decode(model, ids, NEW, assistant_model=toy_local) == expected
    assert model.last_stats.draft_s > 0
    with model.inference_session(max_length=96) as session:
        one = model.generate(torch.tensor([ids]), max_new_tokens=12)[0].tolist()
        assert session._decoder.streams[0].drafter is None
        two = model.generate(None, max_new_tokens=6, assistant_model=toy_local)[0].tolist()
        assert session._decoder.streams[0].drafter.name == "model(LlamaForCausalLM)"
        three = model.generate(None, max_new_tokens=6)[0].tolist()
        assert session._decoder.streams[0].drafter is None
    assert [*one, *two, *three] == [*ids, *expected]


def test_an_assistant_of_another_vocabulary_is_refused(model: Any) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    small = LlamaForCausalLM(LlamaConfig(vocab_size=99, **sizes))
    with pytest.raises(ValueError, match=r"211 token ids and the drafter 99.*assistant_tokenizer"):
        decode(model, [1, 2, 3], 4, assistant_model=small)
    with pytest.raises(ValueError, match="expected a transformers causal LM"):
        decode(model, [1, 2, 3], 4, assistant_model="some/name")


def test_prompt_lookup_is_the_suffix_drafter(model: Any, toy_local: Any) -> None:
    (ids,) = prompts(1, VOCAB, seed=49)
    text = [*ids, *reference(toy_local, ids, NEW), *ids]
    expected = reference(toy_local, text, NEW)
    respec(model, drafter="none")
    assert decode(model, text, NEW, prompt_lookup_num_tokens=4) == expected
    assert model.last_stats.proposed > 0


# --- ends and streams ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eos", [None, 209])
@pytest.mark.parametrize("mode", ["ring", "relay"])
def test_criteria_end_rows_of_a_batch_as_in_transformers(
    model: Any, toy_local: Any, eos: int | None, mode: str
) -> None:
    ids, mask = left_padded(3, seed=50)
    _, plain = both(model, toy_local, ids, attention_mask=mask)
    tokens = {row[ids.shape[1] + at] for row, at in zip(plain.tolist(), (3, 9, 6))}
    respec(model, mode=mode)
    options = {"attention_mask": mask, "eos_token_id": eos}
    mine = model.generate(
        ids, max_new_tokens=NEW, pad_token_id=PAD, stopping_criteria=[Seen(ids.shape[1], tokens)], **options
    )
    theirs = toy_local.generate(
        ids, max_new_tokens=NEW, pad_token_id=PAD, stopping_criteria=[Seen(ids.shape[1], tokens)], **options
    )
    assert mine.tolist() == theirs.tolist() and mine.shape[1] < ids.shape[1] + NEW
    assert model.last_stats.mode == mode


def test_a_relay_session_goes_on_after_a_criterion_ended_rows_in_flight(model: Any, toy_local: Any) -> None:
    rows = [row[:9] for row in prompts(2, VOCAB, seed=51)]
    ids = torch.tensor(rows)
    respec(model, mode="relay")
    seen = {reference(toy_local, rows[0], 8)[-1]}

    def first_row(input_ids: torch.Tensor, scores: Any, **_: Any) -> bool:
        return int(input_ids[0, -1]) in seen and input_ids.shape[1] >= 17

    with model.inference_session(max_length=96):
        one = model.generate(ids, max_new_tokens=NEW, stopping_criteria=[first_row])
        assert one.shape[1] == 17
        two = model.generate(torch.tensor([[5, 6], [7, 8]]), max_new_tokens=6)
    for row, before, after in zip(rows, one.tolist(), two.tolist()):
        assert before == [*row, *reference(toy_local, row, 8)]
        assert after[2:] == reference(toy_local, [*before, *after[:2]], 6)


def test_stop_strings_max_time_and_text_streamers(model: Any, toy_local: Any, capsys: Any) -> None:
    tokenizer = word_tokenizer(VOCAB)
    (ids,) = prompts(1, VOCAB, seed=52)
    plain = reference(toy_local, ids, NEW)
    options: dict[str, Any] = {"stop_strings": [f"w{plain[7]}"], "tokenizer": tokenizer}
    mine, theirs = both(model, toy_local, torch.tensor([ids]), **options)
    assert mine.tolist() == theirs.tolist() and mine.shape[1] < len(ids) + NEW
    mine, theirs = both(model, toy_local, torch.tensor([ids]), max_time=0.0)
    assert mine.tolist() == theirs.tolist() == [[*ids, plain[0]]]
    mine, _ = both(model, toy_local, torch.tensor([ids]), max_time=600.0)
    assert mine[0, len(ids) :].tolist() == plain

    text = tokenizer.decode(plain)
    model.generate(torch.tensor([ids]), max_new_tokens=NEW, streamer=TextStreamer(tokenizer, skip_prompt=True))
    assert capsys.readouterr().out.split() == text.split()
    chunks = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    worker = threading.Thread(
        target=model.generate, args=(torch.tensor([ids]),), kwargs={"max_new_tokens": NEW, "streamer": chunks}
    )
    worker.start()
    assert "".join(chunks).split() == text.split()
    worker.join()


def test_a_streamer_of_many_tokens_gets_a_lap_at_once(model: Any, toy_local: Any) -> None:
    class Chunks(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.chunks: list[list[int]] = []

        def put_many(self, tokens: torch.Tensor) -> None:
            self.chunks.append(tokens[0].tolist())

    (ids,) = prompts(1, VOCAB, seed=53)
    expected = reference(toy_local, ids, NEW)
    respec(model, drafter=lambda: Knowing([[*ids, *expected]], VOCAB, Script(1.0)))
    streamer = Chunks()
    decode(model, ids, NEW, streamer=streamer)
    assert [token for chunk in streamer.chunks for token in chunk] == expected
    assert len(streamer.chunks) < NEW and streamer.ended == 1


# --- ways to call -------------------------------------------------------------------------------------------------


def test_pipeline(model: Any, toy_local: Any) -> None:
    tokenizer = word_tokenizer(VOCAB)
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    out = generate("w7 w9 w33", max_new_tokens=12, do_sample=False, return_full_text=False)
    expected = tokenizer.decode(reference(toy_local, [7, 9, 33], 12), skip_special_tokens=True)
    assert out[0]["generated_text"].split() == expected.split()
    assert model.last_stats.mode == "ring"
    several = generate("w7 w9 w33", max_new_tokens=6, do_sample=True, num_return_sequences=2)
    assert len(several) == 2


def test_a_generation_config_may_be_positional(model: Any, toy_local: Any) -> None:
    (ids,) = prompts(1, VOCAB, seed=54)
    config = GenerationConfig(max_new_tokens=8, do_sample=False)
    out = model.generate(torch.tensor([ids]), config, LogitsProcessorList([Banned()]))
    assert out[0, len(ids) :].tolist() == reference(toy_local, ids, 8, logits_processor=[Banned()])
    with pytest.raises(TypeError, match="two values for generation_config"):
        model.generate(torch.tensor([ids]), config, generation_config=config)


def test_two_calls_at_once_are_exact(model: Any, toy_local: Any) -> None:
    one, two = prompts(2, VOCAB, seed=55)
    plain, processed = at_once(
        lambda: [decode(model, one, NEW) for _ in range(3)],
        lambda: [decode(model, two, NEW, logits_processor=[Banned()]) for _ in range(3)],
    )
    assert plain == [reference(toy_local, one, NEW)] * 3
    assert processed == [reference(toy_local, two, NEW, logits_processor=[Banned()])] * 3


# --- what is not the plugin's --------------------------------------------------------------------------------------

HOSTS: dict[str, dict[str, Any]] = {
    "beam search": {"num_beams": 2},
    "group beam search": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "constrained beam search": {"num_beams": 2, "force_words_ids": [[5]]},
    "contrastive search": {"penalty_alpha": 0.6, "top_k": 4},
    "DoLa": {"dola_layers": "low"},
    "inputs_embeds": {"inputs_embeds": torch.zeros(1, 3, 96)},
    "position_ids": {"position_ids": torch.arange(3)[None]},
    "right padding": {"attention_mask": torch.tensor([[1, 1, 0]])},
    "unknown": {"an_argument_of_nobody": 3},
}


@pytest.mark.parametrize("name", HOSTS)
def test_what_the_host_is_asked_for_is_never_ignored(model: Any, name: str) -> None:
    """BloomBee 0.1.3 serves none of these; it says so, and goes on working."""
    options = {"max_new_tokens": 4, "do_sample": False, **HOSTS[name]}
    with pytest.raises(UnsupportedCall):
        model.generate(torch.tensor([[1, 2, 3]]), **options)
    respec(model, strict=False)
    with pytest.raises((NotImplementedError, AssertionError, ValueError)):
        model.generate(torch.tensor([[1, 2, 3]]), **options)
    assert model.last_stats is None


def test_the_model_works_after_the_hosts_refusals(model: Any, toy_local: Any) -> None:
    respec(model, strict=False)
    with pytest.raises(NotImplementedError):
        decode(model, [1, 2, 3], 4, num_beams=2, do_sample=False)
    assert decode(model, [1, 2, 3], 6) == reference(toy_local, [1, 2, 3], 6)
    assert model.last_stats.mode == "ring"


@pytest.mark.parametrize(
    "options",
    [{"output_attentions": True}, {"output_hidden_states": True}, {"token_healing": True}],
)
def test_what_nobody_can_serve_is_refused(model: Any, options: dict[str, Any]) -> None:
    respec(model, strict=False)
    with pytest.raises(UnsupportedCall, match=next(iter(options))):
        decode(model, [1, 2, 3], 4, **options)


@pytest.mark.parametrize("options", [{"use_cache": False}, {"cache_implementation": "static"}])
def test_where_the_cache_is_changes_nothing(model: Any, toy_local: Any, options: dict[str, Any]) -> None:
    assert decode(model, [1, 2, 3], 6, **options) == reference(toy_local, [1, 2, 3], 6)


def test_prompt_tuning_takes_the_hosts_path(swarm: Any) -> None:
    with client(swarm, SpecConfig(), ROUTES[1], tuning_mode="ptune", pre_seq_len=3) as tuned:
        out = decode(tuned, [1, 2, 3], 5, do_sample=False)
        assert tuned.last_stats is None
        respec(tuned, mode="off")
        assert decode(tuned, [1, 2, 3], 5, do_sample=False) == out
        respec(tuned, mode="auto", strict=True)
        with pytest.raises(UnsupportedCall, match="prompt tuning"):
            decode(tuned, [1, 2, 3], 5)
