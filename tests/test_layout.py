"""The habits of this repository, as checks: where things lie, what they are called, who may import what."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.repository import (
    PACKAGE_FOLDERS,
    ROOT,
    hand_written_python,
    pyproject_value,
    repository_files,
    source_modules,
)

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PUBLIC_METHODS = 10

# What is longer than the limits, and why it reads better whole.
LONG_FOR_A_REASON: dict[str, str] = {
    "engine/models/json_file.py:JsonFields": "one short reader per JSON type: a table, not a task",
}

TOP_LEVEL = {
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "proto",
    "service",
    "engine",
    "clients",
    "tests",
    "docker",
}

# Written in two halves, so that this file does not hold what it looks for.
FOREIGN_TEXT = re.compile(
    "|".join(
        re.escape(first + second)
        for first, second in [
            ("pypi", ".org"),
            ("files.python", "hosted"),
            ("registry.npm", "js"),
            ("deb.debian", ".org"),
            ("download.py", "torch.org"),
            ("/wo", "rk/"),
            ("/ro", "ot/"),
            ("/fa", "rm/"),
            ("/tm", "p/"),
            ("/opt/py", "pi"),
            ("/opt/whe", "els"),
        ]
    )
)


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_the_package_list_names_every_folder_with_code() -> None:
    walked = {module.name for module in source_modules() if module.is_package}
    assert pyproject_value("tool", "setuptools", "packages") == sorted(walked)


def test_every_folder_with_code_is_a_package() -> None:
    folders = {module.path.parent for module in source_modules()}
    assert [relative(folder) for folder in sorted(folders) if not (folder / "__init__.py").is_file()] == []


def test_package_folders_are_those_that_setuptools_maps() -> None:
    mapping = {name: relative(folder) for name, folder in PACKAGE_FOLDERS.items()}
    assert pyproject_value("tool", "setuptools", "package-dir") == mapping


def test_every_package_is_marked_as_typed() -> None:
    assert [name for name, folder in PACKAGE_FOLDERS.items() if not (folder / "py.typed").is_file()] == []


def test_the_top_level_holds_nothing_else() -> None:
    entries = {path.relative_to(ROOT).parts[0] for path in repository_files()}
    assert {entry for entry in entries if not entry.startswith(".")} <= TOP_LEVEL


def test_every_engine_module_has_its_place_in_the_layers() -> None:
    contracts = pyproject_value("tool", "importlinter", "contracts")
    assert isinstance(contracts, list)
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    placed = {name.strip().strip("()") for layer in layers for name in layer.split(":")}
    modules = [module.name for module in source_modules() if module.name.startswith("headrace.engine.")]
    without_code = {
        module.name for module in source_modules() if module.is_package and not has_code(module.path)
    }
    unplaced = [
        name
        for name in modules
        if name not in without_code
        and not any(name == place or name.startswith(f"{place}.") for place in placed)
    ]
    assert unplaced == [], "add them to the layers contract in pyproject.toml"


def has_code(path: Path) -> bool:
    """Whether a file holds more than a docstring."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return any(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in body)


def test_no_file_is_too_long() -> None:
    lengths = {
        relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in hand_written_python()
    }
    too_long = {name: length for name, length in lengths.items() if length > MAX_FILE_LINES}
    assert {name: length for name, length in too_long.items() if name not in LONG_FOR_A_REASON} == {}


def own_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function's body, its signature and docstring left out."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    return (function.end_lineno or 0) - body[0].lineno + 1 if body else 0


