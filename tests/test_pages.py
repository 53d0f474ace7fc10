"""The pages say what the code says: defaults, names of functions and tests, targets of links; and they are short."""

import ast
import csv
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

from sb3_grpo import GRPO
from sb3_grpo.buffers import BUFFERS, buffer_options

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "LOG.md", *sorted((ROOT / "docs").glob("*.md"))]
#: Pages to look things up in
REFERENCES = ("api",)
MAX_WORDS = 1500
MAX_WORDS_OF_README = 500


def without_generated_tables(text: str) -> str:
    """
    :param text: Text of a page
    :return: The text without the tables that `benchmarks.report` writes
    """
    return re.sub(r"<!-- report: \w+ -->.*?<!-- end -->", "", text, flags=re.DOTALL)


def test_the_table_of_arguments_has_each_argument_in_order_with_its_default() -> None:
    page = (ROOT / "docs" / "from_ppo.md").read_text(encoding="utf-8").split("\n## Arguments\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \| \S", page, re.MULTILINE)
    parameters = inspect.signature(GRPO).parameters
    optional = [
        (name, parameter.default) for name, parameter in parameters.items() if parameter.default is not parameter.empty
    ]
    assert [(name, ast.literal_eval(default)) for name, default in rows] == optional[:-1]
    assert optional[-1] == ("_init_setup_model", True)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_functions_and_tests_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\{(?:func|class|meth)\}`~?(sb3_grpo[\w.]*)`", text):
        pkgutil.resolve_name(target)  # raises an error if there is no such name
    for name, file in re.findall(r"\[`(test_\w+)`\]\(\.\./(tests/\w+\.py)\)", text):
        assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8"), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_buffer_takes_each_option_that_a_page_advises(page: Path) -> None:
    # Blocks of code are run, and some have a buffer of their own.
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    advised = set(re.findall(r"rollout_buffer_kwargs=dict\((\w+)=", text))
    assert advised <= {option for buffer in BUFFERS.values() for option in buffer_options(buffer)}


def healthy_ranges() -> dict[str, tuple[float, float]]:
    """:return: For each metric with a range on the page of the metrics, its ends"""
    page = (ROOT / "docs" / "diagnostics.md").read_text(encoding="utf-8").split("\n## Default runs\n")[0]
    found = re.findall(r"^\| `(train/\w+)` \|.*?\| (-?[\d.]+) to (-?[\d.]+)\b[^|]*\|", page, re.MULTILINE)
    return {key: (float(low), float(high)) for key, low, high in found}


def test_default_runs_have_healthy_metrics_from_the_first_update_on() -> None:
    ranges = healthy_ranges()
    assert len(ranges) >= 9
    with (ROOT / "benchmarks" / "results" / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] in ranges]
    assert len({row["env"] for row in rows}) == 5
    assert {row["metric"] for row in rows} == set(ranges)
    for row in rows:
        low, high = ranges[row["metric"]]
        assert all(low <= float(row[name]) <= high for name in ("first", "low", "high")), row


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_the_first_update_of_a_default_run_is_healthy(env: str) -> None:
    model = GRPO("MlpPolicy", env, seed=1, device="cpu")
    model.learn(1024)
    logged = {key: value for key, value in model.logger.name_to_value.items() if key in healthy_ranges()}
    of_clipped_updates = {key for key in healthy_ranges() if "clip" in key and model.update_rule == "natural"}
    assert logged.keys() == healthy_ranges().keys() - of_clipped_updates
    for key, value in logged.items():
        low, high = healthy_ranges()[key]
        assert low <= value <= high, (key, value)


def test_the_page_of_formulas_names_functions_and_tests() -> None:
    text = (ROOT / "docs" / "how_it_works.md").read_text(encoding="utf-8")
    sections = text.split("\n## ")[2:]  # after the introduction and the groups
    assert len(sections) == 7
    assert all("\nCode: {func}`" in section or "\nCode: {meth}`" in section for section in sections)
    assert all(re.search(r"Tests?:\s\[`test_", section) for section in sections)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_a_page_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", page.read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith("auto_tour/"):  # made when the site is built
            assert (page.parent / target).is_file(), target


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in REFERENCES], ids=lambda page: page.stem)
def test_a_page_is_short(page: Path) -> None:
    n_words = len(re.findall(r"\S*\w\S*", without_generated_tables(page.read_text(encoding="utf-8"))))
    assert n_words <= (MAX_WORDS_OF_README if page.stem == "README" else MAX_WORDS)


@pytest.mark.parametrize("kind", ["svg", "webp"])
def test_a_picture_is_small(kind: str) -> None:
    assert not [
        path.name
        for path in (ROOT / "docs").rglob(f"*.{kind}")
        if path.stat().st_size > 200_000 and "_build" not in path.parts
    ]
