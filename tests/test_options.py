"""GRPO's objective options as a user meets them: each alone, at its limits, all together, and in what is logged."""

import itertools
import pathlib
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.vec_env import DummyVecEnv
from test_grpo import (
    ACTION_SPACES,
    BOX,
    ENDLESS,
    OBSERVATIONS,
    SMALL,
    AnyEnv,
    ContextEnv,
    Watcher,
    assert_trained,
    kl_between,
    logged_keys,
    make_envs,
    make_model,
    mean_return,
    reload,
    same,
    weights,
    weights_of,
)

from sb3_grpo import GRPO
from sb3_grpo.buffers import BUFFERS, GroupRolloutBufferSamples

GROUP_BUFFERS = [buffer for buffer in BUFFERS if buffer != "kernel"]
#: Settings under which most ratios leave the clip range.
FAR: dict[str, Any] = dict(clip_range=0.05, learning_rate=0.05, n_epochs=4)


class ComponentsEnv(AnyEnv):
    """Reports its reward and a second number as components."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = super().step(action)
        components = {"mean": reward, "square": float(np.square(action).mean())}
        return observation, reward, terminated, truncated, {**info, "reward_components": components}


def component_envs(n_envs: int = 2, **kwargs: Any) -> DummyVecEnv:
    return DummyVecEnv([lambda: ComponentsEnv(**kwargs)] * n_envs)


def limited_envs() -> DummyVecEnv:
    """Every episode lasts exactly the time limit."""
    return DummyVecEnv([lambda: TimeLimit(AnyEnv(lengths=(ENDLESS, ENDLESS + 1)), 4)] * 2)


def trained(make_env: Any = make_envs, n_updates: int = 4, **kwargs: Any) -> dict[str, th.Tensor]:
    """:return: the weights after some rollouts; those before them were others"""
    model = make_model(make_env(), **kwargs)
    before = weights(model)
    assert_trained(model.learn(32 * n_updates), before)
    return weights(model)


def even_envs() -> DummyVecEnv:
    return make_envs(lengths=(4, 5))


def one_step_envs() -> DummyVecEnv:
    return make_envs(lengths=(1, 2))


def box_envs() -> DummyVecEnv:
    return make_envs(action_space=BOX)


# --- Where an option changes nothing, and where it does -----------------------------------------------------------------


GROUP: dict[str, Any] = dict(rollout_buffer_class="return_to_go")
OUTCOME: dict[str, Any] = dict(rollout_buffer_class="outcome")
PENALTY: dict[str, Any] = dict(kl_coef=1.0)


def falling(progress: float) -> float:
    return 0.01 + 0.1 * progress


def kwargs_of_buffer(**kwargs: Any) -> dict[str, Any]:
    return dict(rollout_buffer_kwargs=kwargs)


@pytest.mark.parametrize(
    ("make_env", "kwargs", "option", "plain"),
    [
        pytest.param(make_envs, FAR, dict(clip_range_high=0.05), {}, id="clip_range_high-equal"),
        pytest.param(
            make_envs, {**FAR, "clip_range": falling}, dict(clip_range_high=falling), {}, id="clip_range_high-same-schedule"
        ),
        pytest.param(make_envs, FAR, dict(dual_clip=1e6), {}, id="dual_clip-infinite"),
        pytest.param(make_envs, {**FAR, **GROUP}, dict(dual_clip=1e6), {}, id="dual_clip-infinite-groups"),
        pytest.param(even_envs, GROUP, dict(loss_aggregation="trajectory"), {}, id="trajectories-of-one-length-groups"),
        pytest.param(even_envs, {}, dict(loss_aggregation="trajectory"), {}, id="trajectories-of-one-length-kernel"),
        pytest.param(limited_envs, GROUP, dict(loss_aggregation="constant"), {}, id="always-the-time-limit-groups"),
        pytest.param(limited_envs, {}, dict(loss_aggregation="constant"), {}, id="always-the-time-limit-kernel"),
        pytest.param(
            one_step_envs, {**FAR, **GROUP}, dict(importance_sampling_level="trajectory"), {}, id="one-step-episodes-groups"
        ),
        pytest.param(one_step_envs, FAR, dict(importance_sampling_level="trajectory"), {}, id="one-step-episodes-kernel"),
        pytest.param(box_envs, GROUP, kwargs_of_buffer(tied_groups="skip"), {}, id="no-ties-to-skip"),
        pytest.param(make_envs, GROUP, kwargs_of_buffer(scale="group"), {}, id="scale-default"),
        pytest.param(make_envs, OUTCOME, kwargs_of_buffer(leave_one_out=False), {}, id="leave_one_out-off"),
        pytest.param(component_envs, GROUP, kwargs_of_buffer(reward_weights={"mean": 1.0}), {}, id="the-reward-as-component"),
        pytest.param(
            make_envs,
            PENALTY,
            dict(kl_reference="polyak", kl_reference_tau=1.0),
            dict(kl_reference="old"),
            id="polyak-all-the-way",
        ),
        pytest.param(
            make_envs,
            PENALTY,
            dict(kl_reference="polyak", kl_reference_tau=0.0),
            dict(kl_reference="initial"),
            id="polyak-never",
        ),
    ],
)
def test_an_option_at_its_limit_leaves_a_run_as_it_is_bit_for_bit(
    make_env: Any, kwargs: dict[str, Any], option: dict[str, Any], plain: dict[str, Any]
):
    assert same(trained(make_env, **kwargs, **option), trained(make_env, **kwargs, **plain))


@pytest.mark.parametrize(
    ("make_env", "kwargs", "option", "plain"),
    [
        pytest.param(make_envs, FAR, dict(clip_range_high=0.3), {}, id="clip_range_high-wider"),
        pytest.param(make_envs, FAR, dict(clip_range_high=0.01), {}, id="clip_range_high-narrower"),
        pytest.param(make_envs, FAR, dict(clip_range_high=falling), {}, id="clip_range_high-schedule"),
        pytest.param(make_envs, FAR, dict(clip_range_high=falling), dict(clip_range_high=0.11), id="clip_range_high-falls"),
        pytest.param(make_envs, FAR, dict(dual_clip=1.05), {}, id="dual_clip"),
        pytest.param(make_envs, {**FAR, **GROUP}, dict(dual_clip=1.05), {}, id="dual_clip-groups"),
        pytest.param(make_envs, GROUP, dict(loss_aggregation="trajectory"), {}, id="trajectories-of-several-lengths-groups"),
        pytest.param(make_envs, {}, dict(loss_aggregation="trajectory"), {}, id="trajectories-of-several-lengths-kernel"),
        pytest.param(make_envs, GROUP, dict(loss_aggregation="constant"), {}, id="shorter-than-the-limit-groups"),
        pytest.param(make_envs, {}, dict(loss_aggregation="constant"), {}, id="shorter-than-the-limit-kernel"),
        pytest.param(even_envs, GROUP, dict(importance_sampling_level="trajectory"), {}, id="whole-trajectories-groups"),
        pytest.param(even_envs, {}, dict(importance_sampling_level="trajectory"), {}, id="whole-trajectories-kernel"),
        pytest.param(make_envs, GROUP, kwargs_of_buffer(tied_groups="skip"), {}, id="ties-to-skip"),
        pytest.param(make_envs, GROUP, kwargs_of_buffer(scale="none"), {}, id="scale-none"),
        pytest.param(make_envs, GROUP, kwargs_of_buffer(scale="batch"), {}, id="scale-batch"),
        pytest.param(make_envs, OUTCOME, kwargs_of_buffer(leave_one_out=True), {}, id="leave_one_out"),
        pytest.param(component_envs, GROUP, kwargs_of_buffer(reward_weights={"square": 1.0}), {}, id="another-component"),
        pytest.param(
            component_envs, GROUP, kwargs_of_buffer(reward_weights={"mean": 1.0, "square": -1.0}), {}, id="two-components"
        ),
        pytest.param(
            make_envs,
            PENALTY,
            dict(kl_reference="polyak", kl_reference_tau=0.3),
            dict(kl_reference="old"),
            id="polyak-and-not-old",
        ),
        pytest.param(
            make_envs,
            PENALTY,
            dict(kl_reference="polyak", kl_reference_tau=0.3),
            dict(kl_reference="initial"),
            id="polyak-and-not-initial",
        ),
        pytest.param(make_envs, PENALTY, dict(adaptive_kl_target=1e-4), {}, id="adaptive_kl_target"),
        pytest.param(make_envs, {}, dict(n_reused_rollouts=1), {}, id="n_reused_rollouts"),
        pytest.param(make_envs, {}, dict(n_reused_rollouts=2), dict(n_reused_rollouts=1), id="n_reused_rollouts-2-and-not-1"),
        pytest.param(make_envs, GROUP, dict(n_reused_rollouts=1), {}, id="n_reused_rollouts-groups"),
    ],
)
def test_an_option_changes_a_run_where_it_should(
    make_env: Any, kwargs: dict[str, Any], option: dict[str, Any], plain: dict[str, Any]
):
    assert not same(trained(make_env, **kwargs, **option), trained(make_env, **kwargs, **plain))


class Ties(BaseCallback):
    """The fraction of tied groups in each update."""

    def __init__(self) -> None:
        super().__init__()
        self.fractions: list[float] = []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        self.fractions.append(self.model.rollout_buffer.metrics["rollout/groups_tied"])  # type: ignore[attr-defined]


def test_the_runs_with_and_without_ties_are_what_they_are_said_to_be():
    without, with_ties = Ties(), Ties()
    make_model(box_envs(), **GROUP).learn(32 * 4, callback=without)
    make_model(**GROUP).learn(32 * 4, callback=with_ties)
    assert without.fractions == [0.0] * 4
    assert 0.0 < max(with_ties.fractions) < 1.0


@pytest.mark.parametrize(("level", "n_steps"), [("step", 4), ("trajectory", 2)])
def test_minibatches_are_of_whole_trajectories_only_where_these_have_ratios_of_their_own(level: str, n_steps: int):
    """32 transitions, of two trajectories, in minibatches of 8."""
    endless = make_envs(lengths=(ENDLESS, ENDLESS + 1))
    model = make_model(endless, batch_size=8, n_epochs=1, importance_sampling_level=level).learn(32)
    assert {int(state["step"]) for state in model.policy.optimizer.state.values()} == {n_steps}


def test_a_clip_range_of_its_own_for_large_ratios_follows_the_progress():
    watcher = Watcher()
    make_model(clip_range=0.1, clip_range_high=falling).learn(32 * 4, callback=watcher)
    logged = watcher.logged[1:]
    assert [update["train/clip_range_high"] for update in logged] == pytest.approx([0.085, 0.06, 0.035, 0.01])
    assert [update["train/clip_range"] for update in logged] == pytest.approx([0.1] * 4)


# --- The adaptive penalty -------------------------------------------------------------------------------------------------


class Coefficients(Watcher):
    """The coefficient of the penalty before each update and after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.kl_coefs: list[float] = []

    def _note(self) -> None:
        super()._note()
        self.kl_coefs.append(self.model.kl_coef)  # type: ignore[attr-defined]


