"""Actor-only policies, held against the actor of SB3's PPO."""

import pathlib
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3 import A2C, DQN, PPO
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, CombinedExtractor, FlattenExtractor, NatureCNN
from torch import nn

from sb3_grpo import load_actor
from sb3_grpo.policies import (
    ActorCnnPolicy,
    ActorPolicy,
    CnnPolicy,
    MlpPolicy,
    MultiInputActorPolicy,
    MultiInputPolicy,
)

N_OBS = 5
VECTOR = spaces.Box(-1.0, 1.0, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (3, 36, 36), np.uint8)
DICT = spaces.Dict({"position": VECTOR, "room": spaces.Discrete(4)})
BOX = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 1.0], np.float32))

ACTION_SPACES = [
    pytest.param(BOX, id="Box"),
    pytest.param(spaces.Box(-1.0, 1.0, (2, 2), np.float32), id="Box-2d"),
    pytest.param(spaces.Discrete(3), id="Discrete"),
    pytest.param(spaces.MultiDiscrete([2, 3]), id="MultiDiscrete"),
    pytest.param(spaces.MultiBinary(4), id="MultiBinary"),
]
OBSERVATIONS = [
    pytest.param(MlpPolicy, VECTOR, {}, id="vector"),
    pytest.param(CnnPolicy, IMAGE, dict(features_extractor_kwargs=dict(features_dim=8)), id="image"),
    pytest.param(MultiInputPolicy, DICT, {}, id="Dict"),
    pytest.param(MlpPolicy, spaces.Discrete(4), {}, id="Discrete-obs"),
]
SMALL: dict[str, Any] = dict(net_arch=[8])
GSDE = [
    pytest.param({}, id="plain"),
    pytest.param(dict(full_std=False), id="one-std-per-feature"),
    pytest.param(dict(use_expln=True), id="expln"),
    pytest.param(dict(squash_output=True), id="squashed"),
]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    th.manual_seed(0)
    th.set_num_threads(1)


def constant_lr(_: float) -> float:
    return 1e-3


def make_policy(
    action_space: spaces.Space = BOX,
    observation_space: spaces.Space = VECTOR,
    cls: type[ActorPolicy] = ActorPolicy,
    **kwargs: Any,
) -> Any:
    return cls(observation_space, action_space, constant_lr, **kwargs)


def perturb(policy: nn.Module) -> None:
    """Move each weight away from its initial value, so that a weight that is not copied shows."""
    with th.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.3 * th.randn_like(parameter))


def sample_batch(space: spaces.Space, n: int = N_OBS) -> Any:
    space.seed(0)
    samples = [space.sample() for _ in range(n)]
    if isinstance(space, spaces.Dict):
        return {key: np.stack([sample[key] for sample in samples]) for key in space.spaces}
    return np.stack(samples)


def state_of(model: Any) -> dict[str, th.Tensor]:
    return {key: value.clone() for key, value in model.policy.state_dict().items()}


def same(before: dict[str, th.Tensor], after: dict[str, th.Tensor]) -> bool:
    return before.keys() == after.keys() and all(th.equal(before[key], after[key]) for key in before)


class RandomEnv(gym.Env):
    """Random observations; what matters are its spaces."""

    def __init__(self, observation_space: spaces.Space = VECTOR, action_space: spaces.Space = BOX):
        self.observation_space, self.action_space = observation_space, action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observation_space.sample(), 0.0, False, False, {}


def make_ppo(
    action_space: spaces.Space = BOX, observation_space: spaces.Space = VECTOR, policy: str = "MlpPolicy", **kw: Any
) -> Any:
    use_sde = kw.pop("use_sde", False)
    kw = {"net_arch": dict(pi=[8], vf=[6]), **kw}
    env = RandomEnv(observation_space, action_space)
    model = PPO(policy, env, n_steps=8, batch_size=8, use_sde=use_sde, policy_kwargs=kw, seed=0, device="cpu")
    perturb(model.policy)
    return model


def saved(model: Any, folder: pathlib.Path) -> Any:
    model.save(folder / "model")
    return folder / "model.zip"


# --- An actor, and nothing but an actor ---


