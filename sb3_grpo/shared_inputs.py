"""A check whether the members of a group, which act differently, still live through the same inputs, and how much they do."""

import random
from collections.abc import Iterable, Iterator
from contextlib import closing
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import gymnasium as gym
import numpy as np
import torch as th
from stable_baselines3.common.vec_env import VecEnv

from sb3_grpo.advantages import centre_within, differences_from_others, discounted_returns, leave_one_out_factor
from sb3_grpo.baseline import KernelBaseline, calibration_slope, predict_by_fold
from sb3_grpo.fit_inputs import hashed_inputs
from sb3_grpo.observations import same_values
from sb3_grpo.persistence import random_state, set_random_state
from sb3_grpo.relative import correlation_sums, shrunk_correlation
from sb3_grpo.validation import require_at_least

#: Discount factor of the returns, and number of folds of the fit, as GRPO has them by default
GAMMA, N_FOLDS = 0.99, 4
ADVICE = (
    "Training still works, but comparing the members of a group cannot cancel their effect. In an environment of your own, "
    "draw the whole stream of inputs in `reset`, from `self.np_random` after `super().reset(seed=seed)`, and let `step` read "
    "from it; or draw the same amount of random numbers in each step, whatever the action."
)


@dataclass(frozen=True)
class SharedInputs:
    """
    Result of :func:`check_shared_inputs`.

    :param verdict: "shared" if inputs stay in step as far as can be seen, "lost" if they depend on the actions, "not seeded"
        if some random numbers do not come from the seed alone, "unknown" if no copy could be checked
    :param message: What was seen, what it means for training, and how to mend it
    :param share: Share of the variance of returns from the same step that the members of a group have in common and that a fit
        to state and time does not explain, from 0 to 1, for random actions; ``None`` if it was not measured
    """

    verdict: Literal["shared", "lost", "not seeded", "unknown"]
    message: str
    share: float | None = None


class _Step(NamedTuple):
    """Everything that is compared after a reset or a step, and the global generator that it used."""

    outcome: Any
    inputs: Any
    generators: dict[str, Any]
    used: str | None


def check_shared_inputs(
    env: gym.Env, n_steps: int = 200, n_members: int = 4, seed: int = 0, n_groups: int = 32
) -> SharedInputs:
    """
    Play members of groups, which start from the same seed and act differently, and say whether their inputs stay in step, and
    for how much of the returns these account.

    A group shares what its seed fixes only if the inputs do not depend on the actions. They do if ``step`` draws random
    numbers for some actions and not for others: after the same number of steps, the states of the random generators of the
    environment and its wrappers then differ. An environment may expose its inputs as an attribute ``inputs`` (an array, or
    arrays in a dictionary), either all of them or those so far; then these are compared as well. A global random generator
    (``numpy.random``, Python's ``random`` or torch's) is found as well: all environments of a process draw from it in turn.

    It cannot see random numbers that are drawn only for actions that were not played, or by another generator that is no
    attribute of the environment or a wrapper.

    :param env: The environment, wrapped or not; it is reset several times
    :param n_steps: Number of steps to play, if no episode ends before
    :param n_members: Number of members, each with random actions of its own
    :param seed: Seed of the first group's resets; the others have the numbers after it
    :param n_groups: Number of groups that the share is measured with
    :return: The verdict, a message that explains it, and the share
    :raises ValueError: If it is no Gymnasium environment, cannot be reset with a seed, or fails in a step, or if a number is
        out of range
    """
    if not isinstance(env, gym.Env):
        raise ValueError(f"`env` is {env!r}: pass a single environment, such as `gymnasium.make('CartPole-v1')`.")
    require_at_least("n_steps", n_steps, 1)
    require_at_least("n_members", n_members, 2)
    require_at_least("n_groups", n_groups, 2)
    found, share = _check_generators(env, n_steps, n_members, seed), _measure_share(env, n_steps, n_members, seed, n_groups)
    if share is None:
        return found
    measured = f"With random actions, {share:.0%} of the variance of returns is shared and not explained by state and time."
    return replace(found, share=share, message=f"{found.message} {measured}")


