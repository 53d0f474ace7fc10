"""Observations that the policy standardises itself."""

import pathlib
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from helpers import AnyEnv
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.torch_layers import FlattenExtractor

from sb3_grpo import GRPO, ActorPolicy, MultiInputPolicy, load_actor
from sb3_grpo.normalization import ObservationNormalizer, normalized_parts
from sb3_grpo.observations import has_images, space_parts

VECTOR = spaces.Box(-np.inf, np.inf, (3,))
ROLLOUTS = np.random.default_rng(0).normal(5.0, [0.1, 1.0, 100.0], (2, 40, 3)).astype(np.float32)


class Affine(gym.ObservationWrapper):
    """Gives observations in other units."""

    factor, offset = 1.0, 0.0

    def __init__(self, env: gym.Env):
        super().__init__(env)
        self.observation_space = spaces.Box(-np.inf, np.inf, env.observation_space.shape, np.float64)

    def observation(self, observation: np.ndarray) -> np.ndarray:
        return self.factor * observation.astype(np.float64) + self.offset


class Thousandfold(Affine):
    factor, offset = 1000.0, 300.0


class Watcher(BaseCallback):
    """Remembers all observations, and the statistics in use at each step and at the end of each rollout."""

    def __init__(self) -> None:
        super().__init__()
        self.observations: list[np.ndarray] = []
        self.shifts: list[th.Tensor] = []

    def _on_rollout_start(self) -> None:
        self.observations.append(self.model._last_obs)  # type: ignore[arg-type]

    def _on_step(self) -> bool:
        self.observations.append(self.locals["new_obs"])
        self.shifts.append(self.model.policy.normalizer.shift.clone())  # type: ignore[union-attr, operator]
        return True

    def _on_rollout_end(self) -> None:
        self.observations.pop()  # belongs to the next rollout


def make_model(env: Any = "Pendulum-v1", **kwargs: Any) -> GRPO:
    options: dict[str, Any] = dict(n_steps=32, batch_size=16, n_epochs=2, normalize_observations=True, seed=0, device="cpu")
    return GRPO("MlpPolicy", env, **{**options, **kwargs})


def wide_box(*shape: int, dtype: Any = np.float32) -> spaces.Box:
    return spaces.Box(0, 255, shape, dtype)


# --- the statistics ---------------------------------------------------------------------------------------------------


def test_the_statistics_are_those_of_all_observations():
    normalizer = ObservationNormalizer(VECTOR)
    for rollout in ROLLOUTS:
        normalizer.observe(rollout)
    normalizer.renew()
    everything = ROLLOUTS.reshape(-1, 3).astype(np.float64)
    expected = (everything - everything.mean(axis=0)) / everything.std(axis=0)
    np.testing.assert_allclose(normalizer(th.as_tensor(everything)), expected, atol=1e-4)


def test_the_first_observations_are_used_at_once_and_later_ones_only_after_renewal():
    normalizer = ObservationNormalizer(VECTOR)
    x = th.as_tensor(ROLLOUTS[0])
    assert th.equal(normalizer(x / 100.0), x / 100.0)
    normalizer.observe(ROLLOUTS[0])
    first = normalizer(x)
    np.testing.assert_allclose(first.mean(dim=0), 0.0, atol=1e-4)
    normalizer.observe(ROLLOUTS[1] + 1.0)
    assert th.equal(normalizer(x), first)
    normalizer.renew()
    assert not th.equal(normalizer(x), first)


def test_an_input_that_has_never_changed_is_centred_and_not_scaled():
    normalizer = ObservationNormalizer(VECTOR)
    normalizer.observe(np.full((50, 3), [0.0, 0.1, 1e6], dtype=np.float32))
    later = th.tensor([[0.5, 0.6, 1e6 + 0.5]])
    np.testing.assert_allclose(normalizer(later), [[0.5, 0.5, 0.5]], rtol=1e-5)


def test_far_away_observations_are_clipped():
    normalizer = ObservationNormalizer(VECTOR)
    normalizer.observe(ROLLOUTS[0])
    assert normalizer(th.tensor([[-1e9, 1e9, 5.0]]))[0, :2].tolist() == [-10.0, 10.0]


