"""Exported policies act as ``predict`` does, without this package."""

import pathlib
import subprocess
import sys
import warnings
import zipfile
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from helpers import (
    ACTION_SPACES,
    BOX,
    CHW,
    HWC,
    SMALL,
    SMALL_CNN,
    SMALL_COMBINED,
    VECTOR,
    make_envs,
    make_model,
    samples,
    saved,
    weights,
)
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env

from sb3_grpo import GRPO, ActorPolicy, MaskableGRPO, export_onnx
from sb3_grpo.masks import choices_of

pytest.importorskip("onnxscript")
ort = pytest.importorskip("onnxruntime")

N = 1000
EVERYTHING = spaces.Dict(
    vector=VECTOR, image=CHW, number=spaces.Discrete(4), numbers=spaces.MultiDiscrete([2, 3]), flags=spaces.MultiBinary(3)
)
MATRIX = spaces.Box(-1.0, 1.0, (2, 3), np.float32)
#: The files of models with masks, below, have further actions.
CASES = [
    pytest.param("MlpPolicy", VECTOR, spaces.Discrete(3), {}, id="Discrete"),
    pytest.param("MlpPolicy", VECTOR, spaces.MultiBinary(4), dict(normalize_observations=False), id="MultiBinary, raw"),
    pytest.param("MlpPolicy", VECTOR, BOX, dict(use_sde=True), id="gSDE"),
    pytest.param("MlpPolicy", VECTOR, BOX, dict(use_sde=True, policy_kwargs=dict(squash_output=True, **SMALL)), id="squashed"),
    pytest.param("MlpPolicy", MATRIX, MATRIX, {}, id="matrices"),
    pytest.param("CnnPolicy", HWC, spaces.Discrete(3), dict(learning_rate=1e-5, policy_kwargs=SMALL_CNN), id="channels last"),
    pytest.param("MultiInputPolicy", EVERYTHING, BOX, dict(learning_rate=1e-5, policy_kwargs=SMALL_COMBINED), id="Dict"),
]


def decide(model: Any, observations: Any) -> None:
    """
    Make an actor choose different actions for these observations, and discrete ones by margins. Otherwise noise for an image
    leads to the same action every time, and an untrained actor's logits, which are small, may differ by a rounding error.
    """
    actor = model.policy
    with th.no_grad():
        outputs = actor.action_net(actor._latent(actor.obs_to_tensor(observations)[0]))
        actor.action_net.bias.sub_(outputs.mean(dim=0))
        if not isinstance(model.action_space, spaces.Box):
            for parameter in actor.action_net.parameters():
                parameter.div_(outputs.std())


def played(path: pathlib.Path, observations: Any, **further: Any) -> np.ndarray:
    inputs = observations if isinstance(observations, dict) else {"observation": observations}
    return ort.InferenceSession(path).run(["action"], {**inputs, **further})[0]


