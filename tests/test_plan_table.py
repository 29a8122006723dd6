"""`bloombee-spec plan` reproduces the review's reference points, and says where it differs."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee_spec.cli import plan as command
from bloombee_spec.plan.compute import ComputeProfile
from bloombee_spec.plan.curve import parse_curve
from bloombee_spec.plan.route import lap_time
from bloombee_spec.plan.table import (
    Ring,
    bounded,
    break_even_bandwidth,
    cheapest_break_even,
    size_table,
    widest_layer,
)

CURVE = parse_curve("3.05*ln(n)-1.3")
REVIEW = Ring(8, 0.025, 2048)


def _run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    args = parser.parse_args(["plan", *arguments])
    code = args.run(args)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_reviews_tree_sizes() -> None:
    rows = size_table(CURVE, REVIEW, [1e7, 1e8, 1e9])
    assert [row.best_power for row in rows] == [16, 64, 256]
    for row in rows:  # between the powers of two the optimum is flat: the review's reading loses next to nothing
        assert row.best_power / 2 < row.best < 2 * row.best_power
        assert row.power_tok_s <= row.tok_s < 1.01 * row.power_tok_s
        assert abs(row.continuous - row.best) < 1.0
    assert [round(row.off_tok_s, 1) for row in rows] == [4.7, 5.0, 5.0]


@pytest.mark.parametrize(
    ("hidden", "value_bytes", "mbps", "reading"),
    [(4096, 0.5, 10, 15), (4096, 2.0, 10, 4), (8192, 2.0, 10, 2), (4096, 0.5, 100, 153)],
)
def test_the_reviews_widest_layers(hidden: int, value_bytes: float, mbps: float, reading: int) -> None:
    assert round(widest_layer(mbps * 1e6, 0.025, hidden * value_bytes)) == reading


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12), st.floats(0.001, 0.3), st.floats(100, 20000), st.integers(2, 300), st.floats(0, 0.05))
def test_break_even_is_where_a_tree_is_as_fast_as_no_tree(
    hops: int, hop_s: float, row_bytes: float, size: int, row_s: float
) -> None:
    ring = Ring(hops, hop_s, row_bytes, 0.01, ComputeProfile.measured({1: 0.004, 2: 0.004 + row_s / 50}))
    tokens = bounded(CURVE)(size)
    edge = break_even_bandwidth(tokens, size, ring)
    if math.isinf(edge):
        for bandwidth in (1e6, 1e15):
            route = ring.route(bandwidth)
            assert tokens / lap_time(size, route) <= (1 + 1e-9) / lap_time(1, route)
    elif edge > 0:
        below, above = ring.route(edge * 0.99), ring.route(edge * 1.01)
        assert tokens / lap_time(size, below) < 1 / lap_time(1, below)
        assert tokens / lap_time(size, above) > 1 / lap_time(1, above)


def test_some_tree_pays_exactly_above_the_cheapest_break_even() -> None:
    edge = cheapest_break_even(CURVE, REVIEW)
    below, above = size_table(CURVE, REVIEW, [edge * 0.98, edge * 1.02])
    assert below.best == 1 and below.first_gain is None
    assert above.best > 1 and above.first_gain is not None


def test_the_command_prints_the_reference_points_and_the_differences(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(capsys)
    assert code == 0
    lines = [line.split() for line in out.splitlines()]
    assert [line[1] for line in lines if line and line[0] in ("10", "100", "1000")] == ["16", "64", "256"]
    assert out.count("off its chart: the same") == 3
    assert "13 instead of 16 at 10 Mbit/s" in out and "used from 1 up" in out and "no return leg" in out
    assert "off its chart" not in _run(capsys, "--hop-ms", "50")[1], "the review's reading is about its own ring only"


def test_the_command_sizes_a_70b_in_fp16(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(capsys, "--hidden", "8192", "--bytes-per-value", "2", "--bandwidth", "10", "--json")
    row = json.loads(out)["rows"][0]
    assert code == 0 and round(row["widest_exact"]) == 2 and row["widest"] == 1


def test_json_has_no_infinities_and_the_planner_answers(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = _run(
        capsys, "--acceptance", "0.8,0.08,0.03", "--compute-ms", "1:3,8:4,64:10", "--bandwidth", "0.01,100", "--json",
        "--largest", "64",
    )  # fmt: skip
    report = json.loads(out, parse_constant=lambda name: pytest.fail(name))
    assert code == 0
    assert report["rows"][0]["best"] == 1 or report["rows"][0]["break_even_bps"] is not None
    assert report["plans"][1]["mode"] in ("stream", "tree") and report["plans"][1]["expected_tok_s"] > 10


def test_the_plot_is_a_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    target = tmp_path / "sizes.png"
    assert _run(capsys, "--plot", str(target), "--largest", "256")[0] == 0
    assert target.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--curve", "__import__('os')"),
        ("--curve", "1/(n-3)"),
        ("--bandwidth", "0"),
        ("--bandwidth", "ten"),
        ("--acceptance", "0.9,0.9"),
        ("--acceptance", "x"),
        ("--compute-ms", "1"),
        ("--compute-ms", "0:1"),
        ("--hops", "0"),
        ("--hidden", "0"),
        ("--hop-ms", "-5"),
        ("--largest", "0"),
        ("--acceptance", "0.5", "--largest", "9999"),
        ("--plot", "/nonexistent-folder/x.png"),
    ],
)
def test_bad_arguments_get_one_sentence(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]) -> None:
    code, out, err = _run(capsys, *arguments)
    assert code == 2 and out == "" and err.startswith("error: ") and len(err.splitlines()) == 1
