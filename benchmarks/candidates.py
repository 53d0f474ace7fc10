"""
Which settings should be the default: the score of each candidate, from the rows of the suite `candidates`.

    python -m benchmarks.run --suite candidates_final    # run what is missing of the last stage
    python -m benchmarks.candidates                      # the tables

The score of a run is the mean of its area and its evaluation, each above that of random actions and divided by the same for
the best arm of PPO that was stored in that environment when the search began, and at most 2. The candidate with the largest
interquartile mean over environments and seeds is the best. The reference is a file, `results/ppo.csv`; the rows that it was
made of are those of commit `1af8f9f`.

The second table has the effects of the changes in the factorial design (Box, Hunter & Hunter 2005, "Statistics for
Experimenters", chapter 6), by least squares: where all runs are there, each is the difference of two means, over the half with
the change and the half without.
"""

import argparse
import math
from typing import Any

import numpy as np

from benchmarks.matrix import load_matrix
from benchmarks.results import RESULTS, Suite, read_rows
from benchmarks.statistics import interquartile_mean
from benchmarks.tables import markdown_table

REFERENCE = RESULTS / "ppo.csv"
MAX_SCORE = 2.0
COLUMNS = ("auc", "eval_mean")
#: The arm of the factorial design without changes, the beginning of the names of the others, and the seed that they have
BASE, DESIGN, SEED = "normalised, 1024", "design ", 0


def score(area: np.ndarray, evaluation: np.ndarray, reference: dict[str, str]) -> np.ndarray:
    """
    :param area: Areas of runs, shape ``(n,)``
    :param evaluation: Evaluations after training, shape ``(n,)``
    :param reference: Row of the environment in the file of the reference
    :return: Scores, shape ``(n,)``
    """
    random = float(reference["random"])
    shares = [
        (values - random) / (float(reference[name]) - random) for name, values in (("area", area), ("evaluation", evaluation))
    ]
    return np.minimum(np.mean(shares, axis=0), MAX_SCORE)


def table(suite: Suite, references: dict[str, dict[str, str]]) -> str:
    """
    :param suite: Finished runs of candidates
    :param references: Rows of the reference, by environment
    :return: One line per candidate, the best first: its score, and the mean score in each environment
    """
    envs = list(suite.timesteps)
    lines = []
    for arm in suite.arms:
        by_env: dict[str, dict[int, float]] = {}
        for env in envs:
            seeds = [each.run.seed for each in suite.runs(arm, env)]
            area, evaluation = (suite.values(arm, env, seeds, name) for name in COLUMNS)
            by_env[env] = dict(zip(seeds, score(area, evaluation, references[env]), strict=True))
        means = [float(np.mean(list(each.values()))) if each else math.nan for each in by_env.values()]
        if all(map(math.isnan, means)):
            continue
        common = sorted(set.intersection(*(set(each) for each in by_env.values())))
        total = interquartile_mean(np.array([[by_env[env][seed] for env in envs] for seed in common])) if common else None
        cells = ["" if math.isnan(mean) else f"{mean:.2f}" for mean in means]
        lines.append((total.value if total else -np.inf, [arm, len(common), total or "", *cells]))
    header = ["candidate", "seeds", "score", *(env.removeprefix("sb3_grpo/") for env in envs)]
    return markdown_table(header, [cells for _, cells in sorted(lines, key=lambda line: -line[0])])


def changes_of(settings: dict[str, Any], base: dict[str, Any], prefix: str = "") -> set[str]:
    """
    :param settings: Hyperparameters
    :param base: Other hyperparameters
    :param prefix: Names of the mappings that contain both
    :return: What differs from the others, one ``name=value`` for each
    """
    changes = set()
    for name, value in settings.items():
        if isinstance(value, dict):
            changes |= changes_of(value, base.get(name, {}), f"{prefix}{name}.")
        elif name not in base or base[name] != value:
            changes.add(f"{prefix}{name}={value}")
    return changes


def effects(levels: np.ndarray, scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """
    Least squares with an intercept: ``y = a + sum_j x_j b_j``.

    :param levels: Whether each run has each change, zeros and ones, shape ``(n_runs, n_changes)``
    :param scores: Scores of the runs, shape ``(n_runs, n_columns)``
    :return: Effects ``b`` and their standard errors, shapes ``(n_changes, n_columns)``
    """
    design = np.column_stack([np.ones(len(levels)), levels])
    inverse = np.linalg.inv(design.T @ design)
    weights = inverse @ design.T @ scores
    variances = np.sum((scores - design @ weights) ** 2, axis=0) / (len(design) - design.shape[1])
    return weights[1:], np.sqrt(np.outer(np.diag(inverse)[1:], variances))


def effects_table(suite: Suite, references: dict[str, dict[str, str]], arms: dict[str, Any]) -> str:
    """
    :param suite: Finished runs of candidates
    :param references: Rows of the reference, by environment
    :param arms: Settings of all arms of the matrix
    :return: One line per change of the design: its effect on the score in each environment, with a standard error. Only where
        there are enough runs of the design
    """
    cells: dict[str, dict[str, str]] = {}
    for env in suite.timesteps:
        done = [
            arm for arm in (BASE, *suite.arms) if (arm == BASE or arm.startswith(DESIGN)) and SEED in suite.by_seed(arm, env)
        ]
        has = {arm: changes_of(arms[arm]["set"], arms[BASE]["set"]) for arm in done}
        changes = sorted(set().union(*has.values()))
        if len(has) < len(changes) + 2:
            continue
        columns = [[suite.values(arm, env, [SEED], name) for name in COLUMNS] for arm in has]
        scores = [score(area, evaluation, references[env]) for area, evaluation in columns]
        levels = np.array([[change in each for change in changes] for each in has.values()], dtype=float)
        found, errors = effects(levels, np.array(scores))
        for change, effect, error in zip(changes, found[:, 0], errors[:, 0], strict=True):
            cells.setdefault(change, {})[env] = f"{effect:+.2f} ({error:.2f})"
    envs = [env for env in suite.timesteps if any(env in each for each in cells.values())]
    lines = [[change, *(each.get(env, "") for env in envs)] for change, each in cells.items()]
    return markdown_table(["change", *(env.removeprefix("sb3_grpo/") for env in envs)], lines)


def stored_references() -> dict[str, dict[str, str]]:
    """:return: Rows of the reference, by environment"""
    return {row["env"]: row for row in read_rows(REFERENCE)}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    suite = Suite("candidates")
    print(table(suite, stored_references()))
    print()
    print(effects_table(suite, stored_references(), load_matrix()["arms"]))


if __name__ == "__main__":
    main()
