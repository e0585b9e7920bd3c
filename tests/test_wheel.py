"""The wheel as an operator installs it: away from the source tree, in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from console import __version__
from console.sources.files import shipped_profiles_directory

TREE = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(TREE)]
    subprocess.run(build, check=True, capture_output=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that has the wheel; what it depends on is lent by this one."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, symlinks=True)
    python = folder / "bin/python"
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True, timeout=120)
    packages = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    # Appended to the path, so the wheel's own package comes first; a .pth within it is not followed.
    (Path(packages) / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def run(program: Path, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment["XDG_CONFIG_HOME"] = str(folder)
    return subprocess.run(
        [program, *arguments],
        capture_output=True,
        text=True,
        timeout=30,
        cwd=folder,
        env=environment,
        check=False,
    )


def test_the_wheel_holds_what_is_shipped_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for kind, pattern in (("profiles", "*.yaml"), ("styles", "*.tcss")):
        shipped = {f"console/_data/{kind}/{path.name}" for path in (TREE / kind).glob(pattern)}
        assert shipped
        assert shipped <= set(names)
    tables = {str(path.relative_to(TREE)) for path in (TREE / "console/checks/flags/tables").iterdir()}
    assert len(tables) >= 10
    assert tables <= set(names)
    assert {name.partition("/")[0].removesuffix(f"-{__version__}.dist-info") for name in names} == {
        "console",
        "gpuops",
    }


def test_the_installed_command_has_its_profiles(installed: Path, tmp_path: Path) -> None:
    assert run(installed / "gpuops", "--version", folder=tmp_path).stdout == f"gpuops {__version__}\n"
    where = "import console; print(console.__file__)"
    assert Path(run(installed / "python", "-c", where, folder=tmp_path).stdout).is_relative_to(
        installed.parent
    )
    listed = json.loads(run(installed / "gpuops", "profile", "list", "--json", folder=tmp_path).stdout)
    shipped = [path.stem for path in sorted(shipped_profiles_directory().glob("*.yaml"))]
    assert sorted(one["name"] for one in listed["profiles"]) == shipped


def test_the_installed_demo_answers_the_installed_status(installed: Path, tmp_path: Path) -> None:
    # A folder with a package of our name in it must not be taken for ours.
    (tmp_path / "console").mkdir()
    (tmp_path / "console/__init__.py").write_text("raise SystemExit('imported from the working directory')\n")
    command = [installed / "gpuops", "demo", "--headless", "--dir", tmp_path / "box"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as box:
        assert box.stdout is not None
        site = box.stdout.readline().strip()
        status = run(installed / "gpuops", "status", "--json", "--site", site, folder=tmp_path)
        box.terminate()
    assert box.returncode == 0
    assert status.returncode == 0, status.stderr
    assert json.loads(status.stdout)["state"]["name"] in ("ready", "busy")
