"""What the kernel baseline sees of observations, compared with numbers worked out by hand and with slow loops."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from helpers import VECTOR, make_model, samples

from sb3_grpo.fit_inputs import MAX_INPUTS, N_CHANGES, PICTURE_SIZE, FitInputs, hashed_inputs, pooled_pictures
from sb3_grpo.policies import ActorCnnPolicy, ActorPolicy, MultiInputActorPolicy
from sb3_grpo.recurrent import MlpLstmPolicy, MultiInputLstmPolicy

IMAGE = spaces.Box(0, 255, (3, 36, 40), np.uint8)
DISCRETE = spaces.Discrete(2)


# --- hashing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_inputs", [MAX_INPUTS + 1, 2 * MAX_INPUTS, 3 * MAX_INPUTS + 7])
def test_each_input_is_added_to_one_sum_with_a_sign_that_does_not_depend_on_the_others(n_inputs: int):
    unit_sums = hashed_inputs(th.eye(n_inputs))
    assert unit_sums.shape == (n_inputs, MAX_INPUTS)
    for i, sums in enumerate(unit_sums):
        assert abs(sums[i % MAX_INPUTS]) == 1.0 and sums.abs().sum() == 1.0
    inputs = th.as_tensor(np.random.default_rng(0).normal(size=(4, n_inputs)))
    th.testing.assert_close(hashed_inputs(inputs), inputs @ unit_sums.double())


@pytest.mark.parametrize("similar", [False, True], ids=["independent", "smooth as an image"])
def test_hashing_keeps_distances(similar: bool):
    inputs = np.random.default_rng(0).normal(size=(2, 100, 30_000))
    if similar:
        inputs = inputs.cumsum(axis=2) / 100.0
    differences = th.as_tensor(inputs[0] - inputs[1])
    ratios = hashed_inputs(differences).norm(dim=1) / differences.norm(dim=1)
    # Without signs, the distances of the smooth inputs would be fifteen times as large
    assert (ratios.mean() - 1.0).abs() < 0.15 and (ratios - 1.0).abs().max() < 0.4


# --- images -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels_first", [True, False], ids=["channels first", "channels last"])
def test_a_spot_that_moves_is_seen_where_it_was_and_where_it_is(channels_first: bool):
    # Cells of 3 x 6 pixels. The spot has 200 in the first frame, and goes on in the second; a wall stays
    images = np.zeros((2, 3, 42, 84), np.uint8)
    images[1, 0, 4, 13] = 200
    images[1, 1:, 4, 20] = 200
    images[1, :, 41, 83] = 255
    given = images if channels_first else np.ascontiguousarray(images.transpose(0, 2, 3, 1))
    mean, change = pooled_pictures(given).view(2, 2, PICTURE_SIZE, PICTURE_SIZE).unbind(dim=1)
    assert not mean[0].any() and not change[0].any()
    expected = th.zeros(PICTURE_SIZE, PICTURE_SIZE)
    expected[1, 2], expected[1, 3], expected[13, 13] = 200 / 3 / 18, 2 * 200 / 3 / 18, 255 / 18
    th.testing.assert_close(mean[1], expected)
    # Bytes would wrap: 0 - 200 is 56
    expected = th.zeros(PICTURE_SIZE, PICTURE_SIZE)
    expected[1, 2] = expected[1, 3] = 200
    th.testing.assert_close(change[1], expected)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((4, 36, 50), np.uint8), ((61, 36, 2), np.float64), ((3, 100, 100), np.bool_), ((36, 36, 36), np.float32)],
)
def test_images_of_every_size_and_type_are_pooled(shape: tuple[int, ...], dtype: Any):
    images = np.random.default_rng(0).integers(0, 2, (70, *shape)).astype(dtype)
    pictures = pooled_pictures(images).view(70, 2, PICTURE_SIZE, PICTURE_SIZE)
    frames = images.astype(np.float64)
    frames = frames if np.argmin(shape) == 0 and shape[0] < shape[2] else np.moveaxis(frames, -1, 1)
    n_rows, n_columns = frames.shape[2:]
    for row in range(PICTURE_SIZE):
        for column in range(PICTURE_SIZE):
            rows = slice(row * n_rows // PICTURE_SIZE, -(-(row + 1) * n_rows // PICTURE_SIZE))
            columns = slice(column * n_columns // PICTURE_SIZE, -(-(column + 1) * n_columns // PICTURE_SIZE))
            cell = frames[:, :, rows, columns]
            np.testing.assert_allclose(pictures[:, 0, row, column], cell.mean(axis=(1, 2, 3)), rtol=1e-5)
            steps = np.abs(np.diff(cell, axis=1))
            np.testing.assert_array_equal(pictures[:, 1, row, column], steps.max(axis=(1, 2, 3)))


# --- spaces -----------------------------------------------------------------------------------------------------------

PICTURES = 2 * PICTURE_SIZE**2
BOARD = spaces.Box(0.0, 1.0, (5, 4, 3), np.float32)


def make_policy(space: spaces.Space) -> ActorPolicy:
    policy_class = MultiInputActorPolicy if isinstance(space, spaces.Dict) else ActorCnnPolicy
    options: dict[str, Any] = {} if isinstance(space, spaces.Dict) else dict(features_extractor_kwargs=dict(features_dim=7))
    return policy_class(space, DISCRETE, lambda _: 1e-3, normalize_observations=True, **options)


@pytest.mark.parametrize(
    ("space", "size", "n_standardised"),
    [
        pytest.param(IMAGE, PICTURES, 0, id="image"),
        pytest.param(spaces.Dict(b=spaces.Discrete(4), a=IMAGE, c=VECTOR), PICTURES + 4 + 3, 3, id="image and others"),
        pytest.param(spaces.Dict(a=IMAGE, b=IMAGE, c=VECTOR), MAX_INPUTS, 0, id="two images"),
        pytest.param(BOARD, 7, 0, id="board"),
        pytest.param(spaces.Dict(a=BOARD, c=VECTOR), 60 + 3, 0, id="board and others"),
        pytest.param(spaces.Dict(a=BOARD, b=IMAGE), 60 + 256, 0, id="board and image"),
    ],
)
def test_the_inputs_of_a_space(space: spaces.Space, size: int, n_standardised: int):
    policy, observations = make_policy(space), samples(space, 5)
    see = FitInputs(space)
    inputs, standardised = see(observations, policy), see.standardised_by(policy)
    assert inputs.shape == (5, size) and inputs.dtype == np.float64
    assert np.sum(standardised) == n_standardised
    if n_standardised:
        np.testing.assert_allclose(inputs[:, standardised], observations["c"], rtol=1e-6)
        np.testing.assert_array_equal(inputs[:, 4 : 4 + PICTURES], pooled_pictures(observations["a"]))


def test_the_baseline_has_statistics_of_its_own_only_of_inputs_that_the_policy_does_not_standardise():
    for normalizes in (True, False):
        baseline = make_model(normalize_observations=normalizes).learn(64).rollout_buffer.baseline
        statistics = baseline.get_state()["input_statistics"]
        assert (statistics.mean == 0.0).all() == (statistics.var == 1.0).all() == normalizes


# --- changes ----------------------------------------------------------------------------------------------------------


def test_changes_of_the_last_two_steps_are_inputs_with_a_memory_and_none_reach_into_another_episode():
    space, steps = spaces.Box(-np.inf, np.inf, (1,)), np.array([[7, 8, 9, 0, 1]])
    seen, after = np.array([[3.0], [5.0], [4.0], [9.0], [9.5]], np.float32), np.array([[7.0], [10.0]], np.float32)
    memory, none = (cls(space, DISCRETE, lambda _: 1e-3) for cls in (MlpLstmPolicy, ActorPolicy))
    inputs, after_cuts = FitInputs(space).of_rollout(seen, steps, np.array([2, 4]), after, memory)
    np.testing.assert_array_equal(inputs, [[3, 0, 0], [5, 2, 0], [4, -1, 2], [9, 0, 0], [9.5, 0.5, 0]])
    np.testing.assert_array_equal(after_cuts, [[7, 3, -1], [10, 0.5, 0.5]])
    inputs, after_cuts = FitInputs(space).of_rollout(seen, steps, np.array([2, 4]), after, none)
    np.testing.assert_array_equal(inputs, seen)
    np.testing.assert_array_equal(after_cuts, after)


def slow_inputs(observations: list[float], starts: list[bool], last: int) -> list[float]:
    """:return: The observation at an index of a list, and its two last changes, as far as they lie in its episode"""
    begin = max(i for i in range(last + 1) if starts[i] or i == 0)
    at = [observations[max(last - age, begin)] for age in range(N_CHANGES + 1)]
    return [at[0], *(now - before for now, before in itertools.pairwise(at))]


@pytest.mark.parametrize("n_steps", [1, 2, 5, 20])
def test_each_environment_has_the_changes_of_its_own_episodes_in_rollouts_of_any_length(n_steps: int):
    rng, space, n_envs = np.random.default_rng(0), spaces.Box(-np.inf, np.inf, (1,)), 7
    values = rng.normal(size=(n_envs, n_steps + 1)).astype(np.float32)
    starts = rng.random(values.shape) < 0.3
    starts[:, -1] = rng.random(n_envs) < 0.3
    time = np.arange(n_steps + 1)
    # An episode that goes on from the rollout before has 100 steps there
    steps = np.stack([time - np.maximum.accumulate(np.where(row, time, 0 if row[0] else -100)) for row in starts])
    running = np.flatnonzero(~starts[:, -1])
    inputs, after_cuts = FitInputs(space).of_rollout(
        values[:, :-1].reshape(-1, 1),
        steps[:, :-1],
        running * n_steps + n_steps - 1,
        values[running, -1:],
        MlpLstmPolicy(space, DISCRETE, lambda _: 1e-3),
    )
    expected = [[slow_inputs(list(values[e]), list(starts[e]), int(t)) for t in time] for e in range(n_envs)]
    np.testing.assert_allclose(inputs, np.array(expected)[:, :-1].reshape(-1, 3), atol=1e-6)
    np.testing.assert_allclose(after_cuts, np.array(expected)[running, -1], atol=1e-6)


def test_only_observations_are_standardised_by_the_policy_and_not_their_changes():
    space = spaces.Dict(a=VECTOR, b=DISCRETE)
    memory = MultiInputLstmPolicy(space, DISCRETE, lambda _: 1e-3, normalize_observations=True)
    np.testing.assert_array_equal(FitInputs(space).standardised_by(memory), [True] * 3 + [False] * 12)