@pytest.mark.parametrize(("target", "factor"), [(1e-9, 2.0), (1e3, 0.5)], ids=["above-the-target", "below-the-target"])
def test_the_coefficient_doubles_where_the_divergence_is_too_large_and_halves_where_it_is_too_small(
    target: float, factor: float
):
    watcher = Coefficients()
    make_model(kl_coef=0.1, adaptive_kl_target=target).learn(32 * 4, callback=watcher)
    assert watcher.kl_coefs == pytest.approx([0.1 * factor**update for update in range(5)])
    # What is logged is the coefficient with which the update was made
    assert [logged["train/kl_coef"] for logged in watcher.logged[1:]] == pytest.approx(watcher.kl_coefs[:-1])


def test_the_coefficient_goes_by_the_divergence_at_the_end_of_the_update_and_not_by_the_whole_update():
    """With a single minibatch the policy is still its own reference while the loss is computed, and no longer at the end."""
    for reference in ("initial", "old", "polyak"):
        model = make_model(kl_coef=0.1, kl_reference=reference, adaptive_kl_target=1e-9, n_epochs=1, batch_size=32)
        before = weights(model)
        model.learn(32)
        assert model.update_metrics["train/kl_loss"] == pytest.approx(0.0, abs=1e-7)
        assert model.update_metrics["train/kl_to_reference"] == pytest.approx(kl_between(weights(model), before), rel=0.5)
        assert model.kl_coef == pytest.approx(0.2)


