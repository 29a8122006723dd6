"""Drafters by name, by object and by function; each stream gets its own."""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from bloombee_spec.draft import registry
from bloombee_spec.draft.base import Drafter, Proposal, never
from bloombee_spec.draft.check import check_proposals
from bloombee_spec.draft.coupling import couple
from bloombee_spec.draft.mix import MixedDrafter
from bloombee_spec.draft.model import ModelDrafter
from bloombee_spec.draft.registry import SilentDrafter, drafter_factory, drafter_names, make_drafter
from bloombee_spec.draft.scripted import Script, ScriptedDrafter
from bloombee_spec.draft.suffix import SuffixDrafter
from bloombee_spec.draft.vocabulary import check_same_vocabulary
from examples.custom_drafter import LookupDrafter
from tests.draft_helpers import accepted, proposed, tiny_llama


class Custom(Drafter):
    name = "custom"

    def __init__(self, argument: str | None = None, vocab_size: int | None = None) -> None:
        self.argument, self.vocab_size, self.closed = argument, vocab_size, 0

    def start(self, prompt: Sequence[int]) -> None:
        self.prompt = list(prompt)

    def observe(self, tokens: Sequence[int]) -> None:
        self.prompt += tokens

    def propose(
        self, path: Sequence[int], budget: int, *, max_depth: int = 64, interrupted: Callable[[], bool] = never
    ) -> list[Proposal]:
        return [Proposal(-1, self.prompt[-1], 0.5)][:budget]

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint("custom", f"{__name__}:Custom", registry.ENTRY_POINT_GROUP)]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == "bloombee_spec.drafters" else [])


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models+more") / "tiny"
    tiny_llama().save_pretrained(path)
    return path


def test_names() -> None:
    assert isinstance(make_drafter("suffix"), SuffixDrafter)
    for nothing in ("none", None):
        drafter = make_drafter(nothing)
        drafter.start([1, 2, 1])
        assert isinstance(drafter, SilentDrafter) and proposed(drafter) == []
    assert set(drafter_names()) >= {"none", "suffix", "model", "mix"}


def test_an_installed_drafter_is_found_by_name(installed: None) -> None:
    factory = drafter_factory("custom:some/argument", vocab_size=100)
    first, second = factory(), factory()
    assert isinstance(first, Custom) and isinstance(second, Custom) and first is not second
    assert (first.argument, first.vocab_size) == ("some/argument", 100)
    plain = make_drafter("custom")
    assert isinstance(plain, Custom) and plain.argument is None
    assert "custom" in drafter_names()


def test_a_model_is_loaded_once_and_forked(model_path: Path) -> None:
    factory = drafter_factory(f"model:{model_path}", vocab_size=61)
    first, second = factory(), factory()
    assert isinstance(first, ModelDrafter) and isinstance(second, ModelDrafter)
    assert first.model is second.model and first._stream is not second._stream
    first.start([1, 2])
    assert proposed(first)


def test_a_model_object_is_a_drafter() -> None:
    model = tiny_llama()
    drafter = make_drafter(model, vocab_size=61)
    assert isinstance(drafter, ModelDrafter) and drafter.model.model is model


def test_a_mixture_by_name(model_path: Path, installed: None) -> None:
    factory = drafter_factory(f"mix:suffix+model:{model_path}+custom")
    first, second = factory(), factory()
    assert isinstance(first, MixedDrafter) and isinstance(second, MixedDrafter)
    assert [type(each) for each in first.drafters] == [SuffixDrafter, ModelDrafter, Custom]
    assert first.name == "mix(suffix+model(LlamaForCausalLM)+custom)"
    assert not set(first.drafters) & set(second.drafters)
    first.start([1, 2])
    second.start([3])
    assert proposed(first) and proposed(second)


def test_a_class_and_a_function_are_called_for_each_stream() -> None:
    assert isinstance(make_drafter(LookupDrafter), LookupDrafter)
    made: list[Drafter] = []

    def make(vocab_size: int) -> Drafter:
        made.append(Custom(vocab_size=vocab_size))
        return made[-1]

    factory = drafter_factory(make, vocab_size=9)
    assert made == []  # not before there is a stream
    assert [factory(), factory()] == made and made[0] is not made[1]


def test_an_instance_serves_one_stream_after_the_other() -> None:
    # Seen to fail with a loan that never ends, and with a second loan at the same time.
    custom = Custom()
    factory = drafter_factory(custom)
    first = factory()
    first.start([4])
    assert proposed(first)[0].token == 4
    with pytest.raises(ValueError, match="one stream at a time"):
        factory()
    first.close()
    first.close()
    assert custom.closed == 1
    with pytest.raises(RuntimeError, match="closed"):
        first.start([5])
    second = factory()
    second.start([6])
    assert proposed(second)[0].token == 6
    with pytest.raises(ValueError):
        factory()


def test_only_what_is_instant_throughout_is_instant() -> None:
    # Seen to fail with a loan, and with a mixture, that says nothing of it.
    slow, quick = Custom(), LookupDrafter()
    assert drafter_factory(quick)().instant and not drafter_factory(slow)().instant
    assert MixedDrafter([quick, SuffixDrafter()]).instant
    assert not MixedDrafter([quick, slow]).instant