def test_cartpole_policy_has_half_the_parameters_of_ppo_which_is_ppo_without_its_critic() -> None:
    ppo = PPO("MlpPolicy", "CartPole-v1", device="cpu").policy
    ours = make_policy(ppo.action_space, ppo.observation_space)
    critic = [*ppo.mlp_extractor.value_net.parameters(), *ppo.value_net.parameters()]
    n_ours, n_ppo, n_critic = (sum(p.numel() for p in ps) for ps in (ours.parameters(), ppo.parameters(), critic))
    assert n_ours == n_ppo - n_critic == 4610
    assert 0.45 < n_ours / n_ppo < 0.55


@pytest.mark.parametrize("cls, observation_space, kwargs", OBSERVATIONS)
def test_nothing_in_the_policy_is_named_after_a_value(cls: type[ActorPolicy], observation_space: Any, kwargs: Any) -> None:
    policy = make_policy(BOX, observation_space, cls, **SMALL, **kwargs)
    names = [*policy.state_dict(), *(name for name, _ in policy.named_modules()), *vars(policy), *dir(policy)]
    assert [name for name in names if "value" in name or "vf" in name or "critic" in name] == []
    # The same search finds PPO's critic
    ppo = ActorCriticPolicy(VECTOR, BOX, constant_lr)
    assert any("value" in name for name in ppo.state_dict()) and any("vf" in name for name in dir(ppo))


@pytest.mark.parametrize(
    "alias, cls, extractor",
    [
        pytest.param(MlpPolicy, ActorPolicy, FlattenExtractor, id="MlpPolicy"),
        pytest.param(CnnPolicy, ActorCnnPolicy, NatureCNN, id="CnnPolicy"),
        pytest.param(MultiInputPolicy, MultiInputActorPolicy, CombinedExtractor, id="MultiInputPolicy"),
    ],
)
def test_alias_names_the_class_with_its_extractor(alias: Any, cls: Any, extractor: Any) -> None:
    assert alias is cls
    assert cls.default_features_extractor_class is extractor


# --- Actions and their probabilities ---


@pytest.mark.parametrize("cls, observation_space, kwargs", OBSERVATIONS)
@pytest.mark.parametrize("action_space", ACTION_SPACES)
class TestEverySpace:
    def test_forward_gives_actions_and_log_probs_for_the_batch(
        self, action_space: Any, cls: type[ActorPolicy], observation_space: Any, kwargs: Any
    ) -> None:
        policy = make_policy(action_space, observation_space, cls, **SMALL, **kwargs)
        obs, _ = policy.obs_to_tensor(sample_batch(observation_space))
        actions, log_prob = policy(obs)
        assert actions.shape == (N_OBS, *action_space.shape)
        assert log_prob.shape == (N_OBS,)
        first, second = policy(obs, deterministic=True)[0], policy(obs, deterministic=True)[0]
        assert th.equal(first, second)

    def test_evaluate_actions_gives_the_log_prob_of_forward_in_either_shape(
        self, action_space: Any, cls: type[ActorPolicy], observation_space: Any, kwargs: Any
    ) -> None:
        policy = make_policy(action_space, observation_space, cls, **SMALL, **kwargs)
        perturb(policy)
        obs, _ = policy.obs_to_tensor(sample_batch(observation_space))
        actions, log_prob = policy(obs)
        for shaped in (actions, actions.reshape(N_OBS, -1)):
            evaluated, entropy = policy.evaluate_actions(obs, shaped)
            assert evaluated.shape == entropy.shape == (N_OBS,)
            th.testing.assert_close(evaluated, log_prob, rtol=0, atol=0)

    def test_predict_stays_inside_the_action_space(
        self, action_space: Any, cls: type[ActorPolicy], observation_space: Any, kwargs: Any
    ) -> None:
        policy = make_policy(action_space, observation_space, cls, **SMALL, **kwargs)
        perturb(policy)
        actions, state = policy.predict(sample_batch(observation_space, 40))
        assert state is None
        assert len(actions) == 40
        for action in actions:
            assert action_space.contains(action.astype(action_space.dtype))
        observation_space.seed(0)
        action, _ = policy.predict(observation_space.sample(), deterministic=True)
        assert action.shape == action_space.shape

    def test_actor_of_ppo_gives_exactly_ppos_distribution(
        self, action_space: Any, cls: type[ActorPolicy], observation_space: Any, kwargs: Any
    ) -> None:
        names = {MlpPolicy: "MlpPolicy", CnnPolicy: "CnnPolicy", MultiInputPolicy: "MultiInputPolicy"}
        ppo = make_ppo(action_space, observation_space, names[cls], **kwargs)
        policy = make_policy(action_space, observation_space, cls, **SMALL, **kwargs)
        obs, _ = policy.obs_to_tensor(sample_batch(observation_space))
        actions, _, expected = ppo.policy(obs)
        flat = actions.reshape(N_OBS, -1).squeeze(-1)
        before, _ = policy.evaluate_actions(obs, flat)
        assert not th.allclose(before, expected)

        load_actor(SimpleNamespace(policy=policy), ppo)
        assert th.equal(policy.get_distribution(obs).log_prob(flat), expected)
        log_prob, entropy = policy.evaluate_actions(obs, flat)
        th.testing.assert_close(log_prob, expected)
        th.testing.assert_close(entropy, ppo.policy.get_distribution(obs).entropy())
        assert th.equal(policy(obs, deterministic=True)[0], ppo.policy(obs, deterministic=True)[0])


