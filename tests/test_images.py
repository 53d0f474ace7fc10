"""Images and boards: the network for small ones, defaults, and what an update may cost."""

import io
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from helpers import CHW, HWC, VECTOR, AnyEnv
from stable_baselines3.common.atari_wrappers import EpisodicLifeEnv
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.torch_layers import NatureCNN
from torch.utils._python_dispatch import TorchDispatchMode

from sb3_grpo import GRPO, CnnPolicy
from sb3_grpo.extractors import SmallCNN

BOARD = spaces.Box(0.0, 1.0, (5, 5, 3), dtype=bool)  # type: ignore[arg-type]


class Quadrants(gym.Env):
    """A board with a mark, at a place that changes. The action is right if it names the quadrant."""

    def __init__(self, observation_space: spaces.Space = BOARD):
        self.observation_space, self.action_space = observation_space, spaces.Discrete(4)
        self.time = 0

    def _look(self) -> np.ndarray:
        y, x = self.np_random.integers(4, size=2)
        self.quadrant = 2 * (y // 2) + x // 2
        board = np.zeros((5, 5, 3), dtype=bool)
        board[y + (y > 1), x + (x > 1), self.np_random.integers(3)] = True
        board = board if self.observation_space.shape == board.shape else board.transpose(2, 0, 1)
        return board.astype(self.observation_space.dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.time = 0
        return self._look(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.time += 1
        reward = float(action == self.quadrant)
        return self._look(), reward, self.time == 10, False, {}


@pytest.mark.parametrize(
    "space", [BOARD, spaces.Box(0, 1, (3, 5, 5), np.int64)], ids=["yes or no, channels last", "integers, channels first"]
)
def test_boards_are_learned_with_the_default_settings(space: spaces.Space):
    model = GRPO("CnnPolicy", make_vec_env(lambda: Quadrants(space), 8), seed=0, device="cpu")
    before, _ = evaluate_policy(model, make_vec_env(lambda: Quadrants(space), 1, seed=1), 20)
    after, _ = evaluate_policy(model.learn(12_000), make_vec_env(lambda: Quadrants(space), 1, seed=1), 20)
    assert np.mean(before) < 5.0 and np.mean(after) > 9.5


@pytest.mark.parametrize(
    ("shape", "channels_first"),
    [((10, 10, 4), False), ((10, 10, 10), False), ((7, 9, 12), True), ((3, 7, 7), True), ((5, 4, 3), False)],
)
def test_the_channels_are_the_first_axis_if_it_is_the_shortest_and_else_the_last(shape: tuple[int, ...], channels_first: bool):
    extractor = SmallCNN(spaces.Box(0.0, 1.0, shape, np.float32), features_dim=6)
    n_channels = shape[0] if channels_first else shape[2]
    assert extractor.cnn[0].in_channels == n_channels
    pictures = th.rand(2, *shape)
    assert extractor(pictures).shape == (2, 6)
    # A picture that is moved by one square gives the convolution the same numbers, moved by one square
    moved = pictures.roll(1, dims=2 if channels_first else 1)
    rows = 2
    before, after = (
        extractor.cnn[:2](each if channels_first else each.permute(0, 3, 1, 2)).roll(shift, dims=rows)[:, :, 1:]
        for each, shift in ((pictures, 1), (moved, 0))
    )
    th.testing.assert_close(before, after)


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (VECTOR, "`SmallCNN` is for pictures with channels, three axes in all, not for Box"),
        (spaces.Box(0.0, 1.0, (1, 5, 2), np.float32), "Pictures of 5 x 2 are too small"),
        (spaces.Box(0.0, 1.0, (9, 2, 2), np.float32), "Pictures of 9 x 2 are too small"),
    ],
)
def test_a_network_for_pictures_says_what_it_cannot_take(space: spaces.Space, message: str):
    with pytest.raises(ValueError, match=message):
        SmallCNN(space)


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [((36, 36, 3), np.uint8, NatureCNN), ((84, 84, 4), np.uint8, NatureCNN), ((7, 7, 3), np.uint8, SmallCNN),
     ((10, 10, 4), bool, SmallCNN), ((36, 35, 3), np.uint8, SmallCNN)],
)  # fmt: skip
def test_the_network_suits_the_size_of_the_picture(shape: tuple[int, ...], dtype: Any, expected: type):
    high = 255 if dtype is np.uint8 else 1
    model = GRPO("CnnPolicy", AnyEnv(spaces.Box(0, high, shape, dtype)), n_steps=16, batch_size=16, seed=0, device="cpu")
    assert type(model.policy.features_extractor) is expected and model.policy.net_arch == []
    assert model.learn(16).num_timesteps == 16


