"""The whole protocol in memory: the real tree, lanes, stages, verifier, sessions and client, a hash for a model,
random timing.

Whatever the order of events, the output is the plain autoregressive one, nothing deadlocks, every frame is answered
and every
column is free at the end. Each rule of the protocol is then removed from the real code, and the games must notice.
"""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest

from tests.ring_mutants import MUTANTS, Mutant
from tests.ring_play import Game, commit_times, play
from tests.ring_world import RingShape

MOST_GAMES = 600  # until a mutant has to be noticed; most are within a dozen


@pytest.fixture(autouse=True)
def quiet() -> object:
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("block", range(8))
def test_random_timing_never_changes_the_tokens(block: int) -> None:
    for seed in range(block * 50, block * 50 + 50):
        play(Game(seed))


def test_two_clients_share_the_stages() -> None:
    for seed in range(60):
        play(Game(seed, clients=2))


def test_drafting_in_a_thread_of_its_own() -> None:
    for seed in range(30):
        play(Game(seed, drafting="thread"))


def test_without_speculation_each_token_is_one_row_per_stage() -> None:
    for stages in (1, 2, 4):
        times, rows = commit_times(RingShape(blocks=(1,) * stages), wrong=range(100), n=12)
        plain, plain_rows = commit_times(RingShape(blocks=(1,) * stages), wrong=range(100), n=12)
        assert (times, rows) == (plain, plain_rows)
        laps = {round(b - a, 6) for a, b in pairwise(times)}
        assert len(laps) == 1, "every token takes the same lap"


@pytest.mark.parametrize("embed", [True, False])
def test_a_miss_costs_exactly_one_lap(embed: bool) -> None:
    """Links take a second each: with hits only, tokens come without a pause; each miss adds the same lap."""
    shape = RingShape(blocks=(1, 1, 1), embed=embed, arena=64)
    n = 16
    smooth = commit_times(shape, wrong=(), n=n)[0][-1]
    delays = {commit_times(shape, wrong=(at,), n=n)[0][-1] - smooth for at in (4, 7, 10)}
    assert len(delays) == 1
    lap = delays.pop()
    two = commit_times(shape, wrong=(4, 10), n=n)[0][-1] - smooth
    assert two == pytest.approx(2 * lap)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.rule)
def test_the_games_notice_when_a_rule_is_removed(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    for seed in range(MOST_GAMES):
        try:
            play(Game(seed, **mutant.game), **mutant.shape)
        except Exception:
            return
    pytest.fail(f"nobody noticed that this rule is gone: {mutant.rule}")