def test_two_distributions_of_one_policy_are_one_object() -> None:
    policy = make_policy(**SMALL)
    perturb(policy)
    first = policy.get_distribution(th.zeros(1, 3))
    inner = first.distribution
    second = policy.get_distribution(th.ones(1, 3))
    assert first is second and not th.equal(inner.mean, second.distribution.mean)


@pytest.mark.parametrize("kwargs", GSDE)
class TestGsde:
    def test_predicted_actions_are_inside_the_bounds(self, kwargs: dict[str, Any]) -> None:
        policy = make_policy(use_sde=True, log_std_init=1.0, **SMALL, **kwargs)
        perturb(policy)
        actions, _ = policy.predict(sample_batch(VECTOR, 50))
        assert all(BOX.contains(action) for action in actions)
        assert np.ptp(actions, axis=0).min() > 0.1

    def test_evaluate_actions_gives_the_log_prob_of_forward(self, kwargs: dict[str, Any]) -> None:
        policy = make_policy(use_sde=True, log_std_init=-1.0, **SMALL, **kwargs)
        obs = th.randn(N_OBS, 3)
        actions, log_prob = policy(obs)
        evaluated, entropy = policy.evaluate_actions(obs, actions)
        assert th.equal(evaluated, log_prob)
        assert (entropy is None) == policy.squash_output

    def test_noise_holds_until_it_is_reset(self, kwargs: dict[str, Any]) -> None:
        policy = make_policy(use_sde=True, **SMALL, **kwargs)
        obs = th.randn(N_OBS, 3)
        held = policy(obs)[0]
        assert th.equal(held, policy(obs)[0])
        policy.reset_noise(N_OBS)
        assert not th.equal(held, policy(obs)[0])

    def test_actor_of_ppo_gives_exactly_ppos_distribution(self, kwargs: dict[str, Any]) -> None:
        ppo = make_ppo(use_sde=True, **kwargs)
        policy = make_policy(use_sde=True, **SMALL, **kwargs)
        load_actor(SimpleNamespace(policy=policy), ppo)
        obs = th.randn(N_OBS, 3)
        actions, _, expected = ppo.policy(obs)
        assert th.equal(policy.evaluate_actions(obs, actions)[0], expected)


def test_squashed_actions_span_the_box_rather_than_pile_up_at_its_bounds() -> None:
    clipped, squashed = (make_policy(use_sde=True, log_std_init=0.0, squash_output=s, **SMALL) for s in (False, True))
    at_bounds = []
    for policy in (clipped, squashed):
        perturb(policy)
        actions, _ = policy.predict(sample_batch(VECTOR, 50))
        at_bounds.append(np.mean((actions == BOX.low) | (actions == BOX.high)))
    assert at_bounds[0] > 0.2 and at_bounds[1] == 0.0


