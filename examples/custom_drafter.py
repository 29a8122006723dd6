"""A drafter of your own: prompt lookup in thirty lines.

Anything that guesses what comes next can draft. What it proposes never changes the output, only how many tokens a lap
carries, so that a mistake here costs speed and nothing else. Use it as

    model = AutoDistributedSpecModelForCausalLM.from_pretrained(..., drafter=LookupDrafter)

or give it a name for everybody who installs your package, in its pyproject.toml:

    [project.entry-points."bloombee_spec.drafters"]
    lookup = "your_package.custom_drafter:LookupDrafter"

and then `drafter="lookup"`, or `drafter="mix:lookup+model:PATH"`. A constructor is called once for each stream (row of
the batch), with those of the keywords `tokenizer`, `vocab_size` and `argument` (from "lookup:ARGUMENT") that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bloombee_spec.draft.base import Drafter, Proposal, never


class LookupDrafter(Drafter):
    """Proposes what followed the last two tokens when they last occurred."""

    name = "lookup"
    instant = True  # answers in microseconds: the decode loop may wait for it

    def start(self, prompt: Sequence[int]) -> None:
        self.tokens: list[int] = []
        self.after: dict[tuple[int, int], int] = {}  # pair of tokens -> position behind its latest occurrence
        self.observe(prompt)

    def observe(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if len(self.tokens) >= 2:
                self.after[self.tokens[-2], self.tokens[-1]] = len(self.tokens)
            self.tokens.append(token)

    def propose(
        self, path: Sequence[int], budget: int, *, max_depth: int = 64, interrupted: Callable[[], bool] = never
    ) -> list[Proposal]:
        # `path` is a guess, perhaps a wrong one: look it up, but never remember it.
        context = [*self.tokens[-2:], *path][-2:]
        position = self.after.get((context[0], context[1])) if len(context) == 2 else None
        if position is None:
            return []  # saying nothing costs nothing
        found = self.tokens[position : position + min(budget, max_depth)]
        # A chain: each proposal hangs below the one before, the first one below the anchor (-1). The probabilities are
        # what decides how much is sent: 0.7 for each token, given that the one before was right.
        return [Proposal(parent=i - 1, token=token, prob=0.7) for i, token in enumerate(found)]
