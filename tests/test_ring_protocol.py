"""The whole protocol in memory: the real tree, lanes, stages, verifier, sessions and client, a hash for a model,
random timing.

Whatever the order of events, the output is the plain autoregressive one, nothing deadlocks, every frame is answered
and every column is free at the end. Each rule of the protocol is then removed from the real code, and the games must
notice.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Collection, Iterator

import pytest

from tests.ring_mutants import MUTANTS, Mutant
from tests.ring_play import Game, commit_times, play
from tests.ring_world import RingShape

MOST_GAMES = 600  # until a mutant has to be noticed; most are within a dozen
TOKENS = 12
BREAK = ("break", "break", "run", "stop")
ROUTES = [RingShape((1, 2, 1), embed, verify, 64, max_rows=64) for embed in (False, True) for verify in (False, True)]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("block", range(10))
def test_random_timing_never_changes_the_tokens(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        play(Game(seed))


def test_many_turns_with_few_credits() -> None:
    for seed in range(60):
        play(Game(seed, turns=5, hit=0.9), arena=1 + seed % 3, max_rows=1 + seed % 4)


def test_two_clients_share_the_stages() -> None:
    for seed in range(60):
        play(Game(seed, clients=2))


def test_a_ring_that_lost_stages_is_gone_on_with() -> None:
    for seed in range(150):
        play(Game(seed, turns=3, ends=BREAK, drafting="instant"))


def test_drafting_in_a_thread_of_its_own() -> None:
    for seed in range(30):
        play(Game(seed, drafting="thread"))


def test_sampled_turns_with_any_timing_give_the_tokens_of_plain_sampling() -> None:
    for seed in range(40):
        play(Game(seed, sampled=1.0))


# --- time: links take a second, compute nothing -------------------------------------------------------------------


def _lap(route: RingShape) -> float:
    """From a commit at the client to the next one that needs a new row: the first stage hears of it, or the client
    sends it; then one second per hop, the last one back to the client."""
    heard_from_verifier = route.embed and route.verify
    return len(route.blocks) + (0.0 if heard_from_verifier else 1.0)


def _expected_times(route: RingShape, wrong: Collection[int], n: int) -> list[float]:
    """One lap per miss and not a second more. Where the first stage goes on by itself, it is a second ahead of the
    candidates that the client drafts behind the same commit."""
    times, now, waiting_for_drafts = [], len(route.blocks) + 1.0, False
    for i in range(n):
        times.append(now)
        if i in wrong:
            now += _lap(route)
            waiting_for_drafts = _lap(route) == len(route.blocks)
        elif waiting_for_drafts:
            now, waiting_for_drafts = now + 1.0, False
    return times


@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_without_speculation_each_token_is_one_lap_and_one_row_per_stage(route: RingShape) -> None:
    times, rows = commit_times(route, None, TOKENS)
    first = len(route.blocks) + 1.0
    assert times == [first + i * _lap(route) for i in range(TOKENS)]
    assert rows == [3 + TOKENS - 1] * len(route.blocks), "three of the prompt; the last token needs no row"


@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_a_miss_costs_exactly_one_lap(route: RingShape) -> None:
    rng = random.Random(0)
    for misses in (0, 1, 2, 3, 3, 5, 8):
        wrong = set(rng.sample(range(TOKENS), misses))
        assert commit_times(route, wrong, TOKENS)[0] == _expected_times(route, wrong, TOKENS)


def test_candidates_that_overtake_the_commit_below_them_wait_for_it() -> None:
    """The commit reaches the first stage half a second after the candidates that build upon it."""
    route, wrong = ROUTES[-1], {0, 4, 5}
    lap = 2.5 - 1 + len(route.blocks)
    expected = [4 + lap * sum(at < i for at in wrong) for i in range(8)]
    assert commit_times(route, wrong, 8, commit_delay=2.5)[0] == expected


@pytest.mark.parametrize("route", ROUTES, ids=str)
def test_right_candidates_are_computed_once_and_none_is_dropped(route: RingShape) -> None:
    assert commit_times(route, (), TOKENS)[1] == [3 + TOKENS - 1] * len(route.blocks)


# --- sharpness ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.rule)
def test_the_games_notice_when_a_rule_is_removed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    if mutant.laps:
        with pytest.raises(AssertionError):
            test_candidates_that_overtake_the_commit_below_them_wait_for_it()
        return
    for seed in range(MOST_GAMES):
        try:
            play(Game(seed, **mutant.game), **mutant.shape)
        except Exception:
            return
    pytest.fail(f"nobody noticed that this rule is gone: {mutant.rule}")
