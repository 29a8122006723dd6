"""Who may import whom, and what no file may do: read from the source, so that a lazy import inside a function
counts."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from host_helpers import OLD_TRANSFORMERS

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGE = REPOSITORY / "bloombee_spec"
FILES = sorted(PACKAGE.rglob("*.py"))
HOST_PACKAGES = ("bloombee", "petals")
PURE = ("draft", "plan", "sampling", "kv", "wire", "tree.py", "lane.py", "verify.py", "choose.py")
BEYOND_PURE = (
    *HOST_PACKAGES, "hivemind", "torch.distributed",
    "bloombee_spec.hosts", "bloombee_spec.server", "bloombee_spec.client", "bloombee_spec.cli",
)  # fmt: skip
BLOCK_PARTS = (
    "self_attn", "self_attention", "mlp", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    "input_layernorm", "post_attention_layernorm", "rotary_emb", "query_key_value", "dense_h_to_4h", "dense_4h_to_h",
    "block_sparse_moe", "ln_attn", "ln_mlp",
)  # fmt: skip
UNSAFE_MODULES = ("pickle", "dill", "cloudpickle", "marshal", "shelve", "torch.load")  # torch.load: by its full name
UNSAFE_CALLS = ("eval", "exec", "compile")

Rule = Callable[[Path, ast.Module], Iterator[str]]


def imported(path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """`(line, dotted name)` of everything that a file imports; `from a import b` gives both `a` and `a.b`."""
    package = path.relative_to(REPOSITORY).with_suffix("").parts[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join((*package[: len(package) - node.level + 1], node.module or "") if node.level else ())
            source = base.strip(".") if node.level else str(node.module)
            yield node.lineno, source
            yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and called(node) in ("import_module", "__import__", "find_spec"):
            yield from (
                (node.lineno, word.value)
                for word in node.args
                if isinstance(word, ast.Constant) and isinstance(word.value, str)
            )


def called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def inside(path: Path, *parts: str) -> bool:
    relative = path.relative_to(PACKAGE)
    return any(relative.is_relative_to(part) for part in parts)


def below(name: str, packages: tuple[str, ...]) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


# --- the rules ----------------------------------------------------------------------------------------------------


def only_hosts_import_a_host(path: Path, tree: ast.Module) -> Iterator[str]:
    if not inside(path, "hosts"):
        yield from (f"{line}: imports {name}" for line, name in imported(path, tree) if below(name, HOST_PACKAGES))


def the_core_is_pure(path: Path, tree: ast.Module) -> Iterator[str]:
    if inside(path, *PURE):
        yield from (f"{line}: imports {name}" for line, name in imported(path, tree) if below(name, BEYOND_PURE))


def only_families_know_a_block(path: Path, tree: ast.Module) -> Iterator[str]:
    if inside(path, "server/families"):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in BLOCK_PARTS:
            yield f"{node.lineno}: touches .{node.attr}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (f"{node.lineno}: names {part!r}" for part in node.value.split(".") if part in BLOCK_PARTS)


def only_commands_print(path: Path, tree: ast.Module) -> Iterator[str]:
    if not inside(path, "cli"):
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                yield f"{node.lineno}: prints"


def nothing_executes_data(path: Path, tree: ast.Module) -> Iterator[str]:
    yield from (f"{line}: imports {name}" for line, name in imported(path, tree) if below(name, UNSAFE_MODULES))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        options = {option.arg: option.value for option in node.keywords}
        if isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
            yield f"{node.lineno}: calls {node.func.id}"
        elif ast.unparse(node.func) == "torch.load" and not _is_true(options.get("weights_only")):
            yield f"{node.lineno}: loads without weights_only=True"
        elif _is_true(options.get("allow_pickle")):
            yield f"{node.lineno}: allows pickle"
        elif ast.unparse(node.func) in ("yaml.load", "yaml.unsafe_load", "os.system", "os.popen"):
            yield f"{node.lineno}: calls {ast.unparse(node.func)}"


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


RULES: tuple[Rule, ...] = (
    only_hosts_import_a_host, the_core_is_pure, only_families_know_a_block, only_commands_print, nothing_executes_data,
)  # fmt: skip

# A file that breaks the rule, and one next door that may do the same or something similar.
BROKEN: list[tuple[Rule, str, str]] = [
    (only_hosts_import_a_host, "client/x.py", "def f():\n    from bloombee.client import config"),
    (only_hosts_import_a_host, "x.py", "import petals.server as s"),
    (only_hosts_import_a_host, "cli/x.py", "import importlib\nimportlib.import_module('bloombee.cli.run_server')"),
    (the_core_is_pure, "draft/x.py", "from hivemind.utils.logging import get_logger"),
    (the_core_is_pure, "plan/sim/x.py", "from bloombee_spec import hosts"),
    (the_core_is_pure, "kv/x.py", "from torch import distributed"),
    (the_core_is_pure, "wire/x.py", "from ..server.config import SpecServerConfig"),
    (the_core_is_pure, "verify.py", "def f():\n    import bloombee_spec.client.ring"),
    (only_families_know_a_block, "server/stage.py", "block.self_attn.rotary_emb(x)"),
    (only_families_know_a_block, "hosts/x.py", "block.get_submodule('mlp.gate_proj')"),
    (only_commands_print, "client/x.py", "print('hello')"),
    (nothing_executes_data, "wire/x.py", "import pickle"),
    (nothing_executes_data, "wire/x.py", "from marshal import loads"),
    (nothing_executes_data, "server/x.py", "torch.load(path)"),
    (nothing_executes_data, "server/x.py", "torch.load(path, weights_only=False)"),
    (nothing_executes_data, "server/x.py", "from torch import load"),
    (nothing_executes_data, "plan/x.py", "eval(text)"),
    (nothing_executes_data, "plan/x.py", "exec(compile(text, 'f', 'exec'))"),
    (nothing_executes_data, "draft/x.py", "np.load(path, allow_pickle=True)"),
]
ALLOWED: list[tuple[Rule, str, str]] = [
    (only_hosts_import_a_host, "hosts/x.py", "import bloombee"),
    (only_hosts_import_a_host, "client/x.py", "import bloombee_spec.config"),
    (the_core_is_pure, "client/x.py", "import hivemind"),
    (the_core_is_pure, "draft/x.py", "from ..tree import Node"),
    (only_families_know_a_block, "server/families/x.py", "block.self_attn"),
    (only_commands_print, "cli/x.py", "print('hello')"),
    (nothing_executes_data, "server/x.py", "model.eval()\ntorch.load(path, weights_only=True)\nre.compile('x')"),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_file_keeps_the_rule(rule: Rule) -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{problem}"
        for path in FILES
        for problem in rule(path, ast.parse(path.read_text()))
    ]
    assert found == []


@pytest.mark.parametrize(("rule", "name", "source"), BROKEN)
def test_a_file_that_breaks_the_rule_is_found(rule: Rule, name: str, source: str) -> None:
    assert list(rule(PACKAGE / name, ast.parse(source)))


@pytest.mark.parametrize(("rule", "name", "source"), ALLOWED)
def test_a_file_that_keeps_the_rule_is_not_accused(rule: Rule, name: str, source: str) -> None:
    assert not list(rule(PACKAGE / name, ast.parse(source)))


# --- what is really loaded ----------------------------------------------------------------------------------------


def loaded_after(source: str) -> set[str]:
    """Names of all modules in a fresh interpreter after running `source`."""
    script = f"{source}\nimport sys\nprint('\\n'.join(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=True, cwd=REPOSITORY
    )
    return set(done.stdout.split())


def test_importing_the_package_loads_neither_torch_nor_a_host() -> None:
    names = loaded_after("import bloombee_spec")
    heavy = (*HOST_PACKAGES, "hivemind", "torch", "numpy", "transformers", "bitsandbytes", "peft")
    assert "bloombee_spec.config" in names
    assert sorted(name for name in names if below(name, heavy)) == []


def test_the_command_line_is_built_without_a_host() -> None:
    names = loaded_after("from bloombee_spec.cli.main import build_parser; build_parser()")
    assert sorted(name for name in names if below(name, (*HOST_PACKAGES, "transformers"))) == []


@pytest.mark.skipif(OLD_TRANSFORMERS, reason="model drafters need the cache class of a newer transformers")
def test_the_core_runs_without_hivemind_and_hosts() -> None:
    """Imports of imports count too."""
    modules = [
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        for path in FILES
        if inside(path, *PURE)
    ]
    assert len(modules) > 40
    names = loaded_after("\n".join(f"import {module}" for module in modules))
    assert set(modules) <= names
    beyond = tuple(name for name in BEYOND_PURE if name != "torch.distributed")  # torch imports that by itself
    assert sorted(name for name in names if below(name, beyond)) == []