def public_methods(cls: ast.ClassDef) -> list[str]:
    methods = [node for node in cls.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [
        method.name
        for method in methods
        if not method.name.startswith("_")
        and not any(isinstance(mark, ast.Name) and mark.id == "property" for mark in method.decorator_list)
    ]


def production_nodes() -> Iterator[tuple[str, ast.AST]]:
    """Every syntax node of the hand-written code outside `tests/`, with its file's name."""
    for path in hand_written_python():
        if ROOT / "tests" not in path.parents:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                yield relative(path), node


def test_no_function_is_too_long() -> None:
    too_long = {
        f"{name}:{node.name}": own_lines(node)
        for name, node in production_nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and own_lines(node) > MAX_FUNCTION_LINES
    }
    assert {name: lines for name, lines in too_long.items() if name not in LONG_FOR_A_REASON} == {}


def test_no_class_has_too_many_public_methods() -> None:
    too_wide = {
        f"{name}:{node.name}": len(public_methods(node))
        for name, node in production_nodes()
        if isinstance(node, ast.ClassDef) and len(public_methods(node)) > MAX_PUBLIC_METHODS
    }
    assert {name: count for name, count in too_wide.items() if name not in LONG_FOR_A_REASON} == {}


def test_what_is_excused_from_the_limits_still_exists() -> None:
    known = {relative(path) for path in hand_written_python()} | {
        f"{name}:{node.name}"
        for name, node in production_nodes()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    assert LONG_FOR_A_REASON.keys() <= known


def test_no_module_is_named_after_nothing() -> None:
    empty_words = {"utils.py", "util.py", "helpers.py", "helper.py", "common.py", "misc.py"}
    assert [relative(path) for path in hand_written_python() if path.name in empty_words] == []


def subjects(test: str) -> list[str]:
    """What a test file may be about: `test_core_states.py` tests `core_states` or, in one aspect, `core`."""
    words = test.removeprefix("test_").split("_")
    return ["_".join(words[:count]) for count in range(len(words), 0, -1)]


def test_test_files_are_named_after_what_they_test() -> None:
    folders = {"engine": ROOT / "engine", "service": ROOT / "service", "clients": ROOT / "clients" / "python"}
    homeless = []
    for name, source in folders.items():
        tests = ROOT / "tests" / name
        for path in sorted(tests.rglob("test_*.py")):
            package = source / path.parent.relative_to(tests)
            known = {entry.stem for entry in package.glob("*") if entry.suffix == ".py" or entry.is_dir()}
            if not known.union({package.name}).intersection(subjects(path.stem)):
                homeless.append(relative(path))
    assert homeless == [], "tests about several modules belong in tests/e2e or tests/faults"


def test_only_the_service_configuration_reads_the_environment() -> None:
    readers = {
        name
        for name, node in production_nodes()
        if name.startswith(("engine/", "service/", "clients/python/"))
        and isinstance(node, ast.Attribute)
        and node.attr in {"environ", "getenv"}
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
    }
    # The command tells gRPC's core to be quiet, unless its user has said how much it may tell.
    assert readers <= {"service/config.py", "clients/python/cli.py"}


def test_torch_is_imported_only_where_tensors_are() -> None:
    tensor_code = re.compile(
        r"engine/(batch|transfer|kv/storage|(attention|distillation|models|native|speculative)/\w+|sampling/(?!params)\w+|runner/(?!protocol)\w+)\.py"
    )
    importers = {
        name
        for name, node in production_nodes()
        if (
            isinstance(node, ast.Import)
            and any(alias.name.partition(".")[0] == "torch" for alias in node.names)
        )
        or (isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch")
    }
    assert {name for name in importers if tensor_code.fullmatch(name) is None} == set()


def test_no_file_names_a_registry_or_a_folder_of_some_machine() -> None:
    found = []
    for path in repository_files():
        text = path.read_bytes().decode("utf-8", errors="replace")
        found += [f"{relative(path)}: {match.group()}" for match in FOREIGN_TEXT.finditer(text)]
    assert found == []


def run_python(code: str) -> str:
    """Run code in a fresh interpreter that starts in the repository's root, and return what it printed.

    There the folders `engine` and `service` can be imported under their bare names: the mistake to catch.
    """
    outcome = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=100
    )
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout


def test_no_module_enters_the_interpreter_under_a_bare_name() -> None:
    # flash-attn is there on CUDA machines alone; __main__ modules run when imported.
    names = [
        module.name
        for module in source_modules()
        if not module.name.endswith(("__main__", ".attention.flash"))
    ]
    code = f"""
import importlib, sys
for name in {names!r}:
    importlib.import_module(name)
tops = {{name.partition(".")[0] for name in sys.modules}}
print(sorted(tops & {{"engine", "service", "clients", "proto"}}))
"""
    assert run_python(code).strip() == "[]"


@pytest.mark.parametrize(
    ("imported", "unwanted"),
    [
        ("headrace.engine", ("torch", "grpc", "transformers", "headrace.v1", "headrace.service")),
        ("headrace.clients", ("torch", "transformers", "headrace.engine", "headrace.service")),
        ("headrace.clients.cli", ("torch", "transformers", "headrace.engine", "headrace.service")),
        ("headrace.v1.generation_pb2_grpc", ("torch", "headrace.engine", "headrace.service")),
    ],
)
def test_an_import_brings_nothing_heavy(imported: str, unwanted: tuple[str, ...]) -> None:
    code = f"import sys, {imported}; print([name for name in {unwanted!r} if name in sys.modules])"
    assert run_python(code).strip() == "[]"


def test_help_imports_little() -> None:
    code = """
import contextlib, io, sys
sys.argv = ["headrace", "--help"]
with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as out:
    from headrace.clients.cli import main
    main()
assert "Serving" in out.getvalue(), out.getvalue()
print(*sys.modules)
"""
    modules = set(run_python(code).split())
    # Each of them costs more than all of ours.
    assert modules & {"asyncio", "ssl", "grpc", "google.protobuf", "numpy", "pydantic", "yaml"} == set()
    # 14 of 344 in all when this was written; most are those of rich, which draws the help.
    assert len({name for name in modules if name.startswith("headrace.")}) <= 18
    assert len(modules) <= 400
