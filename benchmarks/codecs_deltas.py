"""Would references pay? Variance, entropy and quantisation error of rows, against rows that the receiver holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.codecs_rows import BOUNDARIES, Recording
from bloombee_spec.wire.activations import bits_of, get_codec

_CODES = 16  # exponents, relative to the mean of their row


@dataclass(frozen=True, slots=True)
class Rows:
    """Decode-time rows of one boundary, double precision.

    :param rows: `[steps, hidden]`, candidate 0 of each step; `parents` likewise
    :param siblings: `[steps, siblings - 1, hidden]`, the other candidates
    :param held: `[steps, hidden]`: mean of the rows of the step's prompt, without the first (a sink with values of
        its own)
    """

    rows: torch.Tensor
    parents: torch.Tensor
    siblings: torch.Tensor
    held: torch.Tensor


def gather(recordings: Sequence[Recording], boundary: int) -> Rows:
    steps = [r.steps[boundary].double() for r in recordings]
    held = [r.prompt[boundary][1:].double().mean(0).expand(len(s), -1) for r, s in zip(recordings, steps)]
    return Rows(
        torch.cat([s[:, 0] for s in steps]),
        torch.cat([r.parents(boundary).double() for r in recordings]),
        torch.cat([s[:, 1:] for s in steps]),
        torch.cat(held),
    )


def outlier_table(recordings: Sequence[Recording]) -> str:
    lines = [
        "| prompts | after block | rms | kurtosis | channels with the largest rms | their share of the energy |",
        "|---|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys(r.kind for r in recordings):
        for boundary in BOUNDARIES:
            rows = gather([r for r in recordings if r.kind == kind], boundary).rows
            energy = rows.pow(2).mean(0)
            top = energy.argsort(descending=True)[:4]
            kurtosis = float(rows.pow(4).mean() / energy.mean() ** 2)
            named = ", ".join(f"{int(c)}: {float(energy[c].sqrt()):.0f}" for c in top)
            lines.append(
                f"| {kind} | {boundary} | {float(energy.mean().sqrt()):.1f} | {kurtosis:.0f} | {named} | "
                f"{float(energy[top].sum() / energy.sum()) * 100:.0f} % |"
            )
    return "\n".join(lines)


def variance_table(recordings: Sequence[Recording]) -> str:
    """Energy of the difference to a reference as a share of the row's energy; in brackets, of the median channel's."""
    lines = [
        "| prompts | after block | mean of the prompt's rows | parent | parent, best factor per channel | "
        "first candidate | first candidate, best factor per channel |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys(r.kind for r in recordings):
        for boundary in BOUNDARIES:
            data = gather([r for r in recordings if r.kind == kind], boundary)
            first = data.rows[:, None].expand_as(data.siblings)
            shares = [
                _share(data.rows, data.rows - data.held),
                _share(data.rows, data.rows - data.parents),
                _share(data.rows, _residual(data.rows, data.parents)),
                _share(data.siblings, data.siblings - first),
                _share(data.siblings, _residual(data.siblings, first)),
            ]
            lines.append(f"| {kind} | {boundary} | {' | '.join(shares)} |")
    return "\n".join(lines)


def _share(rows: torch.Tensor, residual: torch.Tensor) -> str:
    whole, rest = rows.pow(2).flatten(0, -2), residual.pow(2).flatten(0, -2)
    per_channel = rest.mean(0) / whole.mean(0)
    return f"{float(rest.sum() / whole.sum()):.2f} ({float(per_channel.median()):.2f})"


def _residual(rows: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """What the best affine prediction of each channel from the reference's leaves, fitted on these very rows."""
    dims = tuple(range(rows.ndim - 1))
    x, y = rows - rows.mean(dims), reference - reference.mean(dims)
    return x - (x * y).sum(dims) / (y * y).sum(dims) * y


