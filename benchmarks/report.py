"""
Write tables and figures of finished runs into the pages of `docs/` and the README.

    python -m benchmarks.report                     # from the rows in benchmarks/results alone; nothing is run
    python -m benchmarks.report --print             # to the terminal, pages stay as they are
    python -m benchmarks.report --print learning    # one table

The definitions are those of `benchmarks.tables` and `benchmarks.statistics`.
"""

import argparse
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from benchmarks import clock, foreign, metrics
from benchmarks.figures import N_POINTS, draw_curves, draw_panels, draw_profiles, draw_scores
from benchmarks.results import RESULTS, Suite, read_rows
from benchmarks.tables import (
    NO_ROWS,
    comparison_table,
    progress,
    variance_table,
    zoo_table,
)
from benchmarks.versus import (
    MEASURES,
    claim,
    compilation_table,
    curves_by_arm,
    environments_table,
    losses_table,
    outcomes_by_environment,
    outcomes_table,
    scores_by_arm,
    seconds_runs_table,
    seconds_table,
    speed_claim,
    summary_table,
)

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
#: Names of the pages of `docs` with places to fill
TABLES_ON = ("benchmark", "benchmark_details", "speed", "games")
PAGES = (
    ROOT / "README.md",
    *(DOCS / f"{name}.md" for name in TABLES_ON),
)
#: GRPO as it comes, and what it is compared with, by their names in tables and figures
OURS = "now"
CRITICS = {
    "PPO, our settings": ["ppo, our settings"],
    "PPO, our settings, rewards normalised": ["ppo, our settings, rewards normalised"],
    "PPO, defaults": ["ppo, defaults"],
    "PPO, rl-zoo3": ["ppo", "ppo, not normalized", "ppo, entry of Ant-v4"],
    "TRPO, rl-zoo3": ["trpo"],
}
WITHOUT_GROUPS = {"GRPO without groups": ["now, no groups"]}
DEEPSEEK = {"GRPO as DeepSeekMath has it": ["outcome, DeepSeekMath"]}
#: The same step with a critic in the place of the fit, for continuous actions
WITH_CRITIC = {"TRPO, our settings": ["trpo, our settings"]}
RIVALS = {**CRITICS, **WITH_CRITIC, **DEEPSEEK}
#: What GRPO is without one of its parts
PARTS = {**WITHOUT_GROUPS, **WITH_CRITIC, **DEEPSEEK}
#: Environments that are also reported apart: those whose seed fixes inputs
GROUPS = {
    "inputs": [f"sb3_grpo/{name}" for name in (
        "LoadBalancing-v0", "LostSales-v0", "EnergyStorage-v0", "BitRate-v0", "GustyHalfCheetah-v0", "Queueing-v0"
    )],
}  # fmt: skip
#: The sentences of the claim
CLAIMS = {
    "PPO, our settings": "Against PPO with the settings of GRPO's clipped updates, GRPO is",
    "PPO, our settings, rewards normalised": "Against PPO with these settings and normalised rewards, it is",
    "PPO, defaults": "Against PPO with its defaults, it is",
    "PPO, rl-zoo3": "Against PPO with rl-zoo3's settings for each environment, it is",
    "TRPO, rl-zoo3": "Against sb3-contrib's TRPO with rl-zoo3's settings, it is",
    "TRPO, our settings": "Against TRPO with the settings of GRPO's natural-gradient steps, it is",
}
#: Those about speed
SPEEDS = {
    "PPO, our settings": "Against PPO with the settings of GRPO's clipped updates, GRPO takes",
    "TRPO, our settings": "Against TRPO with those of natural-gradient steps, it takes",
}
#: Those that the README shows
IN_README = {
    "PPO, rl-zoo3": "Against PPO with rl-zoo3's settings for each environment, GRPO is",
    "TRPO, rl-zoo3": CLAIMS["TRPO, rl-zoo3"],
}
GROUPS_CLAIMS = {
    "inputs": "On the input-driven environments, GRPO with groups is",
    "others": "On the other environments, it is",
}
#: Seconds of compilation: none, as `python -m benchmarks.speed cold` has measured, and on a slow or busy machine
COMPILING = (0, 7, 20)
#: Arms where the seed fixes the inputs
SHARED_INPUTS = {"GRPO": [OURS], **WITHOUT_GROUPS, **CRITICS}
#: Lines of the figure
DRAWN = {"GRPO": [OURS], **{name: arms for name, arms in CRITICS.items() if name != "TRPO, rl-zoo3"}}
#: Lines of the figure that has time as its axis
ZOO_RIVALS = {name: CRITICS[name] for name in ("PPO, rl-zoo3", "TRPO, rl-zoo3")}
SBX = {"PPO of sbx, our settings": ["sbx, our settings"]}
RACE = {"GRPO": [OURS], **SBX, **ZOO_RIVALS}
#: What GRPO is compared with at a million steps
MILLION_RIVALS = {"PPO, our settings": CRITICS["PPO, our settings"], **ZOO_RIVALS}
#: What GRPO is compared with on boards
BOARD_RIVALS = {"PPO, same settings": ["ppo, boards"]}
#: Columns of the tables of Atari games
ATARI = {"GRPO": ["grpo"], "PPO, same rate": ["ppo, our rate"], "PPO, 7.5e-4": ["ppo, 7.5e-4"], "PPO, rl-zoo3": ["ppo"]}
#: The same in other units
CHANGES = ("rewards times 1e-3", "rewards times 1e3", "observations in other units")
UNITS = {"GRPO": [OURS], "PPO": ["ppo, defaults"]}
UNITS |= {f"{name}, {what}": [f"{arm}, {what}"] for name, (arm,) in UNITS.items() for what in CHANGES}


