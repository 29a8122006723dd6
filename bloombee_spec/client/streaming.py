"""`model.stream(…)`: the tokens of a `generate` call as they are committed, several per lap.

`generate` decides as ever who serves the call and with which rule. A `Handover` in place of its streamer makes it give
the work away instead of doing it, and the consumer's own loop then pulls the tokens: what it does not ask for is not
waited for, and closing the iterator ends the session.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from bloombee_spec.client.call import Call
from bloombee_spec.client.host_stream import host_tokens
from bloombee_spec.client.model import SpecDecodingMixin, UnsupportedCall, steps
from bloombee_spec.client.routing import NoPluginRoute
from bloombee_spec.client.session import SpecSession
from bloombee_spec.client.stats import SpecStats
from bloombee_spec.sampling.spec import SamplingSpec


@dataclass(eq=False)
class Handover:
    """What `generate` decided: a call for the plugin, or the host's own decoding of it (given a streamer)."""

    call: Call | None = None
    session: SpecSession | None = None
    host: Callable[[Any], Any] | None = None


class StreamingMixin(SpecDecodingMixin):
    """Adds `stream` and `stream_rows` beside `generate`, which stays the only judge of arguments."""

    def stream(self: Any, inputs: torch.Tensor | None = None, **kwargs: Any) -> Iterator[list[int]]:
        """Yields lists of new token ids `[≥ 1]` as soon as they are committed; together they are what `generate`
        returns for the same arguments (the prompt not included). `last_stats` is set when it ends or is closed.

        Closing the generator early (`break` out of the loop and `close()`, or an exception) ends the generation: the
        servers free what they hold for it. A session that was open before stays open and keeps what was yielded.

        :param inputs: `[1, length]`
        :param kwargs: as for `stream_rows`
        :raises ValueError: more than one row; see `stream_rows`
        """
        rows = self.stream_rows(inputs, **kwargs)
        if rows.n_rows != 1:
            raise ValueError(f"stream takes one row, the input has {rows.n_rows}; see stream_rows")
        return _only_tokens(rows)

    def stream_rows(
        self: Any, inputs: torch.Tensor | None = None, *, session: Any = None, seed: int | None = None,
        presence_penalty: float = 0.0, frequency_penalty: float = 0.0, **kwargs: Any,
    ) -> RowStream:  # fmt: skip
        """The same for several rows, each as fast as it can.

        :param inputs: `[batch, length]`
        :param seed: key of the sampling noise of this call, instead of `SpecConfig.seed`
        :param presence_penalty: subtracted from the score of each token that was generated before, `frequency_penalty`
            the same times how often
        :param kwargs: as for `generate`, but for `streamer`
        :raises UnsupportedCall: strict, and the plugin cannot serve the call; or only the plugin can honour `seed` or
            a penalty, and the host has to serve it
        :raises ValueError: arguments out of range
        """
        if kwargs.get("streamer") is not None:
            raise ValueError("stream yields the tokens itself; a streamer goes with generate")
        handover = Handover()
        self.generate(inputs, session=session, streamer=handover, **kwargs)
        wanted: dict[str, Any] = {} if seed is None else {"seed": seed}
        penalties = {"presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty}
        wanted.update({name: value for name, value in penalties.items() if value})
        if handover.call is None:
            _refuse_at_host(wanted)
            return RowStream(self, handover, 1)
        handover.call = _with_rule(handover.call, wanted)
        ids, session = (inputs if inputs is not None else kwargs.get("input_ids")), handover.session

        def by_host(reason: str) -> Callable[[Any], Any]:
            _refuse_at_host(wanted)
            again = Handover()
            self._host_generate(reason, ids, (), session, {**kwargs, "streamer": again})
            assert again.host is not None
            return again.host

        return RowStream(self, handover, len(handover.call.rows), by_host)

    def _spec_generate(self: Any, call: Call, session: SpecSession | None, n_previous: int) -> Any:
        if not isinstance(call.streamer, Handover):
            return super()._spec_generate(call, session, n_previous)
        handover = call.streamer
        handover.call, handover.session = replace(call, streamer=None), session
        return call.input_ids

    def _host_generate(self: Any, reason: str, inputs: Any, args: Any, session: Any, kwargs: dict[str, Any]) -> Any:
        decode = super()._host_generate
        handover = kwargs.get("streamer")
        if not isinstance(handover, Handover) or self.spec.strict:
            return decode(reason, inputs, args, session, kwargs)
        if inputs is not None and len(inputs) != 1:
            raise ValueError(f"the host's own path streams one row, the input has {len(inputs)} ({reason})")
        handover.host = torch.no_grad()(
            lambda streamer: decode(reason, inputs, args, session, {**kwargs, "streamer": streamer})
        )
        return inputs


class RowStream:
    """Iterates over `(row, new tokens)`; `close` ends it, from the thread that iterates.

    :param by_host: the host's own decoding, where it turns out that the plugin cannot serve the call
    """

    def __init__(
        self, model: Any, handover: Handover, n_rows: int, by_host: Callable[[str], Callable[[Any], Any]] | None = None
    ):
        self.n_rows = n_rows
        self.stats: SpecStats | None = None  # when it has ended; None also where the host decoded
        self._model, self._handover, self._by_host = model, handover, by_host
        self._active: SpecSession | None = None
        self._lengths = [0] * n_rows  # tokens that were yielded
        self._steps = self._run()

    def __iter__(self) -> RowStream:
        return self

    def __next__(self) -> tuple[int, list[int]]:
        return next(self._steps)

    @property
    def laps(self) -> int:
        """Round trips that the slowest row has waited for so far; 0 where the host decodes."""
        if self._active is None:
            return self.stats.laps if self.stats is not None else 0
        return max((tally.laps for tally in self._active.tallies), default=0)

    def stop(self, row: int) -> None:
        """No more of this row: what was yielded is all of it."""
        if self._active is None:
            raise RuntimeError("only a running stream of the plugin can stop a row; close it instead")
        assert self._handover.call is not None
        self._active.stop(row, len(self._handover.call.rows[row]) + self._lengths[row])

    def close(self) -> None:
        self._steps.close()

    def _run(self) -> Generator[tuple[int, list[int]], None, None]:
        if self._handover.host is not None:
            yield from host_tokens(self._handover.host)
            return
        try:
            yield from self._decode()
        except NoPluginRoute as e:  # comes before the first token, or not at all
            if self._by_host is None:
                raise
            yield from host_tokens(self._by_host(str(e)))

    @torch.no_grad()
    def _decode(self) -> Iterator[tuple[int, list[int]]]:
        call, session = self._handover.call, self._handover.session
        assert call is not None
        try:
            with self._model._decoding(call, session) as (active, output):
                self._active = active
                try:
                    for _ in steps(call, active, output):
                        # With criteria, rows wait for each other.
                        fresh = [(row, output.settled(row)[length:]) for row, length in enumerate(self._lengths)]
                        self._lengths = [length + len(new) for length, (_, new) in zip(self._lengths, fresh)]
                        yield from [(row, new) for row, new in fresh if new]
                    active.output_ids = output.finish()
                except GeneratorExit:
                    if session is not None:  # it goes on, and holds what was yielded, and no more
                        for lane in range(self.n_rows):
                            self.stop(lane)
                        active.output_ids = output.finish()
                    raise
        finally:
            if self._active is not None:
                self.stats = self._active.last_stats
                self._active = None


def _with_rule(call: Call, wanted: dict[str, Any]) -> Call:
    """The call with a seed and penalties that transformers' configuration has no field for.

    :raises ValueError: out of range, or a penalty with padding, which it would count as generated
    """
    if not wanted:
        return call
    if call.rules:
        if set(wanted) != {"seed"}:
            raise ValueError("presence_penalty and frequency_penalty do not go with options that the client evaluates")
        for rule in call.rules:
            rule.reseed(wanted["seed"])
        return call
    if set(wanted) != {"seed"} and any(len(row) < call.width for row in call.rows):
        raise ValueError("presence_penalty and frequency_penalty do not go with padded rows")
    spec = SamplingSpec.from_wire(call.sampling) if call.sampling else SamplingSpec(prompt_length=call.width)
    spec = replace(spec, **wanted)
    return replace(call, sampling={} if spec.is_plain_greedy else spec.to_wire())


def _refuse_at_host(wanted: dict[str, Any]) -> None:
    if wanted:
        raise UnsupportedCall(f"the host has to serve this call, and cannot honour {', '.join(sorted(wanted))}")


def _only_tokens(rows: RowStream) -> Iterator[list[int]]:
    try:
        for _, tokens in rows:
            yield tokens
    finally:
        rows.close()
