"""What an installed moelora holds: every package, its types, its license and its command."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("cli", "slicing", "kernels", "validate")


def _setuptools() -> dict[str, dict[str, list[str]]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def test_every_package_is_listed() -> None:
    # A package that is missing in the list is missing in the wheel, without a word, while the
    # editable install still finds it.
    found = {
        "moelora." + ".".join(file.parent.relative_to(ROOT).parts)
        for part in PARTS
        for file in (ROOT / part).rglob("*.py")
    }
    assert set(_setuptools()["packages"]) == found


def test_every_package_has_an_init() -> None:
    for name in _setuptools()["packages"]:
        folder = ROOT.joinpath(*name.split(".")[1:])
        assert (folder / "__init__.py").is_file(), folder


def test_every_part_is_typed() -> None:
    for part in PARTS:
        assert (ROOT / part / "py.typed").is_file()
        assert _setuptools()["package-data"][f"moelora.{part}"] == ["py.typed"]


def test_no_moelora_folder_shadows_the_installed_package() -> None:
    assert not (ROOT / "moelora").exists()


def test_wheel_holds_every_file(tmp_path: Path) -> None:
    # Built in a copy: setuptools leaves a build/ behind, and reuses what it finds there.
    tree = tmp_path / "tree"
    for part in PARTS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / part, tree / part, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree / name)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path],
        cwd=tree,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = tmp_path.glob("moelora-*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = next(n for n in names if n.endswith("/entry_points.txt")).split("/")[0]
        entry = archive.read(f"{info}/entry_points.txt").decode()
    expected = {
        f"moelora/{file.relative_to(tree).as_posix()}"
        for part in PARTS
        for file in (tree / part).rglob("*")
        if file.suffix in (".py", ".typed") or file.name == "py.typed"
    }
    assert {n for n in names if not n.startswith(f"{info}/")} == expected
    assert f"{info}/licenses/LICENSE" in names
    assert "moelora = moelora.cli.main:main" in entry