def sections(results: pathlib.Path) -> dict[str, Callable[[], str]]:
    """
    :param results: Folder
    :return: By name of the place on a page, a function that makes its content
    """
    proof, million = Suite("proof", results), Suite("proof_million", results)
    groups = {name: Suite("proof", results, envs=envs) for name, envs in GROUPS.items()}
    groups["others"] = Suite("proof", results, envs=set(proof.timesteps) - set(GROUPS["inputs"]))
    ours = {"GRPO": [OURS]}
    boards, bodies, atari = (Suite(name, results) for name in ("minatar", "large_bodies", "atari"))
    return {
        "claim": lambda: claims(proof, CLAIMS),
        "short_claim": lambda: claims(proof, IN_README, speed=False),
        "compilation": lambda: compilation_table(proof, OURS, CRITICS, COMPILING),
        "progress": lambda: progress(proof),
        "million_progress": lambda: progress(million),
        "summary": lambda: summary_table(proof, OURS, RIVALS),
        "inputs_summary": lambda: summary_table(groups["inputs"], OURS, {**CRITICS, **WITHOUT_GROUPS, **DEEPSEEK}),
        "outcomes": lambda: outcomes_table(proof, OURS, {**CRITICS, **WITH_CRITIC}),
        "deepseek_outcomes": lambda: outcomes_table(proof, OURS, DEEPSEEK),
        "losses": lambda: losses_table(proof, OURS, RIVALS),
        "critics_area": lambda: environments_table(proof, {**ours, **CRITICS}, "auc"),
        "critics_evaluation": lambda: environments_table(proof, {**ours, **CRITICS}, "eval_mean"),
        "grpo_area": lambda: environments_table(proof, {**ours, **PARTS}, "auc"),
        "grpo_evaluation": lambda: environments_table(proof, {**ours, **PARTS}, "eval_mean"),
        "at_a_million": lambda: environments_table(million, {**ours, **MILLION_RIVALS}, "eval_mean"),
        "short_million": lambda: environments_table(million, {**ours, **ZOO_RIVALS}, "eval_mean"),
        "million_area": lambda: environments_table(million, {**ours, **MILLION_RIVALS}, "auc"),
        "million_outcomes": lambda: outcomes_table(million, OURS, {**MILLION_RIVALS, **SBX}),
        "million_seconds": lambda: seconds_table(million, OURS, {**MILLION_RIVALS, **SBX}),
        "three_million": lambda: environments_table(Suite("three_million", results), ours, "eval_mean"),
        "large_bodies": lambda: environments_table(bodies, {**ours, "PPO, rl-zoo3": ["ppo"]}, "eval_mean"),
        "boards_evaluation": lambda: environments_table(boards, {**ours, **BOARD_RIVALS}, "eval_mean"),
        "boards_area": lambda: environments_table(boards, {**ours, **BOARD_RIVALS}, "auc"),
        "boards_summary": lambda: summary_table(boards, OURS, BOARD_RIVALS),
        "boards_seconds": lambda: seconds_table(boards, OURS, BOARD_RIVALS),
        "atari_evaluation": lambda: environments_table(atari, ATARI, "eval_mean"),
        "atari_area": lambda: environments_table(atari, ATARI, "auc"),
        "seconds": lambda: seconds_table(proof, OURS, CRITICS),
        "seconds_runs": lambda: seconds_runs_table(proof, OURS, CRITICS),
        "units": lambda: environments_table(Suite("units", results), UNITS, "auc"),
        "zoo": lambda: zoo_table(Suite("zoo", results)),
        "groups_claim": lambda: listed(
            [
                claim(groups[name], OURS, WITHOUT_GROUPS["GRPO without groups"], opening)
                for name, opening in GROUPS_CLAIMS.items()
            ]
        ),
        "groups_outcomes": lambda: outcomes_by_environment(groups["inputs"], OURS, {**WITHOUT_GROUPS, **CRITICS}),
        "groups_others": lambda: outcomes_table(groups["others"], OURS, WITHOUT_GROUPS),
        "groups_area": lambda: environments_table(groups["inputs"], SHARED_INPUTS, "auc"),
        "groups_evaluation": lambda: environments_table(groups["inputs"], SHARED_INPUTS, "eval_mean"),
        "variance_removed": lambda: variance_table(groups["inputs"], OURS),
        "clock": lambda: clock.table(read_rows(results / clock.ROWS.name), 1.0),
        "clock_later": lambda: clock.table(read_rows(results / clock.ROWS.name), 5.0),
        "clock_last": lambda: clock.table(read_rows(results / clock.ROWS.name), 10.0),
        "clock_hours": lambda: clock.hours(read_rows(results / clock.ROWS.name)),
        "foreign": lambda: foreign.table(read_rows(results / foreign.ROWS.name)),
        "metrics": lambda: metrics.table(read_rows(results / "metrics.csv")),
        "comparison": lambda: comparison_table(read_rows(results / "comparison.csv")),
    }