SPACES: dict[str, tuple[spaces.Space, list[str | None]]] = {
    "vector": (wide_box(4), [None]),
    "stacked vectors": (wide_box(3, 4), [None]),
    "image": (wide_box(36, 36, 3, dtype=np.uint8), [None]),
    "float image": (wide_box(36, 36, 3), [None]),
    "small image": (wide_box(35, 35, 3, dtype=np.uint8), []),
    "board": (wide_box(10, 10, 4), []),
    "integers": (wide_box(4, dtype=np.int32), []),
    "small integers": (wide_box(147, dtype=np.uint8), []),
    "discrete": (spaces.Discrete(4), []),
    "dict": (
        spaces.Dict(a=wide_box(2), b=spaces.Discrete(3), c=wide_box(5), d=wide_box(36, 36, 3, dtype=np.uint8)),
        ["a", "c", "d"],
    ),
}


@pytest.mark.parametrize(("space", "names"), SPACES.values(), ids=SPACES)
def test_vectors_of_floats_and_large_images_are_standardised_and_nothing_else(space: spaces.Space, names: list[str | None]):
    assert list(normalized_parts(space)) == names
    without_images = [name for name in names if not has_images(space_parts(space)[name])]
    assert list(normalized_parts(space, normalize_images=False)) == without_images


# --- in training ------------------------------------------------------------------------------------------------------


def test_a_policy_is_the_same_function_throughout_a_rollout_and_its_update(monkeypatch: pytest.MonkeyPatch):
    model, watcher, in_updates = make_model(), Watcher(), []
    update = GRPO._update

    def watched_update(self: GRPO) -> None:
        in_updates.append(self.policy.normalizer.shift.clone())  # type: ignore[union-attr]
        update(self)

    monkeypatch.setattr(GRPO, "_update", watched_update)
    model.learn(3 * 32, callback=watcher)
    of_rollouts = [th.stack(watcher.shifts[first : first + 32]) for first in (0, 32, 64)]
    assert all(th.equal(rollout, rollout[:1].expand_as(rollout)) for rollout in of_rollouts)
    # The first update has the statistics of the first rollout, which had none.
    assert not of_rollouts[0].any()
    assert th.equal(in_updates[0], of_rollouts[1][0])
    assert th.equal(in_updates[1], of_rollouts[1][0])
    assert th.equal(in_updates[2], of_rollouts[2][0])
    assert not th.equal(of_rollouts[1][0], of_rollouts[2][0])
    seen = np.concatenate(watcher.observations[:64])
    np.testing.assert_allclose(of_rollouts[2][0], seen.mean(axis=0), rtol=1e-4, atol=1e-5)
    assert model.policy.normalizer is not None and model.policy.normalizer.count == 96  # each observation counts once


@pytest.mark.parametrize("use_sde", [False, True], ids=["Gaussian", "gSDE"])
def test_importance_ratios_of_the_first_update_begin_at_one(use_sde: bool, monkeypatch: pytest.MonkeyPatch):
    """The policy that samples the first rollout has no statistics yet."""
    ratios = []

    def watched_update(self: GRPO) -> None:
        with th.no_grad():
            for batch in self.rollout_buffer.get():
                log_prob, _ = self.policy.evaluate_actions(batch.observations, batch.actions)
                ratios.append((log_prob - batch.old_log_prob).exp().numpy())

    monkeypatch.setattr(GRPO, "_update", watched_update)
    make_model(make_vec_env("Pendulum-v1", 2, wrapper_class=Affine), use_sde=use_sde).learn(64)
    np.testing.assert_allclose(np.concatenate(ratios), 1.0, rtol=1e-4)


def final_weights(wrapper: Any, **kwargs: Any) -> np.ndarray:
    env = make_vec_env("Pendulum-v1", n_envs=2, seed=0, wrapper_class=wrapper)
    model = make_model(env, learning_rate=0.01, policy_kwargs=dict(net_arch=[8]), **kwargs)
    th.nn.init.zeros_(model.policy.action_net.weight)  # type: ignore[arg-type]
    model.learn(192)
    return np.concatenate([parameter.detach().numpy().ravel() for parameter in model.policy.parameters()])


def test_learning_does_not_depend_on_the_units_of_observations():
    """The policy is the same in both, because its first actions depend on no observation."""
    np.testing.assert_allclose(final_weights(Affine), final_weights(Thousandfold), atol=1e-3)


def test_without_normalisation_it_does():
    without = [final_weights(each, normalize_observations=False) for each in (Affine, Thousandfold)]
    assert np.abs(without[0] - without[1]).max() > 0.05


