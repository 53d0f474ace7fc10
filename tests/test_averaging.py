"""The average of the weights: what it is, who sees it, and that training does not depend on who looks."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from helpers import BOX, SMALL, make_envs, make_model, reload, same, samples, weights
from stable_baselines3.common.callbacks import BaseCallback
from torch.nn.utils import parameters_to_vector

from sb3_grpo import GRPO, ActorPolicy, MaskableGRPO, load_actor
from sb3_grpo.arithmetic.averaging import WeightAverage

#: Of two environments with rollouts of 16 steps
STEPS = 32
OBSERVED = samples(BOX, 50)[:, [0, 1, 0]].clip(-1, 1)


def natural(seed: int = 0, algorithm: type[GRPO] = GRPO) -> GRPO:
    options: dict[str, Any] = dict(n_steps=16, policy_kwargs=SMALL, rollout_buffer_kwargs=dict(n_features=16))
    envs = make_envs(action_space=BOX if algorithm is GRPO else spaces.Discrete(3))
    return algorithm("MlpPolicy", envs, update_rule="natural", seed=seed, device="cpu", **options)


def learn(model: GRPO, n_steps: int, callback: Any = None) -> GRPO:
    without_masks: dict[str, Any] = dict(use_masking=False) if isinstance(model, MaskableGRPO) else {}
    return model.learn(n_steps, callback, **without_masks)


def vector(model: GRPO) -> th.Tensor:
    return parameters_to_vector(model.policy.parameters()).detach().clone()


class Latest(BaseCallback):
    """Notes the weights that sample each rollout, and does something else on the way."""

    def __init__(self, visit: Any = None) -> None:
        super().__init__()
        self.weights = list[th.Tensor]()
        self.seen = list[Any]()
        self.visit = visit

    def _on_rollout_start(self) -> None:
        self.weights.append(vector(self.model))  # type: ignore[arg-type]

    def _on_step(self) -> bool:
        if self.visit is not None and self.n_calls % 16 == 8:
            self.seen.append(self.visit(self.model))
        return True


def test_after_learning_the_policy_has_the_average():
    # The weights after an update sample the next rollout, so those of the last are seen in a fourth rollout only.
    latest = Latest()
    natural().learn(4 * STEPS, latest)
    # The newest has the share 16/18. Of the rest, the second has 16/17.
    shares = [2 / 18 * 1 / 17, 2 / 18 * 16 / 17, 16 / 18]
    expected = sum(share * each for share, each in zip(shares, latest.weights[1:], strict=True))
    model = natural().learn(3 * STEPS)
    th.testing.assert_close(vector(model), expected)
    assert not th.allclose(vector(model), latest.weights[-1], atol=1e-4)


@pytest.mark.parametrize(("n_updates", "lag"), [(1, 0), (18, 1), (35, 2), (500, 4)])
def test_the_average_lags_by_a_seventeenth_of_the_updates_and_at_most_by_four(n_updates: int, lag: float):
    policy, average = natural().policy, WeightAverage()
    for n in range(1, n_updates + 1):
        for parameter in policy.parameters():
            parameter.data.fill_(n)
        average.add(policy)
    with average.shown(policy):
        shown = parameters_to_vector(policy.parameters())
        th.testing.assert_close(shown, th.full_like(shown, n_updates - lag), rtol=0, atol=1e-3)


def test_clipped_updates_leave_their_last_weights():
    model, latest = make_model(), Latest()
    model.learn(3 * STEPS)
    make_model().learn(4 * STEPS, latest)
    assert th.equal(vector(model), latest.weights[-1])


def fails(model: GRPO) -> None:
    with pytest.raises(ValueError, match="NaN"):
        model.predict(np.full((1, 3), np.nan))


def visits(tmp_path: Path) -> dict[str, Any]:
    return {
        "prediction": lambda model: model.predict(OBSERVED, deterministic=True)[0],
        "prediction that fails": fails,
        "file": lambda model: model.save(tmp_path / "model"),
    }


@pytest.mark.parametrize("visit", ["prediction", "prediction that fails", "file"])
def test_a_run_is_the_same_whoever_looks_at_the_average_on_the_way(visit: str, tmp_path: Path):
    plain, visited = Latest(), Latest(visits(tmp_path)[visit])
    models = [natural().learn(5 * STEPS, callback) for callback in (plain, visited)]
    assert len(visited.seen) == 5
    assert all(map(th.equal, plain.weights, visited.weights))
    assert same(*map(weights, models))


@pytest.mark.parametrize("algorithm", [GRPO, MaskableGRPO])
def test_predictions_during_training_are_those_of_the_average(algorithm: type[GRPO], monkeypatch: pytest.MonkeyPatch):
    acting, predict = list[th.Tensor](), ActorPolicy.predict

    def watched(policy: ActorPolicy, *args: Any) -> Any:
        acting.append(parameters_to_vector(policy.parameters()).detach())
        return predict(policy, *args)

    monkeypatch.setattr(ActorPolicy, "predict", watched)
    latest = Latest(lambda model: model.predict(OBSERVED, deterministic=True))
    learn(natural(algorithm=algorithm), 4 * STEPS, latest)
    assert th.equal(acting[-1], vector(learn(natural(algorithm=algorithm), 3 * STEPS)))
    assert not th.allclose(acting[-1], latest.weights[-1], atol=1e-4)


@pytest.mark.parametrize("how", ["in pieces", "from a file", "from a file of a callback"])
def test_training_goes_on_with_the_last_weights(how: str, tmp_path: Path):
    whole, rest = Latest(), Latest()
    expected = natural().learn(6 * STEPS, whole)
    if how == "from a file of a callback":
        # saved in the fourth rollout, which begins anew
        model = natural()
        model.learn(4 * STEPS - 16, Latest(lambda model: model.save(tmp_path / "model")))
        model = GRPO.load(tmp_path / "model", env=make_envs(action_space=BOX), device="cpu")
    else:
        model = natural().learn(3 * STEPS)
        model = model if how == "in pieces" else reload(model, env=make_envs(action_space=BOX))
    average = vector(model)
    assert not th.equal(average, whole.weights[3])
    model.learn(3 * STEPS, rest, reset_num_timesteps=False)
    assert th.equal(rest.weights[0], whole.weights[3])
    if how == "in pieces":
        assert all(map(th.equal, rest.weights, whole.weights[3:])) and same(weights(model), weights(expected))


def other_weights(model: GRPO, how: str) -> None:
    other = natural(seed=1)
    if how == "load_actor":
        load_actor(model, other)
    elif how == "set_parameters":
        model.set_parameters(other.get_parameters())  # type: ignore[arg-type]
    else:
        with th.no_grad():
            next(model.policy.action_net.parameters()).add_(1.0)


@pytest.mark.parametrize("how", ["load_actor", "set_parameters", "in place"])
def test_weights_that_the_user_gave_to_the_policy_are_trained_and_are_no_part_of_an_average(how: str):
    model, latest = natural().learn(3 * STEPS), Latest()
    other_weights(model, how)
    given = vector(model)
    model.learn(STEPS, latest, reset_num_timesteps=False)
    assert th.equal(latest.weights[0], given)
    assert model.weight_average.n_updates == 1


@pytest.mark.parametrize("how", ["load_actor", "set_parameters", "in place"])
def test_weights_that_a_callback_gives_to_the_policy_act_and_begin_an_average(how: str):
    def visit(model: GRPO) -> tuple[np.ndarray, np.ndarray]:
        if model.num_timesteps > 4 * STEPS:
            other_weights(model, how)
        acting = (of.predict(OBSERVED, deterministic=True)[0] for of in (model, model.policy))
        return next(acting), next(acting)

    model, latest = natural(), Latest(visit)
    model.learn(5 * STEPS, latest)
    differences = [np.abs(one - other).max() for one, other in latest.seen]
    # After the first update, the average is of this one alone.
    assert [difference > 1e-4 for difference in differences] == [False, False, True, True, False]
    assert model.weight_average.n_updates == 1


def test_an_interrupt_leaves_the_average():
    def interrupt(model: GRPO) -> None:
        if model.num_timesteps > 3 * STEPS:
            raise KeyboardInterrupt

    model = natural()
    with pytest.raises(KeyboardInterrupt):
        model.learn(6 * STEPS, Latest(interrupt))
    assert th.equal(vector(model), vector(natural().learn(3 * STEPS)))


def test_a_file_without_the_state_of_the_run_has_the_average_alone():
    model, file = natural().learn(3 * STEPS), io.BytesIO()
    model.save(file, run_state=False)
    file.seek(0)
    loaded, latest = GRPO.load(file, env=make_envs(action_space=BOX), device="cpu"), Latest()
    assert same(weights(loaded), weights(model))
    loaded.learn(STEPS, latest)
    assert th.equal(latest.weights[0], vector(model))