def _check_generators(env: gym.Env, n_steps: int = 200, n_members: int = 4, seed: int = 0) -> SharedInputs:
    """:return: :func:`check_shared_inputs` without the share, which takes many episodes"""
    first, again = (_play(env, n_steps, seed, member=0) for _ in range(2))
    for number, seen in enumerate(first):
        if seen.used is not None:
            return SharedInputs(
                "not seeded",
                f"{f'Step {number}' if number else 'The reset'} uses the global generator of {seen.used}: its random numbers "
                f"do not come from the seed alone, because all environments of a process draw from it. {ADVICE}",
            )
    step = _first_difference([seen[:2] for seen in first], [seen[:2] for seen in again])
    if step is not None:
        return SharedInputs(
            "not seeded",
            f"Two episodes with the same seed and the same actions differ from step {step} on: some random numbers do not "
            f"come from the seed. {ADVICE}",
        )
    for member in range(1, n_members):
        other = _play(env, n_steps, seed, member)
        step = _first_difference([seen[1:3] for seen in first], [seen[1:3] for seen in other])
        if step is not None:
            what = "random generators" if same_values(first[step].inputs, other[step].inputs) else "`inputs`"
            return SharedInputs(
                "lost",
                f"The {what} of two members with the same seed and different actions differ from step {step} on: the inputs "
                f"depend on the actions, so that a group does not share them. {ADVICE}",
            )
    what = "random generators" if first[0].inputs is None else "`inputs` and random generators"
    return SharedInputs("shared", f"The {what} of {n_members} members with the same seed and different actions stay equal.")


def check_copy(venv: VecEnv) -> SharedInputs:
    """:return: The verdict for a fresh copy of the first environment. Global generators stay as they are"""
    state = random_state()
    try:
        envs = getattr(venv.unwrapped, "envs", None)
        if not envs:
            raise ValueError("the environments are not in this process")
        if (spec := envs[0].spec) is None:
            raise ValueError("the environment was not made by `gymnasium.make`")
        # A spec does not say how to make SB3's Monitor again. The copy opens no window and records no video.
        wrappers = tuple(wrapper for wrapper in spec.additional_wrappers if wrapper.name != "Monitor")
        kwargs = {key: value for key, value in spec.kwargs.items() if key != "render_mode"}
        with closing(gym.make(replace(spec, additional_wrappers=wrappers, kwargs=kwargs))) as env:
            return _check_generators(env)
    except Exception as error:
        return SharedInputs(
            "unknown",
            f"could not check whether the members of a group share their inputs ({error}): call `check_shared_inputs(env)` "
            "with one of the environments.",
        )
    finally:
        set_random_state(state)