def test_an_instance_that_can_be_forked_serves_several_streams() -> None:
    text = list(range(50))
    factory = drafter_factory(ScriptedDrafter(text, 97, Script(1.0)))
    streams = [factory() for _ in range(3)]
    for n, drafter in enumerate(streams, 1):
        drafter.start(text[:n])
    assert [accepted(proposed(drafter, budget=4), text[n:]) for n, drafter in enumerate(streams, 1)] == [4, 4, 4]
    mixture = drafter_factory(MixedDrafter([SuffixDrafter(), ScriptedDrafter(text, 97, Script(1.0))]))
    assert mixture() is not mixture()
    stubborn = drafter_factory(MixedDrafter([Custom()]))
    stubborn()
    with pytest.raises(ValueError, match="custom"):
        stubborn()


def test_noise_reaches_the_drafters_that_can_use_it() -> None:
    model = ModelDrafter(tiny_llama())
    mixture = drafter_factory(MixedDrafter([SuffixDrafter(), model]))()
    assert couple(mixture, lambda position: None, 0.7)
    assert model._temperature == 0.7
    assert not couple(SuffixDrafter(), None, 0)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("suffixx", "known are .*suffix"),
        ("model", "model:PATH"),
        ("mix:", "mix:NAME"),
        ("suffix:3", "takes no argument"),
        ("mix:nothing+suffix", "no drafter 'nothing'"),
    ],
)
def test_unknown_names_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        drafter_factory(spec)


def test_other_things_are_refused() -> None:
    with pytest.raises(TypeError, match="expected the name of a drafter"):
        drafter_factory(3)
    with pytest.raises(TypeError, match="returned int"):
        make_drafter(lambda: 3)


# ----------------------------------------------------------------------------------------------- the same language?


class Letters:
    """A tokenizer of single letters. `quirk` letters have ids of their own."""

    def __init__(self, size: int = 256, quirk: str = "") -> None:
        self.size, self.quirk = size, quirk

    def __len__(self) -> int:
        return self.size

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [ord(letter) % 200 + (letter in self.quirk) for letter in text]
        return {"input_ids": [255, *ids] if add_special_tokens else ids}


def test_padding_does_not_matter_and_meaning_does() -> None:
    assert check_same_vocabulary(Letters(), Letters(), 256, 320) == 256
    assert check_same_vocabulary(Letters(), Letters(), 320, 256) == 256
    assert check_same_vocabulary(None, None, 300, 300) == 300
    for quirk in ("e", "\t", "μ", "7", "{"):
        with pytest.raises(ValueError, match="not the target's"):
            check_same_vocabulary(Letters(), Letters(quirk=quirk), 256, 256)
    with pytest.raises(ValueError, match="pass both tokenizers"):
        check_same_vocabulary(Letters(), None, 256, 320)
    with pytest.raises(ValueError, match="rows"):
        check_same_vocabulary(Letters(), Letters(), 256, 200)


def test_a_model_of_another_size_is_refused_by_the_factory() -> None:
    with pytest.raises(ValueError, match="100 token ids and the drafter 61"):
        drafter_factory(tiny_llama(), vocab_size=100)


# ----------------------------------------------------------------------------------------------- custom drafters


def test_the_example_drafts_what_followed() -> None:
    drafter = make_drafter(LookupDrafter)
    drafter.start([1, 2, 3, 4, 5, 1, 2])
    assert [each.token for each in proposed(drafter)] == [3, 4, 5, 1, 2]
    assert [each.token for each in proposed(drafter, path=[3, 4])] == [5, 1, 2]
    assert [each.token for each in proposed(drafter, budget=2)] == [3, 4]
    drafter.observe([9])
    assert proposed(drafter) == []


@pytest.mark.parametrize(
    ("proposals", "message"),
    [
        ([Proposal(-1, 1, 0.5)] * 5, "at most 4"),
        ([Proposal(0, 1, 0.5)], "must come earlier"),
        ([Proposal(-2, 1, 0.5)], "must come earlier"),
        ([Proposal(-1, 1, 0.5), Proposal(0, 1, 0.5), Proposal(1, 1, 0.5)], "3 levels deep"),
        ([Proposal(-1, 61, 0.5)], "token 61"),
        ([Proposal(-1, 1, 0.0)], "probability"),
        ([Proposal(-1, 1, float("nan"))], "probability"),
    ],
)
def test_malformed_proposals_are_named(proposals: list[Proposal], message: str) -> None:
    with pytest.raises(ValueError, match=f"mine.*{message}"):
        check_proposals(proposals, budget=4, max_depth=2, vocab_size=61, name="mine")


def test_no_drafter_imports_a_host() -> None:
    folder = Path(registry.__file__).parent
    imported = set()
    for file in folder.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module or "")
    assert {name for name in imported if name.startswith("bloombee_spec")} <= {
        f"bloombee_spec.draft.{file.stem}" for file in folder.glob("*.py")
    }
    assert not {name.partition(".")[0] for name in imported} & {"bloombee", "petals", "hivemind"}
    assert "torch.distributed" not in imported