def test_loading_an_actor_draws_gsde_noise_from_its_log_std() -> None:
    loud = make_policy(use_sde=True, log_std_init=0.0, **SMALL)
    quiet = make_policy(use_sde=True, log_std_init=-20.0, **SMALL)
    load_actor(SimpleNamespace(policy=loud), SimpleNamespace(policy=quiet))
    assert loud.action_dist.exploration_mat.abs().max() < 1e-6


# --- load_actor ---


@pytest.mark.parametrize("from_disk", [pytest.param(False, id="object"), pytest.param(True, id="zip")])
@pytest.mark.parametrize(
    "policy_name, cls, observation_space, kwargs",
    [
        pytest.param("MlpPolicy", MlpPolicy, VECTOR, {}, id="vector"),
        pytest.param("CnnPolicy", CnnPolicy, IMAGE, dict(features_extractor_kwargs=dict(features_dim=8)), id="image"),
        pytest.param(
            "CnnPolicy",
            CnnPolicy,
            IMAGE,
            dict(features_extractor_kwargs=dict(features_dim=8), share_features_extractor=False),
            id="image-own-extractors",
        ),
    ],
)
def test_round_trip_through_ours_keeps_the_actor_and_leaves_the_critic(
    from_disk: bool, policy_name: str, cls: Any, observation_space: Any, kwargs: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    first = make_ppo(BOX, observation_space, policy_name, **kwargs)
    second = make_ppo(BOX, observation_space, policy_name, **kwargs)
    perturb(second.policy)
    ours_kwargs = {key: value for key, value in kwargs.items() if key != "share_features_extractor"}
    ours = SimpleNamespace(policy=make_policy(BOX, observation_space, cls, **SMALL, **ours_kwargs))
    critic = [key for key in state_of(first) if "value_net" in key]
    critic += [key for key in state_of(first) if key.startswith("vf_") and not second.policy.share_features_extractor]
    before, wanted = state_of(second), state_of(first)
    optimizer = second.policy.optimizer

    load_actor(ours, saved(first, tmp_path) if from_disk else first)
    load_actor(second, ours)

    after = state_of(second)
    assert len(critic) >= 4
    for key, value in after.items():
        assert th.equal(value, (before if key in critic else wanted)[key]), key
        assert not th.equal(before[key], wanted[key]), key
    assert second.policy.optimizer is optimizer
    assert same(state_of(first), wanted)


def test_saved_actor_without_critic_goes_into_ppo(tmp_path: pathlib.Path) -> None:
    ours, ppo = make_policy(**SMALL), make_ppo()
    # What an SB3 model writes, for a model whose policy is ours
    model = make_ppo()
    model.policy = ours
    path = saved(model, tmp_path)
    critic = {key: value for key, value in state_of(ppo).items() if "value_net" in key}
    load_actor(ppo, str(path.with_suffix("")))
    after = state_of(ppo)
    assert th.equal(after["mlp_extractor.policy_net.0.weight"], ours.policy_net[0].weight)
    assert th.equal(after["log_std"], ours.log_std)
    assert same(critic, {key: after[key] for key in critic})


def test_actor_goes_between_a2c_and_ppo_in_place() -> None:
    a2c: Any = A2C("MlpPolicy", RandomEnv(), policy_kwargs=dict(net_arch=[8]), device="cpu", seed=0)
    ppo = make_ppo()
    parameters = list(ppo.policy.parameters())
    load_actor(ppo, a2c)
    assert th.equal(ppo.policy.action_net.weight, a2c.policy.action_net.weight)
    assert all(old is new for old, new in zip(parameters, ppo.policy.parameters(), strict=True))
    assert ppo.policy.action_net.weight.data_ptr() != a2c.policy.action_net.weight.data_ptr()


def test_an_actor_with_an_extractor_of_its_own_is_what_is_copied() -> None:
    """Where the two extractors of a PPO differ, ours takes the actor's."""
    image: dict[str, Any] = dict(features_extractor_kwargs=dict(features_dim=8))
    ppo = make_ppo(BOX, IMAGE, "CnnPolicy", share_features_extractor=False, **image)
    ours = make_policy(BOX, IMAGE, CnnPolicy, **SMALL, **image)
    ppo.policy.features_extractor = ppo.policy.vf_features_extractor  # the critic's, under the ambiguous name
    load_actor(SimpleNamespace(policy=ours), ppo)
    copied = ours.features_extractor.linear[0].weight
    assert th.equal(copied, ppo.policy.pi_features_extractor.linear[0].weight)
    assert not th.equal(copied, ppo.policy.vf_features_extractor.linear[0].weight)
    # The way back writes under both names
    ppo.policy.pi_features_extractor = ppo.policy.make_features_extractor()
    load_actor(ppo, SimpleNamespace(policy=ours))
    for extractor in (ppo.policy.pi_features_extractor, ppo.policy.features_extractor):
        assert th.equal(extractor.linear[0].weight, copied)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        pytest.param(dict(net_arch=[9]), r"policy_net\.0\.weight: \(8, 3\) in the source, \(9, 3\) in the target", id="wider"),
        pytest.param(dict(net_arch=[8, 8]), r"policy_net\.2\.bias: absent in the source, \(8,\) in the target", id="deeper"),
        pytest.param(dict(net_arch=[]), r"policy_net\.0\.bias: \(8,\) in the source, absent in the target", id="shallower"),
        pytest.param(dict(action_space=spaces.Discrete(2)), r"log_std: \(2,\) in the source, absent", id="Discrete"),
        pytest.param(dict(use_sde=True), r"log_std: \(2,\) in the source, \(8, 2\) in the target", id="gSDE"),
    ],
)
def test_an_actor_that_differs_is_refused_and_nothing_changes(kwargs: dict[str, Any], message: str) -> None:
    ours = SimpleNamespace(policy=make_policy(**{**SMALL, **kwargs}))
    before = state_of(ours)
    with pytest.raises(ValueError, match=message):
        load_actor(ours, make_ppo())
    assert same(before, state_of(ours))


