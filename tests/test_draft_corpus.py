"""Past outputs: what is remembered of a stream, what is forgotten, and by many threads at once."""

from __future__ import annotations

import threading

import pytest

from bloombee_spec.draft.corpus import Corpus
from bloombee_spec.draft.suffix import SuffixConfig, SuffixDrafter
from tests.draft_helpers import accepted, proposed


def test_outputs_are_remembered_and_prompts_are_not() -> None:
    corpus = Corpus()
    first = SuffixDrafter(corpus=corpus)
    first.start([1, 2, 3])
    first.observe([10, 11, 12, 13])
    first.close()
    second = first.fork()
    second.start([90, 10, 11])
    assert accepted(proposed(second), [12, 13]) == 2
    second.start([90, 1, 2])
    assert proposed(second) == []


def test_editing_the_output_is_not_the_end_of_the_stream() -> None:
    corpus = Corpus()
    drafter = SuffixDrafter(corpus=corpus)
    drafter.start([1, 2, 3])
    drafter.observe([10, 11, 12, 13])
    drafter.start([1, 2, 3, 10, 11])  # the last two tokens were taken back
    assert len(corpus) == 0
    drafter.observe([20])
    fresh = SuffixDrafter(corpus=None)
    fresh.start([1, 2, 3, 10, 11, 20])
    for path in ([10, 11], [12], []):
        assert proposed(drafter, path) == proposed(fresh, path)
    drafter.start([7, 7])  # another stream
    assert len(corpus) == 4
    assert corpus.segments[0].locate([10, 11, 20])[1] == 3


def test_a_corpus_forgets_what_was_of_no_use_for_longest() -> None:
    # Seen to fail with `touch` left out of `_touch_best`.
    corpus = Corpus(capacity=64, segments=4)
    outputs = [list(range(100 * i, 100 * i + 15)) for i in range(1, 6)]
    for output in outputs[:4]:
        corpus.add(output)
    drafter = SuffixDrafter(corpus=corpus)
    drafter.start(outputs[0][:8])
    assert accepted(proposed(drafter), outputs[0][8:]) > 3
    corpus.add(outputs[4])
    assert len(corpus) <= 64
    known = [bool(SuffixDrafter(corpus=corpus).propose(output[:8], 4)) for output in outputs]
    assert known == [True, False, True, True, True]


def test_a_corpus_keeps_the_end_of_an_output_that_is_too_long() -> None:
    corpus = Corpus(capacity=64, segments=4)
    corpus.add(range(1000))
    assert len(corpus) == 16
    assert corpus.segments[0].locate([998, 999])[1] == 2


def test_threads_share_a_corpus() -> None:
    corpus = Corpus(capacity=4000, segments=4)
    failures: list[BaseException] = []

    def stream(seed: int) -> None:
        try:
            for turn in range(15):
                drafter = SuffixDrafter(corpus=corpus)
                drafter.start([seed, turn])
                for step in range(20):
                    drafter.observe([(seed * step + turn) % 11, step % 7])
                    proposed(drafter)
                drafter.close()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=stream, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert 0 < len(corpus) <= 4000


def test_a_corpus_that_counts_shorter_contexts_is_refused() -> None:
    with pytest.raises(ValueError, match="max_match"):
        SuffixDrafter(SuffixConfig(max_match=24), Corpus(max_context=8))
    with pytest.raises(ValueError, match="segments"):
        Corpus(capacity=4, segments=4)
