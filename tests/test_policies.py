"""Actor-only policies, compared with the actor of SB3's PPO."""

import pathlib
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from helpers import BOX, CHW, SMALL, SMALL_CNN, VECTOR, make_envs, make_model, samples
from stable_baselines3.common.policies import ActorCriticPolicy
from stable_baselines3.common.save_util import recursive_getattr, recursive_setattr
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor, CombinedExtractor, FlattenExtractor, NatureCNN
from torch import nn

from sb3_grpo import GRPO, ActorPolicy, CnnPolicy, MlpPolicy, MultiInputPolicy, load_actor

DICT = spaces.Dict({"position": VECTOR, "room": spaces.Discrete(4)})

#: Each action space with a vector, and each kind of observation with a Box.
SPACES = [
    pytest.param(VECTOR, BOX, SMALL, id="Box"),
    pytest.param(VECTOR, spaces.Box(-1.0, 1.0, (2, 2), np.float32), SMALL, id="matrix of actions"),
    pytest.param(VECTOR, spaces.Discrete(3), SMALL, id="Discrete"),
    pytest.param(VECTOR, spaces.MultiDiscrete([2, 3]), SMALL, id="MultiDiscrete"),
    pytest.param(VECTOR, spaces.MultiBinary(4), SMALL, id="MultiBinary"),
    pytest.param(CHW, BOX, dict(SMALL_CNN, features_extractor_class=NatureCNN), id="images"),
    pytest.param(DICT, BOX, dict(SMALL, features_extractor_class=CombinedExtractor), id="Dict observations"),
    pytest.param(spaces.Discrete(4), BOX, SMALL, id="Discrete observations"),
    *(
        pytest.param(VECTOR, BOX, dict(SMALL, use_sde=True, log_std_init=0.3, **options), id=f"gSDE {options}")
        for options in ({}, dict(full_std=False), dict(use_expln=True), dict(squash_output=True))
    ),
]


def make_policy(
    observation_space: spaces.Space = VECTOR, action_space: spaces.Space = BOX, cls: type = ActorPolicy, **kwargs: Any
) -> Any:
    return cls(observation_space, action_space, lambda _: 1e-3, **kwargs)


def perturb(module: nn.Module) -> Any:
    """Move all weights away from their initial values."""
    with th.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * th.randn_like(parameter))
    return module


# --- an actor and nothing else ---


def test_the_policy_of_cartpole_is_ppos_without_its_critic():
    observation_space, action_space = spaces.Box(-1.0, 1.0, (4,)), spaces.Discrete(2)
    policy = make_policy(observation_space, action_space)
    ppo = make_policy(observation_space, action_space, cls=ActorCriticPolicy)
    critic = [*ppo.mlp_extractor.value_net.parameters(), *ppo.value_net.parameters()]
    ours, theirs, of_critic = (sum(p.numel() for p in each) for each in (policy.parameters(), ppo.parameters(), critic))
    assert ours == theirs - of_critic == 4610


@pytest.mark.parametrize(
    ("cls", "space", "extractor", "hidden"),
    [
        (MlpPolicy, VECTOR, FlattenExtractor, 2),
        (CnnPolicy, CHW, NatureCNN, 0),
        (MultiInputPolicy, DICT, CombinedExtractor, 2),
    ],
)
def test_each_policy_has_the_extractor_and_the_hidden_layers_of_sb3s(cls: type, space: Any, extractor: type, hidden: int):
    policy = make_policy(space, cls=cls)
    assert type(policy.features_extractor) is extractor
    assert [layer.out_features for layer in policy.policy_net if isinstance(layer, nn.Linear)] == [64] * hidden


