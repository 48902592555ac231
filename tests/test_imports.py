"""Who may import whom, read from every file's syntax tree; and what `--help` must not import."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {
    "cli": {"cli", "slicing", "validate"},
    "validate": {"validate", "slicing", "kernels"},
    "slicing": {"slicing"},
    "kernels": {"kernels"},
}
HEAVY = ("torch", "peft", "transformers", "triton", "huggingface_hub", "safetensors")


def _files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def _relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _imports(path: Path) -> Iterator[str]:
    """Yield the full name of everything that the file imports, anywhere in it."""
    package = ["moelora", *path.relative_to(ROOT).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            # `from moelora import cli` imports moelora.cli.
            yield from (f"{module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            yield from (str(a.value) for a in node.args if isinstance(a, ast.Constant))


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


@pytest.mark.parametrize("path", _files(*ALLOWED), ids=_relative)
def test_parts_import_in_one_direction(path: Path) -> None:
    part = path.relative_to(ROOT).parts[0]
    parts = {name.split(".")[1] for name in _imports(path) if name.startswith("moelora.")}
    assert parts <= ALLOWED[part], f"{part} may import {sorted(ALLOWED[part])} only"


@pytest.mark.parametrize("path", _files(*ALLOWED, "tests", "examples"), ids=_relative)
def test_parts_are_imported_as_moelora(path: Path) -> None:
    # A bare `import kernels` works in a checkout only, and may be Hugging Face's package.
    bare = [name for name in _imports(path) if name.split(".")[0] in ALLOWED]
    assert not bare


def test_one_file_imports_huggingface_hub() -> None:
    users = {
        _relative(path)
        for path in _files(*ALLOWED)
        if any(name.split(".")[0] == "huggingface_hub" for name in _imports(path))
    }
    assert users <= {"slicing/source.py"}


def test_cli_imports_nothing_heavy() -> None:
    found = {
        _relative(path): name
        for path in _files("cli")
        for name in _imports(path)
        if name.split(".")[0] in HEAVY
    }
    assert not found


def test_only_main_exits() -> None:
    exits = {
        _relative(path)
        for path in _files(*ALLOWED)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if _is_exit(node)
    }
    assert exits == {"cli/main.py", "cli/app.py"}  # app.py: typer.Exit after --version


def _is_exit(node: ast.AST) -> bool:
    if isinstance(node, ast.Raise) and node.exc is not None:
        target = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
        return getattr(target, "attr", getattr(target, "id", "")) in ("SystemExit", "Exit")
    if isinstance(node, ast.Call):
        return _called(node) in ("exit", "_exit", "quit", "abort")
    return isinstance(node, ast.ImportFrom) and any(a.name == "exit" for a in node.names)


def test_functions_of_kernels_are_annotated_unless_jitted() -> None:
    missing = [
        f"{_relative(path)}:{node.lineno} {node.name}"
        for path in _files("kernels")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and not any("jit" in ast.dump(decorator) for decorator in node.decorator_list)
        and not _is_annotated(node)
    ]
    assert not missing


def _is_annotated(node: ast.FunctionDef) -> bool:
    arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    untyped = [a for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
    return node.returns is not None and not untyped


@pytest.mark.parametrize(
    "line",
    [
        "--help",
        "--version",
        "inspect --help",
        "shard --help",
        "unshard --help",
        "verify --help",
        "demo --help",
        "shard a",  # a usage error is as quick as the help
    ],
)
def test_help_imports_nothing_heavy(line: str) -> None:
    code = (
        "import sys; from moelora.cli.main import run; code = run(sys.argv[1:]); "
        f"print([n for n in {HEAVY!r} if n in sys.modules], code, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *line.split()],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    expected = 0 if line.startswith("--") or line.endswith("--help") else 2
    assert done.stderr.splitlines()[-1] == f"[] {expected}"


def test_parts_are_light_to_import() -> None:
    # transformers looks for a package named kernels and may import ours when the checkout root
    # is on sys.path; Triton must not be imported before TRITON_INTERPRET is decided.
    code = (
        "import sys, moelora.cli, moelora.kernels, moelora.slicing, moelora.validate; "
        "print([n for n in ('triton', 'peft', 'transformers') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], check=False, capture_output=True, text=True, cwd=ROOT
    )
    assert done.stdout == "[]\n", done.stderr


def test_python_m_runs_the_command_line_with_the_checkout_off_the_path() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "moelora.cli", "--version"],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin"},  # no PYTHONSAFEPATH: the unsafe case is the point
    )
    assert (done.returncode, done.stdout[:8]) == (0, "moelora ")
    code = (
        "import runpy, sys; sys.argv = ['moelora', '--version']\n"
        "try: runpy.run_module('moelora.cli', run_name='__main__', alter_sys=True)\n"
        "except SystemExit: pass\n"
        "import importlib.util; print(importlib.util.find_spec('slicing'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin"},
    )
    assert done.stdout.splitlines()[-1] == "None", done.stderr
