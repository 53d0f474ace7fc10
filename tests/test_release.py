"""The files of a release agree on its version, and the wheel has what it should."""

import re
import shutil
import subprocess
import sys
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

import sb3_grpo

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "sb3_grpo"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of the working tree, built from a copy because the build writes beside its sources."""
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, source)
    for name in ("sb3_grpo", "tests", "benchmarks"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(source)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next((source / "dist").glob("*.whl"))


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


def test_the_changelog_and_the_citation_have_the_version_and_the_date_of_the_release() -> None:
    newest = re.search(r"^## \[(.+)\] - (unreleased|\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M)
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert newest
    assert newest[1] == citation["version"] == sb3_grpo.__version__
    assert newest[2] == str(citation.get("date-released", "unreleased"))


def test_the_wheel_has_the_package_with_its_data_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    tracked = [path for path in PACKAGE.rglob("*") if path.is_file() and path.parent.name != "__pycache__"]
    assert {"sb3_grpo/py.typed", "sb3_grpo/version.txt", "sb3_grpo/zoo/hyperparams/grpo.yml"} <= packed
    assert packed == {path.relative_to(ROOT).as_posix() for path in tracked}


def test_the_wheel_bounds_each_requirement_of_users_from_below(wheel: Path) -> None:
    required = metadata(wheel).get_all("Requires-Dist", [])
    users = [line for line in required if not re.search(r'extra == "(tests|docs|benchmarks)"', line)]
    assert len(users) > 10
    # Gymnasium's own bound holds for its extras
    assert not [line for line in users if ">=" not in line and not line.startswith("gymnasium[")]
