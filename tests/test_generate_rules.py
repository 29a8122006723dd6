"""Reading a call, choosing at the client and collecting the output: as transformers' `generate`, on a local model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from generate_helpers import (
    Banned,
    Counting,
    PerRow,
    Recorder,
    Seen,
    allow_some,
    local_generate,
    word_tokenizer,
)
from swarm_helpers import VOCAB, prompts
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList, WatermarkingConfig
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor, TopKLogitsWarper

from bloombee_spec.client.arguments import NotForPlugin, UnsupportedCall
from bloombee_spec.client.call import read_call

NEW = 12
PAD = 1
OPTIONS: dict[str, dict[str, Any]] = {
    "custom processor": {"logits_processor": LogitsProcessorList([Banned()])},
    "a list of processors": {"logits_processor": [Banned(), RepetitionPenaltyLogitsProcessor(3.0)]},
    "custom and built-in": {"logits_processor": [Banned()], "no_repeat_ngram_size": 2, "renormalize_logits": True},
    "prefix_allowed_tokens_fn": {"prefix_allowed_tokens_fn": allow_some, "repetition_penalty": 1.3},
    "sequence_bias": {"sequence_bias": {(5,): -9.0, (7, 9): 4.0}},
    "watermark": {"watermarking_config": WatermarkingConfig(bias=4.0, seeding_scheme="selfhash")},
    "encoder repetition penalty": {"encoder_repetition_penalty": 4.0, "encoder_no_repeat_ngram_size": 2},
    "lengths": {
        "logits_processor": [Banned()],
        "min_length": 40,
        "min_new_tokens": 6,
        "eos_token_id": list(range(2, 60)),
    },
    "guidance": {"guidance_scale": 2.0},
    "long list": {"suppress_tokens": [token % 100 for token in range(9000)]},
}
PADDED = {
    "penalty": {"repetition_penalty": 2.5},
    "n-grams": {"no_repeat_ngram_size": 1},
    "min_length": {"min_length": 18, "eos_token_id": list(range(2, 90))},
    "custom": {"logits_processor": [Banned()]},
    "allowed": {"prefix_allowed_tokens_fn": allow_some},
    "plain": {},
}


def batch(n: int, seed: int = 0, left: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    rows = prompts(n, VOCAB, seed=seed)
    width = max(map(len, rows)) if left else min(map(len, rows))
    if not left:
        rows = [row[:width] for row in rows]
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def expected(model: Any, ids: torch.Tensor, **kwargs: Any) -> Any:
    kwargs = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False, **kwargs}
    return model.generate(ids, pad_token_id=PAD, **kwargs)


def ours(model: Any, ids: torch.Tensor, **kwargs: Any) -> Any:
    kwargs = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "do_sample": False, **kwargs}
    return local_generate(model, ids, pad_token_id=PAD, **kwargs)


@pytest.mark.parametrize("name", OPTIONS)
def test_rules_at_the_client_choose_as_transformers(toy_local: Any, name: str) -> None:
    ids, _ = batch(3, left=False)
    out, call = ours(toy_local, ids, **OPTIONS[name])
    assert call.rules and not call.sampling
    assert out.tolist() == expected(toy_local, ids, **OPTIONS[name]).tolist()
    assert out.tolist() != expected(toy_local, ids).tolist(), "the option changes something"


@pytest.mark.parametrize("name", PADDED)
def test_padded_rows_are_processed_with_their_padding(toy_local: Any, name: str) -> None:
    ids, mask = batch(3, seed=1)
    assert (mask == 0).any()
    out, call = ours(toy_local, ids, attention_mask=mask, **PADDED[name])
    assert bool(call.rules) == (name != "plain")
    assert out.tolist() == expected(toy_local, ids, attention_mask=mask, **PADDED[name]).tolist()


def test_padding_is_inferred_as_transformers_infers_it(toy_local: Any) -> None:
    ids, _ = batch(3, seed=1)
    out, _ = ours(toy_local, ids, attention_mask=None)
    assert out.tolist() == expected(toy_local, ids, attention_mask=None).tolist()
    out, _ = ours(toy_local, ids, attention_mask=None, eos_token_id=PAD)  # now it may be a text's end
    assert out.tolist() == expected(toy_local, ids, attention_mask=None, eos_token_id=PAD).tolist()
    ids[0, -2] = PAD
    with pytest.raises(NotForPlugin, match="left padding"):
        ours(toy_local, ids, attention_mask=None)


def test_a_processor_may_depend_on_the_row_of_the_batch(toy_local: Any) -> None:
    ids, _ = batch(3, left=False)
    biases = 6 * torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(0))
    out, _ = ours(toy_local, ids, logits_processor=[PerRow(biases)])
    assert out.tolist() == expected(toy_local, ids, logits_processor=[PerRow(biases)]).tolist()


def test_a_processor_may_keep_state_over_one_row(toy_local: Any) -> None:
    ids, _ = batch(1)
    theirs, mine = Counting(), Counting()
    out, _ = ours(toy_local, ids, logits_processor=[mine])
    assert out.tolist() == expected(toy_local, ids, logits_processor=[theirs]).tolist()
    assert mine.calls == theirs.calls == NEW


def test_a_processor_that_an_option_stands_for_is_treated_as_by_transformers(toy_local: Any) -> None:
    """Refused up to 4.49, preferred to the option since."""
    ids, _ = batch(1)
    twice = {
        "repetition_penalty": 1.2,
        "logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(9.0)]),
    }
    try:
        theirs = expected(toy_local, ids, **twice)
    except ValueError as e:
        with pytest.raises(ValueError, match="RepetitionPenaltyLogitsProcessor") as mine:
            ours(toy_local, ids, **twice)
        assert str(mine.value).split(" object at ")[0] == str(e).split(" object at ")[0]
    else:
        assert ours(toy_local, ids, **twice)[0].tolist() == theirs.tolist()


def test_client_and_last_stage_sample_the_same(toy_local: Any) -> None:
    ids, _ = batch(3, left=False)
    options = {"do_sample": True, "temperature": 0.9, "top_k": 50, "repetition_penalty": 1.4}
    at_stage, call = ours(toy_local, ids, seed=5, **options)
    assert call.sampling and not call.rules
    nothing = [lambda input_ids, scores: scores]
    at_client, call = ours(toy_local, ids, seed=5, logits_processor=nothing, **options)
    assert call.rules and at_client.tolist() == at_stage.tolist()
    warped, _ = ours(toy_local, ids, seed=5, do_sample=True, top_k=0, logits_processor=[TopKLogitsWarper(1)])
    assert warped.tolist() == expected(toy_local, ids).tolist()


@pytest.mark.parametrize("do_sample", [False, True])
def test_scores_and_logits_have_transformers_shape_and_values(toy_local: Any, do_sample: bool) -> None:
    ids, mask = batch(2, seed=1)
    options = {
        "attention_mask": mask, "return_dict_in_generate": True, "output_scores": True, "output_logits": True,
        "do_sample": do_sample, "top_k": 1 if do_sample else 50, "temperature": 0.5, "repetition_penalty": 1.1,
    }  # fmt: skip
    theirs, (mine, _) = expected(toy_local, ids, **options), ours(toy_local, ids, **options)
    assert type(mine) is type(theirs)
    assert mine.sequences.tolist() == theirs.sequences.tolist()
    for which in ("scores", "logits"):
        a, b = getattr(mine, which), getattr(theirs, which)
        assert isinstance(a, tuple) and len(a) == len(b) == NEW
        for x, y in zip(a, b):
            assert x.shape == y.shape and x.dtype == y.dtype
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-3)
    transitions = toy_local.compute_transition_scores(mine.sequences, mine.scores, normalize_logits=True)
    assert transitions.shape == (2, NEW)


def test_scores_end_where_a_row_ends(toy_local: Any) -> None:
    ids, _ = batch(2, left=False)
    plain = expected(toy_local, ids)[:, ids.shape[1] :].tolist()
    eos = next(token for token in plain[0][:6] if token not in plain[1])
    options = {"eos_token_id": eos, "return_dict_in_generate": True, "output_scores": True}
    theirs, (mine, _) = expected(toy_local, ids, **options), ours(toy_local, ids, **options)
    assert mine.sequences.tolist() == theirs.sequences.tolist() and mine.logits is None
    end = plain[0].index(eos)
    for step, (x, y) in enumerate(zip(mine.scores, theirs.scores)):
        torch.testing.assert_close(x[1], y[1], rtol=1e-3, atol=1e-3)
        assert bool(x[0].any()) == (step <= end)


def test_a_dict_without_scores_needs_no_client(toy_local: Any) -> None:
    ids, _ = batch(1)
    out, call = ours(toy_local, ids, return_dict_in_generate=True)
    assert not call.rules and out.scores is None
    assert out.sequences.tolist() == expected(toy_local, ids).tolist()
    _, call = ours(toy_local, ids, output_scores=True)  # without effect, as in transformers
    assert not call.rules


@pytest.mark.parametrize("eos", [None, 209])
def test_stopping_criteria_see_the_batch_step_by_step(toy_local: Any, eos: int | None) -> None:
    """With and without EOS: transformers pads a row that ended only if there is one."""
    ids, _ = batch(3, left=False)
    plain = expected(toy_local, ids)[:, ids.shape[1] :].tolist()
    tokens = {plain[0][2], plain[1][5], plain[2][8]}
    theirs, mine = Seen(ids.shape[1], tokens), Seen(ids.shape[1], tokens)
    kwargs: dict[str, Any] = {"eos_token_id": eos}
    out, _ = ours(toy_local, ids, stopping_criteria=[mine], **kwargs)
    reference = expected(toy_local, ids, stopping_criteria=StoppingCriteriaList([theirs]), **kwargs)
    assert out.tolist() == reference.tolist()
    assert out.shape[1] < ids.shape[1] + NEW
    assert mine.calls == theirs.calls


def test_a_criterion_that_answers_with_one_bool_ends_all_rows(toy_local: Any) -> None:
    ids, _ = batch(3, left=False)
    plain = expected(toy_local, ids)[:, ids.shape[1] :].tolist()

    def first_row(input_ids: torch.Tensor, scores: Any, **_: Any) -> bool:
        return bool(input_ids[0, -1] == plain[0][4])

    for eos in (None, 209):
        out, _ = ours(toy_local, ids, stopping_criteria=[first_row], eos_token_id=eos)
        assert out.tolist() == expected(toy_local, ids, stopping_criteria=[first_row], eos_token_id=eos).tolist()


def test_stop_strings_and_a_missing_tokenizer(toy_local: Any) -> None:
    ids, _ = batch(1)
    plain = expected(toy_local, ids)[0, ids.shape[1] :].tolist()
    tokenizer = word_tokenizer(VOCAB)
    options = {"stop_strings": [f"w{plain[5]}"], "tokenizer": tokenizer}
    out, _ = ours(toy_local, ids, **options)
    assert out.tolist() == expected(toy_local, ids, **options).tolist()
    assert out.shape[1] < ids.shape[1] + NEW
    with pytest.raises(ValueError, match="tokenizer"):
        ours(toy_local, ids, stop_strings=["w5"])


def test_streamers_see_steps(toy_local: Any) -> None:
    ids, _ = batch(2, left=False)
    theirs, mine = Recorder(), Recorder()
    expected(toy_local, ids, streamer=theirs)
    ours(toy_local, ids, streamer=mine)
    assert mine.seen[0] == theirs.seen[0] and mine.seen[1:] == theirs.seen[1:]
    assert mine.ended == theirs.ended == 1


def test_a_streamer_may_take_many_tokens_at_once(toy_local: Any) -> None:
    class Chunks(Recorder):
        def __init__(self) -> None:
            super().__init__()
            self.chunks: list[torch.Tensor] = []

        def put_many(self, tokens: torch.Tensor) -> None:
            self.chunks.append(tokens)

    ids, _ = batch(2, left=False)
    streamer = Chunks()
    out, _ = ours(toy_local, ids, streamer=streamer)
    assert streamer.seen == [ids.flatten().tolist()] and streamer.ended == 1
    assert torch.cat(streamer.chunks, dim=1).tolist() == out[:, ids.shape[1] :].tolist()
    assert 1 < len(streamer.chunks) < NEW  # the helper commits several tokens at a time


def test_num_return_sequences_are_rows(toy_local: Any) -> None:
    ids, mask = batch(2, seed=1)
    out, call = ours(toy_local, ids, seed=3, attention_mask=mask, do_sample=True, top_k=0, num_return_sequences=3)
    assert out.shape == (6, ids.shape[1] + NEW)
    assert out[:, : ids.shape[1]].tolist() == ids.repeat_interleave(3, dim=0).tolist()
    assert len({tuple(row) for row in out.tolist()}) == 6
    with pytest.raises(ValueError, match="num_return_sequences"):
        ours(toy_local, ids, num_return_sequences=2)
    with pytest.raises(ValueError, match="num_return_sequences"):
        expected(toy_local, ids, num_return_sequences=2)


def test_a_generation_config_of_the_callers_own_is_completed_as_by_transformers(toy_local: Any) -> None:
    ids, _ = batch(1)
    plain = expected(toy_local, ids)[0, ids.shape[1] :].tolist()
    try:
        toy_local.generation_config.eos_token_id = plain[4]
        config = GenerationConfig(max_new_tokens=NEW, do_sample=False)
        theirs = toy_local.generate(ids, config, attention_mask=torch.ones_like(ids))
        mine, call = local_generate(toy_local, ids, generation_config=config)
        assert call.eos == (plain[4],) and mine.tolist() == theirs.tolist()
        assert mine.shape[1] == ids.shape[1] + plain.index(plain[4]) + 1
    finally:
        toy_local.generation_config.eos_token_id = None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_beams": 2}, NotForPlugin),
        ({"penalty_alpha": 0.6, "top_k": 4}, NotForPlugin),
        ({"inputs_embeds": torch.zeros(1, 3, 4)}, NotForPlugin),
        ({"position_ids": torch.zeros(1, 3)}, NotForPlugin),
        ({"an_argument_of_the_host": 3}, NotForPlugin),
        ({"negative_prompt_ids": torch.tensor([[1]])}, ValueError),
        ({"token_healing": True}, UnsupportedCall),
        ({"return_dict_in_generate": True, "output_hidden_states": True}, UnsupportedCall),
        ({"return_dict_in_generate": True, "output_attentions": True}, UnsupportedCall),
    ],
)
def test_what_the_plugin_does_not_serve_is_said(toy_local: Any, options: dict[str, Any], error: type) -> None:
    ids, _ = batch(1)
    with pytest.raises(error):
        read_call(toy_local, ids, {"max_new_tokens": 3, **options}, None)
