"""GRPO as users meet it: spaces, wrappers, callbacks, updates and the log. Files are in ``test_saving.py``."""

import csv
import inspect
import itertools
import pathlib
import re
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from helpers import (
    ACTION_SPACES,
    BOX,
    ENDLESS,
    KERNEL_AND_GROUPS,
    OBSERVATIONS,
    OBSERVED,
    SMALL,
    VECTOR,
    AnyEnv,
    Starts,
    Watcher,
    assert_trained,
    flat,
    learned_in_context,
    make_envs,
    make_model,
    mean_return,
    reload,
    same,
    weights,
)
from stable_baselines3 import PPO
from stable_baselines3.common import logger
from stable_baselines3.common.callbacks import BaseCallback, CheckpointCallback, EvalCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from stable_baselines3.common.vec_env import DummyVecEnv

from sb3_grpo import GRPO, Doctor, load_actor
from sb3_grpo.arithmetic.update import MAX_KL
from sb3_grpo.buffers import BUFFERS

DICT = spaces.Dict({"a": VECTOR, "b": spaces.Discrete(4)})

# --- Spaces, wrappers, episodes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "observation_space", "policy_kwargs", "action_space"),
    [
        *[pytest.param(*each.values, spaces.Discrete(3), id=f"{each.id}, Discrete") for each in OBSERVATIONS],
        *[pytest.param("MlpPolicy", VECTOR, SMALL, *each.values, id=f"vector, {each.id}") for each in ACTION_SPACES],
    ],
)
def test_every_kind_of_space_trains(policy: str, observation_space: Any, policy_kwargs: Any, action_space: Any):
    env = make_envs(observation_space=observation_space, action_space=action_space)
    model = make_model(env, policy, policy_kwargs=policy_kwargs, n_epochs=1)
    before = weights(model)
    assert_trained(model.learn(64), before)
    action, _ = model.predict(model.get_env().reset())
    assert all(action_space.contains(np.asarray(single, dtype=action_space.dtype)) for single in action)


