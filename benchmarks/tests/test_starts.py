"""The rules with which that of the package is compared."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch as th
from stable_baselines3.common.env_util import make_vec_env

from benchmarks import starts
from benchmarks.curves import TrainingCurve
from benchmarks.matrix import load_matrix
from benchmarks.starts import AnyStart, ByAdvantage, Repeats
from sb3_grpo import GRPO
from sb3_grpo.starts.choice import EndedGroup


def fresh(number: int, *returns: float) -> EndedGroup:
    return EndedGroup(number, 100 + number, True, returns)


def test_any_start_is_repeated_however_its_groups_end() -> None:
    choice = AnyStart(1.0)
    choice.record([*[fresh(0, 0, 0)] * 4, fresh(1, 0, 1), fresh(2, 1, 1)])
    choice.record([EndedGroup(3, 102, False, (1, 1))])
    drawn = [choice.draw((0.0, u)) for u in (0.1, 0.5, 0.9)]
    assert drawn == [100, 101, 102]


def test_replay_by_advantage_prefers_the_largest_mean_and_plays_stale_starts() -> None:
    """Group 1 spans two rollouts: its mean is over both."""
    buffer: Any = SimpleNamespace()
    choice = ByAdvantage(1.0, buffer)
    for groups, advantages, ended in (
        ([[0, 0, 1]], [1.0, -3.0, 5.0], [fresh(0, 0, 0)]),
        ([[1, 1, 2]], [-3.0, 1.0, 2.5], [fresh(1, 0, 0), fresh(2, 0, 0)]),
    ):
        buffer.groups = np.array(groups)
        buffer.update = SimpleNamespace(advantages=th.tensor(advantages))
        choice.record(ended)
    assert {seed: start.score for seed, start in choice.pool.items()} == {100: 2.0, 101: 3.0, 102: 2.5}
    by_seed = dict(zip(choice.pool, choice._weights(), strict=True))
    assert by_seed[101] > 0.89 and by_seed[100] > 0.09 > by_seed[102]


@pytest.mark.parametrize("rule", Repeats.__subclasses__())
def test_the_callbacks_of_the_matrix_replace_the_rule(rule: type[Repeats]) -> None:
    names = [arm["set"].get("callback") for arm in load_matrix()["arms"].values() if "set" in arm]
    assert f"{rule.__module__}.{rule.__name__}" in names
    model = GRPO("MlpPolicy", make_vec_env("CartPole-v1", 4), repeat_starts=0.5, n_steps=64, seed=0, device="cpu")
    model.learn(1024, callback=rule())
    assert model.ledger is not None and type(model.ledger.choice) is rule.rule and len(model.ledger.choice.pool) > 5


def test_the_curve_of_a_training_leaves_out_episodes_that_repeat_a_start() -> None:
    model = GRPO(
        "MlpPolicy", make_vec_env("CartPole-v1", 1, seed=0), n_steps=256, seed=0, device="cpu", stats_window_size=1000
    )
    curve = TrainingCurve()
    assert model.ledger is not None
    model.ledger.choice = always(model)
    model.learn(256 * 4, callback=curve)
    assert curve.returns == [episode["r"] for episode in model.ep_info_buffer or ()]
    n_episodes = 2 * model.ledger.position.groups[0] + model.ledger.position.members[0]
    assert 5 < len(curve.returns) < 0.9 * n_episodes


def always(model: Any) -> AnyStart:
    """:return: A rule that repeats half of the groups from the second rollout on"""

    class Always(AnyStart):
        @property
        def probability(self) -> float:
            return 0.5 if self.pool else 0.0

    model.repeat_starts = 0.5
    return Always(0.5)


def test_the_figure_is_drawn_from_a_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starts, "TIMESTEPS", 4096)
    curve, history = starts.train(0.5)
    assert len(curve.returns) > 5
    assert all(0 < first <= last <= 4096 for first, last in history.stays.values())
