"""Acceptance rules that need the drafter's distribution q, for measurements against the keyed rule: see
`round_rules.py` for how they run over a network.

All of them draw from the target p exactly, on one condition that the keyed rule does not have: the drafts must be
independent draws from the very q that is passed in, made with randomness that nothing else uses (see `profiles.py`).

Shapes: `p [batch, k + 1, vocab]` is the target after 0 .. k drafted tokens, `q [batch, k, vocab]` what they were drawn
from, `drafted [batch, k]`. Rows are probabilities; arithmetic is in float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Verification:
    """`accepted [batch]`: how many drafted tokens are kept; `token [batch]`: the token that follows them."""

    accepted: torch.Tensor
    token: torch.Tensor


def draw(weights: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """One index per row with probability proportional to `weights [batch, vocab]`; never one of weight zero."""
    clocks = torch.empty_like(weights).exponential_(generator=rng).clamp_min_(torch.finfo(weights.dtype).tiny)
    return (weights / clocks).argmax(dim=-1)


def accepted_prefix(
    p: torch.Tensor, q_of_draft: torch.Tensor, drafted: torch.Tensor, rng: torch.Generator
) -> torch.Tensor:
    """How many drafted tokens pass `u < p(x) / q(x)`, up to the first that does not: `[batch]`.

    All that a verifier needs of q is one number per drafted token, `q_of_draft [batch, k]`. DSSD's split of the rule:
    the verifier runs this part, and after a rejection sends its row of p down, where q is known and `after_rejection`
    can be drawn from.
    """
    p_of_draft = _pick(p[:, :-1].double(), drafted)
    q_of_draft = _positive(q_of_draft.double())
    uniform = torch.rand(drafted.shape, generator=rng, dtype=torch.float64)
    return (uniform * q_of_draft < p_of_draft).long().cumprod(dim=-1).sum(dim=-1)


def after_rejection(p_row: torch.Tensor, q_row: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """A token from `max(p - q, 0)`, normalised: rows `[batch, vocab]` at the rejected position. With q = 0, a token
    from p.
    """
    return draw(_residual(p_row.double(), q_row.double()), rng)


def leviathan_chain(p: torch.Tensor, q: torch.Tensor, drafted: torch.Tensor, rng: torch.Generator) -> Verification:
    """Token-by-token acceptance of a chain (Leviathan et al. 2023, Chen et al. 2023)."""
    accepted = accepted_prefix(p, _pick(q, drafted), drafted, rng)
    # After the last draft there is nothing to subtract.
    q_or_nothing = torch.cat([q, torch.zeros_like(p[:, :1])], dim=1)
    return Verification(accepted, after_rejection(_row(p, accepted), _row(q_or_nothing, accepted), rng))


def block_verification(p: torch.Tensor, q: torch.Tensor, drafted: torch.Tensor, rng: torch.Generator) -> Verification:
    """Joint acceptance of a chain (Sun et al. 2024, "Block verification accelerates speculative decoding").

    With `w_i = min(w_{i-1} p(x_i) / q(x_i), 1)` and `m_i = sum max(w_i p - q, 0)` over the next token (q = 0 where
    i = k), the first i drafts may be kept with chance `m_i / (m_i + 1 - w_i)`. The longest such i is kept, and the
    next token is drawn from `max(w_i p - q, 0)`. Never accepts fewer tokens than `leviathan_chain` on average.
    """
    p, q = p.double(), q.double()
    k = drafted.shape[1]
    ratio = _pick(p[:, :-1], drafted) / _positive(_pick(q, drafted))
    weights = [torch.ones_like(p[:, 0, 0])]
    for i in range(k):
        weights.append((weights[-1] * ratio[:, i]).clamp_max(1.0))
    weight = torch.stack(weights, dim=1)  # [batch, k + 1]
    q_or_nothing = torch.cat([q, torch.zeros_like(p[:, :1])], dim=1)
    residual = (weight.unsqueeze(-1) * p - q_or_nothing).clamp_min(0.0)
    mass = residual.sum(dim=-1)
    # Where w = 1 and p = q both vanish; the chance is then 1, like everywhere else on w = 1.
    keep = torch.where(weight == 1.0, 1.0, mass / (mass + 1.0 - weight))
    kept = torch.rand(drafted.shape, generator=rng, dtype=torch.float64) < keep[:, 1:]
    lengths = torch.arange(k + 1) * torch.cat([torch.ones_like(keep[:, :1], dtype=torch.bool), kept], dim=1)
    accepted = lengths.amax(dim=-1)
    return Verification(accepted, draw(_or_else(_row(residual, accepted), _row(p, accepted)), rng))


def specinfer_siblings(
    p: torch.Tensor, q: torch.Tensor, siblings: torch.Tensor, rng: torch.Generator, *, replacement: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multi-step acceptance at one node of a tree (Miao et al. 2024, SpecInfer).

    The siblings are tried in order; each rejection replaces p by `max(p - q, 0)`, normalised, and without replacement
    also takes the rejected token out of q. Leaving q as it was is a small bias, easy to miss.

    :param p: `[batch, vocab]` at the node; `q` likewise
    :param siblings: `[batch, n]`, drawn from q one after the other
    :param replacement: whether the draws were independent (true) or each excluded the ones before it
    :returns: `(index, token)`, both `[batch]`: which sibling was accepted, -1 for none, and the token that follows the
      node
    """
    p, q = p.double(), q.double()
    index = torch.full_like(siblings[:, 0], -1)
    for i, sibling in enumerate(siblings.unbind(dim=1)):
        column = sibling.unsqueeze(1)
        open_rows = index < 0
        q_of_sibling = torch.where(open_rows, q.gather(1, column)[:, 0], 1.0)
        uniform = torch.rand(sibling.shape, generator=rng, dtype=torch.float64)
        accept = open_rows & (uniform * _positive(q_of_sibling) < p.gather(1, column)[:, 0])
        index = torch.where(accept, i, index)
        p = torch.where((index < 0).unsqueeze(1), _normalised(_residual(p, q)), p)
        if not replacement:
            q = _normalised(q.scatter(1, column, 0.0))
    chosen = siblings.gather(1, index.clamp_min(0).unsqueeze(1))[:, 0]
    return index, torch.where(index >= 0, chosen, draw(p, rng))