@pytest.mark.parametrize(
    ("policy", "space", "given", "expected"),
    [
        ("MlpPolicy", VECTOR, None, 10),
        ("CnnPolicy", CHW, None, 4),
        ("CnnPolicy", BOARD, None, 4),
        ("MlpPolicy", BOARD, None, 4),
        ("MultiInputPolicy", spaces.Dict(eye=HWC, speed=VECTOR), None, 4),
        ("CnnPolicy", CHW, 7, 7),
    ],
)
def test_pictures_are_passed_over_four_times_unless_another_number_is_given(
    policy: str, space: spaces.Space, given: int | None, expected: int
):
    model = GRPO(policy, AnyEnv(space), n_epochs=given, n_steps=16, batch_size=16, device="cpu").learn(16)
    assert model.n_epochs == model._n_updates == expected
    file = io.BytesIO()
    model.save(file)
    file.seek(0)
    assert GRPO.load(file, device="cpu").n_epochs == expected


def test_a_model_that_is_saved_and_loaded_judges_pictures_as_before():
    env = make_vec_env(Quadrants, 4, seed=0)
    model = GRPO("CnnPolicy", env, n_steps=16, batch_size=32, learning_rate=1e-2, seed=0, device="cpu").learn(256)
    file = io.BytesIO()
    model.save(file)
    file.seek(0)
    loaded = GRPO.load(file, env=make_vec_env(Quadrants, 4, seed=0), device="cpu")
    pictures = np.stack([Quadrants().reset(seed=seed)[0] for seed in range(8)])
    ours, theirs = (each.rollout_buffer.inputs(pictures, each.policy) for each in (model, loaded))
    np.testing.assert_array_equal(ours, theirs)
    # It is not the present network of the policy that judges
    assert np.abs(ours - model.policy.encode(pictures)).max() > 1e-2


class Waits(TorchDispatchMode):
    """Counts the numbers that Python takes from tensors. On a GPU, it would wait for each of them."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.n += func in (th.ops.aten._local_scalar_dense.default, th.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("policy", "space", "action_space"),
    [
        ("CnnPolicy", CHW, spaces.Discrete(3)),
        ("CnnPolicy", CHW, spaces.MultiDiscrete([2, 3])),
        ("MultiInputPolicy", spaces.Dict(eye=HWC, speed=VECTOR), spaces.MultiBinary(2)),
    ],
)
def test_an_update_does_not_wait_for_its_minibatches(policy: str, space: spaces.Space, action_space: spaces.Space):
    counts = []
    for batch_size in (32, 8):
        env = make_vec_env(lambda: AnyEnv(space, action_space), 2)
        model = GRPO(policy, env, n_steps=16, batch_size=batch_size, target_kl=np.inf, seed=0, device="cpu")
        model.learn(32)
        with Waits() as waits:
            model.train()
        counts.append(waits.n)
    assert counts[0] == counts[1] > 0


def test_the_baseline_encodes_large_pictures_a_few_at_a_time():
    space = spaces.Box(0, 255, (3, 200, 200), np.uint8)
    policy, sizes = CnnPolicy(space, spaces.Discrete(2), lambda _: 1e-3), []
    policy.features_extractor.register_forward_hook(lambda _, given, output: sizes.append(len(given[0])))
    pictures = np.repeat(np.arange(80, dtype=np.uint8), 3 * 200 * 200).reshape(80, *space.shape)
    features = policy.encode(pictures)
    assert features.shape == (80, 512) and sum(sizes) == 80 and max(sizes) * 3 * 200 * 200 <= 2**21
    np.testing.assert_allclose(features[-3:], policy.encode(pictures[-3:]), rtol=1e-4, atol=1e-6)


class Lives(gym.Env):
    """A game of two lives, of three steps each."""

    observation_space, action_space = VECTOR, spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.time, self.start = 0, self.np_random.uniform(-1.0, 1.0, 3).astype(np.float32)
        self.ale = self  # SB3's wrapper asks it for the number of lives
        return self.start, {}

    def lives(self) -> int:
        return 2 - self.time // 3

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.time += 1
        return self.start, 1.0, self.time == 6, False, {}


@pytest.mark.parametrize("lives_are_episodes", [True, False])
def test_starts_are_shared_unless_an_episode_is_a_life(lives_are_episodes: bool, recwarn: pytest.WarningsRecorder):
    wrapper = EpisodicLifeEnv if lives_are_episodes else None
    model = GRPO("MlpPolicy", make_vec_env(Lives, 4, wrapper_class=wrapper), n_steps=16, seed=0, device="cpu").learn(128)
    assert model._seeded_env is not None and model._seeded_env.share_starts is not lives_are_episodes
    assert not [str(each.message) for each in recwarn if "start" in str(each.message)]
    lengths = {episode["l"] for episode in model.ep_info_buffer or ()}
    assert lengths == {6}  # Monitor is inside, and counts games
