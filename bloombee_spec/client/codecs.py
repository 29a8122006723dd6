"""Which activation codec each link of a route uses: agreed when the session opens, chosen while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from bloombee_spec.client.info import StageInfo
from bloombee_spec.client.measured import RouteMeter
from bloombee_spec.client.peers import known_bandwidth
from bloombee_spec.config import SpecConfig
from bloombee_spec.hosts.base import Span
from bloombee_spec.plan.codecs import CodecOption, choose_codec
from bloombee_spec.wire.link_codec import SEPARATOR, split_names

EXACT = ("raw", "lossless")
SLOW_BPS, SLOW_CODEC = 20e6, "int8"


def agree(config: SpecConfig, spans: Sequence[Span], infos: Sequence[StageInfo]) -> list[str]:
    """The codecs that may be used on each link, from the client around to the client.

    Exact ones may change while a session runs; a lossy one is fixed, so that plain and speculative decoding see the
    same rows.
    """
    if config.codec != "auto":
        return [config.codec] * (len(spans) + 1)
    exact = SEPARATOR.join(name for name in EXACT if all(name in info.codecs for info in infos))
    names = [exact] * (len(spans) + 1)
    for i, (before, after) in enumerate(pairwise(infos), 1):
        bandwidth = known_bandwidth(spans[i].peer)
        slow = bandwidth is not None and bandwidth < SLOW_BPS
        if config.lossy == "slow-links" and slow and SLOW_CODEC in before.codecs and SLOW_CODEC in after.codecs:
            names[i] = SLOW_CODEC
    return names


class LinkCodecs:
    """:param names: what `agree` gave"""

    def __init__(self, names: Sequence[str]):
        self.names = tuple(names)
        self.used = [split_names(each)[0] for each in names]

    def better(self, link: int, meter: RouteMeter) -> str | None:
        """The codec to change to, None to stay.

        :param link: index in `names`, 1 for the one behind the first stage
        """
        offered = split_names(self.names[link])
        costs, bandwidth_bps = meter.codec_costs(link - 1)
        if len(offered) == 1 or len(costs) != 2 * len(offered) or bandwidth_bps is None:
            return None
        options = [CodecOption(name, costs[2 * i], costs[2 * i + 1]) for i, name in enumerate(offered)]
        best = choose_codec(options, bandwidth_bps, 1, current=self.used[link]).name
        if best == self.used[link]:
            return None
        self.used[link] = best
        return best