def divergences(kl_coef: float, target: float | None) -> list[float]:
    """:return: from the initial policy, after each of the last updates of a run"""
    watcher = Watcher()
    make_model(make_envs(4), n_steps=64, batch_size=64, n_epochs=4, kl_coef=kl_coef, adaptive_kl_target=target).learn(
        256 * 16, callback=watcher
    )
    return [kl_between(after, watcher.weights[0]) for after in watcher.weights[-6:]]


@pytest.mark.slow
@pytest.mark.parametrize(("kl_coef", "is_too_far"), [(0.02, True), (20.0, False)], ids=["begins-low", "begins-high"])
def test_an_adaptive_penalty_brings_the_divergence_about_that_a_constant_one_misses(kl_coef: float, is_too_far: bool):
    target = 0.05
    missed = np.median(divergences(kl_coef, None))
    assert missed > 3 * target if is_too_far else missed < target / 3
    assert target / 3 < np.median(divergences(kl_coef, target)) < 3 * target


def test_an_adapted_coefficient_survives_a_file_and_goes_on_from_there():
    model = make_model(kl_coef=0.1, adaptive_kl_target=1e3).learn(96)
    assert model.kl_coef == pytest.approx(0.0125)
    loaded = reload(model, env=make_envs())
    assert loaded.kl_coef == model.kl_coef
    assert loaded.learn(32).kl_coef == pytest.approx(0.00625)