@pytest.mark.parametrize(("policy", "observation_space", "action_space", "options"), CASES)
def test_the_file_has_the_actions_of_predict(
    policy: str, observation_space: Any, action_space: Any, options: dict[str, Any], tmp_path: pathlib.Path
):
    model = make_model(make_envs(observation_space=observation_space, action_space=action_space), policy, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some of these models learn nothing
        model.learn(64)
    observations = samples(model.observation_space, N)
    decide(model, observations)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export_onnx(model, tmp_path / "actor.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["actor.onnx"]
    actions, expected = played(tmp_path / "actor.onnx", observations), model.predict(observations, deterministic=True)[0]
    assert actions.dtype == expected.dtype and actions.shape == expected.shape
    if isinstance(action_space, spaces.Box):
        np.testing.assert_allclose(actions, expected, rtol=0, atol=1e-6)
    else:
        np.testing.assert_array_equal(actions, expected)
    assert len(np.unique(expected)) > 1
    one = samples(model.observation_space, 1)  # the batch axis may have any length
    np.testing.assert_allclose(played(tmp_path / "actor.onnx", one), model.predict(one, deterministic=True)[0], atol=1e-6)


def test_actions_beyond_the_bounds_are_clipped_in_the_file(tmp_path: pathlib.Path):
    model = make_model(make_envs(observation_space=VECTOR, action_space=BOX))
    with th.no_grad():
        model.policy.action_net.weight.mul_(1e4)
    export_onnx(model, tmp_path / "actor.onnx")
    actions = played(tmp_path / "actor.onnx", samples(VECTOR, N))
    assert (actions >= BOX.low).all() and (actions <= BOX.high).all()
    assert {(2.0, 1.0), (-2.0, 0.0)} <= set(map(tuple, actions.tolist()))


PLAYER = """
import sys
import numpy as np, onnxruntime
data = np.load(sys.argv[2])
session = onnxruntime.InferenceSession(sys.argv[1])
(actions,) = session.run(["action"], {"observation": data["observation"], "action_masks": data["action_masks"]})
assert not {"torch", "sb3_grpo", "stable_baselines3"} & set(sys.modules)
np.save(sys.argv[3], actions)
"""


@pytest.mark.parametrize("action_space", [space for space in ACTION_SPACES if space.id in ("MultiDiscrete", "MultiBinary")])
def test_a_file_of_a_model_with_masks_takes_masks(action_space: spaces.Space, tmp_path: pathlib.Path):
    envs = make_envs(observation_space=VECTOR, action_space=action_space)
    model = MaskableGRPO("MlpPolicy", envs, seed=0, device="cpu")
    observations, choices = samples(VECTOR, N), choices_of(action_space)
    decide(model, observations)
    export_onnx(model, tmp_path / "actor.onnx")
    masks = np.random.default_rng(0).random((N, sum(choices))) < 0.5
    masks[:, np.cumsum([0, *choices[:-1]])] = True
    actions = played(tmp_path / "actor.onnx", observations, action_masks=masks)
    np.testing.assert_array_equal(actions, model.predict(observations, deterministic=True, action_masks=masks)[0])


def test_a_model_with_normalisation_and_masks_is_saved_loaded_and_played_elsewhere(tmp_path: pathlib.Path):
    env = make_vec_env("benchmarks.tasks:sb3_grpo/FullServers-v0", n_envs=2, env_kwargs=dict(n_jobs=32))
    model = MaskableGRPO("MlpPolicy", env, n_steps=64, seed=0, device="cpu").learn(256)
    observations = samples(model.observation_space, N)
    decide(model, observations)
    loaded = MaskableGRPO.load(saved(model), device="cpu")
    assert loaded.policy.normalizer is not None and loaded.policy.normalizer.count > 0
    export_onnx(loaded, tmp_path / "actor.onnx")
    masks = np.random.default_rng(0).random((N, 10)) < 0.3
    masks[~masks.any(axis=1), 0] = True
    np.savez(tmp_path / "data.npz", observation=observations, action_masks=masks)
    files = [str(tmp_path / name) for name in ("actor.onnx", "data.npz", "actions.npy")]
    subprocess.run([sys.executable, "-c", PLAYER, *files], check=True, cwd=tmp_path)
    actions = np.load(tmp_path / "actions.npy")
    np.testing.assert_array_equal(actions, model.predict(observations, deterministic=True, action_masks=masks)[0])
    assert masks[np.arange(N), actions].all() and len(set(actions.tolist())) > 2


def test_a_policy_that_acts_in_its_own_way_is_refused(tmp_path: pathlib.Path):
    class Own(ActorPolicy):
        def _distribution(self, latent: th.Tensor, action_masks: Any = None) -> Any:
            return super()._distribution(-latent, action_masks)

    model = GRPO(Own, gym.make("CartPole-v1"), device="cpu")
    with pytest.raises(ValueError, match="Own chooses actions in its own way"):
        export_onnx(model, tmp_path / "actor.onnx")
    assert not list(tmp_path.iterdir())


# --- small files ------------------------------------------------------------------------------------------------------


def test_a_file_without_the_state_of_its_run_is_as_small_as_that_of_ppo_and_acts_the_same(tmp_path: pathlib.Path):
    sizes = {}
    name: str
    make: Any
    options: Any
    for name, make, options in (("ppo", PPO, {}), ("whole", GRPO, {}), ("bare", GRPO, dict(run_state=False))):
        model = make("MlpPolicy", "CartPole-v1", n_steps=256, seed=0, device="cpu").learn(512)
        model.save(tmp_path / name, **options)
        with zipfile.ZipFile(tmp_path / f"{name}.zip") as file:
            sizes[name] = file.getinfo("data").file_size
    assert sizes["bare"] < 2 * sizes["ppo"] < 0.2 * sizes["whole"]
    whole, bare = (GRPO.load(tmp_path / name, env=gym.make("CartPole-v1"), device="cpu") for name in ("whole", "bare"))
    assert all(th.equal(each, weights(bare)[key]) for key, each in weights(whole).items())
    before = weights(bare)["action_net.weight"]
    bare.learn(256)
    assert not th.equal(before, weights(bare)["action_net.weight"])
