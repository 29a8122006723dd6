"""Collects the tokens of a call as transformers would return them: stopping criteria, streamers, padding, scores."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from bloombee_spec.client.call import Call


class OutputRows:
    """Rows may run ahead of each other; streamers and stopping criteria see them step by step, as in transformers.

    A streamer gets one `put` per step with the tokens `[batch]`, or, if it has a method `put_many`, one call with all
    steps `[batch, steps]` that became known at once.
    """

    def __init__(self, call: Call):
        n = len(call.rows)
        self._call = call
        self._rows: list[list[int]] = [[] for _ in range(n)]
        self._lengths: list[int | None] = [None] * n  # generated tokens of rows that ended
        self._steps = 0
        self._over = False
        self._ids = call.input_ids  # grows by doubling, so that nothing is allocated for tokens that never come
        self._scores: list[torch.Tensor] = []  # `[batch, vocab]` per step
        self._logits: list[torch.Tensor] = []
        if call.streamer is not None:
            call.streamer.put(call.input_ids.cpu())

    def append(self, lane: int, tokens: list[int]) -> list[tuple[int, int]]:
        """
        :returns: `(lane, generated tokens to keep)` of rows that a criterion ended before their own end; these need
            not be the row that has new tokens
        """
        self._rows[lane] += tokens
        first = self._steps
        stopped: list[tuple[int, int]] = []
        while not self._over and all(len(row) > self._steps or self._is_padded(i) for i, row in enumerate(self._rows)):
            stopped += self._step()
        self._stream(first)
        return stopped

    def settled(self, lane: int) -> list[int]:
        """Generated tokens of a row that no criterion can take back any more. Without criteria that is all of them;
        with some, rows wait for each other."""
        if self._over or self._is_padded(lane):
            return self._rows[lane][: self._lengths[lane]]
        return self._rows[lane][: self._steps] if self._call.criteria else self._rows[lane]

    def finish(self) -> torch.Tensor:
        """`[batch, width + longest]`, rows that ended early padded on the right."""
        if self._call.streamer is not None:
            self._call.streamer.end()
        rows = [self.settled(lane) for lane in range(len(self._rows))]
        longest = max(len(row) for row in rows)
        padded = [row + [self._call.pad] * (longest - len(row)) for row in rows]
        new = torch.tensor(padded, dtype=self._ids.dtype, device=self._ids.device)
        return torch.cat([self._call.input_ids, new], dim=1)

    def result(self, sequences: torch.Tensor) -> Any:
        """What `generate` returns: the tokens, or transformers' own class with what was asked for."""
        call = self._call
        if not call.returned.as_dict:
            return sequences
        found = {
            "sequences": sequences,
            "scores": tuple(self._scores) if call.returned.scores else None,
            "logits": tuple(self._logits) if call.returned.logits else None,
        }
        kind = _output_class(call)
        names = {field.name for field in fields(kind)}
        return kind(**{name: value for name, value in found.items() if name in names})

    def _is_padded(self, lane: int) -> bool:
        """Without EOS, transformers goes on with a row that a criterion ended until all rows have ended."""
        return self._lengths[lane] is not None and bool(self._call.eos)

    def _step(self) -> list[tuple[int, int]]:
        call, step = self._call, self._steps
        column = [call.pad if self._is_padded(i) else row[step] for i, row in enumerate(self._rows)]
        if self._ids.shape[1] == call.width + step:
            self._ids = torch.cat([self._ids, torch.full_like(self._ids, call.pad)], dim=1)
        self._ids[:, call.width + step] = torch.tensor(column, dtype=self._ids.dtype, device=self._ids.device)
        if call.returned.scores or call.returned.logits:
            self._record(step)
        self._steps += 1
        if call.streamer is not None and not hasattr(call.streamer, "put_many"):
            call.streamer.put(torch.tensor(column))
        stopped = []
        for lane, met in enumerate(self._criteria_met()):
            if self._lengths[lane] is not None:
                continue
            ended = column[lane] in call.eos or self._steps >= call.new_tokens
            if ended or met:
                self._lengths[lane] = self._steps
            if met and not ended and call.eos:
                stopped.append((lane, self._steps))
        self._over = all(length is not None for length in self._lengths)
        if self._over and not call.eos:
            self._lengths = [self._steps] * len(self._rows)
            if self._steps < call.new_tokens:
                stopped = [(lane, self._steps) for lane in range(len(self._rows))]
        return stopped

    def _criteria_met(self) -> list[bool]:
        call, n = self._call, len(self._rows)
        if not call.criteria:
            return [False] * n
        scores = tuple(self._scores) if call.returned.scores else None
        met = call.criteria(self._ids[:, : call.width + self._steps], scores)
        if not isinstance(met, torch.Tensor) or met.numel() == 1:
            return [bool(met)] * n
        return [bool(one) for one in met.tolist()]

    def _stream(self, first: int) -> None:
        call = self._call
        if self._steps > first and call.streamer is not None and hasattr(call.streamer, "put_many"):
            call.streamer.put_many(self._ids[:, call.width + first : call.width + self._steps].cpu())

    def _record(self, step: int) -> None:
        """Zeros where a row has ended already, of which nothing was computed."""
        call = self._call
        rows = [
            None if self._is_padded(i) else rule.take(len(row) + step)
            for i, (rule, row) in enumerate(zip(call.rules, call.rows))
        ]
        nothing = torch.zeros_like(next(row for row in rows if row is not None)[0])
        if call.returned.logits:
            self._logits.append(torch.stack([nothing if row is None else row[0] for row in rows]))
        if call.returned.scores:
            self._scores.append(torch.stack([nothing if row is None else row[1] for row in rows]))


def _output_class(call: Call) -> Any:
    from transformers.generation import utils

    old = "SampleDecoderOnlyOutput" if call.returned.sampled else "GreedySearchDecoderOnlyOutput"
    return getattr(utils, "GenerateDecoderOnlyOutput", None) or getattr(utils, old)


def padded(history: torch.Tensor, padding: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    """`[batch, length]`: zeros where `padding`, an earlier input with its mask, had padding on the left of this
    history."""
    mask = torch.ones_like(history)
    if padding is not None:
        ids, seen = padding
        n = int((seen == 0).sum(dim=1).max())
        if history.shape[0] == ids.shape[0] and torch.equal(history[:, :n], ids[:, :n].to(history.device)):
            mask[:, :n] = seen[:, :n]
    return mask