def _measure_share(env: gym.Env, n_steps: int, n_members: int, seed: int, n_groups: int) -> float | None:
    """:return: The share of :class:`SharedInputs`; ``None`` if returns do not vary or a number is not finite"""
    parts = []
    for start in range(n_groups * n_members):
        group_seed = seed + start // n_members
        outcomes = _outcomes(env, group_seed, _random_actions(env, n_steps, group_seed, member=start))
        observations, rewards = [np.array(gym.spaces.flatten(env.observation_space, next(outcomes)))], []
        for observation, reward, *_ in outcomes:
            observations.append(np.array(gym.spaces.flatten(env.observation_space, observation)))
            rewards.append(float(reward))
        length = len(rewards)
        inputs = hashed_inputs(th.tensor(np.stack(observations[:-1]), dtype=th.float64)).numpy()
        returns = discounted_returns(np.array(rewards), np.array([length]), GAMMA)
        parts.append((inputs, returns, np.arange(length), np.full(length, start // n_members)))
    inputs, returns, steps, groups = (np.concatenate(each) for each in zip(*parts, strict=True))
    variance = np.sum(centre_within(returns, steps) ** 2 * leave_one_out_factor(steps))
    if not (variance > 0.0 and np.isfinite(inputs).all()):
        return None
    baseline = KernelBaseline()
    baseline.observe(inputs)
    features, folds = baseline.features(inputs, steps / n_steps, th.float64), th.as_tensor(groups % N_FOLDS)
    # Not LSTD but least squares, and groups stay whole, so that no fit knows what happened to a member.
    weights = baseline.fit(features, th.from_numpy(returns), folds, features, features)
    predicted = predict_by_fold(features, weights, folds).numpy()
    residuals = returns - predicted.mean() - calibration_slope(predicted, returns) * (predicted - predicted.mean())
    peers = np.unique(groups * n_steps + steps, return_inverse=True)[1]
    others = np.where(np.bincount(peers)[peers] > 1, residuals - differences_from_others(residuals, peers), np.nan)
    sums = correlation_sums(residuals, others, groups).sum(axis=0)
    return float(np.clip(shrunk_correlation(sums) * sums[2] / variance, 0.0, 1.0))


def _play(env: gym.Env, n_steps: int, seed: int, member: int) -> list[_Step]:
    actions = list(_random_actions(env, n_steps, seed, member))  # drawn before, as a space may use a global generator
    play, before = [], _global_states()
    for outcome in _outcomes(env, seed, actions):
        play.append(_look(env, outcome, before))
        before = _global_states()
    return play


def _random_actions(env: gym.Env, n_steps: int, seed: int, member: int) -> Iterator[Any]:
    action_space = deepcopy(env.action_space)  # other environments may have the same one
    # With the seed of the reset, the actions would come from the same random numbers as the inputs
    action_space.seed(1_000_003 + seed + member)
    return (action_space.sample() for _ in range(n_steps))


def _outcomes(env: gym.Env, seed: int, actions: Iterable[Any]) -> Iterator[Any]:
    """Yield the first observation of an episode, and then what each step returns, without the info."""
    try:
        yield env.reset(seed=seed)[0]
    except TypeError as error:
        raise ValueError(f"The environment cannot be reset with a seed ({error}): let `reset` accept `seed`.") from error
    for step, action in enumerate(actions, start=1):
        try:
            *outcome, _ = env.step(action)
        except Exception as error:
            raise ValueError(
                f"The environment failed in step {step} of an episode ({error!r}). If `gym.make` gives it a time limit, pass "
                "it as `gym.make` returns it."
            ) from error
        yield outcome
        if outcome[2] or outcome[3]:
            break


def _global_states() -> dict[str, Any]:
    of_numpy: Any = np.random.get_state(legacy=False)
    return {
        "`numpy.random`": (of_numpy["state"]["key"].tobytes(), of_numpy["state"]["pos"], of_numpy["gauss"]),
        "Python's `random`": random.getstate(),
        "torch": th.get_rng_state().numpy().tobytes(),
    }


def _look(env: gym.Env, outcome: Any, before: dict[str, Any]) -> _Step:
    generators: dict[str, Any] = {}
    layers = [env]
    while isinstance(layers[-1], gym.Wrapper):
        layers.append(layers[-1].env)
    for depth, layer in enumerate(layers):
        for name, value in vars(layer).items():
            if isinstance(value, np.random.Generator):
                generators[f"{depth} {name}"] = value.bit_generator.state
            elif isinstance(value, np.random.RandomState):
                generators[f"{depth} {name}"] = value.get_state(legacy=False)
            elif isinstance(value, random.Random):
                generators[f"{depth} {name}"] = np.array(value.getstate()[1])
    after = _global_states()
    used = next((name for name, state in before.items() if state != after[name]), None)
    return _Step(deepcopy(outcome), deepcopy(getattr(env.unwrapped, "inputs", None)), generators, used)


def _first_difference(left: list[Any], right: list[Any]) -> int | None:
    return next((i for i, (mine, other) in enumerate(zip(left, right, strict=False)) if not same_values(mine, other)), None)