def entropy_table(recordings: Sequence[Recording]) -> str:
    """Bits per bf16 value, in parts and then given the parent, by tables fitted on the other half of the prompts."""
    lines = [
        "| after block | sign | exponent | mantissa | sum | exponent and sign, given the parent's | sum | "
        "Gaussian around the best prediction from the parent |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for boundary in BOUNDARIES:
        fit, test = gather(recordings[0::2], boundary), gather(recordings[1::2], boundary)
        code, sign, mantissa = _fields(test.rows)
        fit_code, fit_sign, fit_mantissa = _fields(fit.rows)
        parent_code, parent_sign, _ = _fields(test.parents)
        fit_parent_code, fit_parent_sign, _ = _fields(fit.parents)
        none = torch.zeros_like(code)
        parts = [
            _cost(fit_sign, torch.zeros_like(fit_sign), sign, none),
            _cost(fit_code, torch.zeros_like(fit_code), code, none),
            _cost(fit_mantissa, torch.zeros_like(fit_mantissa), mantissa, none),
        ]
        joint = _cost(
            fit_code * 2 + fit_sign,
            fit_parent_code * 2 + fit_parent_sign,
            code * 2 + sign,
            parent_code * 2 + parent_sign,
        )
        residual = _residual(test.rows, test.parents)
        bound = _gaussian_bits(test.rows, test.rows - residual, residual.std(0))
        values = [*parts, sum(parts), joint, joint + parts[2], bound]
        lines.append(f"| {boundary} | {' | '.join(f'{v:.2f}' for v in values)} |")
    return "\n".join(lines)


def _fields(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    bits = bits_of(rows.to(torch.bfloat16)).int()
    exponent = bits >> 7 & 0xFF
    mean = exponent.float().mean(-1, keepdim=True).round().int()
    return (exponent - mean + 10).clamp(0, _CODES - 1), bits >> 15 & 1, bits & 0x7F


def _cost(fit: torch.Tensor, fit_context: torch.Tensor, test: torch.Tensor, test_context: torch.Tensor) -> float:
    """Bits per symbol of `test` under the frequencies of `fit` in the same context."""
    size = int(max(fit.max(), test.max())) + 1
    contexts = int(max(fit_context.max(), test_context.max())) + 1
    counts = torch.bincount((fit_context * size + fit).flatten().long(), minlength=size * contexts) + 0.1
    shares = counts.view(contexts, size) / counts.view(contexts, size).sum(1, keepdim=True)
    return -float(shares.flatten()[(test_context * size + test).flatten().long()].log2().mean())


def _gaussian_bits(rows: torch.Tensor, mean: torch.Tensor, deviation: torch.Tensor) -> float:
    """-log2 of the mass that N(mean, deviation) puts on the bf16 cell of each value."""
    magnitude = bits_of(rows.to(torch.bfloat16)).int() & 0x7FFF
    low = (magnitude << 16).view(torch.float32).double()
    width = ((magnitude + 1) << 16).view(torch.float32).double() - low
    centre = (low * rows.sign() - mean) / deviation
    half = width / 2 / deviation
    upper, lower = -centre.abs() + half, -centre.abs() - half
    mass = torch.special.ndtr(upper) - torch.special.ndtr(lower)
    return -float(mass.clamp_min(1e-7).log2().mean())


def error_table(recordings: Sequence[Recording]) -> str:
    """Relative error of lossy codecs against a reference, closed loop: references are what the receiver decoded.

    In brackets the net gain in bits per value: log2 of the reduction of the error, less what a basis itself costs.
    """
    lines = [
        "| codec | after block | alone | mean of the prompt | parent | half of the parent | "
        "candidates alone | first one | basis of 1 | basis of 4 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in ("int8", "tah4", "tah3"):
        for boundary in BOUNDARIES:
            single, grouped = _single_errors(recordings, boundary, name), _grouped_errors(recordings, boundary, name)
            cells = [*_with_gain(single), *_with_gain(grouped)]
            lines.append(f"| {name} | {boundary} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _with_gain(errors: Sequence[tuple[float, float]]) -> list[str]:
    alone = errors[0][0]
    gains = [math.log2(alone / error) - cost for error, cost in errors[1:]]
    return [f"{alone:.4f}", *(f"{error:.4f} ({gain:+.2f})" for (error, _), gain in zip(errors[1:], gains))]


def _through(name: str, rows: torch.Tensor) -> torch.Tensor:
    flat = rows.reshape(-1, rows.shape[-1])
    codec = get_codec(name)
    return codec.decode(codec.encode(flat), *flat.shape, flat.dtype).view(rows.shape)


def _relative(back: torch.Tensor, rows: torch.Tensor) -> float:
    """Root mean square, over rows, of the relative error of a row."""
    return float(((back - rows).pow(2).sum(-1) / rows.pow(2).sum(-1)).mean().sqrt())


def _single_errors(recordings: Sequence[Recording], boundary: int, name: str) -> list[tuple[float, float]]:
    """Candidate 0 of each step against nothing, the mean of its prompt's rows, its parent, half of its parent."""
    rows: list[torch.Tensor] = []
    backs: list[list[torch.Tensor]] = [[], [], [], []]
    for r in recordings:
        own = r.steps[boundary][:, 0].float()
        held = _through(name, r.prompt[boundary].float())
        mean = held[1:].mean(0)
        rows.append(own)
        backs[0].append(_through(name, own))
        backs[1].append(_through(name, own - mean) + mean)
        backs[2].append(_chain(name, own, held[-1], 1.0))
        backs[3].append(_chain(name, own, held[-1], 0.5))
    return [(_relative(torch.cat(back), torch.cat(rows)), 0.0) for back in backs]


def _chain(name: str, rows: torch.Tensor, last: torch.Tensor, factor: float) -> torch.Tensor:
    """Each row against `factor` times its parent, as decoded."""
    decoded = []
    for row in rows:
        last = _through(name, (row - factor * last)[None])[0] + factor * last
        decoded.append(last)
    return torch.stack(decoded)


def _grouped_errors(recordings: Sequence[Recording], boundary: int, name: str) -> list[tuple[float, float]]:
    """All candidates of a step against nothing, the first of them, and their strongest directions, sent as rows."""
    steps = torch.cat([r.steps[boundary].float() for r in recordings])
    count, width = steps.shape[1:]
    bits = get_codec(name).max_bytes(1, width, steps.dtype) * 8 / width
    alone = _through(name, steps)
    against_first = torch.cat([alone[:, :1], _through(name, steps[:, 1:] - alone[:, :1]) + alone[:, :1]], dim=1)
    errors = [(_relative(alone, steps), 0.0), (_relative(against_first, steps), 0.0)]
    directions = torch.linalg.svd(steps, full_matrices=False).Vh
    for rank in (1, 4):
        basis = _through(name, directions[:, :rank]).transpose(1, 2)
        reference = (basis @ torch.linalg.lstsq(basis, steps.transpose(1, 2)).solution).transpose(1, 2)
        back = _through(name, steps - reference) + reference
        errors.append((_relative(back, steps), bits * rank / count))
    return errors


def spectrum(recordings: Sequence[Recording], boundary: int) -> torch.Tensor:
    """Share of the energy of a step's candidates that their strongest r directions hold, r = 1 ..

    candidates, on average.
    """
    steps = torch.cat([r.steps[boundary].double() for r in recordings])
    energy = torch.linalg.svdvals(steps).pow(2)
    return (energy.cumsum(1) / energy.sum(1, keepdim=True)).mean(0)
