"""
Write tables and figures of finished runs into the pages of `docs/`, the README and the log.

    python -m benchmarks.report                     # from the rows in benchmarks/results alone; nothing is run
    python -m benchmarks.report --print             # to the terminal, pages stay as they are
    python -m benchmarks.report --print learning    # one table

The definitions are those of `benchmarks.tables` and `benchmarks.statistics`.
"""

import argparse
import pathlib
import re
from collections.abc import Callable, Sequence

from benchmarks import candidates, metrics, seconds
from benchmarks.figures import draw_curves, draw_profiles
from benchmarks.matrix import load_matrix
from benchmarks.results import RESULTS, Suite, read_rows
from benchmarks.tables import (
    ablation_table,
    gains_table,
    learning_table,
    paired_table,
    rivals_table,
    throughput_table,
    variance_table,
    variants_table,
    zoo_table,
)
from benchmarks.versus import claim, environments_table, losses_table, outcomes_table, scores_by_arm, summary_table

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
#: Names of the pages of `docs` with places to fill
TABLES_ON = ("benchmark", "benchmark_details", "when_groups_win", "from_trl", "images_and_gpus", "zoo", "diagnostics")
PAGES = (
    ROOT / "README.md",
    ROOT / "benchmarks" / "LOG.md",
    *(DOCS / f"{name}.md" for name in TABLES_ON),
)
#: The default settings and what they are compared with, by the names that tables and figures have
OURS = "default"
RIVALS = {
    "PPO, our settings": ["ppo, our settings"],
    "PPO, our settings, rewards normalised": ["ppo, our settings, rewards normalised"],
    "PPO, defaults": ["ppo, defaults"],
    "PPO, rl-zoo3": ["ppo", "ppo, not normalized"],
}
ARMS = {"GRPO, kernel": [OURS], **RIVALS}
#: The rivals of the protocol: those of before, others, and two arms of GRPO itself
PROOF = {
    **RIVALS,
    "PPO, rl-zoo3": ["ppo", "ppo, not normalized", "ppo, entry of Ant-v4"],
    "TRPO, rl-zoo3": ["trpo"],
    "GRPO without groups": ["default, no groups"],
    "GRPO as DeepSeekMath has it": ["outcome, DeepSeekMath"],
}
#: The sentences of the claim
CLAIMS = {
    "PPO, our settings": "Against PPO with the same settings, GRPO with the `kernel` buffer is",
    "PPO, defaults": "Against PPO's defaults, it is",
    "PPO, rl-zoo3": "Against PPO with rl-zoo3's settings for each environment, it is",
}
#: What a figure can hold
DRAWN = {name: ARMS[name] for name in ("GRPO, kernel", "PPO, our settings", "PPO, defaults", "PPO, rl-zoo3")}
#: The same in other units
CHANGES = ("rewards times 1e-3", "rewards times 1e3", "observations in other units")
UNITS = {"GRPO": [OURS], "PPO": ["ppo, defaults"]}
UNITS |= {f"{name}, {what}": [f"{arm}, {what}"] for name, (arm,) in UNITS.items() for what in CHANGES}
ABLATIONS = ("buffers", "groups", "starts", "baseline")