# --- policies of users ----------------------------------------------------------------------------------------------


class Explicit(ActorPolicy):
    """Takes only the arguments that it knows."""

    def __init__(self, observation_space: Any, action_space: Any, lr_schedule: Any, use_sde: bool = False):
        super().__init__(observation_space, action_space, lr_schedule, [4], use_sde=use_sde)


class Passing(ActorPolicy):
    """Passes on what it does not know."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)


def test_a_policy_that_takes_no_normalisation_is_used_where_there_is_nothing_to_standardise():
    options: dict[str, Any] = dict(n_steps=8, batch_size=8, device="cpu")
    assert GRPO(Explicit, AnyEnv(spaces.Discrete(3)), **options).learn(8).policy.normalizer is None
    assert GRPO(Explicit, AnyEnv(), normalize_observations=False, **options).learn(8).policy.normalizer is None
    with pytest.raises(
        ValueError, match=r"`Explicit` takes no `normalize_observations`, .* pass normalize_observations=False"
    ):
        GRPO(Explicit, AnyEnv(), **options)
    assert GRPO(Passing, AnyEnv(), **options).learn(8).policy.normalizer is not None


# --- saved and copied -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net_arch", [[8], []], ids=["hidden layer", "no hidden layer"])
def test_ppo_gets_the_statistics_in_its_first_layer(net_arch: list[int], tmp_path: pathlib.Path):
    model = make_model(policy_kwargs=dict(net_arch=net_arch), learning_rate=0.01).learn(128)
    model.save(tmp_path / "model.zip")
    observations = np.stack([model.observation_space.sample() for _ in range(20)])
    for source in (model, tmp_path / "model.zip"):
        ppo = PPO("MlpPolicy", "Pendulum-v1", policy_kwargs=dict(net_arch=net_arch), device="cpu")
        load_actor(ppo, source)
        expected = model.predict(observations, deterministic=True)[0]
        np.testing.assert_allclose(ppo.predict(observations, deterministic=True)[0], expected, rtol=1e-4, atol=1e-5)


def test_statistics_are_not_folded_where_the_noise_of_gsde_sees_the_observations():
    kwargs: dict[str, Any] = dict(use_sde=True, device="cpu")
    with_layer, without = dict(policy_kwargs=dict(net_arch=[8])), dict(policy_kwargs=dict(net_arch=[]))
    load_actor(
        PPO("MlpPolicy", "Pendulum-v1", **kwargs, **with_layer), GRPO("MlpPolicy", "Pendulum-v1", **kwargs, **with_layer)
    )
    with pytest.raises(ValueError, match="cannot become part of the target's first layer"):
        load_actor(PPO("MlpPolicy", "Pendulum-v1", **kwargs, **without), GRPO("MlpPolicy", "Pendulum-v1", **kwargs, **without))


def test_the_actor_of_ppo_goes_on_without_statistics(tmp_path: pathlib.Path):
    ppo = PPO("MlpPolicy", "Pendulum-v1", n_steps=64, policy_kwargs=dict(net_arch=[8]), device="cpu").learn(64)
    observations = np.stack([ppo.observation_space.sample() for _ in range(20)])
    model = make_model(policy_kwargs=dict(net_arch=[8])).learn(64)
    load_actor(model, ppo)
    expected = ppo.predict(observations, deterministic=True)[0]
    np.testing.assert_allclose(model.predict(observations, deterministic=True)[0], expected, rtol=1e-5)
    model.save(tmp_path / "model.zip")
    loaded = GRPO.load(tmp_path / "model.zip", device="cpu")
    np.testing.assert_allclose(loaded.predict(observations, deterministic=True)[0], expected, rtol=1e-5)
    model.learn(32)
    assert model.policy.normalizer is None


class Squares(FlattenExtractor):
    """Has no weights, and yet its outputs are not the observations."""

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return super().forward(observations) ** 2


def test_statistics_are_not_folded_into_a_layer_that_sees_no_observations():
    kwargs: dict[str, Any] = dict(policy_kwargs=dict(net_arch=[8], features_extractor_class=Squares), device="cpu")
    model = GRPO("MlpPolicy", "Pendulum-v1", normalize_observations=True, **kwargs)
    with pytest.raises(ValueError, match="cannot become part of the target's first layer"):
        load_actor(PPO("MlpPolicy", "Pendulum-v1", **kwargs), model)


def test_a_reference_with_statistics_is_forgotten_with_them(tmp_path: pathlib.Path):
    ppo = PPO("MlpPolicy", "Pendulum-v1", policy_kwargs=dict(net_arch=[8]), device="cpu")
    model = make_model(objective=dict(kl_coef=0.1, kl_reference=1), policy_kwargs=dict(net_arch=[8])).learn(64)
    load_actor(model, ppo)
    model.learn(64).save(tmp_path / "model.zip")
    GRPO.load(tmp_path / "model.zip", env=model.get_env(), device="cpu").learn(64)


# --- images -----------------------------------------------------------------------------------------------------------

FRAMES = wide_box(2, 36, 40, dtype=np.uint8)


def frames(n: int = 60) -> np.ndarray:
    """Bright pictures, in which a square of three pixels is at another place each time."""
    images = np.full((n, *FRAMES.shape), 200, dtype=np.uint8)
    for image, (row, column) in zip(images, np.random.default_rng(2).integers(0, 30, (n, 2)), strict=True):
        image[:, row : row + 3, column : column + 3] = 255
    return images


def test_images_have_a_mean_for_each_pixel_and_one_standard_deviation():
    normalizer, images = ObservationNormalizer(FRAMES), frames()
    assert th.equal(normalizer(th.from_numpy(images)), th.from_numpy(images) * th.tensor(1 / 255))
    normalizer.observe(images)
    centred = images - images.mean(axis=0)
    expected = (centred / np.sqrt(np.mean(centred**2))).clip(-10, 10)
    for memory_format in (th.contiguous_format, th.channels_last):
        result = normalizer(th.from_numpy(images).contiguous(memory_format=memory_format))
        np.testing.assert_allclose(result, expected, atol=1e-4)
        assert result.is_contiguous(memory_format=memory_format)
    assert (result[:, :, 34:] == 0).all()  # nothing moves there


def test_statistics_of_many_images_are_those_of_a_part_of_them_and_count_all():
    normalizer, images = ObservationNormalizer(FRAMES), frames(300)
    normalizer.observe(images)
    assert normalizer.count == 300
    np.testing.assert_allclose(normalizer.mean.view(FRAMES.shape), images[::2].mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(normalizer.var.view(FRAMES.shape), images[::2].var(axis=0), rtol=1e-4, atol=1e-4)


def test_images_and_vectors_of_a_dict_are_standardised_each_in_their_way():
    space = spaces.Dict(a=FRAMES, b=VECTOR, c=wide_box(5, dtype=np.uint8))
    batch = dict(a=frames(40), b=ROLLOUTS[0], c=np.full((40, 5), 51, dtype=np.uint8))
    policy = MultiInputPolicy(space, spaces.Discrete(2), lambda _: 1e-3, normalize_observations=True)
    assert policy.normalizer is not None
    policy.normalizer.observe(batch)
    seen: list[dict[str, th.Tensor]] = []
    policy.features_extractor.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    policy.extract_features({name: th.from_numpy(part) for name, part in batch.items()})
    for name in ("a", "b"):
        alone = ObservationNormalizer(space[name])
        alone.observe(batch[name])
        th.testing.assert_close(seen[0][name], alone(th.from_numpy(batch[name])))
    assert (seen[0]["c"] == 51).all()


class BrightRoom(gym.Env):
    """A small square shows in a bright picture. The right action is the side on which it is."""

    def __init__(self) -> None:
        self.observation_space, self.action_space = wide_box(1, 36, 36, dtype=np.uint8), spaces.Discrete(2)

    def picture(self) -> np.ndarray:
        picture = np.full((1, 36, 36), 200, dtype=np.uint8)
        self.side, row, column = (int(self.np_random.integers(n)) for n in (2, 33, 15))
        picture[0, row : row + 3, 18 * self.side + column : 18 * self.side + column + 3] = 255
        return picture

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.step_number = 0
        return self.picture(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        reward = float(action == self.side)
        self.step_number += 1
        return self.picture(), reward, False, self.step_number == 16, {}


def test_what_matters_may_be_a_small_part_of_a_bright_picture():
    env = make_vec_env(BrightRoom, 8, seed=0)
    model = GRPO("CnnPolicy", env, n_steps=64, learning_rate=1e-3, seed=0, device="cpu").learn(4096)
    assert evaluate_policy(model, make_vec_env(BrightRoom, 4, seed=1), 20)[0] > 14  # 8 by chance, and without statistics
