"""A curve from the command line is arithmetic in n, and nothing else."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bloombee_spec.plan.curve import MAX_LENGTH, CurveError, parse_curve


@pytest.mark.parametrize(
    ("text", "n", "value"),
    [
        ("3.05*ln(n)-1.3", 16, 3.05 * math.log(16) - 1.3),
        ("log(n) + log2(n) + log10(n)", 100, math.log(100) + math.log2(100) + 2),
        ("-n ** 2 / 4 + +1", 4, -3.0),
        ("min(n, 5) * max(1, 2, 3)", 9, 15.0),
        ("sqrt(exp(0) * abs(-9)) + pi - e", 1, 3 + math.pi - math.e),
    ],
)
def test_arithmetic_is_evaluated(text: str, n: float, value: float) -> None:
    assert parse_curve(text)(n) == pytest.approx(value)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "().__class__",
        "n.real",
        "(lambda: 1)()",
        "[n for n in range(3)]",
        "'a' * 9",
        "n if n else 1",
        "n == 1",
        "n and 1",
        "open(n)",
        "f(n)",
        "m + 1",
        "ln(n, 2)",
        "ln(x=n)",
        "ln",
        "True",
        "1j",
        "n // 2",
        "1 << 9",
        "10 ** 400 + 1e400",
        "",
        "1 +",
        "n; n",
        "x = 1",
        "min(n)",
        "\x00",
        "(" * 90 + "n" + ")" * 90 + ".__class__",
        "n+" * MAX_LENGTH + "n",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(CurveError):
        parse_curve(text)


@pytest.mark.parametrize("text", ["9**9**9**9", "1/(n-1)", "ln(n-1)", "sqrt(-n)", "exp(n*1000)", "(-n)**0.5"])
def test_a_curve_without_a_value_says_so_when_asked(text: str) -> None:
    curve = parse_curve(text)
    with pytest.raises(CurveError, match="at n = 1"):
        curve(1)


@settings(deadline=None)
@given(st.text(alphabet="n0123456789.+-*/() lnogexpsqrt,_'\"[]", max_size=60))
def test_no_text_does_anything_but_give_a_number_or_a_curve_error(text: str) -> None:
    try:
        value = parse_curve(text)(7.0)
    except CurveError:
        return
    assert math.isfinite(value)