def test_a_coefficient_stays_as_it_is_without_a_target_or_an_update():
    assert make_model(kl_coef=0.1).learn(96).kl_coef == 0.1
    endless = make_envs(lengths=(ENDLESS, ENDLESS + 1))
    assert make_model(endless, kl_coef=0.1, adaptive_kl_target=1e3, **GROUP).learn(96).kl_coef == 0.1


# --- The moving reference -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0.05, 0.5])
def test_a_polyak_reference_is_the_moving_average_of_the_policies_before_each_update(tau: float):
    watcher = Watcher()
    make_model(kl_coef=0.1, kl_reference="polyak", kl_reference_tau=tau).learn(32 * 6, callback=watcher)
    assert watcher.references[0] is None
    average = watcher.weights[0]
    for update in range(1, 7):
        for name, value in watcher.references[update].items():
            th.testing.assert_close(value, average[name], rtol=1e-5, atol=1e-7)
        average = {name: (1 - tau) * value + tau * watcher.weights[update][name] for name, value in average.items()}
    assert all(not same(*pair) for pair in itertools.pairwise(watcher.references[1:]))


def test_a_polyak_reference_survives_a_file_and_goes_on_identically():
    model = make_model(kl_coef=0.5, kl_reference="polyak", kl_reference_tau=0.3, **GROUP).learn(96)
    loaded = reload(model, env=make_envs())
    assert same(weights_of(loaded.kl_reference_policy), weights_of(model.kl_reference_policy))
    assert not same(weights_of(loaded.kl_reference_policy), weights(loaded))
    loaded._random_state = None  # both with the seeds below, instead of the state that the file has kept
    ends = []
    for goes_on in (model, loaded):
        np.random.seed(1)
        th.manual_seed(1)
        before = weights(goes_on)
        assert_trained(goes_on.learn(96), before)
        ends.append((weights(goes_on), weights_of(goes_on.kl_reference_policy)))
    assert same(ends[0][0], ends[1][0])
    assert same(ends[0][1], ends[1][1])


# --- Rollouts that are trained on again -----------------------------------------------------------------------------------