def truncate_top_k(p: torch.Tensor, k: int) -> torch.Tensor:
    """p restricted to its k largest entries and renormalised: all that a top-k downlink (PicoSpec) lets the other side
    see.

    Verifying against it samples from the truncated distribution, not from p: exact only for a target that has `top_k
    <= k` itself.
    """
    values, tokens = p.topk(k, dim=-1)
    return _normalised(torch.zeros_like(p).scatter(-1, tokens, values))


def _pick(rows: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """`rows [batch, k, vocab]` at `tokens [batch, k]`."""
    return rows.gather(2, tokens.unsqueeze(2))[:, :, 0]


def _row(rows: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """`rows [batch, k, vocab]` at one position per batch row: `[batch, vocab]`."""
    return rows[torch.arange(rows.shape[0]), position]


def _residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return _or_else((p - q).clamp_min(0.0), p)


def _or_else(weights: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """`weights`, or p where nothing is left of them: p = q up to rounding, where a rejection has a chance of about
    1e-16.
    """
    return torch.where(weights.sum(dim=-1, keepdim=True) > 0, weights, p)


def _normalised(weights: torch.Tensor) -> torch.Tensor:
    total = weights.sum(dim=-1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)


def _positive(q_of_draft: torch.Tensor) -> torch.Tensor:
    if not bool((q_of_draft > 0).all()):
        raise ValueError("a drafted token has q = 0: it was not drawn from this q")
    return q_of_draft
