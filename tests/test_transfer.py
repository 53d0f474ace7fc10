"""Copying actors between models, with and without a critic."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch as th
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.envs import FakeImageEnv
from torch import nn

from sb3_grpo import GRPO, load_actor

SMALL_CNN: dict[str, Any] = dict(net_arch=[8], features_extractor_kwargs=dict(features_dim=8))
OWN_EXTRACTORS = dict(SMALL_CNN, share_features_extractor=False)


def make_model(cls: Any = GRPO, env: Any = "Pendulum-v1", policy: str = "MlpPolicy", **kwargs: Any) -> Any:
    """A model whose weights are its own: none is at its initial value."""
    model = cls(policy, env, device="cpu", **{"policy_kwargs": dict(net_arch=[8]), **kwargs})
    with th.no_grad():
        for parameter in model.policy.parameters():
            parameter.add_(0.3 * th.randn_like(parameter))
    return model


def make_image_model(cls: Any, policy_kwargs: dict[str, Any]) -> Any:
    env = FakeImageEnv(screen_height=36, screen_width=36, discrete=False)
    options = dict(n_steps=8, batch_size=8) if cls is PPO else dict(n_steps=8, batch_size=8, share_starts=False)
    return make_model(cls, env, "CnnPolicy", policy_kwargs=policy_kwargs, **options)


def state_of(model: Any) -> dict[str, th.Tensor]:
    return {key: value.clone() for key, value in model.policy.state_dict().items()}


PPO_AND_OURS: dict[str, Callable[[], tuple[Any, Any, Any]]] = {
    "vector": lambda: (make_model(PPO), make_model(), make_model(PPO)),
    "gSDE": lambda: (make_model(PPO, use_sde=True), make_model(use_sde=True), make_model(PPO, use_sde=True)),
    "images": lambda: (*(make_image_model(cls, SMALL_CNN) for cls in (PPO, GRPO)), make_image_model(PPO, SMALL_CNN)),
    "images, critic with its own extractor": lambda: (
        make_image_model(PPO, OWN_EXTRACTORS),
        make_image_model(GRPO, SMALL_CNN),
        make_image_model(PPO, OWN_EXTRACTORS),
    ),
}


@pytest.mark.parametrize("make", PPO_AND_OURS.values(), ids=PPO_AND_OURS)
def test_an_actor_goes_from_ppo_through_ours_to_another_ppo_whose_critic_stays(
    make: Callable[[], tuple[Any, Any, Any]], tmp_path: pathlib.Path
):
    first, ours, second = make()
    before, wanted = state_of(second), state_of(first)
    optimizer, parameters = second.policy.optimizer, list(second.policy.parameters())
    first.save(tmp_path / "first.zip")
    load_actor(ours, first)
    copied = state_of(ours)
    load_actor(ours, second)
    load_actor(ours, tmp_path / "first.zip")
    assert all(th.equal(value, copied[key]) for key, value in state_of(ours).items())
    load_actor(ours, second)
    load_actor(ours, first.policy)
    assert all(th.equal(value, copied[key]) for key, value in state_of(ours).items())
    load_actor(second, ours)
    # Under `vf_features_extractor`, PPO lists an extractor that the critic shares with the actor a second time.
    shares = second.policy.share_features_extractor
    critic = [key for key in before if "value_net" in key or (key.startswith("vf_") and not shares)]
    assert len(critic) >= 4
    for key, value in state_of(second).items():
        assert th.equal(value, (before if key in critic else wanted)[key]), key
        assert not th.equal(before[key], wanted[key])
    # In place, and without sharing memory.
    assert second.policy.optimizer is optimizer
    assert all(old is new for old, new in zip(parameters, second.policy.parameters(), strict=True))
    assert second.policy.action_net.weight.data_ptr() != ours.policy.action_net.weight.data_ptr()
    obs = th.as_tensor(second.observation_space.sample()[None])
    th.testing.assert_close(ours.policy(obs, deterministic=True)[0], first.policy(obs, deterministic=True)[0])


def test_the_extractor_of_the_actor_is_copied_where_that_of_the_critic_differs():
    ppo, ours = make_image_model(PPO, OWN_EXTRACTORS), make_image_model(GRPO, SMALL_CNN)
    # PPO's `features_extractor` is the actor's, unless somebody has replaced it.
    ppo.policy.features_extractor = ppo.policy.vf_features_extractor
    load_actor(ours, ppo)
    copied = ours.policy.features_extractor.linear[0].weight
    assert th.equal(copied, ppo.policy.pi_features_extractor.linear[0].weight)
    assert not th.equal(copied, ppo.policy.vf_features_extractor.linear[0].weight)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(policy_kwargs=dict(net_arch=[9])), r"policy_net\.0\.weight: \(8, 3\) in the source, \(9, 3\) in the target"),
        (dict(policy_kwargs=dict(net_arch=[8, 8])), r"policy_net\.2\.bias: absent in the source, \(8,\) in the target"),
        (dict(use_sde=True), r"log_std: \(1,\) in the source, \(8, 1\) in the target"),
    ],
    ids=["wider", "deeper", "gSDE"],
)
def test_an_actor_of_another_shape_is_refused_and_nothing_is_copied(kwargs: dict[str, Any], message: str):
    ours = make_model(**kwargs)
    before = state_of(ours)
    with pytest.raises(ValueError, match=message):
        load_actor(ours, make_model(A2C))
    assert all(th.equal(value, before[key]) for key, value in state_of(ours).items())


def test_a_policy_of_another_kind_is_refused_although_the_rest_may_fit(tmp_path: pathlib.Path):
    ours = make_model(env="CartPole-v1")
    dqn = DQN("MlpPolicy", "CartPole-v1", buffer_size=10, device="cpu")
    dqn.save(tmp_path / "dqn.zip")
    for source in (dqn, tmp_path / "dqn"):
        with pytest.raises(ValueError, match=r"q_net\.q_net\.0\.weight: \(64, 4\) in the source, absent in the target"):
            load_actor(ours, source)
    recurrent = make_model(PPO, "CartPole-v1")
    recurrent.policy.lstm_actor = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"memory\.weight: \(2, 2\) in the source, absent in the target"):
        load_actor(ours, recurrent)


def test_objects_without_a_policy_are_refused_by_name():
    for arguments, message in (((3, make_model()), "target=3 has no policy"), ((make_model(), None), "source=None has no")):
        with pytest.raises(ValueError, match=message):
            load_actor(*arguments)


def test_weights_come_from_a_file_without_unpickling_objects(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    model, fresh = make_model(), make_model()
    model.save(tmp_path / "model.zip")

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("an object was unpickled")

    monkeypatch.setattr("cloudpickle.loads", refuse)
    monkeypatch.setattr("pickle.loads", refuse)
    load_actor(fresh, tmp_path / "model.zip")
    assert all(th.equal(value, state_of(model)[key]) for key, value in state_of(fresh).items())
    with pytest.raises(AssertionError, match="an object was unpickled"):
        GRPO.load(tmp_path / "model.zip", device="cpu")


@pytest.mark.parametrize("saved", [False, True], ids=["model", "file"])
def test_the_actor_of_maskable_ppo_can_be_taken_over(saved: bool, tmp_path: pathlib.Path):
    contrib = pytest.importorskip("sb3_contrib")
    masked = make_model(contrib.MaskablePPO, "CartPole-v1")
    masked.save(tmp_path / "masked.zip")
    ours = make_model(env="CartPole-v1")
    load_actor(ours, tmp_path / "masked.zip" if saved else masked)
    assert th.equal(ours.policy.action_net.weight, masked.policy.action_net.weight)