class Updates(BaseCallback):
    """What each update trains on, the log-probabilities of its actions under the policy that it starts from, metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.updates: list[GroupRolloutBufferSamples] = []
        self.starts: list[np.ndarray] = []
        self.log_probs: list[th.Tensor] = []
        self.metrics: list[dict[str, float]] = []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        assert isinstance(self.model, GRPO) and self.model.rollout_buffer._update is not None
        update = self.model.rollout_buffer._update.map(th.clone)
        self.updates.append(update)
        self.starts.append(self.model.rollout_buffer._update_starts.copy())
        self.log_probs.append(self.model.policy.evaluate_actions(update.observations, update.actions)[0].detach())
        self.metrics.append(dict(self.model.rollout_buffer.metrics))


def assert_same_observations(left: GroupRolloutBufferSamples, right: GroupRolloutBufferSamples) -> None:
    parts, others = (
        list(each.values()) if isinstance(each, dict) else [each] for each in (left.observations, right.observations)
    )
    assert all(th.equal(*pair) for pair in zip(parts, others, strict=True))


def updates_of(n_updates: int, **kwargs: Any) -> Updates:
    updates = Updates()
    make_model(**kwargs).learn(32 * n_updates, callback=updates)
    return updates


@pytest.mark.parametrize("n_reused", [1, 3])
def test_an_update_reuses_the_rollouts_before_with_the_probabilities_and_weights_of_the_present_policy(n_reused: int):
    # Far from the policies that sampled, so that some weights are truncated
    updates = updates_of(6, env=box_envs(), n_reused_rollouts=n_reused, learning_rate=0.05)
    own = [update.take(slice(32)) for update in updates.updates]
    truncated = 0
    for index, (update, log_probs) in enumerate(zip(updates.updates, updates.log_probs, strict=True)):
        n_earlier = min(index, n_reused)
        assert len(update.advantages) == 32 * (1 + n_earlier)
        th.testing.assert_close(update.old_log_prob, log_probs, rtol=1e-4, atol=1e-5)
        weights_of_all = []
        for age in range(1, n_earlier + 1):
            reused, sampled = update.take(slice(32 * age, 32 * (age + 1))), own[index - age]
            assert_same_observations(reused, sampled)
            assert th.equal(reused.actions, sampled.actions)
            ratio = th.exp(reused.old_log_prob - sampled.old_log_prob)
            weights_of_all.append(ratio.clamp(max=2.0))
            truncated += int((ratio > 2.0).sum())
            th.testing.assert_close(reused.advantages, sampled.advantages * weights_of_all[-1], rtol=1e-4, atol=1e-6)
        name = "train/reuse_effective_sample_size"
        if n_earlier == 0:
            assert name not in updates.metrics[index]
        else:
            all_weights = th.cat(weights_of_all).double()
            expected = all_weights.sum() ** 2 / (all_weights**2).sum() / len(all_weights)
            assert updates.metrics[index][name] == pytest.approx(expected.item(), rel=1e-4)
    assert truncated > 0


def test_the_first_update_of_a_run_has_nothing_to_reuse():
    assert same(trained(n_updates=1, n_reused_rollouts=3), trained(n_updates=1))


def test_rollouts_before_a_reset_from_outside_are_not_reused():
    updates = Updates()
    model = make_model(n_reused_rollouts=3)
    model.learn(64)
    model.learn(64, callback=updates)
    assert [len(update.advantages) for update in updates.updates] == [32, 64]


def test_a_rollout_that_completes_no_group_makes_no_update_of_those_before():
    # Episodes of 40 steps in rollouts of 16: groups are complete in some rollouts only
    updates = updates_of(10, env=make_envs(lengths=(40, 41)), n_reused_rollouts=2, **GROUP)
    lengths = [len(update.advantages) for update in updates.updates]
    complete = [index for index, length in enumerate(lengths) if length > 0]
    assert 2 <= len(complete) < len(lengths)
    assert lengths[complete[1]] == 2 * lengths[complete[0]] == 160


def test_whole_groups_are_reused_with_their_trajectories():
    updates = updates_of(
        4, n_reused_rollouts=1, importance_sampling_level="trajectory", loss_aggregation="trajectory", **GROUP
    )
    for update, starts in zip(updates.updates, updates.starts, strict=True):
        assert update.weights is not None and len(starts) == len(update.advantages)
        _, trajectories, lengths = np.unique(starts, return_inverse=True, return_counts=True)
        expected = len(starts) / len(lengths) / lengths[trajectories]
        np.testing.assert_allclose(update.weights.numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize(("policy", "space", "policy_kwargs"), OBSERVATIONS)
@pytest.mark.parametrize("buffer", ["kernel", "outcome"])
def test_observations_of_every_kind_are_reused(buffer: str, policy: str, space: spaces.Space, policy_kwargs: dict[str, Any]):
    envs = make_envs(observation_space=space)
    first, second = updates_of(
        2, env=envs, policy=policy, policy_kwargs=policy_kwargs, n_reused_rollouts=1, rollout_buffer_class=buffer
    ).updates
    n_first = len(first.advantages)
    assert 0 < n_first < len(second.advantages)
    assert_same_observations(second.take(slice(-n_first, None)), first)


# --- All together ---------------------------------------------------------------------------------------------------------


ALL: dict[str, Any] = dict(
    clip_range_high=0.3,
    dual_clip=2.0,
    importance_sampling_level="trajectory",
    loss_aggregation="constant",
    adaptive_kl_target=0.01,
    kl_coef=0.1,
    kl_reference="polyak",
    n_reused_rollouts=1,
    ent_coef=0.01,
)


@pytest.mark.parametrize("buffer", BUFFERS)
@pytest.mark.parametrize(
    ("action_space", "use_sde"),
    [*(pytest.param(*space.values, False, id=space.id) for space in ACTION_SPACES), pytest.param(BOX, True, id="gSDE")],
)
def test_all_options_together_train_and_go_on_from_a_file(action_space: spaces.Space, use_sde: bool, buffer: str):
    of_groups: dict[str, Any] = dict(
        tied_groups="skip",
        scale="none",
        reward_weights={"mean": 1.0, "square": -0.5},
        component_aggregation="normalize_then_sum",
    )
    buffer_kwargs = {} if buffer == "kernel" else of_groups
    if buffer == "outcome":
        buffer_kwargs["leave_one_out"] = True
    model = make_model(
        component_envs(action_space=action_space),
        rollout_buffer_class=buffer,
        rollout_buffer_kwargs=buffer_kwargs,
        use_sde=use_sde,
        **ALL,
    )
    before = weights(model)
    assert_trained(model.learn(96), before)
    loaded = reload(model, env=component_envs(action_space=action_space))
    assert same(weights(model), weights(loaded))
    assert all(getattr(loaded, name) == getattr(model, name) for name in ALL if name != "clip_range_high")
    assert loaded.clip_range_high(1.0) == 0.3
    assert all(getattr(loaded.rollout_buffer, name) == value for name, value in buffer_kwargs.items())
    assert_trained(loaded.learn(96), before)
    assert not same(weights(model), weights(loaded))


# --- Learning -------------------------------------------------------------------------------------------------------------


def learned_in_context(n_updates: int, **kwargs: Any) -> float:
    """:return: the mean return of four steps: 4/3 by chance, 4 at best"""
    model = make_model(
        DummyVecEnv([ContextEnv] * 8),
        **{**dict(n_steps=32, batch_size=64, n_epochs=4, gamma=0.5, group_size=4, policy_kwargs={}), **kwargs},
    )
    return mean_return(model.learn(256 * n_updates), ContextEnv(), n_episodes=50)


@pytest.mark.parametrize(
    "option",
    [
        pytest.param(dict(clip_range_high=0.28), id="clip_range_high"),
        pytest.param(dict(dual_clip=3.0), id="dual_clip"),
        pytest.param(dict(importance_sampling_level="trajectory"), id="importance_sampling_level"),
        pytest.param(dict(loss_aggregation="trajectory"), id="loss_aggregation-trajectory"),
        pytest.param(dict(loss_aggregation="constant"), id="loss_aggregation-constant"),
        pytest.param(dict(kl_coef=0.1, adaptive_kl_target=0.5), id="adaptive_kl_target"),
        pytest.param(dict(kl_coef=0.1, kl_reference="polyak"), id="polyak"),
        pytest.param(dict(n_reused_rollouts=2), id="n_reused_rollouts"),
        pytest.param(dict(n_reused_rollouts=1, **GROUP), id="n_reused_rollouts-groups"),
        pytest.param({**GROUP, **kwargs_of_buffer(tied_groups="skip")}, id="tied_groups"),
        pytest.param({**GROUP, **kwargs_of_buffer(scale="batch")}, id="scale-batch"),
        pytest.param({**GROUP, **kwargs_of_buffer(scale="none")}, id="scale-none"),
        pytest.param({**OUTCOME, **kwargs_of_buffer(leave_one_out=True, scale="none")}, id="leave_one_out"),
    ],
)
def test_every_option_learns_where_actions_have_different_rewards(option: dict[str, Any]):
    assert learned_in_context(0, **option) < 2.2
    assert learned_in_context(12, **option) > 2.8


# --- What is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        pytest.param(dict(clip_range_high=0), "`clip_range_high` must be a positive number, not 0", id="clip_range_high-0"),
        pytest.param(dict(clip_range_high=-1), "`clip_range_high` .* not -1", id="clip_range_high-negative"),
        pytest.param(dict(clip_range_high="0.3"), r"`clip_range_high` .* not '0\.3'", id="clip_range_high-text"),
        pytest.param(dict(dual_clip=1.0), r"`dual_clip` .* must be greater than 1, not 1\.0", id="dual_clip-1"),
        pytest.param(dict(dual_clip=0.5), r"`dual_clip` .* must be greater than 1, not 0\.5", id="dual_clip-below-1"),
        pytest.param(dict(dual_clip=0), "`dual_clip` .* not 0", id="dual_clip-0"),
        pytest.param(dict(dual_clip="3"), "`dual_clip` .* not '3'", id="dual_clip-text"),
        pytest.param(
            dict(loss_aggregation="token"),
            "`loss_aggregation` must be 'step', 'trajectory' or 'constant', not 'token'",
            id="loss_aggregation",
        ),
        pytest.param(
            dict(importance_sampling_level="sequence"),
            "`importance_sampling_level` must be 'step' or 'trajectory', not 'sequence'",
            id="importance_sampling_level",
        ),
        pytest.param(
            dict(kl_coef=0.1, adaptive_kl_target=0),
            "`adaptive_kl_target` must be a positive number, not 0",
            id="adaptive_kl_target-0",
        ),
        pytest.param(
            dict(kl_coef=0.1, adaptive_kl_target=-0.1), r"`adaptive_kl_target` .* not -0\.1", id="adaptive_kl_target-negative"
        ),
        pytest.param(
            dict(adaptive_kl_target=0.02),
            r"adaptive_kl_target=0\.02 adapts `kl_coef` between .* not 0\.0",
            id="nothing-to-adapt",
        ),
        pytest.param(
            dict(kl_reference_tau=-0.1),
            r"`kl_reference_tau` must be a finite number from 0 to 1, not -0\.1",
            id="tau-negative",
        ),
        pytest.param(dict(kl_reference_tau=1.5), r"`kl_reference_tau` .* not 1\.5", id="tau-above-1"),
        pytest.param(dict(kl_reference="ema"), "`kl_reference` must be 'old', 'initial', 'polyak' or .* not 'ema'", id="ema"),
        pytest.param(
            {**GROUP, **kwargs_of_buffer(tied_groups="drop")}, "`tied_groups` must be 'keep' or 'skip', not 'drop'", id="tied"
        ),
        pytest.param(
            {**GROUP, **kwargs_of_buffer(scale="std")}, "`scale` must be 'group', 'batch' or 'none', not 'std'", id="scale"
        ),
        pytest.param(
            {**GROUP, **kwargs_of_buffer(reward_weights={})}, "`reward_weights` must be a mapping .* not {}", id="no-weights"
        ),
    ],
)
def test_a_bad_value_of_an_option_is_refused_and_quoted(kwargs: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        make_model(**kwargs)


# --- Diagnostics ----------------------------------------------------------------------------------------------------------


class OwnUpdate(BaseCallback):
    """
    Moves the policy away from the one that sampled, and makes the same update by gradient descent on its own.

    :param noise: standard deviation of the move
    :param n_epochs: steps, each on all transitions
    :param max_grad_norm: norm to which the gradient is clipped
    """

    low, high, learning_rate = 0.1, 0.25, 0.5

    def __init__(self, noise: float, n_epochs: int, max_grad_norm: float):
        super().__init__()
        self.noise, self.n_epochs, self.max_grad_norm = noise, n_epochs, max_grad_norm
        self.grad_norms: list[float] = []
        self.log_ratios: list[np.ndarray] = []
        self.losses: list[float] = []

    def _on_step(self) -> bool:
        return True

    def _on_rollout_end(self) -> None:
        model: Any = self.model
        with th.no_grad():
            for parameter in model.policy.parameters():
                parameter.add_(self.noise * th.randn_like(parameter))
        policy = make_model(model.get_env(), seed=None).policy
        policy.load_state_dict(model.policy.state_dict())
        parameters = list(policy.parameters())
        (data,) = model.rollout_buffer.get(batch_size=None)
        for _ in range(self.n_epochs):
            log_ratio = policy.get_distribution(data.observations).log_prob(data.actions) - data.old_log_prob
            ratio, advantages = log_ratio.exp(), data.advantages
            clipped = th.where(ratio > 1 + self.high, 1 + self.high, th.where(ratio < 1 - self.low, 1 - self.low, ratio))
            loss = -th.minimum(ratio * advantages, clipped * advantages).sum() / len(ratio)
            gradients = th.autograd.grad(loss, parameters)
            norm = sum(float((gradient.double() ** 2).sum()) for gradient in gradients) ** 0.5
            self.grad_norms.append(norm)
            self.losses.append(loss.item())
            self.log_ratios.append(log_ratio.detach().double().numpy())
            with th.no_grad():
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter -= self.learning_rate * min(1.0, self.max_grad_norm / norm) * gradient


@pytest.mark.parametrize("action_space", ACTION_SPACES)
@pytest.mark.parametrize("noise", [0.0, 0.3], ids=["on-policy", "off-policy"])
@pytest.mark.parametrize("n_epochs", [1, 3])
@pytest.mark.parametrize("max_grad_norm", [1e6, 0.05], ids=["whole", "clipped"])
def test_the_figures_logged_are_those_of_the_gradient_and_the_ratios(
    max_grad_norm: float, n_epochs: int, noise: float, action_space: spaces.Space
):
    own, watcher = OwnUpdate(noise, n_epochs, max_grad_norm), Watcher()
    model = make_model(
        make_envs(action_space=action_space),
        n_epochs=n_epochs,
        batch_size=32,
        learning_rate=own.learning_rate,
        clip_range=own.low,
        clip_range_high=own.high,
        max_grad_norm=max_grad_norm,
        policy_kwargs={**SMALL, "optimizer_class": th.optim.SGD},
    )
    model.learn(32, callback=[own, watcher])
    logged = watcher.logged[-1]
    all_ratios, last = np.exp(np.concatenate(own.log_ratios)), own.log_ratios[-1]
    expected = {
        "train/grad_norm": np.mean(own.grad_norms),
        "train/clip_fraction_low": np.mean(all_ratios < 1 - own.low),
        "train/clip_fraction_high": np.mean(all_ratios > 1 + own.high),
        "train/clip_fraction": np.mean((all_ratios < 1 - own.low) | (all_ratios > 1 + own.high)),
        "train/approx_kl": np.mean(np.exp(last) - 1 - last),
        "train/effective_sample_size": np.exp(last).sum() ** 2 / len(last) / (np.exp(last) ** 2).sum(),
        "train/policy_gradient_loss": np.mean(own.losses),
        "train/loss": own.losses[-1],
        "train/clip_range": own.low,
        "train/clip_range_high": own.high,
    }
    assert {name: logged[name] for name in expected} == pytest.approx(expected, rel=2e-3, abs=1e-5)
    assert all(model.update_metrics[name] == logged[name] for name in expected if "range" not in name)
    # The figures are worth comparing
    assert min(own.grad_norms) > 0.05
    assert (expected["train/approx_kl"] > 1e-5) == (noise > 0 or n_epochs > 1)
    if noise:
        assert expected["train/clip_fraction_low"] > 0 and expected["train/clip_fraction_high"] > 0
        assert expected["train/effective_sample_size"] < 0.99


@pytest.mark.parametrize(
    ("option", "keys"),
    [
        pytest.param(dict(clip_range_high=0.3), {"train/clip_range_high"}, id="clip_range_high"),
        pytest.param(dict(kl_coef=0.1), {"train/kl_loss"}, id="kl_coef"),
        pytest.param(
            dict(kl_coef=0.1, adaptive_kl_target=0.1),
            {"train/kl_loss", "train/kl_coef", "train/kl_to_reference"},
            id="adaptive_kl_target",
        ),
        pytest.param(dict(dual_clip=2.0, loss_aggregation="trajectory"), set(), id="neither"),
        pytest.param(dict(importance_sampling_level="trajectory"), set(), id="importance_sampling_level"),
    ],
)
def test_what_belongs_to_an_option_is_logged_with_it_and_only_then(
    option: dict[str, Any], keys: set[str], tmp_path: pathlib.Path
):
    plain = logged_keys(make_model(), tmp_path / "plain")
    other = logged_keys(make_model(**option), tmp_path / "other")
    assert other - plain == keys
    assert plain <= other
    assert {
        f"train/{name}" for name in ("grad_norm", "effective_sample_size", "clip_fraction_low", "clip_fraction_high")
    } <= plain


def test_tensorboard_gets_the_diagnostics(tmp_path: pathlib.Path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options: dict[str, Any] = dict(clip_range_high=0.3, kl_coef=0.1, adaptive_kl_target=0.1)
    make_model(tensorboard_log=str(tmp_path), **options, **GROUP).learn(96, tb_log_name="here")
    events = EventAccumulator(str(tmp_path / "here_1"))
    events.Reload()
    train = ("grad_norm", "effective_sample_size", "clip_fraction_low", "clip_fraction_high", "clip_range_high", "kl_coef")
    rollout = ("groups_completed", "groups_tied", "group_return_mean", "group_return_spread")
    assert {*(f"train/{name}" for name in train), *(f"rollout/{name}" for name in rollout)} <= set(events.Tags()["scalars"])


# --- Components -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buffer", GROUP_BUFFERS)
def test_reward_weights_decide_what_is_learned(buffer: str):
    """A component for each of two actions, and no reward: the policy prefers that of the larger weight."""

    class OneAction(gym.Wrapper):
        def step(self, action: Any) -> Any:
            observation, _, terminated, truncated, info = self.env.step(action)
            components = {"zero": float(action == 0), "two": float(action == 2)}
            return observation, 0.0, terminated, truncated, {**info, "reward_components": components}

    def preferred(reward_weights: dict[str, float] | None) -> np.ndarray:
        env = DummyVecEnv([lambda: OneAction(AnyEnv(lengths=(2, 4)))] * 4)
        model = make_model(
            env,
            n_steps=64,
            batch_size=64,
            n_epochs=4,
            group_size=4,
            rollout_buffer_class=buffer,
            rollout_buffer_kwargs=dict(reward_weights=reward_weights),
        )
        model.learn(256 * 8)
        return model.predict(np.random.default_rng(0).uniform(-1, 1, (100, 3)).astype(np.float32), deterministic=True)[0]

    assert np.mean(preferred({"zero": 1.0, "two": 0.1}) == 0) > 0.9
    assert np.mean(preferred({"zero": 0.1, "two": 1.0}) == 2) > 0.9