@pytest.mark.parametrize("lengths", [(1, 2), (ENDLESS, ENDLESS + 1)], ids=["one step", "endless"])
def test_episodes_of_any_length_are_learned_from_by_default(lengths: tuple[int, int]):
    model = make_model(make_envs(lengths=lengths))
    before = weights(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_trained(model.learn(96), before)


@pytest.mark.parametrize("n_envs", [1, 3, 8])
def test_an_ordinary_run_gives_no_warning(n_envs: int, tmp_path: pathlib.Path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluation = EvalCallback(
            Monitor(gym.make("CartPole-v1")), eval_freq=512 // n_envs, n_eval_episodes=1, best_model_save_path=str(tmp_path)
        )
        checkpoint = CheckpointCallback(512 // n_envs, str(tmp_path))
        env: Any = "CartPole-v1" if n_envs == 1 else make_vec_env("CartPole-v1", n_envs)
        model = GRPO("MlpPolicy", env, n_epochs=1, device="cpu").learn(1024, callback=[evaluation, checkpoint])
    assert evaluation.best_mean_reward > 0
    assert (tmp_path / "best_model.zip").exists()
    # By default, the rollout is a multiple of the batch, near 1024.
    assert model.n_steps * n_envs % model.batch_size == 0
    assert 900 < model.n_steps * n_envs <= 1024


def test_a_rollout_that_the_batch_does_not_divide_gives_a_warning_and_one_that_it_divides_does_not():
    with pytest.warns(UserWarning, match=r"batch_size=16 does not divide .* = 9 \* 2 = 18 transitions: .* of size 2"):
        make_model(n_steps=9)
    make_model(n_steps=8)  # warnings of the package are errors
    make_model(n_steps=7)  # all of it is one minibatch
    make_model(n_steps=9, rollout_buffer_class="outcome")  # the update of this buffer is not a rollout


# --- Rollouts and callbacks -------------------------------------------------------------------------------------------


class Locals(BaseCallback):
    """Records the local variables of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[dict[str, Any]] = []

    def _on_step(self) -> bool:
        copies = ("new_obs", "rewards", "dones", "actions", "clipped_actions")
        self.seen.append({k: np.copy(v) if k in copies else v for k, v in self.locals.items()})
        return True


def test_callbacks_see_the_local_names_that_ppo_gives_them():
    ours, ppos = Locals(), Locals()
    env = make_envs(action_space=BOX)
    make_model(env).learn(32, callback=ours)
    PPO("MlpPolicy", env, n_steps=16, batch_size=16, policy_kwargs=SMALL, device="cpu").learn(32, callback=ppos)
    # `values` belongs to the critic; the others are left over from a loop over the environments.
    expected = set(ppos.seen[0]) - {"values", "idx", "done", "terminal_obs", "terminal_value"}
    assert {"new_obs", "rewards", "dones", "infos", "actions", "clipped_actions", "rollout_buffer", "n_steps"} <= expected
    assert all(expected <= set(seen) for seen in ours.seen)
    assert not {"values", "value_loss"} & set(ours.seen[-1])


def test_the_locals_are_those_of_the_step_that_was_just_taken():
    callback = Locals()
    model = make_model(make_envs(action_space=BOX), normalize_observations=False)
    model.learn(32, callback=callback)
    seen, buffer = callback.seen, model.rollout_buffer
    assert [step["n_steps"] for step in seen] == list(range(16))
    for step, current in enumerate(seen):
        np.testing.assert_array_equal(buffer.observations[:, step], current["obs_tensor"])
        np.testing.assert_array_equal(buffer.actions[:, step], current["actions"])
        np.testing.assert_allclose(buffer.rewards[:, step], current["rewards"])
        np.testing.assert_array_equal(buffer.dones[:, step], current["dones"])
        np.testing.assert_array_equal(buffer.log_probs[:, step], current["log_probs"])
        np.testing.assert_array_equal(current["clipped_actions"], np.clip(current["actions"], BOX.low, BOX.high))
    for current, following in itertools.pairwise(seen):
        np.testing.assert_array_equal(current["new_obs"], following["obs_tensor"])
    assert any((step["clipped_actions"] != step["actions"]).any() for step in seen)


@pytest.mark.parametrize("stop_after", [1, 16, 20])
def test_a_callback_that_returns_false_stops_at_that_step(stop_after: int):
    model, watcher = make_model(), Watcher(stop_after)
    before = weights(model)
    model.learn(320, callback=watcher)
    assert model.num_timesteps == 2 * stop_after
    # Only a complete rollout before the stop has led to an update.
    assert same(before, weights(model)) == (stop_after <= 16)
    assert_trained(model.learn(64, reset_num_timesteps=False), before)


def test_an_evaluation_on_the_training_environment_has_starts_of_its_own():
    model, learning = make_model(group_size=2), Starts()
    model.learn(64, callback=learning)
    firsts = []

    def note(evaluating: dict[str, Any], _: dict[str, Any]) -> None:
        if evaluating["done"]:
            firsts.append(flat(evaluating["env"].get_attr("first_observation", [evaluating["i"]])[0]))

    evaluate_policy(model, model.get_env(), n_eval_episodes=20, callback=note, warn=False)
    assert len(set(firsts)) == len(firsts) >= 20
    assert set(firsts).isdisjoint(learning.firsts.values())
    again, newest = Starts(), max(model.ledger.open_groups())
    model.learn(64, reset_num_timesteps=False, callback=again)
    # The evaluation has moved the environments on, so learning continues with new starts.
    assert min(again.firsts) == (newest + 1, 0)
    assert all(len(group) == 1 for group in again.groups(2))


# --- Reproducible runs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", KERNEL_AND_GROUPS)
def test_a_seed_reproduces_a_run_bit_for_bit_and_another_seed_does_not(buffer: str):
    def run(seed: int) -> dict[str, th.Tensor]:
        return weights(make_model(rollout_buffer_class=buffer, seed=seed).learn(128))

    first = run(3)
    assert same(first, run(3))
    assert not same(first, run(4))


def test_seeding_a_model_again_begins_with_the_first_starts_of_the_new_seed():
    model, again, other = make_model().learn(64), Starts(), Starts()
    model.set_random_seed(5)
    model.learn(64, reset_num_timesteps=False, callback=again)
    make_model(seed=5).learn(64, callback=other)
    assert again.firsts[0, 0] == other.firsts[0, 0]
    assert all(len(group) == 1 for group in again.groups(2))


@pytest.mark.parametrize("fails", [False, True], ids=["ended", "failed"])
def test_trajectories_in_progress_continue_after_learning_that_ended_and_not_after_one_that_failed(fails: bool):
    class Fails(BaseCallback):
        def _on_step(self) -> bool:
            if fails and self.n_calls == 5:
                raise RuntimeError("on purpose")
            return True

    model, watcher = make_model(make_envs(lengths=(50, 60)), group_size=4), Watcher()
    try:
        model.learn(32, callback=Fails())
    except RuntimeError:
        assert fails
    model.learn(32, callback=watcher, reset_num_timesteps=False)
    assert watcher.positions[0].groups.tolist() == ([1, 1] if fails else [0, 0])


@pytest.mark.parametrize(("reset", "timesteps"), [(True, 64), (False, 128)], ids=["reset", "continued"])
def test_learning_twice_counts_on_or_starts_afresh(reset: bool, timesteps: int):
    model, watcher = make_model().learn(64), Watcher()
    newest = max(model.ledger.open_groups())
    model.learn(64, reset_num_timesteps=reset, callback=watcher)
    assert model.num_timesteps == timesteps
    # All environments begin a new group, or each continues the start that it was running.
    assert (watcher.positions[0].groups.min() > newest) == reset


# --- Environments that change or fail ---------------------------------------------------------------------------------


def limited(*limits: int) -> DummyVecEnv:
    return DummyVecEnv([lambda limit=limit: TimeLimit(AnyEnv(), limit) for limit in limits])  # type: ignore[misc]


@pytest.mark.parametrize("buffer", KERNEL_AND_GROUPS)
def test_the_horizon_is_the_time_limit_of_the_current_environment_unless_it_was_passed(buffer: str):
    model = make_model(limited(5000, 7000), rollout_buffer_class=buffer)
    loaded = reload(model)
    assert (model.rollout_buffer.horizon, loaded.rollout_buffer.horizon) == (7000, None)
    for limits, horizon in (((5000, 7000), 7000), ((3, 4), 4)):
        loaded.set_env(limited(*limits))
        loaded.learn(32)
        assert loaded.rollout_buffer.horizon == horizon
    chosen = make_model(limited(5, 5), rollout_buffer_class=buffer, rollout_buffer_kwargs=dict(horizon=50)).learn(32)
    assert chosen.rollout_buffer.horizon == 50


class Broken(AnyEnv):
    """The vector of an observation is NaN from a step on, or from the first reset on."""

    def __init__(self, breaks_at: int, observation_space: spaces.Space = VECTOR):
        super().__init__(observation_space, lengths=(ENDLESS, ENDLESS + 1))
        self.steps_to_break = breaks_at

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        observation, info = super().reset(**kwargs)
        return self._shown(observation), info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.steps_to_break -= 1
        observation, *rest = super().step(action)
        return self._shown(observation), *rest

    def _shown(self, observation: Any) -> Any:
        if self.steps_to_break > 0:
            return observation
        return {**observation, "a": observation["a"] + np.nan} if isinstance(observation, dict) else observation + np.nan


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (Broken(0), "observation in the reset, after 0 timesteps"),
        (Broken(21), r"observation in step 21 of its episode, after 20 timesteps: \[nan nan nan\]"),
        (Broken(5, DICT), "observation under 'a' in step 5 of its episode, after 4 timesteps"),
    ],
    ids=["reset", "step", "part of a Dict"],
)
def test_what_is_not_finite_is_named_with_its_step(env: Broken, message: str):
    policy = "MultiInputPolicy" if isinstance(env.observation_space, spaces.Dict) else "MlpPolicy"
    with pytest.raises(ValueError, match=f"Environment 0 returned a non-finite {message}"):
        make_model(env, policy, share_starts=False).learn(64)


class Dividing(BaseFeaturesExtractor):
    """Not finite if the first number of the observation is zero."""

    def __init__(self, observation_space: spaces.Box):
        super().__init__(observation_space, features_dim=3)

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return observations / observations[:, :1]


def test_a_policy_whose_output_is_not_finite_is_refused():
    env = AnyEnv(spaces.Box(0.0, 0.0, (3,), np.float32))
    model = make_model(env, policy_kwargs=dict(net_arch=[8], features_extractor_class=Dividing))
    with pytest.raises(ValueError, match=r"output of the policy is not finite: .*nan.*features extractor"):
        model.learn(64)


# --- The update -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verbose", [0, 1])
def test_target_kl_stops_an_update_early_and_says_so_as_ppo_does(verbose: int, capsys: pytest.CaptureFixture[str]):
    settings: dict[str, Any] = dict(learning_rate=0.1, n_epochs=10, verbose=verbose)
    assert make_model(**settings, target_kl=np.inf).learn(64, log_interval=None)._n_updates == 20
    assert "Early stopping" not in capsys.readouterr().out
    stopped = make_model(**settings, target_kl=0.01).learn(64, log_interval=None)
    assert 2 <= stopped._n_updates < 10
    assert ("Early stopping at epoch 0 due to reaching max kl: 0." in capsys.readouterr().out) == bool(verbose)


@pytest.mark.parametrize("policy_kwargs", [{}, dict(activation_fn=th.nn.ELU)], ids=["machine code", "torch"])
def test_without_a_target_an_update_ends_after_an_epoch_of_large_divergence_and_says_nothing(
    policy_kwargs: dict[str, Any], capsys: pytest.CaptureFixture[str]
):
    for learning_rate, stops in ((0.1, True), (1e-4, False)):
        model = make_model(learning_rate=learning_rate, n_epochs=10, verbose=1, policy_kwargs=policy_kwargs)
        model.learn(32, log_interval=None)
        assert (model._n_updates < 10) == (model.update_metrics["train/approx_kl"] > MAX_KL) == stops
        assert n_optimizer_steps(model) == {model._n_updates * 32 // model.batch_size}
    assert "Early stopping" not in capsys.readouterr().out


def first_update(model: Any) -> tuple[float, int, dict[str, th.Tensor]]:
    """:return: Estimate from the sampled actions how far an update has gone, its number of epochs, and the weights after it"""
    samples = model.learn(32, log_interval=None).rollout_buffer.update
    log_prob, _ = model.policy.evaluate_actions(samples.observations, samples.actions)
    log_ratio = (log_prob - samples.old_log_prob).detach()
    return (log_ratio.exp() - 1 - log_ratio).mean().item(), model._n_updates, weights(model)


class TorchTanh(th.nn.Tanh):
    """Not known to machine code."""


@pytest.mark.parametrize("action_space", [spaces.Discrete(3), BOX], ids=["Discrete", "Box"])
def test_without_a_target_an_update_goes_no_further_than_the_limit(action_space: Any):
    def make(activation_fn: Any = th.nn.Tanh, **kwargs: Any) -> Any:
        kwargs["policy_kwargs"] = dict(net_arch=[8], activation_fn=activation_fn)
        return make_model(make_envs(action_space=action_space), learning_rate=0.1, update_rule="clipped", **kwargs)

    start = weights(make())
    divergence, n_epochs, near = first_update(make(n_epochs=10))
    too_large, _, far = first_update(make(n_epochs=n_epochs, target_kl=np.inf))
    assert 0.5 * MAX_KL < divergence <= MAX_KL + 1e-5 < too_large
    moved = [name for name in start if not th.equal(start[name], far[name]) and name.endswith(("weight", "bias"))]
    sizes = [((near[name] - start[name]).norm() / (far[name] - start[name]).norm()).item() for name in moved]
    assert sizes == pytest.approx([sizes[0]] * len(sizes), rel=1e-3)
    in_torch, _, others = first_update(make(TorchTanh, n_epochs=10))
    assert in_torch == pytest.approx(divergence, rel=1e-3)
    assert all(th.allclose(near[name], others[name], atol=1e-4) for name in moved)


def n_optimizer_steps(model: Any) -> set[int]:
    return {int(state["step"]) for state in model.policy.optimizer.state.values()}


def test_schedules_follow_the_progress():
    watcher = Watcher()
    high = dict(clip_range_high=lambda progress: 0.2 + progress)
    schedules: dict[str, Any] = dict(clip_range=lambda progress: 0.1 + 0.1 * progress, objective=high)
    make_model(learning_rate=lambda progress: 0.01 * progress, **schedules).learn(32 * 4, callback=watcher)
    logged = watcher.logged[1:]
    assert [update["train/learning_rate"] for update in logged] == pytest.approx([0.0075, 0.005, 0.0025, 0.0])
    assert [update["train/clip_range"] for update in logged] == pytest.approx([0.175, 0.15, 0.125, 0.1])
    assert [update["train/clip_range_high"] for update in logged] == pytest.approx([0.95, 0.7, 0.45, 0.2])
    moved = [not same(*pair) for pair in itertools.pairwise(watcher.weights)]
    assert moved == [True, True, True, False]  # the last learning rate is zero


def test_the_entropy_bonus_raises_the_entropy_and_a_penalty_lowers_it():
    def entropy(ent_coef: float) -> float:
        model = make_model(make_envs(4, action_space=BOX), n_steps=64, batch_size=64, n_epochs=4, ent_coef=ent_coef)
        model.learn(256 * 4)
        with th.no_grad():
            return model.policy.get_distribution(OBSERVED).entropy().mean().item()

    with_bonus, without, with_penalty = entropy(1.0), entropy(0.0), entropy(-1.0)
    assert with_bonus > without + 0.1
    assert with_penalty < without - 0.1


@pytest.mark.parametrize("max_grad_norm", [1e-3, 1e6, np.inf])
def test_the_gradient_is_clipped_to_max_grad_norm(max_grad_norm: float):
    sgd = {**SMALL, "optimizer_class": th.optim.SGD}
    model = make_model(n_epochs=1, batch_size=32, learning_rate=1.0, max_grad_norm=max_grad_norm, policy_kwargs=sgd)
    before = th.nn.utils.parameters_to_vector(model.policy.parameters()).detach().clone()
    model.learn(32)
    length = (th.nn.utils.parameters_to_vector(model.policy.parameters()) - before).norm().item()
    assert length == pytest.approx(min(max_grad_norm, model.update_metrics["train/grad_norm"]), rel=1e-2)
    assert model.update_metrics["train/grad_norm"] > 0.01


class BeforeTheUpdate(BaseCallback):
    """Moves the policy away from the one that sampled, and makes PPO's step with PPO's actor on the same data."""

    def __init__(self, ppo: Any, noise: float, clip_range: float, ent_coef: float):
        super().__init__()
        self.ppo, self.noise, self.clip_range, self.ent_coef = ppo, noise, clip_range, ent_coef
        self.clip_fraction = 0.0

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        with th.no_grad():
            for parameter in self.model.policy.parameters():
                parameter.add_(self.noise * th.randn_like(parameter))
        load_actor(self.ppo, self.model)
        (data,) = self.model.rollout_buffer.get(batch_size=None)  # type: ignore[attr-defined]
        _, log_prob, entropy = self.ppo.policy.evaluate_actions(data.observations, data.actions)
        # stable_baselines3/ppo/ppo.py
        ratio = th.exp(log_prob - data.old_log_prob)
        policy_loss_1 = data.advantages * ratio
        policy_loss_2 = data.advantages * th.clamp(ratio, 1 - self.clip_range, 1 + self.clip_range)
        policy_loss = -th.min(policy_loss_1, policy_loss_2).mean()
        loss = policy_loss - self.ent_coef * th.mean(entropy)
        self.clip_fraction = th.mean((th.abs(ratio - 1) > self.clip_range).float()).item()
        self.ppo.policy.optimizer.zero_grad()
        loss.backward()
        self.ppo.policy.optimizer.step()


@pytest.mark.parametrize("action_space", ACTION_SPACES)
@pytest.mark.parametrize("noise", [0.0, 0.3], ids=["on-policy", "off-policy"])
def test_a_step_on_a_full_batch_is_ppos_step_on_the_same_data(noise: float, action_space: spaces.Space):
    sgd: dict[str, Any] = dict(optimizer_class=th.optim.SGD)
    env = make_envs(action_space=action_space)
    ppo = PPO(
        "MlpPolicy", env, n_steps=8, batch_size=8, learning_rate=0.1, policy_kwargs=dict(net_arch=dict(pi=[8], vf=[8]), **sgd)
    )
    settings: dict[str, Any] = dict(n_epochs=1, batch_size=32, learning_rate=0.1, max_grad_norm=1e6)
    model = make_model(env, ent_coef=0.02, clip_range=0.15, policy_kwargs={**SMALL, **sgd}, **settings)
    load_actor(model, ppo)
    before = weights(model)
    callback = BeforeTheUpdate(ppo, noise, clip_range=0.15, ent_coef=0.02)
    model.learn(32, callback=callback)
    assert (callback.clip_fraction > 0) == (noise > 0)
    ours, expected = weights(model), make_model(env)
    load_actor(expected, ppo)
    assert not same(ours, before)
    for name, value in weights(expected).items():
        th.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reference", [2, "initial"])
def test_an_update_that_fails_halfway_leaves_the_model_as_it_was(reference: Any):
    model = make_model(objective=dict(kl_coef=0.5, adaptive_kl_target=1e3, kl_reference=reference), n_epochs=3).learn(32 * 3)

    def state() -> dict[str, th.Tensor]:
        optimizer = model.policy.optimizer.state_dict()["state"]
        parts = {f"optimizer {i} {name}": value for i, each in optimizer.items() for name, value in each.items()}
        parts |= {f"reference {name}": value for name, value in model.kl_penalty.policy.state_dict().items()}
        numbers = th.tensor([model._n_updates, model.kl_coef, model.kl_penalty.age])
        return {name: th.clone(value) for name, value in {**weights(model), **parts, "numbers": numbers}.items()}

    before, step, n_steps = state(), model.policy.optimizer.step, 0

    def failing_step() -> None:
        nonlocal n_steps
        n_steps += 1
        if n_steps == 4:  # of six
            assert not same(state(), before)
            raise KeyboardInterrupt
        step()

    model.policy.optimizer.step = failing_step
    with pytest.raises(KeyboardInterrupt):
        model.train()
    del model.policy.optimizer.step
    assert same(state(), before)
    model.train()
    after = state()
    assert after["numbers"][0] == before["numbers"][0] + 3 and after["numbers"][1] == 0.5 * before["numbers"][1]
    # The age that the failed update had counted would show here.
    assert after["numbers"][2] == {"initial": before["numbers"][2] + 1, 2: 2}[reference]


def dtypes_of(name: str, tensors: Any) -> set[tuple[str, th.dtype]]:
    return {(name, each.dtype) for each in tensors if isinstance(each, th.Tensor) and each.is_floating_point()}


@pytest.mark.parametrize(
    "options",
    [{}, dict(objective=dict(kl_coef=0.1)), dict(objective=dict(loss_aggregation="trajectory"))],
    ids=["default", "kl", "weights"],
)
def test_everything_that_lives_on_the_device_is_in_single_precision(options: dict[str, Any]):
    """Devices such as Apple's GPUs have no double precision."""
    from sb3_grpo.arithmetic.objective import Objective

    seen: set[tuple[str, th.dtype]] = set()
    evaluate = Objective.evaluate

    def watched(self: Any, policy: Any, rollout_data: Any) -> Any:
        loss = evaluate(self, policy, rollout_data)
        seen.update(dtypes_of("rollout", rollout_data) | dtypes_of("loss", loss))
        return loss

    model = make_model(make_envs(action_space=BOX), **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sb3_grpo.arithmetic.choice.machine_policy", lambda *_, **__: "machine code is for the CPU")
        patch.setattr(Objective, "evaluate", watched)
        model.learn(64)
    assert seen == {("rollout", th.float32), ("loss", th.float32)}


# --- gSDE -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sample_freq", "n_matrices", "squash_output"), [(-1, 1, False), (4, 4, True)])
def test_gsde_draws_its_noise_as_often_as_asked(sample_freq: int, n_matrices: int, squash_output: bool):
    class Noise(Locals):
        def _on_step(self) -> bool:
            super()._on_step()
            self.seen[-1]["noise"] = flat(self.model.policy.action_dist.exploration_mat.detach())  # type: ignore[operator, union-attr]
            return True

    callback = Noise()
    policy_kwargs = {**SMALL, "squash_output": squash_output, "log_std_init": 0.0}
    model = make_model(make_envs(action_space=BOX), use_sde=True, sde_sample_freq=sample_freq, policy_kwargs=policy_kwargs)
    before = weights(model)
    assert_trained(model.learn(32, callback=callback), before)
    noise = [step["noise"] for step in callback.seen]
    assert len(set(noise)) == n_matrices
    assert all(len(set(noise[i : i + 16 // n_matrices])) == 1 for i in range(0, 16, 16 // n_matrices))
    actions = np.concatenate([step["actions"] for step in callback.seen])
    taken = np.concatenate([step["clipped_actions"] for step in callback.seen])
    scaled, clipped = BOX.low + 0.5 * (actions + 1) * (BOX.high - BOX.low), np.clip(actions, BOX.low, BOX.high)
    np.testing.assert_allclose(taken, scaled if squash_output else clipped, rtol=1e-5)
    assert (np.abs(actions) <= 1).all() == squash_output


# --- Logging ----------------------------------------------------------------------------------------------------------

#: What is logged by default and has no counterpart in PPO.
OURS_ALONE = {
    *("rollout/start_mismatches", "rollout/group_size"),
    *("train/advantage_mean", "train/advantage_std", "train/baseline_variance_reduction", "train/clip_fraction_low"),
    *("train/clip_fraction_high", "train/effective_sample_size", "train/grad_norm"),
}


def logged_keys(model: Any, folder: pathlib.Path) -> set[str]:
    model.set_logger(logger.configure(str(folder), ["csv"]))
    model.learn(64)
    model.logger.close()
    with open(folder / "progress.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    # The first row is written before the first update.
    assert all(np.isfinite(float(value)) for value in rows[1].values())
    return set(rows[1])


@pytest.mark.parametrize("action_space", ACTION_SPACES[:2])
def test_the_log_has_what_ppo_logs_without_a_value_loss(action_space: spaces.Space, tmp_path: pathlib.Path):
    ours = logged_keys(make_model(Monitor(AnyEnv(action_space=action_space)), n_steps=32), tmp_path / "grpo")
    ppo = PPO("MlpPolicy", Monitor(AnyEnv(action_space=action_space)), n_steps=32, batch_size=16, device="cpu")
    ppos = logged_keys(ppo, tmp_path / "ppo")
    added = {key for key in ours - ppos - OURS_ALONE if not re.match("train/(baseline|relative|discount|gamma)", key)}
    assert not added and OURS_ALONE <= ours
    assert ppos - ours == {"train/value_loss"}
    assert ("train/std" in ours) == isinstance(action_space, spaces.Box)


class Rows(logger.KVWriter):
    """Records the rows of a log."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, Any], step: int = 0) -> None:
        self.rows.append(dict(key_values))

    def close(self) -> None:
        pass


@pytest.mark.parametrize("buffer", KERNEL_AND_GROUPS)
def test_the_metrics_of_advantages_stand_in_the_row_of_the_update_that_uses_them(buffer: str):
    class Pairs(BaseCallback):
        """Records both kinds of metrics of each update from the model itself."""

        def __init__(self) -> None:
            super().__init__()
            self.pairs: list[tuple[float, float]] = []

        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            model: Any = self.model
            if model.update_metrics:
                advantage_std = model.rollout_buffer.metrics["train/advantage_std"]
                self.pairs.append((advantage_std, model.update_metrics["train/grad_norm"]))

    rows, callback = Rows(), Pairs()
    model = make_model(rollout_buffer_class=buffer)
    model.set_logger(logger.Logger(None, [rows]))
    model.learn(32 * 5, callback=callback)
    logged = [(row["train/advantage_std"], row["train/grad_norm"]) for row in rows.rows if "train/grad_norm" in row]
    assert len(rows.rows) == 5 and len(set(logged)) == 4
    assert logged == callback.pairs
    assert "train/advantage_std" not in rows.rows[0]  # it is written before the first update
    assert all("rollout/start_mismatches" in row for row in rows.rows)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        pytest.param({}, "kernel buffer, groups of 2 (shared starts), rollouts of 32", id="defaults"),
        pytest.param(dict(rollout_buffer_class="stepwise"), "stepwise buffer, groups of 2 (shared", id="buffer"),
        pytest.param(dict(n_steps=8), "rollouts of 16 transitions, clipped updates, observations normalised", id="rollout"),
    ],
)
def test_a_run_begins_with_a_line_about_its_settings(settings: dict[str, Any], line: str, capsys: pytest.CaptureFixture[str]):
    make_model(verbose=1, **settings).learn(16, log_interval=None)
    printed = capsys.readouterr().out
    assert line in printed and printed.count("buffer, groups of") == 1
    make_model(**settings).learn(16)
    assert capsys.readouterr().out == ""


def test_tensorboard_gets_the_curves(tmp_path: pathlib.Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    make_model(tensorboard_log=str(tmp_path)).learn(96, tb_log_name="here")
    events = EventAccumulator(str(tmp_path / "here_1"))
    events.Reload()
    assert {"train/loss", "train/grad_norm", "train/explained_variance"} <= set(events.Tags()["scalars"])
    assert [scalar.step for scalar in events.Scalars("train/loss")] == [64, 96]


# --- No value network -------------------------------------------------------------------------------------------------


def test_nothing_in_the_model_is_named_after_a_value_network():
    model = make_model().learn(32)
    names = [*vars(model), *vars(model.policy), *model.policy.state_dict(), *vars(model.rollout_buffer)]
    assert not [name for name in names if "value" in name or "vf" in name or "critic" in name]
    arguments = set(inspect.signature(GRPO).parameters)
    assert set(inspect.signature(PPO).parameters) - arguments == {"vf_coef", "clip_range_vf"}


# --- Learning ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_cartpole_is_solved_by_default_settings_and_not_without_training():
    untrained, model = (GRPO("MlpPolicy", make_vec_env("CartPole-v1", 8), seed=0, device="cpu") for _ in range(2))
    cartpole, doctor = gym.make("CartPole-v1"), Doctor()
    assert mean_return(model.learn(50_000, callback=doctor), cartpole) >= 475
    assert mean_return(untrained, cartpole) < 100
    assert mean_return(untrained, cartpole, deterministic=False) < 100  # as good as random
    assert doctor.reported == []


@pytest.mark.slow
@pytest.mark.parametrize("buffer", BUFFERS)
def test_every_buffer_learns_where_actions_have_different_rewards(buffer: str):
    settings: dict[str, Any] = dict(rollout_buffer_class=buffer, learning_rate=3e-3)
    assert learned_in_context(0, **settings) < 2.2
    assert learned_in_context(60, **settings) > 3.8


@pytest.mark.slow
@pytest.mark.parametrize(("buffer", "learns"), [("process", False), ("return_to_go", True)])
def test_normalised_rewards_learn_nothing_from_a_constant_reward_and_returns_do(buffer: str, learns: bool):
    env = make_vec_env("CartPole-v1", 8)
    model = make_model(env, rollout_buffer_class=buffer, n_steps=128, batch_size=64, n_epochs=10, learning_rate=1e-3)
    before, doctor = weights(model), Doctor()
    model.learn(1024 * 15, callback=doctor)
    assert same(before, weights(model)) != learns
    assert doctor.reported == ([] if learns else ["tied groups"])
    score = mean_return(model, gym.make("CartPole-v1"), deterministic=False)
    assert (score > 100) == learns
    assert (score < 60) != learns
