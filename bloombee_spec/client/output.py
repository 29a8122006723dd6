"""Collects the tokens of a call as transformers would return them: stopping criteria, streamers, padding."""

from __future__ import annotations

import torch

from bloombee_spec.client.call import Call


class OutputRows:
    """Rows may run ahead of each other; a streamer sees them step by step, as in transformers."""

    def __init__(self, call: Call):
        self._call = call
        self._rows: list[list[int]] = [[] for _ in call.rows]
        self._done = [False] * len(call.rows)
        self._streamed = 0
        if call.streamer is not None:
            call.streamer.put(call.input_ids.cpu())

    def append(self, lane: int, tokens: list[int]) -> int | None:
        """:returns: how many generated tokens the row keeps, once a criterion ended it before its own limit; else
        None"""
        row, call = self._rows[lane], self._call
        kept: int | None = None
        for token in tokens:
            if self._done[lane]:
                break
            row.append(token)
            if token in call.eos or len(row) >= call.new_tokens:
                self._done[lane] = True
            elif call.criteria and self._criterion_met(lane):
                self._done[lane] = True
                kept = len(row)
        self._stream()
        return kept

    def finish(self) -> torch.Tensor:
        """`[batch, width + longest]`, rows that ended early padded on the right."""
        self._done = [True] * len(self._rows)
        self._stream()
        if self._call.streamer is not None:
            self._call.streamer.end()
        longest = max(len(row) for row in self._rows)
        padded = [row + [self._call.pad] * (longest - len(row)) for row in self._rows]
        new = torch.tensor(padded, dtype=self._call.input_ids.dtype, device=self._call.input_ids.device)
        return torch.cat([self._call.input_ids, new], dim=1)

    def _criterion_met(self, lane: int) -> bool:
        ids = torch.cat([self._call.input_ids[lane], torch.tensor(self._rows[lane], dtype=self._call.input_ids.dtype)])
        met = self._call.criteria(ids[None], None)  # type: ignore[arg-type]
        return bool(met.all()) if isinstance(met, torch.Tensor) else bool(met)

    def _stream(self) -> None:
        if self._call.streamer is None:
            return
        while any(len(row) > self._streamed for row in self._rows) and all(
            done or len(row) > self._streamed for row, done in zip(self._rows, self._done)
        ):
            step = [row[self._streamed] if len(row) > self._streamed else self._call.pad for row in self._rows]
            self._call.streamer.put(torch.tensor(step))
            self._streamed += 1