def claims(proof: Suite, openings: Mapping[str, str], speed: bool = True) -> str:
    """
    :param proof: Finished runs
    :param openings: Beginnings of sentences by the name of a rival
    :param speed: Whether sentences about speed follow
    :return: The sentences
    """
    sentences = [claim(proof, OURS, RIVALS[name], opening) for name, opening in openings.items()]
    sentences += [speed_claim(proof, OURS, RIVALS[name], opening) for name, opening in SPEEDS.items() if speed]
    return listed(sentences)


def listed(sentences: Sequence[str]) -> str:
    """
    :param sentences: Sentences, or :data:`NO_ROWS` in the place of some
    :return: A list of the sentences, or :data:`NO_ROWS` if there are none
    """
    return "\n".join(f"- {each}" for each in sentences if each != NO_ROWS) or NO_ROWS


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


def draw_figures(results: pathlib.Path, folder: pathlib.Path) -> None:
    """
    :param results: Folder of the rows
    :param folder: Folder of the figures
    """
    proof, inputs = Suite("proof", results), Suite("proof", results, envs=GROUPS["inputs"])
    draw_curves(proof, DRAWN, folder / "benchmark_curves.svg")
    draw_curves(Suite("proof_million", results), RACE, folder / "benchmark_minutes.svg", by_time=True)
    suites = {"all environments": proof, "input-driven environments": inputs}
    curves = {name: curves_by_arm(suite, DRAWN, N_POINTS) for name, suite in suites.items()}
    draw_scores(curves, folder / "benchmark_scores.svg")
    profiles = {measure: scores_by_arm(proof, DRAWN, column) for column, measure in MEASURES.items()}
    draw_profiles(profiles, folder / "benchmark_profiles.svg")
    draw_curves(Suite("minatar", results), {"GRPO": [OURS], **BOARD_RIVALS}, folder / "board_curves.svg")
    draw_curves(Suite("atari", results), ATARI, folder / "atari_curves.svg")
    draw_panels(
        metrics.fit_curves(read_rows(results / metrics.BOARDS_CSV.name)),
        np.linspace(0.0, 1.0, metrics.N_PARTS + 1)[1:],
        ("share of the environment steps", "by the value estimate"),
        folder / "board_fits.svg",
    )


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
    draw_figures(args.results, DOCS)
    print(f"wrote {', '.join(str(page.relative_to(ROOT)) for page in PAGES)} and the figures in docs")


if __name__ == "__main__":
    main()