def sections(results: pathlib.Path) -> dict[str, Callable[[], str]]:
    """
    :param results: Folder
    :return: By name of the place on a page, a function that makes its content
    """
    inputs = Suite("inputs", results)
    rivals: dict[str, Sequence[str]] = {
        "no groups": ["grpo, no groups"],
        "PPO": ["ppo, defaults", "ppo, same settings", "ppo, same settings, rewards normalised"],
    }
    frozen, untouched, million = (Suite(name, results) for name in ("default", "untouched", "default_million"))
    single = {"GRPO, kernel, 1 environment": ["default, 1 environment"]}
    at_a_million = {"PPO, rl-zoo3": ["ppo"], "TRPO, rl-zoo3": ["trpo"]}
    proof, with_inputs = Suite("proof", results), Suite("proof", results, prefix="sb3_grpo/")
    return {
        "frozen_summary": lambda: summary_table(frozen, OURS, RIVALS),
        "frozen_outcomes": lambda: outcomes_table(frozen, OURS, RIVALS),
        "frozen_area": lambda: environments_table(frozen, {**ARMS, **single}, "auc"),
        "frozen_evaluation": lambda: environments_table(frozen, {**ARMS, **single}, "eval_mean"),
        "claim": lambda: "\n".join(dict.fromkeys(claim(frozen, OURS, RIVALS[name], each) for name, each in CLAIMS.items())),
        "frozen_losses": lambda: losses_table(frozen, OURS, RIVALS),
        "seconds_runs": lambda: seconds.runs_table(frozen, OURS, RIVALS),
        "seconds": lambda: seconds.environments_table(frozen, OURS, RIVALS),
        "untouched_outcomes": lambda: outcomes_table(untouched, OURS, {"PPO, defaults": ["ppo, defaults"]}),
        "untouched_area": lambda: environments_table(untouched, ARMS, "auc"),
        "untouched_evaluation": lambda: environments_table(untouched, ARMS, "eval_mean"),
        "frozen_million": lambda: environments_table(million, {"GRPO, kernel": [OURS], **at_a_million}, "eval_mean"),
        "proof_summary": lambda: summary_table(proof, OURS, PROOF),
        "proof_inputs": lambda: summary_table(with_inputs, OURS, PROOF),
        "proof_outcomes": lambda: outcomes_table(proof, OURS, PROOF),
        "proof_losses": lambda: losses_table(proof, OURS, PROOF),
        "proof_area": lambda: environments_table(proof, {"GRPO, kernel": [OURS], **PROOF}, "auc"),
        "proof_evaluation": lambda: environments_table(proof, {"GRPO, kernel": [OURS], **PROOF}, "eval_mean"),
        "proof_million": lambda: environments_table(
            Suite("proof_million", results), {"GRPO, kernel": [OURS], **PROOF}, "eval_mean"
        ),
        "units": lambda: environments_table(Suite("units", results), UNITS, "auc"),
        **{name: lambda name=name: ablation_table(Suite(name, results)) for name in ABLATIONS},  # type: ignore[misc]
        "learning": lambda: learning_table(Suite("learning", results)),
        "variants": lambda: learning_table(Suite("variants", results)),
        "zoo": lambda: zoo_table(Suite("zoo", results)),
        "inputs_area": lambda: gains_table(inputs, "grpo, defaults", rivals, "auc"),
        "inputs_evaluation": lambda: gains_table(
            inputs, "grpo, defaults", {**rivals, "heuristic": ["heuristic"]}, "eval_mean"
        ),
        "inputs_rivals": lambda: rivals_table(inputs, "grpo, defaults", rivals["PPO"]),
        "variance_removed": lambda: variance_table(inputs, "grpo, defaults"),
        "ordinary": lambda: paired_table(Suite("ordinary", results), "grpo, defaults", "grpo, no relative term"),
        "tokens": lambda: variants_table(Suite("tokens", results)),
        "candidates_final": lambda: candidates.table(Suite("candidates_final", results), candidates.stored_references()),
        "candidates_second": lambda: ablation_table(Suite("candidates_second", results), "eval_mean"),
        "long": lambda: ablation_table(Suite("candidates_long", results), "eval_mean"),
        "third_long": lambda: ablation_table(Suite("candidates_third_long", results), "eval_mean"),
        "million": lambda: ablation_table(Suite("candidates_million", results), "eval_mean"),
        "effects": lambda: candidates.effects_table(
            Suite("candidates", results), candidates.stored_references(), load_matrix()["arms"]
        ),
        "metrics": lambda: metrics.table(read_rows(results / "metrics.csv")),
        "throughput": lambda: throughput_table(read_rows(results / "throughput.csv")),
    }


def fill(page: str, contents: dict[str, Callable[[], str]]) -> str:
    """
    :param page: Text with places ``<!-- report: name -->`` ... ``<!-- end -->``
    :param contents: A function for the content of each place
    :return: The text with all places filled
    :raises KeyError: If there is a place that nothing fills
    """

    def replaced(match: re.Match[str]) -> str:
        return f"<!-- report: {match[1]} -->\n{contents[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- report: (\w+) -->\n.*?<!-- end -->", replaced, page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS, help="folder")
    parser.add_argument("--print", nargs="*", dest="printed", metavar="TABLE", help="all of them, or those named")
    args = parser.parse_args()
    contents = sections(args.results)
    if args.printed is not None:
        if unknown := set(args.printed) - set(contents):
            parser.error(f"no table is called {', '.join(sorted(unknown))}: choose from {', '.join(contents)}")
        for name in args.printed or contents:
            print(f"\n{name}\n\n{contents[name]()}")
        return
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8"), contents), encoding="utf-8")
    frozen = Suite("default", args.results)
    draw_curves(frozen, DRAWN, DOCS / "benchmark_curves.svg")
    measures = {"area": "auc", "evaluation": "eval_mean"}
    profiles = {name: scores_by_arm(frozen, DRAWN, column) for name, column in measures.items()}
    draw_profiles(profiles, DOCS / "benchmark_profiles.svg")
    print(f"wrote {', '.join(str(page.relative_to(ROOT)) for page in PAGES)} and the figures in docs")


if __name__ == "__main__":
    main()
