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
TEXTS = {page: page.read_text(encoding="utf-8") for page in PAGES}
#: Of the README and the site together, tables and code included, and of the log
MAX_WORDS, MAX_WORDS_OF_LOG = 20_000, 1_300


def test_the_table_of_arguments_has_each_argument_in_order_with_its_default() -> None:
    page = (ROOT / "docs" / "from_ppo.md").read_text(encoding="utf-8").split("\n## Arguments\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \| \S", page, re.MULTILINE)
    parameters = inspect.signature(GRPO).parameters
    optional = [
        (name, parameter.default) for name, parameter in parameters.items() if parameter.default is not parameter.empty
    ]
    assert [(name, ast.literal_eval(default)) for name, default in rows] == optional[:-1]
    assert optional[-1] == ("_init_setup_model", True)


def test_functions_tests_and_options_of_buffers_that_pages_name_exist() -> None:
    options = {option for buffer in BUFFERS.values() for option in buffer_options(buffer)}
    for page, text in TEXTS.items():
        for target in re.findall(r"\{(?:func|class|meth)\}`~?(sb3_grpo[\w.]*)`", text):
            pkgutil.resolve_name(target)  # raises an error with the name if there is none
        for name, file in re.findall(r"\[`(test_\w+)`\]\(\.\./(tests/\w+\.py)\)", text):
            assert f"\ndef {name}(" in (ROOT / file).read_text(encoding="utf-8"), (page.name, name)
        # Blocks of code are run, and some have a buffer of their own.
        advised = re.findall(r"rollout_buffer_kwargs=dict\((\w+)=", re.sub(r"(?ms)^```.*?^```", "", text))
        assert set(advised) <= options, page.name


def healthy_ranges() -> dict[str, tuple[float, float]]:
    """:return: For each metric with a range on the page of the metrics, its ends"""
    page = (ROOT / "docs" / "diagnostics.md").read_text(encoding="utf-8")
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
    assert sections.pop().startswith("Where groups help")
    assert len(sections) == 7
    assert all("\nCode: {func}`" in section or "\nCode: {meth}`" in section for section in sections)
    assert all(re.search(r"Tests?:\s\[`test_", section) for section in sections)


def test_links_of_pages_lead_to_files() -> None:
    targets = [(page, target) for page in PAGES for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", TEXTS[page])]
    own = [each for each in targets if "://" not in each[1] and not each[1].startswith("auto_tour/")]  # made with the site
    assert len(own) > 50 and [(page.name, target) for page, target in own if not (page.parent / target).is_file()] == []


def test_pages_are_short() -> None:
    site = [text for page, text in TEXTS.items() if page.parent.name == "docs" or page.name == "README.md"]
    assert sum(len(text.split()) for text in site) <= MAX_WORDS
    assert len(TEXTS[ROOT / "benchmarks" / "LOG.md"].split()) <= MAX_WORDS_OF_LOG


def test_pictures_are_small() -> None:
    pictures = [path for kind in ("svg", "webp") for path in (ROOT / "docs").rglob(f"*.{kind}") if "_build" not in path.parts]
    assert pictures and [path.name for path in pictures if path.stat().st_size > 200_000] == []
