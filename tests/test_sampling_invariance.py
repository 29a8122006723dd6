"""The tokens are a function of (target, prompt, seed, row): whatever is drafted, in whatever tree, they come out the
same.
"""

import pytest
import torch
from sampling_targets import PROMPT, SAMPLING, STACKS, VOCAB, model

from bloombee_spec.sampling.noise import NoiseCache
from bloombee_spec.sampling.rule import KeyedRule, propose_keyed
from bloombee_spec.sampling.spec import SamplingSpec
from bloombee_spec.tree import NodeSpec, TokenTree, committed_ref


def _plain(spec: SamplingSpec, length: int, row: int = 0) -> list[int]:
    """The reference: one token at a time, no draft."""
    rule, ids = KeyedRule(spec, VOCAB, row=row), list(PROMPT)
    while len(ids) < len(PROMPT) + length:
        ids.append(rule.choose(model(ids), ids, len(ids)))
    return ids


def _speculative(spec: SamplingSpec, length: int, draft, row: int = 0) -> tuple[list[int], int]:
    """A tree per lap, all its nodes chosen in one batch, walked by matching. Returns the ids and the number of laps.

    :param draft: `(ids, noise) -> [(parent, token)]`, parents by index in the list or -1, for the tree below `ids`
    """
    rule = KeyedRule(spec, VOCAB, row=row)
    noise = NoiseCache(spec.seed, row, VOCAB)
    tree, next_id, laps = TokenTree(PROMPT), 0, 0
    while tree.length < len(PROMPT) + length:
        proposals = draft(tree.committed, noise)
        specs = [
            NodeSpec(next_id + i, committed_ref(tree.length - 1) if parent < 0 else next_id + parent, token)
            for i, (parent, token) in enumerate(proposals)
        ]
        next_id += len(specs)
        tree.extend(specs)
        nodes = tree.live()
        paths = [tree.committed + [ancestor.token for ancestor in node.path()] for node in nodes]
        prefixes = [tree.committed[:], *paths]
        logits = torch.stack([model(prefix) for prefix in prefixes])
        chosen = rule.choose_many(logits, prefixes, [len(prefix) for prefix in prefixes])
        by_node = dict(zip((None, *(node.id for node in nodes)), chosen))
        at = None
        while True:
            commit = tree.commit(by_node[at])
            rule.commit(commit.position)
            if commit.hit is None:
                break
            at = commit.hit.id
        tree.rewind(tree.length)
        laps += 1
    return tree.committed[: len(PROMPT) + length], laps


def _no_draft(ids, noise):
    return []


def _keyed_chain(ids, noise):
    """Drafts with the target's noise and a blurred copy of the target."""
    path, proposals = list(ids), []
    for i in range(4):
        token = propose_keyed(0.7 * model(path), noise.at(len(path)), 1)[0]
        proposals.append((i - 1, token))
        path.append(token)
    return proposals


def _likely_siblings(ids, noise):
    return [(-1, token) for token in model(ids).topk(3).indices.tolist()]


def _full_tree(ids, noise):
    proposals: list[tuple[int, int]] = []
    frontier = [(-1, list(ids))]
    for _ in range(2):
        grown = []
        for parent, path in frontier:
            for token in propose_keyed(model(path), noise.at(len(path)), 3):
                proposals.append((parent, token))
                grown.append((len(proposals) - 1, [*path, token]))
        frontier = grown
    return proposals


def _nonsense_with_duplicates(ids, noise):
    return [(-1, 5), (-1, 5), (0, 5), (1, 6), (-1, 0), (4, 0), (5, 0)]


DRAFTS = [_no_draft, _keyed_chain, _likely_siblings, _full_tree, _nonsense_with_duplicates]


@pytest.mark.parametrize("draft", DRAFTS, ids=lambda draft: draft.__name__)
@pytest.mark.parametrize("name", STACKS)
def test_output_does_not_depend_on_the_draft_or_the_tree(name, draft):
    spec = STACKS[name]
    for row in range(3):
        assert _speculative(spec, 24, draft, row)[0] == _plain(spec, 24, row)


def test_keyed_drafts_save_laps():
    _, laps = _speculative(SAMPLING, 60, _keyed_chain)
    assert laps < 40


@pytest.mark.parametrize("name", [name for name, spec in STACKS.items() if spec.do_sample])
def test_rows_and_seeds_differ(name):
    spec = STACKS[name]
    other = SamplingSpec.from_wire({**spec.to_wire(), "seed": spec.seed + 1})
    texts = [_plain(spec, 24, row=0), _plain(spec, 24, row=1), _plain(other, 24, row=0)]
    assert len({tuple(text) for text in texts}) == 3
    assert _plain(spec, 24) == texts[0]


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_keyed_drafts_are_accepted_more_often_than_likely_ones(temperature):
    """A drafter that differs from the target, and samples at its temperature: hits of one and of four proposals."""
    vocab, streams, rng = 300, 600, torch.Generator().manual_seed(1)
    keyed, likely = [0, 0], [0.0, 0.0]
    for position in range(streams):
        target = 1.5 * torch.randn(vocab, generator=rng) / temperature
        drafter = target + 0.7 * torch.randn(vocab, generator=rng) / temperature
        rule = KeyedRule(SamplingSpec(prompt_length=0, do_sample=True, seed=2), vocab)
        token = rule.choose(target, [], position)
        for i, k in enumerate((1, 4)):
            keyed[i] += token in propose_keyed(drafter, rule.noise.at(position), k)
            likely[i] += float(target.softmax(-1)[drafter.topk(k).indices].sum())
    assert keyed[0] > 1.5 * likely[0] and keyed[1] > 1.5 * likely[1]
    assert keyed[0] > 0.4 * streams and keyed[1] > 0.8 * streams
