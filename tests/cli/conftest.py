"""A stand-in for the library, so that these tests see the command line alone."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Self

import pytest

from moelora.cli.main import run


@dataclass
class Result:
    """What one command line did."""

    code: int
    stdout: str
    stderr: str


class Report:
    """A report as the library returns it."""

    def __init__(self, **fields: Any) -> None:
        self.document: dict[str, Any] = {"kind": "report"}
        self.faults: list[str] = []
        self.warnings: list[str] = []
        self.present: list[int] = []
        self.verdict = "pass"
        self.exit_code = 0
        self.__dict__.update(fields)

    def to_json(self) -> dict[str, Any]:
        return self.document

    def to_text(self) -> str:
        return "the report"

    def to_junit(self) -> str:
        return "<junit/>"

    def to_html(self) -> str:
        return "<html></html>"

    def to_github(self) -> tuple[list[str], str]:
        return ["::error title=moelora verify::wrong"], "## summary\n"


class FakeAdapter:
    """An open adapter; the class attribute is what its config names."""

    base: str | None = "org/base"

    def __init__(self, name: str) -> None:
        self.name_or_path = name

    @property
    def base_name(self) -> str | None:
        return type(self).base

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@dataclass
class FakeLibrary:
    """calls: (function, arguments) in order. raises: function name to the error it raises."""

    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    raises: dict[str, BaseException] = field(default_factory=dict)
    reports: dict[str, Report] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    prints: str = ""

    def call(self, name: str, /, **arguments: Any) -> Report:
        self.calls.append((name, arguments))
        if self.prints:
            print(self.prints)
        if name in self.raises:
            raise self.raises[name]
        return self.reports.get(name, Report())

    def arguments(self, name: str) -> dict[str, Any]:
        """Return the arguments of the only call of ``name``."""
        (found,) = [arguments for called, arguments in self.calls if called == name]
        return found

    def open(self, name: str, revision: str | None = None) -> FakeAdapter:
        self.call("open", name=name, revision=revision)
        return FakeAdapter(name)

    def load_base_model(self, name: str, **kwargs: Any) -> Any:
        self.call("load_base_model", name=name, **kwargs)
        return SimpleNamespace(name_or_path=name)

    def inspect_adapter(self, adapter: FakeAdapter, base: Any, options: Any) -> Report:
        return self.call("inspect_adapter", adapter=adapter, base=base, options=options)

    def plan_shards(
        self, adapter: FakeAdapter, base: Any, layout: Any, placement: Any, **kwargs: Any
    ) -> Report:
        plan = self.call("plan_shards", layout=layout, placement=placement, base=base, **kwargs)
        plan.__dict__.update(
            warnings=self.warnings,
            out_name=f"adapter-tp{layout.tp_size}-ep{layout.moe_ep_size}",
            total_bytes=lambda ranks: 100,
        )
        return plan

    def write_shards(self, plan: Report, out_dir: Path, **kwargs: Any) -> Report:
        if kwargs["progress"]:
            kwargs["progress"](100)
        report = self.call("write_shards", out_dir=out_dir, **kwargs)
        report.present = kwargs["ranks"] or []
        return report

    def unshard(self, shards: Path, out_dir: Path, **kwargs: Any) -> Report:
        return self.call("unshard", shards=shards, out_dir=out_dir, **kwargs)

    def verify(self, shards: Path, **kwargs: Any) -> Report:
        return self.call("verify", shards=shards, **kwargs)

    def publish(self, shards: Path, repo: str, report: Path, **kwargs: Any) -> Report:
        return self.call("publish", shards=shards, repo=repo, report=report, **kwargs)

    def verify_several(self, shards: list[Path], **kwargs: Any) -> Report:
        return self.call("verify_several", shards=shards, **kwargs)

    def self_test(self, shards: Path, **kwargs: Any) -> Report:
        return self.call("self_test", shards=shards, **kwargs)

    def run_demo(
        self, out_dir: Path | None, say: Callable[[str], None], *, force: bool
    ) -> dict[str, Any]:
        say("step 1")
        return self.call("run_demo", out_dir=out_dir, force=force).document


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny ``adapter``, its ``base`` and its ``shards`` (tp 2, ep 2). Not to be
    written to: see ``mine``."""
    from moelora.validate.tiny_models import tiny_adapter, tiny_base

    folder = tmp_path_factory.mktemp("tiny")
    tiny_base("qwen3_moe", folder / "base")
    tiny_adapter(folder / "base", folder / "adapter")
    here = Path.cwd()
    os.chdir(folder)  # so that the config and the manifest hold names, as users type them
    try:
        config = json.loads(Path("adapter/adapter_config.json").read_text())
        config["base_model_name_or_path"] = "base"
        Path("adapter/adapter_config.json").write_text(json.dumps(config))
        assert run(["shard", "adapter", "--tp", "2", "--ep", "2", "-o", "shards"]) == 0
    finally:
        os.chdir(here)
    return folder


@pytest.fixture
def mine(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of ``tiny`` to change, as the current folder."""
    folder = shutil.copytree(tiny, tmp_path / "mine")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Return a function that runs one command line in this process on the real library."""

    def call(*args: str) -> Result:
        code = run(list(args))
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    """Replace every library module that a command imports; returns the record of the calls."""
    import moelora.slicing.families.support  # noqa: F401 (before what it imports is replaced)

    fake = FakeLibrary()
    modules = {
        "moelora.slicing.adapter": {"Adapter": SimpleNamespace(open=fake.open)},
        "moelora.slicing.base_model": {"load_base_model": fake.load_base_model},
        "moelora.slicing.inspect": {"inspect_adapter": fake.inspect_adapter},
        "moelora.slicing.plan": {"plan_shards": fake.plan_shards},
        "moelora.slicing.write": {"write_shards": fake.write_shards},
        "moelora.slicing.unshard": {"unshard": fake.unshard},
        "moelora.validate": {
            "verify": fake.verify,
            "self_test": fake.self_test,
            "verify_several": fake.verify_several,
        },
        "moelora.validate.publish": {"publish": fake.publish},
        "moelora.validate.demo": {"run_demo": fake.run_demo},
    }
    for name, attributes in modules.items():
        module = ModuleType(name)
        module.__dict__.update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
    # The stand-in finds every folder.
    monkeypatch.setattr("moelora.cli.verify._look_first", lambda *_: None)
    monkeypatch.setattr(FakeAdapter, "base", "org/base")
    return fake


@pytest.fixture
def moelora(
    library: FakeLibrary, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    """Return a function that runs one command line in this process on the stand-in library."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # Typer sets its own

    def call(*args: str) -> Result:
        code = run(list(args))
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture
def adapter_class() -> type[FakeAdapter]:
    """The stand-in's adapter class, for tests that change what the config names."""
    return FakeAdapter


@pytest.fixture
def make_report() -> type[Report]:
    """The stand-in's report class."""
    return Report