@pytest.mark.parametrize(("observation_space", "action_space", "kwargs"), SPACES)
def test_with_the_weights_of_ppo_a_policy_acts_and_evaluates_as_ppo_does(
    observation_space: Any, action_space: Any, kwargs: dict[str, Any]
):
    policy, ppo = (make_policy(observation_space, action_space, cls, **kwargs) for cls in (ActorPolicy, ActorCriticPolicy))
    perturb(ppo)
    for ours, theirs in (
        (policy.features_extractor, ppo.features_extractor),
        (policy.policy_net, ppo.mlp_extractor.policy_net),
        (policy.action_net, ppo.action_net),
    ):
        ours.load_state_dict(theirs.state_dict())
    if hasattr(ppo, "log_std"):
        policy.log_std.data.copy_(ppo.log_std)
    obs, _ = policy.obs_to_tensor(samples(observation_space, 5))
    results = []
    for each in (policy, ppo):
        th.manual_seed(1)
        if policy.use_sde:
            each.reset_noise(5)
        results.append(each(obs))
    (actions, log_prob), (expected_actions, _, expected_log_prob) = results
    assert actions.shape == (5, *action_space.shape) and log_prob.shape == (5,)
    th.testing.assert_close(actions, expected_actions)
    th.testing.assert_close(log_prob, expected_log_prob)
    th.testing.assert_close(policy(obs, deterministic=True)[0], ppo(obs, deterministic=True)[0])

    flat = actions.reshape(5, -1)  # as in a rollout buffer
    _, expected, expected_entropy = ppo.evaluate_actions(obs, flat.squeeze(-1))
    for shaped in (actions, flat):
        evaluated, entropy = policy.evaluate_actions(obs, shaped)
        th.testing.assert_close(evaluated, expected)
        assert entropy is expected_entropy is None or th.allclose(entropy, expected_entropy)
    th.testing.assert_close(policy.evaluate_distribution(policy.get_distribution(obs), flat)[0], expected)


def test_the_noise_of_gsde_holds_until_it_is_reset():
    policy, obs = make_policy(use_sde=True, **SMALL), th.randn(5, 3)
    actions = policy(obs)[0]
    assert th.equal(policy(obs)[0], actions)
    policy.reset_noise(5)
    assert not th.equal(policy(obs)[0], actions)
    with pytest.raises(ValueError, match=r"is for gSDE, .*use_sde=False"):
        make_policy(**SMALL).reset_noise()


# --- features ---


class Scaled(BaseFeaturesExtractor):
    """The observation times a parameter."""

    def __init__(self, observation_space: spaces.Box, factor: float = 1.0):
        super().__init__(observation_space, features_dim=3)
        self.factor = nn.Parameter(th.tensor(factor))

    def forward(self, observations: th.Tensor) -> th.Tensor:
        return self.factor * observations


def test_a_custom_features_extractor_is_used_and_trained():
    custom: dict[str, Any] = dict(features_extractor_class=Scaled, features_extractor_kwargs=dict(factor=2.0))
    policy, obs = make_policy(net_arch=[], **custom), th.randn(5, 3)
    th.testing.assert_close(policy(obs, deterministic=True)[0], policy.action_net(2.0 * obs))
    policy.evaluate_actions(obs, th.ones(5, 2))[0].sum().backward()
    policy.optimizer.step()
    assert policy.features_extractor.factor.item() != 2.0


# --- construction ---


