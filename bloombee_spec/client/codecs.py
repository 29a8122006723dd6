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

    Exact ones may change while a session runs; a link that was slow in an earlier session starts with the compact one,
    since most of a prompt crosses it before anything is measured. A lossy one is fixed, so that plain and speculative
    decoding see the same rows.
    """
    if config.codec != "auto":
        return [config.codec] * (len(spans) + 1)
    exact = [name for name in EXACT if all(name in info.codecs for info in infos)]
    names = [SEPARATOR.join(exact)] * (len(spans) + 1)
    for i, (before, after) in enumerate(pairwise(infos), 1):
        bandwidth = known_bandwidth(spans[i].peer)
        slow = bandwidth is not None and bandwidth < SLOW_BPS
        if slow:
            lossy = config.lossy == "slow-links" and SLOW_CODEC in before.codecs and SLOW_CODEC in after.codecs
            names[i] = SLOW_CODEC if lossy else SEPARATOR.join(reversed(exact))
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
        if len(costs) != 2 * len(offered):
            return None
        best = self._best(link, offered, costs, bandwidth_bps)
        meter.rows_take(link - 1, costs[2 * offered.index(best)])
        if best == self.used[link]:
            return None
        self.used[link] = best
        return best

    def _best(self, link: int, offered: Sequence[str], costs: Sequence[float], bandwidth_bps: float | None) -> str:
        if len(offered) == 1 or bandwidth_bps is None:
            return self.used[link]
        options = [CodecOption(name, costs[2 * i], costs[2 * i + 1]) for i, name in enumerate(offered)]
        return choose_codec(options, bandwidth_bps, 1, current=self.used[link]).name
