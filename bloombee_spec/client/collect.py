"""The figures of one call, from where they were counted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

from bloombee_spec.client.decoder import RingDecoder
from bloombee_spec.client.relay import RelayDecoder
from bloombee_spec.client.round_decoder import RoundDecoder
from bloombee_spec.client.stats import SpecStats, Tally


def collect(
    decoder: RingDecoder | RoundDecoder | RelayDecoder | None,
    tallies: Sequence[Tally],
    *,
    started: float,
    **known: Any,
) -> SpecStats:
    """
    :param tallies: by lane; `started` the time, as `time.perf_counter` has it
    :param known: fields of `SpecStats`
    """
    tally = reduce(partial(Tally.plus, beside=True), tallies, Tally())
    first = time.perf_counter()
    if decoder is not None:
        spans = decoder.route if isinstance(decoder, RelayDecoder) else decoder.ring.spans
        known["route"] = tuple(f"{span.start}:{span.end} {span.peer}" for span in spans)
        first = decoder.first_token_at or first
    if isinstance(decoder, (RingDecoder, RoundDecoder)):
        meter = decoder.ring.meter
        known["lap_s"], known["codecs"] = meter.lap_s, tuple(decoder.ring.codecs.used)
        known["legs"] = tuple([(leg.delay_s, leg.bandwidth_bps) for leg in meter.route.legs])
    for name, value in vars(tally).items():
        known[name] = dict(value) if isinstance(value, dict) else value
    return SpecStats(prefill_s=first - started, decode_s=time.perf_counter() - first, **known)