def test_a_policy_of_another_kind_is_refused(tmp_path: pathlib.Path) -> None:
    dqn = DQN("MlpPolicy", RandomEnv(action_space=spaces.Discrete(2)), buffer_size=10, device="cpu")
    ours = SimpleNamespace(policy=make_policy(spaces.Discrete(2), **SMALL))
    for source in (dqn, saved(dqn, tmp_path)):
        with pytest.raises(ValueError, match=r"q_net\.q_net\.0\.weight: \(64, 3\) in the source, absent"):
            load_actor(ours, source)


def test_a_weight_unknown_to_the_target_is_refused_although_the_rest_fits() -> None:
    source, target = make_ppo(), SimpleNamespace(policy=make_policy(**SMALL))
    source.policy.lstm_actor = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"lstm_actor\.weight: \(2, 2\) in the source, absent in the target"):
        load_actor(target, source)


def test_what_has_no_policy_is_refused_by_name(tmp_path: pathlib.Path) -> None:
    holder = SimpleNamespace(policy=make_policy(**SMALL))
    with pytest.raises(ValueError, match="target=3 has no policy"):
        load_actor(3, holder)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="source=None has no policy"):
        load_actor(holder, None)  # type: ignore[arg-type]
    model = make_ppo()
    model._get_torch_save_params = lambda: (["policy.optimizer"], [])
    with pytest.raises(ValueError, match=r"model.zip' holds \['policy.optimizer'\] but no policy"):
        load_actor(holder, saved(model, tmp_path))


# --- Construction ---


@pytest.mark.parametrize(
    "net_arch, sizes",
    [
        pytest.param(None, [64, 64], id="default"),
        pytest.param([], [], id="linear"),
        pytest.param([8], [8], id="list"),
        pytest.param(dict(pi=[8, 4]), [8, 4], id="pi"),
    ],
)
def test_net_arch_gives_hidden_layers_of_these_sizes(net_arch: Any, sizes: list[int]) -> None:
    policy = make_policy(net_arch=net_arch, activation_fn=nn.ReLU)
    assert [layer.out_features for layer in policy.policy_net if isinstance(layer, nn.Linear)] == sizes
    assert [type(layer) for layer in policy.policy_net] == [nn.Linear, nn.ReLU] * len(sizes)
    assert policy.action_net.in_features == [3, *sizes][-1]


