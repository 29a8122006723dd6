"""The token tree against a naive model that keeps whole paths."""

from __future__ import annotations

import random

import pytest

from bloombee_spec.tree import Fate, NodeSpec, TokenTree, committed_ref


class NaiveTree:
    """Live candidates as paths of tokens from position 0."""

    def __init__(self) -> None:
        self.committed: list[int] = []
        self.paths: dict[int, tuple[int, ...]] = {}  # id -> all tokens up to and including the node

    def insert(self, spec: NodeSpec) -> None:
        if spec.parent in self.paths:
            above: tuple[int, ...] | None = self.paths[spec.parent]
        elif spec.parent < 0 and -spec.parent <= len(self.committed):
            above = tuple(self.committed[: -spec.parent])
        else:
            above = None
        if above is not None:
            self.paths[spec.id] = (*above, spec.token)

    def commit(self, token: int) -> None:
        self.committed.append(token)

    def live(self) -> set[int]:
        n = len(self.committed)
        return {i for i, path in self.paths.items() if len(path) > n and path[:n] == tuple(self.committed)}


@pytest.mark.parametrize("seed", range(200))
def test_a_node_is_alive_iff_it_descends_from_the_committed_path(seed: int) -> None:
    rng, tree, naive, next_id = random.Random(seed), TokenTree([1]), NaiveTree(), 0
    naive.commit(1)
    for _ in range(60):
        if rng.random() < 0.7:
            parents = [*naive.paths, committed_ref(tree.length - 1), committed_ref(rng.randrange(tree.length))]
            spec = NodeSpec(next_id, rng.choice(parents), rng.randrange(3))
            next_id += 1
            above = naive.paths.get(spec.parent) or (tuple(naive.committed[: -spec.parent]) if spec.parent < 0 else ())
            if (*above, spec.token) in naive.paths.values():
                continue  # of two equal siblings the first one wins: another test
            fate = tree.fate(spec)
            (verdict,) = tree.extend((spec,))
            naive.insert(spec)
            assert verdict.fate is fate
            path = naive.paths.get(spec.id)
            if fate is Fate.COMMITTED:
                assert path == tuple(naive.committed[: verdict.position + 1])
            elif fate is Fate.LIVE:
                assert path is not None and verdict.position == len(path) - 1
        else:
            options = [node.token for node in tree.roots] + [rng.randrange(3)]
            before = naive.live()
            commit = tree.commit(token := rng.choice(options))
            naive.commit(token)
            gone = before - naive.live() - ({commit.hit.id} if commit.hit else set())
            assert {node.id for node in commit.dead} == gone
        duplicates = len(tree.nodes) - len(naive.live())
        assert duplicates <= 0 and set(tree.nodes) <= naive.live()
        for node in tree.live():
            tokens = [*tree.committed, *[step.token for step in node.path()]]
            assert tuple(tokens) == naive.paths[node.id] and node.position == len(tokens) - 1
            assert tree.is_live(node)


def test_mask_relates_exactly_ancestors_and_self() -> None:
    tree = TokenTree([5])
    ids = {0: -1, 1: 0, 2: 0, 3: 2, 4: -1}
    tree.extend(NodeSpec(i, committed_ref(0) if parent < 0 else parent, i) for i, parent in ids.items())
    rows = tree.live()
    expected = {(0, 0), (1, 0), (1, 1), (2, 0), (2, 2), (3, 0), (3, 2), (3, 3), (4, 4)}
    mask = tree.mask(rows)
    assert {(rows[i].id, rows[j].id) for i in range(5) for j in range(5) if mask[i, j]} == expected


def test_rewind_forgets_candidates_and_tokens_behind() -> None:
    tree = TokenTree([1, 2, 3])
    tree.extend((NodeSpec(0, committed_ref(2), 9),))
    assert [node.id for node in tree.rewind(2)] == [0]
    assert tree.committed == [1, 2] and not tree.nodes
    assert tree.fate(NodeSpec(1, 0, 4)) is Fate.DEAD  # its parent is gone
    with pytest.raises(ValueError, match="cannot rewind"):
        tree.rewind(5)


def test_an_id_in_use_is_refused() -> None:
    tree = TokenTree([1])
    tree.extend((NodeSpec(3, committed_ref(0), 1),))
    with pytest.raises(ValueError, match="already in use"):
        tree.extend((NodeSpec(3, committed_ref(0), 2),))


def test_committed_ids_stay_nameable_for_late_frames() -> None:
    tree = TokenTree([1])
    tree.extend((NodeSpec(0, committed_ref(0), 7), NodeSpec(1, 0, 8)))
    tree.commit(7)
    tree.commit(8)
    assert tree.fate(NodeSpec(2, 1, 4)) is Fate.LIVE
    assert tree.fate(NodeSpec(2, 0, 8)) is Fate.COMMITTED
    assert tree.fate(NodeSpec(2, 0, 9)) is Fate.DEAD


def test_of_two_equal_siblings_the_first_one_wins() -> None:
    tree = TokenTree([1])
    tree.extend((NodeSpec(0, committed_ref(0), 7), NodeSpec(1, committed_ref(0), 7), NodeSpec(2, 1, 8)))
    commit = tree.commit(7)
    assert commit.hit is not None and commit.hit.id == 0
    assert {node.id for node in commit.dead} == {1, 2}
