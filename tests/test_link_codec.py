"""Codecs of one link: the tag, what a stranger may send, what is measured, and the choice between them."""

from __future__ import annotations

import pytest
import torch

from bloombee_spec.client import codecs as client_codecs
from bloombee_spec.client.codecs import LinkCodecs, agree
from bloombee_spec.client.info import StageInfo
from bloombee_spec.client.measured import ID_BYTES, RouteMeter
from bloombee_spec.config import SpecConfig
from bloombee_spec.hosts.base import Span
from bloombee_spec.wire.activations import CodecError, CodecUnavailable
from bloombee_spec.wire.link_codec import SAMPLE_EVERY, LinkCodec
from bloombee_spec.wire.steering import Report

BOTH = "raw|lossless"


def rows(n: int = 3, hidden: int = 96) -> torch.Tensor:
    return torch.randn(n, hidden, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("names", ["raw", "lossless", BOTH, "lossless|raw"])
def test_rows_come_back_exactly_whatever_is_in_use(names: str) -> None:
    sender, receiver = LinkCodec(names), LinkCodec(names)
    for name in (*sender.names, sender.names[0]):
        sender.use(name)
        for n in (1, 5, 0):
            back = receiver.decode(sender.encode(rows(n)), n, 96, torch.float32)
            assert torch.equal(back, rows(n))


def test_a_single_codec_has_no_tag_and_several_have_one_byte() -> None:
    assert len(LinkCodec("raw").encode(rows(2))) == 2 * 96 * 4
    assert len(LinkCodec(BOTH).encode(rows(2))) == 2 * 96 * 4 + 1


def test_hostile_rows_and_names_are_refused() -> None:
    link = LinkCodec(BOTH)
    for data in (b"", b"\x02" + bytes(384), b"\xff", b"\x00" + bytes(383)):
        with pytest.raises(CodecError):
            link.decode(data, 1, 96, torch.float32)
    with pytest.raises(CodecError, match="not agreed"):
        link.use("int8")
    for names in ("raw|raw", "", "raw|lossless|int8|tah4|tah3"):
        with pytest.raises((CodecError, CodecUnavailable)):
            LinkCodec(names)


def test_costs_are_told_once_every_codec_was_tried() -> None:
    link = LinkCodec(BOTH)
    assert link.costs == ()
    link.encode(rows(4))
    bytes_raw, seconds_raw, bytes_lossless, seconds_lossless = link.costs
    assert bytes_raw == 96 * 4 and 0 < bytes_lossless < 96 * 4.5
    assert min(seconds_raw, seconds_lossless) > 0
    before = link.costs
    for _ in range(SAMPLE_EVERY - 1):
        link.encode(rows(4))
    assert link.costs == before, "only now and then"
    link.encode(rows(4))
    assert link.costs != before
    alone = LinkCodec("int8")
    alone.encode(rows(4))
    assert alone.costs[0] == 2 * 2 + 96 and alone.costs[1] > 0, "the planner asks what a row costs, choice or not"


def described(*offers: tuple[str, ...]) -> tuple[list[Span], list[StageInfo]]:
    spans = [Span(f"peer{i}", i, i + 1) for i in range(len(offers))]
    infos = [
        StageInfo(s.peer, s.start, s.end, "llama", True, True, "float32", 96, offer, (), 99, 1, 9, 9, {1: 1e-3})
        for s, offer in zip(spans, offers)
    ]
    return spans, infos


def test_links_agree_on_what_both_ends_can_do(monkeypatch: pytest.MonkeyPatch) -> None:
    everything = ("int8", "lossless", "raw")
    monkeypatch.setattr(client_codecs, "known_bandwidth", lambda peer: {"peer1": 5e6, "peer2": 5e8}.get(peer))
    route = described(everything, everything, everything)
    assert agree(SpecConfig(), *route) == [BOTH, "lossless|raw", BOTH, BOTH], "a slow link starts with fewer bytes"
    assert agree(SpecConfig(codec="tah4"), *route) == ["tah4"] * 4
    assert agree(SpecConfig(lossy="slow-links"), *route) == [BOTH, "int8", BOTH, BOTH]
    old = described(everything, ("raw",), everything)
    assert agree(SpecConfig(lossy="slow-links"), *old) == ["raw"] * 4
    with pytest.raises(ValueError, match="lossy"):
        SpecConfig(lossy="sometimes")


def test_the_planner_changes_the_codec_of_a_slow_link_only_and_not_to_and_fro() -> None:
    spans, infos = described(*[("raw", "lossless")] * 3)
    meter = RouteMeter(spans, infos, embeds=True, verifies=True)
    links = LinkCodecs([BOTH] * 4)
    costs = (400.0, 1e-5, 300.0, 2e-4)  # lossless saves 100 bytes for 0.19 ms: pays below 4.2 Mbit/s
    meter.reported(0, Report(codec_costs=costs))
    assert links.better(1, meter) is None, "the bandwidth of the link is not known yet"
    meter.reported(1, Report(bandwidth_bps=1e6, codec_costs=costs))
    meter.reported(2, Report(bandwidth_bps=1e8))
    assert links.better(1, meter) == "lossless" and links.better(1, meter) is None
    assert links.better(2, meter) is None
    assert links.better(3, meter) is None, "the client's own link reports nothing"
    assert links.used == ["raw", "lossless", "raw", "raw"]
    assert [hop.row_bytes - ID_BYTES for hop in meter.route.hops] == [300.0, 400.0]
    meter.reported(1, Report(bandwidth_bps=4.5e6))
    assert links.better(1, meter) is None, "a gain of a few percent is not worth a change"
    meter.reported(1, Report(bandwidth_bps=1e9))
    assert links.better(1, meter) == "raw"
    meter.reported(0, Report(codec_costs=(1.0,)))
    assert links.better(1, meter) is None, "a report that does not fit the link's codecs"
