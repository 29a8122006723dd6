"""The scripted drafter errs as its script says, at the same positions whatever the timing and the history."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bloombee_spec.draft.scripted import Hostility, Script, ScriptedDrafter
from tests.draft_helpers import accepted, chain_of, proposed, verifications

VOCAB = 97
TEXT = [(31 * i + i * i) % VOCAB for i in range(4000)]
PROMPT = TEXT[:10]

scripts = st.builds(
    Script,
    acceptance=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    siblings=st.sampled_from([(), (0.0,)]),
    depth=st.integers(1, 8),
    seed=st.integers(0, 3),
    hostility=st.sampled_from(Hostility),
)


def _drafter(acceptance: float, **fields: object) -> ScriptedDrafter:
    drafter = ScriptedDrafter(TEXT, VOCAB, Script(acceptance, **fields))  # type: ignore[arg-type]
    drafter.start(PROMPT)
    return drafter


@given(
    script=scripts,
    committed=st.integers(1, 60),
    right=st.integers(0, 6),
    wrong=st.booleans(),
    budget=st.integers(0, 20),
    max_depth=st.integers(0, 9),
)
def test_proposals_are_well_formed(
    script: Script, committed: int, right: int, wrong: bool, budget: int, max_depth: int
) -> None:
    drafter = ScriptedDrafter(TEXT[:64], VOCAB, script)
    drafter.start(TEXT[:committed])
    path = [*TEXT[committed : committed + right], *([(TEXT[committed + right] + 1) % VOCAB] if wrong else [])]
    proposals = proposed(drafter, path, budget, max_depth, VOCAB)
    if script.hostility is not Hostility.DUPLICATES:
        siblings = [(each.parent, each.token) for each in proposals]
        assert script.hostility is Hostility.RANDOM or len(set(siblings)) == len(siblings)
    if wrong and script.hostility is not Hostility.RANDOM:
        assert accepted(proposals, TEXT[committed + len(path) :]) == 0


@pytest.mark.parametrize("acceptance", [0.5, 0.9])
def test_the_first_proposal_is_right_at_the_stated_rate(acceptance: float) -> None:
    drafter = _drafter(acceptance, siblings=(0.06, 0.02))
    ranks = [drafter.right_rank(position) for position in range(20000)]
    for rank, chance in enumerate((acceptance, 0.06, 0.02)):
        assert ranks.count(rank) / len(ranks) == pytest.approx(chance, abs=0.012)


def test_errors_depend_on_seed_and_position_only() -> None:
    """One token at a time, all at once, with a path, or with other trees in between: the same positions fail."""
    drafter = _drafter(0.7)
    failing = []
    for position in range(10, 200):
        drafter.propose(TEXT[position : position + position % 3], 1 + position % 5)
        (proposal,) = proposed(drafter, budget=1)
        if proposal.token != TEXT[position]:
            failing.append(position)
        drafter.observe([TEXT[position]])
    again = _drafter(0.7)
    with_path = [
        position for position in range(10, 200) if proposed(again, TEXT[10:position], 1)[0].token != TEXT[position]
    ]
    assert failing == with_path == [position for position in range(10, 200) if drafter.right_rank(position) < 0]
    other_seed = _drafter(0.7, seed=1)
    assert failing != [position for position in range(10, 200) if other_seed.right_rank(position) < 0]


def test_an_error_spoils_what_hangs_below_it_and_nothing_later() -> None:
    drafter = _drafter(0.8, depth=8)
    error = next(position for position in range(10, 4000) if drafter.right_rank(position) < 0)
    drafter.observe(TEXT[10 : error - 2])
    assert accepted(proposed(drafter, budget=8), TEXT[error - 2 :]) == 2
    drafter.observe(TEXT[error - 2 : error + 1])
    after = next(position for position in range(error + 1, 4000) if drafter.right_rank(position) < 0)
    assert accepted(proposed(drafter, budget=8), TEXT[error + 1 :]) == min(8, after - error - 1)


def test_tokens_per_verification_are_what_the_rate_predicts() -> None:
    output = TEXT[10:3010]
    taken = verifications(ScriptedDrafter(TEXT, VOCAB, Script(0.8, depth=4)), PROMPT, output, budget=4)
    expected = sum(0.8**k for k in range(5))  # 1 + a + ... + a^4
    assert len(output) / taken == pytest.approx(expected, rel=0.05)


def test_a_right_sibling_is_found_in_a_tree() -> None:
    drafter = _drafter(0.5, siblings=(0.5,))
    assert accepted(proposed(drafter, budget=31, max_depth=4), TEXT[10:]) == 4


def test_the_shape_of_the_tree_does_not_tell_where_the_errors_are() -> None:
    drafter = _drafter(0.6, siblings=(0.2, 0.1))
    shapes = set()
    for position in range(10, 40):
        shapes.add(tuple((each.parent, each.prob) for each in proposed(drafter, budget=12)))
        drafter.observe([TEXT[position]])
    assert len(shapes) == 1


def test_always_right_and_always_wrong() -> None:
    assert accepted(proposed(_drafter(1.0), budget=20), TEXT[10:]) == 20
    assert accepted(proposed(_drafter(0.0), budget=20), TEXT[10:]) == 0


def test_hostile_modes() -> None:
    assert proposed(_drafter(0.5, hostility=Hostility.EMPTY)) == []
    twins = proposed(_drafter(0.5, siblings=(0.2, 0.1), hostility=Hostility.DUPLICATES), budget=12)
    assert len({(each.parent, each.token) for each in twins}) < len(twins)
    noise = proposed(_drafter(0.9, hostility=Hostility.RANDOM), budget=40, vocab_size=VOCAB)
    assert accepted(noise, TEXT[10:]) < 3 and len({each.token for each in noise}) > 20


def test_interruption_keeps_whole_layers() -> None:
    drafter = _drafter(1.0, siblings=(0.0,), layer_seconds=1e-4)
    whole = proposed(drafter, budget=12)
    polls = iter([False, False, True])
    part = drafter.propose((), 12, interrupted=lambda: next(polls))
    assert max(len(chain_of(part, i)) for i in range(len(part))) == 2
    assert {tuple(chain_of(part, i)) for i in range(len(part))} <= {
        tuple(chain_of(whole, i)) for i in range(len(whole))
    }


def test_it_proposes_nothing_beyond_its_text() -> None:
    drafter = ScriptedDrafter(TEXT[:12], VOCAB, Script(1.0))
    drafter.start(PROMPT)
    assert [each.token for each in proposed(drafter)] == TEXT[10:12]
    drafter.observe(TEXT[10:13])
    assert proposed(drafter) == []


def test_its_name_says_that_it_is_scripted() -> None:
    assert _drafter(0.9).name == "scripted(h=0.9)"
    assert _drafter(0.0, hostility=Hostility.RANDOM).name == "scripted(random)"


def test_impossible_scripts_are_refused() -> None:
    for fields in (
        {"acceptance": 1.1},
        {"acceptance": -0.1},
        {"acceptance": 0.9, "siblings": (0.2,)},
        {"acceptance": 1, "depth": 0},
    ):
        with pytest.raises(ValueError):
            Script(**fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="too small"):
        ScriptedDrafter(TEXT, 2, Script(0.5, siblings=(0.1, 0.1)))
