"""The documentation builds without a warning, and has every name that the package exports."""

import pathlib
import re
import subprocess
import sys
from typing import Any

import matplotlib.pyplot as plt
import pytest
from sphinx.util.inventory import InventoryFile

import sb3_grpo

# The tour is built within the folder of the documentation: by one process
pytestmark = pytest.mark.xdist_group("site")

DOCS = pathlib.Path(__file__).parents[1] / "docs"


def built(out: pathlib.Path, *options: str) -> pathlib.Path:
    """:return: The built site"""
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-d", str(out / "trees"), *options]
    done = subprocess.run([*build, str(DOCS), str(out / "html")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / "html"


@pytest.fixture(scope="session")  # a worker may run other modules in between
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return built(tmp_path_factory.mktemp("site"), "-D", "plot_gallery=0")  # which does not run the tour


def test_every_exported_name_is_in_the_reference(site: pathlib.Path) -> None:
    inventory = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    documented = {name for kind in inventory.data.values() for name in kind}
    missing = [name for name in sb3_grpo.__all__ if f"sb3_grpo.{name}" not in documented]
    assert not missing


def test_every_page_is_reachable_from_the_first(site: pathlib.Path) -> None:
    first = (site / "index.html").read_text(encoding="utf-8")
    for page in DOCS.glob("*.md"):
        assert page.stem == "index" or f'href="{page.stem}.html"' in first, page.name


def test_pages_load_nothing_from_other_servers(site: pathlib.Path) -> None:
    for page in site.rglob("*.html"):
        loaded = re.findall(
            r"<(?:script|img|link rel=\"(?:stylesheet|preload)\")[^>]* (?:src|href)=\"(https?:[^\"]*)", page.read_text()
        )
        assert not loaded, f"{page.relative_to(site)}: {loaded}"
    assert "\\frac" in (site / "how_it_works.html").read_text()  # MathJax has something to typeset


def test_lines_of_a_table_break_before_an_interval_and_nowhere_in_it(site: pathlib.Path) -> None:
    page = (site / "benchmark_details.html").read_text(encoding="utf-8")
    assert not re.search(r"\d to -?\d[^<]*\)</p></td>", page)
    assert re.search(r"<td><p>-?[\d.,]+ \(-?[\d.,]+\u00a0to\u00a0-?[\d.,]+\)</p></td>", page)


def test_names_break_after_underscores_and_ids_and_options_nowhere(site: pathlib.Path) -> None:
    assert (
        '<span class="pre long">rollout_<wbr>buffer_<wbr>kwargs=<wbr>dict(...)</span>' in (site / "buffers.html").read_text()
    )
    assert '<span class="pre whole">--load-best</span>' in (site / "zoo.html").read_text()
    assert '<td><p><span class="whole">GustyHalfCheetah-v0</span></p></td>' in (site / "benchmark_details.html").read_text()


def test_the_tour_runs_in_a_tenth_of_its_steps() -> None:
    tour = (DOCS / "tour" / "plot_tour.py").read_text(encoding="utf-8")
    shorter = re.sub(r"\b(20_480|16_384|10_240)\b", "2_048", tour).replace("n_steps=2048", "n_steps=256")
    names: dict[str, Any] = {}
    try:
        exec(compile(shorter, "tour", "exec"), names)
        assert len(plt.get_fignums()) == 3 and names["model"].num_timesteps == 4_096
    finally:
        plt.close("all")


@pytest.mark.slow
def test_the_tour_shows_its_pictures_and_ends_with_a_solved_task(tmp_path: pathlib.Path) -> None:
    site = built(tmp_path)
    tour = (site / "auto_tour" / "plot_tour.html").read_text(encoding="utf-8")
    pictures = set(re.findall(r'src="\.\./_images/(sphx_glr_plot_tour_\d+\.png)"', tour))
    assert len(pictures) == 3
    assert all((site / "_images" / picture).is_file() for picture in pictures)
    # The kernel buffer has solved CartPole by the end of it
    final = re.search(r"mean return (\d+) \+/- \d+ after 30,720 steps", tour)
    assert final and int(final[1]) > 400


def test_every_picture_is_shown_and_has_a_script() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in [*DOCS.glob("*.md"), DOCS.parent / "README.md"])
    scripts = "".join(
        script.read_text(encoding="utf-8")
        for folder in ("docs", "benchmarks")
        for script in (DOCS.parent / folder).glob("*.py")
    )
    for picture in DOCS.glob("*.svg"):
        assert re.search(rf"\]\((docs/)?{re.escape(picture.name)}\)", text), f"{picture.name} is on no page"
        assert f'"{picture.name}"' in scripts, f"no script draws {picture.name}"
