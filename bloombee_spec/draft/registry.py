"""Drafters by name: `suffix`, `none`, `model:PATH`, `mix:suffix+model:PATH`, and those that other packages bring."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from bloombee_spec.draft.base import Drafter, Proposal, never
from bloombee_spec.draft.lending import Lender

ENTRY_POINT_GROUP = "bloombee_spec.drafters"
_BUILT_IN = ("none", "suffix", "model", "mix")

DrafterFactory = Callable[[], Drafter]


class SilentDrafter(Drafter):
    """Proposes nothing: plain decoding."""

    name = "none"
    instant = True

    def start(self, prompt: Sequence[int]) -> None:
        pass

    def observe(self, tokens: Sequence[int]) -> None:
        pass

    def propose(
        self, path: Sequence[int], budget: int, *, max_depth: int = 64, interrupted: Callable[[], bool] = never
    ) -> list[Proposal]:
        return []


def make_drafter(spec: Any, *, tokenizer: Any | None = None, vocab_size: int | None = None) -> Drafter:
    """A drafter for one stream; see `drafter_factory`."""
    return drafter_factory(spec, tokenizer=tokenizer, vocab_size=vocab_size)()


def drafter_factory(spec: Any, *, tokenizer: Any | None = None, vocab_size: int | None = None) -> DrafterFactory:
    """A function that makes a drafter for each stream; models are loaded and checked now, and only once.

    :param spec: one of
        a name: `none`, `suffix`, `model:PATH`, `mix:NAME+NAME+...` (the cheapest one first), or an entry point of the
        group `bloombee_spec.drafters`, with `:ARGUMENT` if it takes one;
        a `Drafter`: serves one stream after the other, and several at once if it has a `fork()`;
        a transformers causal LM;
        a class, or a function that returns a drafter: called for each stream with those of the keywords `tokenizer`,
        `vocab_size` and (from an entry point) `argument` that it names
    :param tokenizer: the target's, if there is one; a model drafter's is compared with it
    :param vocab_size: rows of the target's LM head
    :raises ValueError: unknown name, missing argument, or a model that does not fit the target
    :raises TypeError: `spec` is none of these
    """
    if spec is None:
        return SilentDrafter
    if isinstance(spec, str):
        return _by_name(spec, tokenizer, vocab_size)
    if isinstance(spec, Drafter):
        return Lender(spec)
    if hasattr(spec, "get_input_embeddings") and not inspect.isclass(spec):
        return _model_factory(spec, tokenizer, vocab_size)
    if callable(spec):
        return _caller(spec, getattr(spec, "__name__", "function"), None, tokenizer, vocab_size)
    raise TypeError(f"expected the name of a drafter, a Drafter, a model, or a function that makes one, got {spec!r}")


def drafter_names() -> list[str]:
    """Names that `drafter_factory` knows, those of installed packages included."""
    return sorted({*_BUILT_IN, *_entry_points()})


def _by_name(spec: str, tokenizer: Any | None, vocab_size: int | None) -> DrafterFactory:
    name, colon, argument = spec.partition(":")
    installed = _entry_points()
    if name in ("model", "mix") and not argument:
        raise ValueError(f"{spec!r}: expected {'model:PATH' if name == 'model' else 'mix:NAME+NAME'}")
    if name in ("none", "suffix") and colon:
        raise ValueError(f"{spec!r}: the drafter {name!r} takes no argument")
    if name == "none":
        return SilentDrafter
    if name == "model":
        return _model_factory(argument, tokenizer, vocab_size)
    if name == "mix":
        return _mix_factory(argument, tokenizer, vocab_size)
    if name == "suffix":
        from bloombee_spec.draft.suffix import SuffixDrafter

        return SuffixDrafter
    if name in installed:
        return _caller(installed[name].load(), name, argument if colon else None, tokenizer, vocab_size)
    raise ValueError(f"there is no drafter {name!r}; known are {', '.join(drafter_names())}")


def _model_factory(source: Any, tokenizer: Any | None, vocab_size: int | None) -> DrafterFactory:
    from bloombee_spec.draft.model import ModelDrafter

    return ModelDrafter(source, tokenizer=tokenizer, vocab_size=vocab_size).fork


def _mix_factory(names: str, tokenizer: Any | None, vocab_size: int | None) -> DrafterFactory:
    from bloombee_spec.draft.mix import MixedDrafter

    parts: list[str] = []
    for part in names.split("+"):
        if not parts or part.partition(":")[0] in drafter_names():
            parts.append(part)
        else:
            parts[-1] += f"+{part}"  # the plus sign belongs to a path
    factories = [drafter_factory(part, tokenizer=tokenizer, vocab_size=vocab_size) for part in parts]
    prototype = MixedDrafter([factory() for factory in factories])

    def make() -> Drafter:
        return prototype.with_drafters([factory() for factory in factories])

    return make


def _caller(
    target: Callable[..., Any], name: str, argument: str | None, tokenizer: Any | None, vocab_size: int | None
) -> DrafterFactory:
    accepted = inspect.signature(target).parameters
    if argument is not None and "argument" not in accepted:
        raise ValueError(f"the drafter {name!r} takes no argument, got {argument!r}")
    offered = {"argument": argument, "tokenizer": tokenizer, "vocab_size": vocab_size}
    keywords = {key: value for key, value in offered.items() if key in accepted}

    def make() -> Drafter:
        drafter = target(**keywords)
        if not isinstance(drafter, Drafter):
            raise TypeError(f"{name!r} returned {type(drafter).__name__}, expected a bloombee_spec.draft.base.Drafter")
        return drafter

    return make


def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINT_GROUP)}
