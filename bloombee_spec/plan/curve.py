"""A curve such as `3.05*ln(n)-1.3`, read from the command line without ever running it as code."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable

Curve = Callable[[float], float]

MAX_LENGTH = 200
_CONSTANTS = {"e": math.e, "pi": math.pi}
_BINARY: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,  # floats only: overflow is an error, never a million-digit integer
}
_UNARY: dict[type[ast.unaryop], Callable[[float], float]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    "ln": math.log,
    "log": math.log,
    "log2": math.log2,
    "log10": math.log10,
    "exp": math.exp,
    "sqrt": math.sqrt,
    "abs": abs,
    "min": min,
    "max": max,
}
_ARITY = {"min": (2, 8), "max": (2, 8)}


class CurveError(ValueError):
    """The expression is not one that can be evaluated here."""


def parse_curve(text: str) -> Curve:
    """Compile an expression in `n` (a number of tree nodes) to a function.

    Allowed: numbers, `n`, `e`, `pi`, `+ - * / **`, and ln, log (natural), log2, log10, exp, sqrt, abs, min, max.

    :param text: at most 200 characters
    :returns: a function that raises `CurveError` where the expression has no finite value
    :raises CurveError: anything else is in the expression
    """
    if len(text) > MAX_LENGTH:
        raise CurveError(f"the curve is {len(text)} characters long; at most {MAX_LENGTH} are read")
    try:
        body = ast.parse(text.strip(), mode="eval").body
        _check(body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if isinstance(error, CurveError):
            raise
        raise CurveError(f"{text!r} is not an expression: {error}") from None

    def curve(n: float) -> float:
        try:
            value = _evaluate(body, float(n))
        except (ArithmeticError, ValueError) as error:
            raise CurveError(f"{text!r} has no value at n = {n:g}: {error}") from None
        if not math.isfinite(value):
            raise CurveError(f"{text!r} is {value} at n = {n:g}")
        return value

    return curve


def _check(node: ast.expr) -> None:
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool) or not isinstance(node.value, (int, float)):
            raise CurveError(f"{node.value!r} is not a number")
        if abs(node.value) > 1e300:
            raise CurveError("a number in the curve is too large")
    elif isinstance(node, ast.Name):
        if node.id != "n" and node.id not in _CONSTANTS:
            raise CurveError(f"unknown name {node.id!r}; a curve may use n, {', '.join(_CONSTANTS)}")
    elif isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        _check(node.left)
        _check(node.right)
    elif isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        _check(node.operand)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
        low, high = _ARITY.get(node.func.id, (1, 1))
        if node.keywords or not low <= len(node.args) <= high:
            raise CurveError(f"{node.func.id} takes {low}{'' if low == high else f' to {high}'} argument(s)")
        for argument in node.args:
            _check(argument)
    else:
        raise CurveError(f"a curve may use numbers, n, + - * / ** and {', '.join(_FUNCTIONS)}")


def _evaluate(node: ast.expr, n: float) -> float:
    if isinstance(node, ast.Constant):
        return float(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.Name):
        return n if node.id == "n" else _CONSTANTS[node.id]
    if isinstance(node, ast.BinOp):
        return _BINARY[type(node.op)](_evaluate(node.left, n), _evaluate(node.right, n))
    if isinstance(node, ast.UnaryOp):
        return _UNARY[type(node.op)](_evaluate(node.operand, n))
    assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)  # everything else was refused by _check
    return float(_FUNCTIONS[node.func.id](*(_evaluate(argument, n) for argument in node.args)))