def test_default_net_arch_adds_no_layer_to_a_cnn() -> None:
    policy = make_policy(observation_space=IMAGE, cls=CnnPolicy, features_extractor_kwargs=dict(features_dim=8))
    assert len(policy.policy_net) == 0 and policy.action_net.in_features == 8


@pytest.mark.parametrize(
    "net_arch, message",
    [
        pytest.param(
            dict(pi=[8], vf=[8]), r"net_arch=\{'pi': \[8\], 'vf': \[8\]\}: there is no value network in GRPO", id="vf"
        ),
        pytest.param(
            dict(vf=[8]), r"no value network in GRPO; pass net_arch=\[...\] or net_arch=dict\(pi=\[...\]\)", id="vf-only"
        ),
        pytest.param({}, r"net_arch=\{\}: pass a list of positive integers", id="empty-dict"),
        pytest.param(dict(pi=[8], qf=[8]), r"'qf': \[8\]\}: pass a list", id="unknown-key"),
        pytest.param(dict(pi=8), r"\{'pi': 8\}: pass a list", id="pi-not-a-list"),
        pytest.param("64", r"net_arch='64': pass a list", id="string"),
        pytest.param(64, r"net_arch=64: pass a list", id="number"),
        pytest.param([8, 0], r"net_arch=\[8, 0\]: pass a list", id="zero"),
        pytest.param([-8], r"net_arch=\[-8\]: pass a list", id="negative"),
        pytest.param([8.0], r"net_arch=\[8\.0\]: pass a list", id="float"),
        pytest.param([True], r"net_arch=\[True\]: pass a list", id="bool"),
        pytest.param([dict(pi=[8], vf=[8])], r"pass a list", id="list-of-dict"),
    ],
)
def test_net_arch_that_is_no_list_of_sizes_is_refused(net_arch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy(net_arch=net_arch)


@pytest.mark.parametrize(
    "kwargs, message",
    [
        pytest.param(dict(squash_output=True), "squash_output=True needs gSDE", id="squash-without-gSDE"),
        pytest.param(
            dict(log_std_lr_factor=2.0, action_space=spaces.Discrete(2)), r"log_std_lr_factor=2.0 is for Box", id="no-log_std"
        ),
        pytest.param(dict(use_sde=True, action_space=spaces.Discrete(2)), r"action_space=Discrete\(2\)", id="gSDE-Discrete"),
        pytest.param(dict(action_space=spaces.Tuple([BOX])), r"action_space=Tuple\(.*is not supported: pass Box", id="Tuple"),
        pytest.param(dict(action_space=DICT), r"action_space=Dict\(.*is not supported: pass Box", id="Dict"),
        pytest.param(
            dict(action_space=spaces.MultiBinary([2, 3])), r"action_space=MultiBinary\(.*is not flat", id="MultiBinary-2d"
        ),
        pytest.param(
            dict(action_space=spaces.MultiDiscrete(np.array([[2], [3]]))),
            r"MultiDiscrete\(\[\[2\]\n \[3\]\]\) is not flat",
            id="MultiDiscrete-2d",
        ),
    ],
)
def test_arguments_that_do_not_go_together_are_refused(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy(**kwargs)


@pytest.mark.parametrize("kwargs", [pytest.param({}, id="gaussian"), pytest.param(dict(use_sde=True), id="gSDE")])
def test_the_standard_deviation_learns_faster_by_its_factor(kwargs: dict[str, Any]) -> None:
    plain, fast = (make_policy(log_std_lr_factor=factor, **SMALL, **kwargs) for factor in (1.0, 8.0))
    fast.load_state_dict(plain.state_dict())
    before = {name: weight.clone() for name, weight in plain.state_dict().items()}
    for learning_rate in (1e-3, 5e-4):  # of a schedule
        for policy in (plain, fast):
            policy.set_learning_rate(learning_rate)
            for weight in policy.parameters():
                weight.grad = th.ones_like(weight)
            policy.optimizer.step()
    for name, weight in plain.state_dict().items():
        expected = before[name] + (weight - before[name]) * (8.0 if name == "log_std" else 1.0)
        th.testing.assert_close(fast.state_dict()[name], expected)
    assert not th.equal(plain.log_std, before["log_std"])


def test_the_first_step_is_at_the_factor_too() -> None:
    lrs = [group["lr"] for group in make_policy(log_std_lr_factor=3.0, **SMALL).optimizer.param_groups]
    assert lrs == [constant_lr(1.0), 3.0 * constant_lr(1.0)]


def test_noise_of_a_policy_without_gsde_cannot_be_reset() -> None:
    with pytest.raises(ValueError, match="use_sde=False"):
        make_policy(**SMALL).reset_noise()


def gram(layer: Any) -> th.Tensor:
    """Inner products of the rows, or of the columns where there are fewer."""
    weight = layer.weight.detach().flatten(1)
    weight = weight.T if len(weight) > weight.shape[1] else weight
    return weight @ weight.T


def test_orthogonal_init_has_ppos_gains_and_can_be_turned_off() -> None:
    image: dict[str, Any] = dict(features_extractor_kwargs=dict(features_dim=8), net_arch=[8])
    ortho, plain = (make_policy(BOX, IMAGE, CnnPolicy, ortho_init=on, **image) for on in (True, False))
    for policy, orthogonal in ((ortho, True), (plain, False)):
        layers = [policy.features_extractor.cnn[0], policy.features_extractor.linear[0], policy.policy_net[0]]
        for layer, gain in (*((layer, 2**0.5) for layer in layers), (policy.action_net, 0.01)):
            expected = gain**2 * th.eye(len(gram(layer)))
            assert th.allclose(gram(layer), expected, rtol=1e-4, atol=1e-5) == orthogonal
            assert (layer.bias == 0).all() == orthogonal


class Doubler(BaseFeaturesExtractor):
    """Twice the observation, through a weight."""

    def __init__(self, observation_space: spaces.Box, factor: float = 1.0):
        super().__init__(observation_space, features_dim=3)
        self.factor = nn.Parameter(th.tensor(factor))

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return self.factor * observations


def test_custom_features_extractor_is_used_trained_and_copied() -> None:
    custom: dict[str, Any] = dict(net_arch=[], features_extractor_class=Doubler)
    policy = make_policy(features_extractor_kwargs=dict(factor=2.0), **custom)
    obs = th.randn(N_OBS, 3)
    assert th.allclose(policy.get_distribution(obs).distribution.mean, policy.action_net(2.0 * obs))
    policy(obs)[1].sum().backward()
    assert policy.features_extractor.factor.grad is not None
    assert any(p is policy.features_extractor.factor for p in policy.optimizer.param_groups[0]["params"])
    ppo = make_ppo(**custom)
    load_actor(ppo, SimpleNamespace(policy=policy))
    assert ppo.policy.pi_features_extractor.factor.item() == 2.0


@pytest.mark.parametrize(
    "kwargs, expected",
    [
        pytest.param({}, dict(eps=1e-5), id="Adam"),
        pytest.param(dict(optimizer_kwargs=dict(weight_decay=0.1)), dict(eps=1e-8, weight_decay=0.1), id="Adam-own"),
        pytest.param(dict(optimizer_class=th.optim.SGD), dict(momentum=0), id="SGD"),
    ],
)
def test_optimizer_starts_from_the_schedule_with_ppos_epsilon(kwargs: dict[str, Any], expected: dict[str, float]) -> None:
    defaults = make_policy(**SMALL, **kwargs).optimizer.defaults
    assert defaults["lr"] == constant_lr(1.0)
    assert {key: defaults[key] for key in expected} == expected


def test_dicts_and_lists_of_the_caller_are_left_alone() -> None:
    extractor_kwargs: dict[str, Any] = dict(features_dim=8)
    optimizer_kwargs: dict[str, Any] = {}
    layers = [8]
    unit_image = spaces.Box(0.0, 1.0, (3, 36, 36), np.float32)
    policy = make_policy(
        BOX,
        unit_image,
        CnnPolicy,
        net_arch=layers,
        normalize_images=False,
        features_extractor_kwargs=extractor_kwargs,
        optimizer_kwargs=optimizer_kwargs,
    )
    policy.optimizer_kwargs["eps"] = 1.0
    policy.net_arch.append(4)
    assert extractor_kwargs == dict(features_dim=8) and optimizer_kwargs == {} and layers == [8]


@pytest.mark.parametrize(
    "kwargs",
    [
        pytest.param(
            dict(net_arch=[8], activation_fn=nn.ReLU, ortho_init=False, log_std_init=-1.0, log_std_lr_factor=4.0),
            id="gaussian",
        ),
        pytest.param(dict(net_arch=dict(pi=[8]), use_sde=True, squash_output=True, full_std=False, use_expln=True), id="gSDE"),
        pytest.param(
            dict(net_arch=[8], features_extractor_class=Doubler, features_extractor_kwargs=dict(factor=3.0)), id="custom"
        ),
        pytest.param(dict(net_arch=[8], optimizer_class=th.optim.SGD, optimizer_kwargs=dict(momentum=0.5)), id="SGD"),
        pytest.param(dict(net_arch=[8], normalize_images=False), id="raw-images"),
    ],
)
def test_saved_policy_loads_with_its_settings_and_acts_the_same(kwargs: dict[str, Any], tmp_path: pathlib.Path) -> None:
    policy = make_policy(**kwargs)
    perturb(policy)
    policy.save(str(tmp_path / "policy.pt"))
    loaded = ActorPolicy.load(str(tmp_path / "policy.pt"), device="cpu")
    obs = sample_batch(VECTOR)
    np.testing.assert_array_equal(policy.predict(obs, deterministic=True)[0], loaded.predict(obs, deterministic=True)[0])
    ours, theirs = policy._get_constructor_parameters(), loaded._get_constructor_parameters()
    assert ours == theirs
    normalized = {**kwargs, "net_arch": [8]}
    assert {key: theirs[key] for key in kwargs} == normalized


# --- Observations that no action can be predicted from ---


@pytest.mark.parametrize(
    "observation, message",
    [
        pytest.param(np.array([0.0, np.nan, 1.0]), r"observation=\[ 0\., nan,  1\.\] has NaN or infinite", id="NaN"),
        pytest.param(np.array([[0.0, np.inf, 1.0]]), r"observation=\[\[ 0\., inf,  1\.\]\] has NaN or infinite", id="inf"),
        pytest.param(np.array([]), r"observation=\[\] of shape \(0,\) is empty: pass at least one", id="empty"),
        pytest.param(np.zeros((0, 3)), r"observation=\[\] of shape \(0, 3\) is empty", id="empty-batch"),
        pytest.param([0.0, float("nan"), 1.0], r"has NaN or infinite entries: pass finite numbers", id="list"),
    ],
)
def test_observation_that_is_empty_or_not_finite_is_refused(observation: Any, message: str) -> None:
    policy = make_policy(**SMALL)
    for refuse in (policy.predict, policy.obs_to_tensor):
        with pytest.raises(ValueError, match=message):
            refuse(observation)


@pytest.mark.parametrize(
    "observation, message",
    [
        pytest.param(
            dict(position=np.array([np.nan, 0, 0]), room=1), r"observation\['position'\]=\[nan,  0\.,  0\.\] has NaN", id="NaN"
        ),
        pytest.param(dict(position=np.zeros(3), room=np.array([])), r"observation\['room'\]=\[\] of shape", id="empty"),
        pytest.param({}, r"observation=\{\} is empty: pass one array for each key", id="no-keys"),
    ],
)
def test_dict_observation_is_refused_by_its_key(observation: Any, message: str) -> None:
    policy = make_policy(BOX, DICT, MultiInputPolicy, **SMALL)
    with pytest.raises(ValueError, match=message):
        policy.predict(observation)


def test_a_long_observation_is_quoted_in_short() -> None:
    policy = make_policy(observation_space=spaces.Box(-1, 1, (10_000,), np.float32), **SMALL)
    with pytest.raises(ValueError) as error:
        policy.predict(np.full(10_000, np.nan))
    assert len(str(error.value)) < 300


def test_forward_does_not_pay_for_the_check() -> None:
    policy = make_policy(spaces.MultiBinary(2), **SMALL)
    obs = th.full((1, 3), th.nan)
    with pytest.raises(ValueError) as error:  # raised by PyTorch's own validation of the distribution
        policy(obs)
    assert "observation" not in str(error.value)
