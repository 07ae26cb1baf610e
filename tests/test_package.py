"""The package as others get it: the wheel, installed away from the repository."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import layerjump as lj

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder with nothing but the wheel; its dependencies are those of the tests."""
    folder = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder)]
    subprocess.run([*pip, str(wheel)], check=True)
    return folder


def run(installed, folder, *arguments):
    """Run the installed command in a folder of its own."""
    command = [sys.executable, "-m", "layerjump", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(installed), "LAYERJUMP_HOME": str(folder / "home")}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_the_wheel_has_every_file_of_the_package(wheel):
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("layerjump/")}
    listed = subprocess.run(["git", "ls-files", "src/layerjump"], cwd=ROOT, capture_output=True, text=True, check=True)
    missing = {path.removeprefix("src/") for path in listed.stdout.split()} - inside
    assert not missing


def test_the_installed_command_runs_a_study(installed, data_folder, tmp_path):
    where = "import layerjump; print(layerjump.__file__)"
    environment = os.environ | {"PYTHONPATH": str(installed)}
    path = subprocess.run([sys.executable, "-c", where], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert path.stdout.startswith(str(installed))
    assert lj.__version__ in run(installed, tmp_path, "--version").stdout
    arguments = ["--text", "pydoc", "--tokens", "4000", "-o", "study"]
    done = run(installed, tmp_path, "study", data_folder / "tiny-gpt2", "r2", *arguments)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "study" / "report.html").is_file()


def test_the_citation_names_this_version():
    assert f"\nversion: {lj.__version__}\n" in (ROOT / "CITATION.cff").read_text()