def test_net_arch_gives_the_sizes_of_the_hidden_layers():
    for sizes in ([], [8], [8, 4]):
        for net_arch in (sizes, tuple(np.array(sizes, dtype=int)), dict(pi=sizes)):
            policy = make_policy(net_arch=net_arch, activation_fn=nn.ReLU)
            assert [type(layer) for layer in policy.policy_net] == [nn.Linear, nn.ReLU] * len(sizes)
            assert [layer.out_features for layer in policy.policy_net[::2]] == sizes
            assert policy.action_net.in_features == [3, *sizes][-1]


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (dict(net_arch=dict(pi=[8], vf=[8])), r"asks for a value network, .* pass net_arch=\[...\] or net_arch=dict\(pi"),
        (dict(net_arch=[dict(pi=[8], vf=[8])]), "asks for a value network"),
        (dict(net_arch=[8, 0]), r"net_arch=\[8, 0\] is no list"),
        (dict(squash_output=True), "squash_output=True needs gSDE"),
        (dict(log_std_init=np.nan), "`log_std_init` must be a finite number, not nan"),
        (dict(log_std_lr_factor=0), "`log_std_lr_factor` must be a positive number, not 0"),
        (dict(cls=MultiInputPolicy), r"needs a Dict observation space, not Box.*pass `MlpPolicy`"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_arguments_that_make_no_actor_are_refused_and_quoted(kwargs: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        make_policy(**kwargs)


def test_layers_are_orthogonal_with_ppos_gains_only_with_ortho_init():
    for ortho_init in (True, False):
        policy = make_policy(CHW, cls=CnnPolicy, ortho_init=ortho_init, **SMALL_CNN)
        layers = [policy.features_extractor.cnn[0], policy.features_extractor.linear[0], policy.policy_net[0]]
        for layer, gain in (*((each, 2**0.5) for each in layers), (policy.action_net, 0.01)):
            weight = layer.weight.detach().flatten(1)
            norms = th.linalg.svdvals(weight)
            assert th.allclose(norms, th.full_like(norms, gain), rtol=1e-3) == ortho_init
            assert (layer.bias == 0).all() == ortho_init


def test_the_initial_deviation_is_a_quarter_of_the_range_of_each_action_unless_it_is_given():
    uneven = spaces.Box(np.array([-2.0, 0.0, 5.0]), np.array([2.0, 10.0, 5.0]), dtype=np.float64)
    std = make_policy(action_space=uneven, **SMALL).log_std.detach().exp()
    assert std.tolist() == pytest.approx([1.0, 2.5, 1.0])
    wide = spaces.Box(-3e38, 3e38, (2,))  # of which PPO makes a policy
    for kwargs, expected in ((dict(log_std_init=-0.5), -0.5), (dict(use_sde=True), 0.0)):
        for space in (uneven, wide):
            assert (make_policy(action_space=space, **SMALL, **kwargs).log_std == expected).all()
    model = make_model(make_envs(action_space=wide), policy_kwargs=dict(SMALL, log_std_init=0.0)).learn(32)
    assert all(th.isfinite(each).all() for each in model.policy.parameters())


def test_the_optimizer_has_ppos_epsilon_unless_told_otherwise():
    for kwargs, expected in (
        ({}, dict(lr=1e-3, eps=1e-5)),
        (dict(optimizer_kwargs=dict(weight_decay=0.1)), dict(lr=1e-3, eps=1e-8, weight_decay=0.1)),
        (dict(optimizer_class=th.optim.SGD), dict(lr=1e-3, momentum=0)),
    ):
        defaults = make_policy(**SMALL, **kwargs).optimizer.defaults
        assert {key: defaults[key] for key in expected} == expected


class OnlyTrained(th.optim.SGD):
    """An optimizer that takes parameters, and no groups of them."""

    def __init__(self, params: Any, **kwargs: Any):
        super().__init__([each for each in params if each.requires_grad], **kwargs)


def test_an_optimizer_gets_parameters_as_from_sb3():
    policy = make_policy(optimizer_class=OnlyTrained, **SMALL)
    assert [id(each) for each in policy.optimizer.param_groups[0]["params"]] == [id(each) for each in policy.parameters()]


@pytest.mark.parametrize("use_sde", [False, True])
def test_the_standard_deviation_learns_faster_by_its_factor(use_sde: bool):
    policies = [make_policy(log_std_lr_factor=factor, use_sde=use_sde, lr_follows_std=False, **SMALL) for factor in (1.0, 8.0)]
    policies[1].load_state_dict(policies[0].state_dict())
    before = {name: weight.clone() for name, weight in policies[0].state_dict().items()}
    for learning_rate in (None, 5e-4):  # the initial rate, and a later one of a schedule
        for policy in policies:
            if learning_rate is not None:
                policy.set_learning_rate(learning_rate)
            for weight in policy.parameters():
                weight.grad = th.ones_like(weight)
            policy.optimizer.step()
    plain, fast = (policy.state_dict() for policy in policies)
    for name, weight in plain.items():
        assert not th.equal(weight, before[name])
        factor = 8.0 if name == "log_std" else 1.0
        th.testing.assert_close(fast[name], before[name] + factor * (weight - before[name]))


def test_the_learning_rate_falls_with_the_standard_deviation():
    following, constant = (make_policy(lr_follows_std=follows, log_std_init=-1.0, **SMALL) for follows in (True, False))
    # The geometric mean of the shares of the initial deviations, and at most 1
    for shares, factor in (([1.0, 1.0], 1.0), ([1 / 16, 1.0], 0.25), ([0.5, 0.5], 0.5), ([2.0, 4.0], 1.0)):
        for policy, expected in ((following, factor), (constant, 1.0)):
            policy.log_std.data = -1.0 + th.tensor(shares).log()
            policy.set_learning_rate(0.01)
            assert policy.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * expected)


def test_the_learning_rate_falls_from_the_initial_deviation_also_in_a_policy_that_is_loaded(tmp_path: pathlib.Path):
    policy = make_policy(action_space=spaces.Box(-3.0, 5.0, (2,), np.float32), **SMALL)
    policy.log_std.data = th.zeros(2)  # a quarter of the range is 2
    assert policy.learning_rate_factor() == pytest.approx(0.5)
    policy.save(str(tmp_path / "policy.pt"))
    assert ActorPolicy.load(str(tmp_path / "policy.pt"), device="cpu").learning_rate_factor() == pytest.approx(0.5)
    assert make_policy(action_space=spaces.Discrete(3), **SMALL).learning_rate_factor() == 1.0


@pytest.mark.parametrize(
    "kwargs",
    [
        dict(activation_fn=nn.ReLU, ortho_init=False, log_std_init=-1.0, log_std_lr_factor=4.0, normalize_images=False),
        dict(use_sde=True, squash_output=True, full_std=False, use_expln=True),
        dict(features_extractor_class=Scaled, features_extractor_kwargs=dict(factor=3.0)),
    ],
    ids=lambda kwargs: next(iter(kwargs)),
)
def test_a_saved_policy_is_loaded_with_its_settings_and_acts_the_same(kwargs: dict[str, Any], tmp_path: pathlib.Path):
    policy = perturb(make_policy(net_arch=[8], **kwargs))
    policy.save(str(tmp_path / "policy"))
    loaded = ActorPolicy.load(str(tmp_path / "policy"), device="cpu")
    obs = samples(VECTOR, 5)
    np.testing.assert_array_equal(policy.predict(obs, deterministic=True)[0], loaded.predict(obs, deterministic=True)[0])
    assert {key: getattr(loaded, key) for key in ("net_arch", *kwargs)} == {"net_arch": [8], **kwargs}


# --- observations ---


@pytest.mark.parametrize("hook", ["_build_mlp_extractor", "_get_action_dist_from_latent"])
def test_a_hook_of_actor_critic_policies_that_nothing_would_call_is_refused(hook: str):
    policy_class = type("Custom", (ActorPolicy,), {hook: lambda self: None})
    with pytest.raises(TypeError, match=rf"Custom defines `{hook}`, which belongs to SB3's ActorCriticPolicy"):
        make_policy(cls=policy_class)


@pytest.mark.parametrize(
    ("space", "observation", "message"),
    [
        (VECTOR, np.array([0.0, np.nan, 1.0]), r"`observation` has NaN or infinite entries: \[ 0\., nan,  1\.\]"),
        (VECTOR, [[0.0, float("inf"), 1.0]], "`observation` has NaN or infinite"),
        (VECTOR, np.zeros((0, 3)), r"`observation` of shape \(0, 3\) is empty"),
        (DICT, dict(position=np.array([np.nan, 0, 0]), room=1), r"`observation\['position'\]` has NaN"),
    ],
    ids=["NaN", "infinite", "empty", "part of a Dict"],
)
def test_predict_refuses_observations_that_are_empty_or_not_finite(space: Any, observation: Any, message: str):
    policy = make_policy(space, cls=MultiInputPolicy if space is DICT else MlpPolicy, **SMALL)
    with pytest.raises(ValueError, match=message):
        policy.predict(observation)


# --- policies that their constructor does not describe ---


class Encoder(BaseFeaturesExtractor):
    """An extractor around a module of the user, which keeps its last output."""

    def __init__(self, observation_space: spaces.Box, encoder: nn.Module):
        super().__init__(observation_space, features_dim=8)
        self.encoder = encoder

    def forward(self, observations: th.Tensor) -> th.Tensor:
        self.last = th.tanh(self.encoder(observations))
        return self.last


class Sized(ActorPolicy):
    """Needs an argument of its own."""

    def __init__(self, observation_space: Any, action_space: Any, lr_schedule: Any, width: int, **kwargs: Any):
        super().__init__(observation_space, action_space, lr_schedule, [width], **kwargs)


def with_encoder() -> dict[str, Any]:
    encoder = dict(encoder=nn.Linear(4, 8))
    return dict(policy_kwargs=dict(features_extractor_class=Encoder, features_extractor_kwargs=encoder, ortho_init=False))


def with_size() -> dict[str, Any]:
    return dict(policy=Sized, policy_kwargs=dict(width=8))


def with_two_layers() -> dict[str, Any]:
    return dict(policy_kwargs=dict(net_arch=[4, 4]))


def unchanged(policy: Any) -> None:
    pass


def freeze_extractor(policy: Any) -> None:
    policy.features_extractor.requires_grad_(False)


def replace_net(policy: Any) -> None:
    policy.policy_net = nn.Sequential(nn.Linear(4, 8), nn.ELU(), nn.Linear(8, 4), nn.Tanh())
    policy.optimizer = th.optim.Adam(policy.parameters())


def normalize_weights(policy: Any) -> None:
    nn.utils.weight_norm(policy.policy_net[0])  # keeps a tensor with a gradient function
    policy.optimizer = th.optim.Adam(policy.parameters())


#: A function that gives arguments of the model, and one that changes its policy.
UNUSUAL: dict[str, tuple[Any, Any]] = {
    "shared encoder": (with_encoder, unchanged),
    "frozen encoder": (with_encoder, freeze_extractor),
    "required argument": (with_size, unchanged),
    "replaced net": (with_two_layers, replace_net),
    "weight norm": (with_two_layers, normalize_weights),
}


def make_unusual(name: str, **kwargs: Any) -> Any:
    settings, change = UNUSUAL[name]
    short = dict(policy="MlpPolicy", n_steps=32, batch_size=32, n_epochs=2, learning_rate=0.01, seed=0, device="cpu")
    model = GRPO(**{**short, **settings(), **kwargs, "env": "CartPole-v1"})
    change(model.policy)
    return model


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("kl_coef", [0.0, 0.1], ids=["without penalty", "with penalty"])
@pytest.mark.parametrize("name", UNUSUAL)
def test_a_policy_that_its_constructor_does_not_describe_learns_and_takes_its_own_weights(name: str, kl_coef: float):
    def weights(policy: Any) -> dict[str, th.Tensor]:
        return {key: each.detach().clone() for key, each in policy.named_parameters()}

    model = make_unusual(name, objective=dict(kl_coef=kl_coef, kl_reference=2))
    initial, trained = weights(model.policy), {key for key, each in model.policy.named_parameters() if each.requires_grad}
    model.learn(64)
    before = weights(model.policy)
    model.learn(32, reset_num_timesteps=False)
    assert {key for key, each in model.policy.named_parameters() if each.requires_grad} == trained
    assert {key for key, each in model.policy.named_parameters() if not th.equal(each, initial[key])} == trained
    if kl_coef > 0:  # renewed before the third update
        th.testing.assert_close(weights(model.kl_penalty.policy), before, rtol=0, atol=0)
    other = make_unusual(name, seed=1)
    other.set_parameters(model.get_parameters())
    obs = samples(model.observation_space, 20)
    np.testing.assert_array_equal(*(each.predict(obs, deterministic=True)[0] for each in (model, other)))


@pytest.mark.parametrize("kl_coef", [0.0, 0.1], ids=["without penalty", "with penalty"])
@pytest.mark.parametrize("part", ["policy", "policy.policy_net"])
def test_a_compiled_policy_learns_as_an_ordinary_one_and_is_saved_and_copied_as_one(
    part: str, kl_coef: float, tmp_path: pathlib.Path
):
    plain = make_unusual("required argument", objective=dict(kl_coef=kl_coef)).learn(64)
    expected = plain.policy.state_dict()
    compiled = make_unusual("required argument", objective=dict(kl_coef=kl_coef))
    recursive_setattr(compiled, part, th.compile(recursive_getattr(compiled, part), backend="eager"))
    compiled.learn(64)
    target = make_unusual("required argument")
    compiled.save(tmp_path / "model")
    loaded = GRPO.load(tmp_path / "model", env=plain.get_env(), device="cpu")
    load_actor(target, compiled)
    for model in (loaded, target):
        th.testing.assert_close(dict(model.policy.state_dict()), dict(expected), rtol=1e-3, atol=1e-5)
    load_actor(target, tmp_path / "model.zip")
    load_actor(compiled, target)
    assert loaded.learn(64).num_timesteps == 64
