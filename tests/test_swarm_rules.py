"""Rules beside the keyed one on a real swarm: rounds through the stages, judged by the last one, committed by the
client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from host_helpers import OLD_TRANSFORMERS
from round_play import play_round
from swarm_helpers import PLAIN, ROUTES, VOCAB, client, decode, prompts, reference, respec

from benchmarks.drafters import without_layers
from bloombee_spec.client.arguments import UnsupportedCall
from bloombee_spec.client.stage_link import RingError
from bloombee_spec.sampling.round_rules import ROUND_RULES
from bloombee_spec.sampling.rounds import Distributions
from bloombee_spec.sampling.spec import SamplingSpec

pytestmark = pytest.mark.swarm
NEW, BURST = 16, 6
WARM: dict[str, Any] = {"do_sample": True, "temperature": 0.8, "top_k": 0}
EVERY_RULE = pytest.mark.parametrize("name", ROUND_RULES)


@pytest.fixture(scope="module")
def model(swarm: Any) -> Iterator[Any]:
    with client(swarm, PLAIN, ROUTES[3]) as connected:
        yield connected


@pytest.fixture(scope="module")
def draft_model(toy_local: Any) -> Any:
    """Right often, but not always."""
    if OLD_TRANSFORMERS:
        pytest.skip("model drafters need the cache class of a newer transformers")
    return without_layers(toy_local, 1)


def use(model: Any, name: str, drafter: Any, **changes: Any) -> None:
    respec(model, **{**{"speculate": True, "plan": "auto", "burst": BURST, "seed": 5, "client_embeds": False},
                     "rule": name, "drafter": drafter, **changes})  # fmt: skip


def law_of(local: Any, spec: SamplingSpec) -> Callable[[tuple[int, ...]], torch.Tensor]:
    shape, known = Distributions(spec, VOCAB), {}

    def law(text: tuple[int, ...]) -> torch.Tensor:
        if text not in known:
            with torch.inference_mode():
                known[text] = shape(local(torch.tensor([text])).logits[0, -1], text)
        return known[text]

    return law


@EVERY_RULE
def test_greedy_text_is_the_models_own(model: Any, toy_local: Any, draft_model: Any, name: str) -> None:
    (ids,) = prompts(1, VOCAB, seed=70)
    expected = reference(toy_local, ids, NEW)
    for drafter in (draft_model, "suffix", "none"):
        use(model, name, drafter)
        assert decode(model, ids, NEW) == expected
        stats = model.last_stats
        assert (stats.tokens, stats.mode, stats.modes) == (NEW, "ring", {name: NEW})
        if drafter is draft_model:
            assert stats.hits > 0 and stats.laps < NEW
    use(model, name, draft_model, client_embeds=True)  # then the client starts the row of each committed token
    assert decode(model, ids, NEW) == expected


@EVERY_RULE
def test_sampled_text_is_that_of_the_rule_without_a_network(
    model: Any, toy_local: Any, draft_model: Any, name: str
) -> None:
    """The functions whose laws are tested, with the same seed and on local models, give the swarm's text."""
    (ids,) = prompts(1, VOCAB, seed=71)
    rule, spec = ROUND_RULES[name], SamplingSpec(len(ids), do_sample=True, temperature=0.8, seed=5)
    p, q = law_of(toy_local, spec), law_of(draft_model, spec)
    text = tuple(ids)
    while len(text) < len(ids) + NEW:
        room = len(ids) + NEW - 1 - len(text)
        text += tuple(play_round(rule, p, q, rule.widths(BURST)[:room], text, 5, 0))
    use(model, name, draft_model)
    got = decode(model, ids, NEW, **WARM)
    assert got == list(text[len(ids) :])
    assert len(got) == NEW and 0 < model.last_stats.hits < NEW
    assert decode(model, ids, NEW, **WARM) == got  # the same seed again
    use(model, name, draft_model, seed=6)
    assert decode(model, ids, NEW, **WARM) != got


@EVERY_RULE
def test_rows_of_a_batch_and_turns_of_a_session(model: Any, toy_local: Any, draft_model: Any, name: str) -> None:
    rows = [ids[:9] for ids in prompts(3, VOCAB, seed=72)]
    use(model, name, draft_model)
    texts = model.generate(torch.tensor(rows), max_new_tokens=6, **WARM).tolist()
    assert [row[:9] for row in texts] == rows and {len(row) for row in texts} == {15}
    assert model.generate(torch.tensor(rows[:1]), max_new_tokens=6, **WARM).tolist() == texts[:1]
    stop = reference(toy_local, rows[0], NEW)[4]
    with model.inference_session(max_length=64) as session:
        first = model.generate(torch.tensor(rows[:1]), max_new_tokens=NEW, session=session, eos_token_id=stop)
        assert first[0, 9:].tolist() == reference(toy_local, rows[0], NEW, eos_token_id=stop)
        more = model.generate(torch.tensor([[7, 8]]), max_new_tokens=5, session=session)
        assert more[0, 2:].tolist() == reference(toy_local, [*first[0].tolist(), 7, 8], 5)


@EVERY_RULE
def test_a_ring_that_broke_goes_on_with_the_same_text(model: Any, draft_model: Any, name: str) -> None:
    (ids,) = prompts(1, VOCAB, seed=75)
    use(model, name, draft_model)
    expected = decode(model, ids, NEW, **WARM)
    rows = model.stream_rows(torch.tensor([ids]), max_new_tokens=NEW, **WARM)
    got = list(next(rows)[1])
    rows._active._decoder.ring.events.put(RingError("told to break"))
    got += [token for _, tokens in rows for token in tokens]
    assert got == expected and model.last_stats.retries == 1


def test_what_goes_where(model: Any, draft_model: Any) -> None:
    """Whole rows of q go up with `block`, one row of p comes down with `leviathan`, and only after a rejection."""
    (ids,) = prompts(1, VOCAB, seed=71)
    row, seen = 2 * VOCAB, {}
    for name in ROUND_RULES:
        use(model, name, draft_model)
        decode(model, ids, NEW, **WARM)
        seen[name] = model.last_stats
    stats = seen["block"]
    assert stats.candidate_bytes_up > row * stats.proposed and stats.commit_bytes_down < 20 * stats.laps
    assert seen["specinfer"].candidate_bytes_up > row * stats.laps
    stats = seen["leviathan"]
    assert stats.candidate_bytes_up < (4 + 6 + 12) * stats.proposed + 80 * stats.laps
    assert row < stats.commit_bytes_down < row * stats.laps + 20 * stats.laps
    assert seen["picospec"].candidate_bytes_up < stats.candidate_bytes_up


def test_the_client_refuses_what_it_would_have_to_evaluate(model: Any) -> None:
    use(model, "leviathan", "suffix")
    ids = torch.tensor([prompts(1, VOCAB, seed=73)[0]])
    with pytest.raises(UnsupportedCall, match="does not go with options that the client evaluates"):
        model.generate(ids, max_new_tokens=2, logits_processor=[lambda ids, scores: scores])


def test_a_server_refuses_rules_that_it_does_not_know(model: Any) -> None:
    use(model, "leviathan", "none", max_retries=0)
    object.__setattr__(model.spec, "rule", "next year's")
    with pytest.raises(RingError, match=r"rule .* is not known here, only leviathan"):
        decode(model, prompts(1, VOCAB, seed=74)[0], 2)
