"""The actor without autograd: the same numbers as the modules and autograd give, and where it stands aside."""

from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.envs import FakeImageEnv
from torch import nn

from sb3_grpo import GRPO
from sb3_grpo.buffers import GroupRolloutBufferSamples
from sb3_grpo.fast_actor import ClosedFormActor
from sb3_grpo.grpo import ClipRange
from sb3_grpo.policies import ActorPolicy, MultiInputActorPolicy

VECTOR = spaces.Box(-1.0, 1.0, (3,))
ACTION_SPACES = {"Discrete": spaces.Discrete(4), "Box": spaces.Box(-1.0, 1.0, (2,))}
N = 40


def make_policy(action_space: spaces.Space, observation_space: spaces.Space = VECTOR, **kwargs: Any) -> ActorPolicy:
    # Initialised orthogonally, the action layer starts near zero, and most gradients with it
    return ActorPolicy(observation_space, action_space, lambda _: 1e-3, **{"ortho_init": False, **kwargs})


def closed_form_of(policy: ActorPolicy) -> ClosedFormActor:
    closed_form = policy.closed_form()
    assert closed_form is not None
    return closed_form


def gradients(policy: ActorPolicy) -> list[th.Tensor]:
    return [parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None]


class Autograd(ActorPolicy):
    """The same policy, for which there is no closed form."""

    def evaluate_actions(self, *args: Any) -> Any:
        return super().evaluate_actions(*args)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


@pytest.mark.parametrize("action_space", ACTION_SPACES.values(), ids=ACTION_SPACES)
@pytest.mark.parametrize("activation_fn", [nn.Tanh, nn.ReLU])
@pytest.mark.parametrize("net_arch", [[], [8], [8, 5], [8, 5, 7]], ids=str)
@pytest.mark.parametrize("of_entropy", [0.0, 0.3], ids=["without entropy", "with entropy"])
def test_values_and_gradients_are_those_of_autograd(action_space, activation_fn, net_arch, of_entropy):
    policy = make_policy(action_space, net_arch=net_arch, activation_fn=activation_fn)
    if hasattr(policy, "log_std"):
        nn.init.normal_(policy.log_std)
    obs, of_log_prob, of_entropies = th.randn(N, 3), th.randn(N), of_entropy * th.randn(N)
    actions = policy(obs)[0].detach()

    log_prob, entropy = policy.evaluate_actions(obs, actions)
    assert entropy is not None
    ((of_log_prob * log_prob).sum() + (of_entropies * entropy).sum()).backward()
    expected = gradients(policy)
    assert len(expected) == len(list(policy.parameters()))
    assert all(gradient.abs().max() > 0.01 for gradient in expected)

    closed_form = closed_form_of(policy)
    with th.no_grad():
        evaluation = closed_form.evaluate(obs, actions)
        closed_form.backward(of_log_prob, of_entropies if of_entropy else None)
    th.testing.assert_close(evaluation.log_prob, log_prob)
    th.testing.assert_close(evaluation.entropy, entropy)
    th.testing.assert_close(gradients(policy), expected)


def test_a_forbidden_action_has_no_gradient_and_spoils_none():
    policy = make_policy(spaces.Discrete(3), net_arch=[])
    with th.no_grad():
        policy.action_net.bias[2] = -th.inf
    closed_form = closed_form_of(policy)
    with th.no_grad():
        closed_form.evaluate(th.randn(N, 3), th.zeros(N, dtype=th.long))
        closed_form.backward(th.ones(N), th.ones(N))
    weight, bias = gradients(policy)
    assert th.isfinite(weight).all() and th.isfinite(bias).all()
    assert weight[2].tolist() == [0.0, 0.0, 0.0] and bias[2] == 0.0
    assert weight[:2].abs().min() > 0


@pytest.mark.parametrize("action_space", ACTION_SPACES.values(), ids=ACTION_SPACES)
def test_samples_are_those_of_the_policy(action_space):
    policy = make_policy(action_space)
    obs = th.randn(N, 3)
    th.manual_seed(1)
    actions, log_prob = policy(obs)
    th.manual_seed(1)
    with th.no_grad():
        sample = closed_form_of(policy).sample(obs)
    assert th.equal(sample.actions, actions) and th.equal(sample.log_prob, log_prob)


@pytest.mark.parametrize("max_norm", [0.1, 1e6], ids=["clipped", "left as it is"])
def test_the_gradient_is_clipped_as_by_torch(max_norm):
    policy = make_policy(ACTION_SPACES["Box"])
    closed_form = closed_form_of(policy)
    with th.no_grad():
        closed_form.evaluate(th.randn(N, 3), th.randn(N, 2))
        closed_form.backward(th.randn(N), None)
    theirs = [parameter.clone() for parameter in policy.parameters()]
    for copy, parameter in zip(theirs, policy.parameters(), strict=True):
        assert parameter.grad is not None
        copy.grad = parameter.grad.clone()
    norm = closed_form.clip_gradient(max_norm)
    th.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs, max_norm))
    th.testing.assert_close(gradients(policy), [copy.grad for copy in theirs])


def test_the_gradient_is_replaced_not_added_up_even_where_somebody_has_dropped_it():
    policy = make_policy(ACTION_SPACES["Discrete"])
    closed_form = closed_form_of(policy)

    def differentiate() -> list[th.Tensor]:
        with th.no_grad():
            closed_form.evaluate(th.ones(N, 3), th.ones(N, dtype=th.long))
            closed_form.backward(th.ones(N), None)
        return gradients(policy)

    first = differentiate()
    policy.optimizer.zero_grad()
    th.testing.assert_close(differentiate(), first)
    th.testing.assert_close(differentiate(), first)


# --- where it stands aside --------------------------------------------------------------------------------------------


class DoubledFeatures(ActorPolicy):
    def extract_features(self, *args: Any) -> Any:
        return 2.0 * super().extract_features(*args)


class OwnDistribution(ActorPolicy):
    def get_distribution(self, obs: Any) -> Any:
        return super().get_distribution(2.0 * obs)


class Residual(nn.Sequential):
    def forward(self, x: th.Tensor) -> th.Tensor:
        return x + super().forward(x)


def replaced(policy: ActorPolicy, name: str, module: nn.Module) -> ActorPolicy:
    setattr(policy, name, module)
    return policy


def listened_to(policy: ActorPolicy, module: nn.Module) -> ActorPolicy:
    module.register_forward_hook(lambda *_: None)
    return policy


def frozen(policy: ActorPolicy) -> ActorPolicy:
    policy.policy_net[0].requires_grad_(False)
    return policy


def with_gradient_hook(policy: ActorPolicy) -> ActorPolicy:
    next(policy.policy_net.parameters()).register_hook(lambda gradient: gradient)
    return policy


def with_method(policy: ActorPolicy) -> ActorPolicy:
    policy.evaluate_actions = lambda obs, actions: None  # type: ignore[method-assign, assignment, return-value]
    return policy


class OwnLatent(ActorPolicy):
    def _latent(self, obs: Any) -> Any:
        return super()._latent(2.0 * obs)


def tied(policy: ActorPolicy) -> ActorPolicy:
    policy.policy_net[4].weight = policy.policy_net[2].weight
    return policy


def with_accumulate_hook(policy: ActorPolicy) -> ActorPolicy:
    next(policy.policy_net.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    return policy


def with_own_forward(policy: ActorPolicy) -> ActorPolicy:
    policy.policy_net[0].forward = lambda x: 2.0 * x
    return policy


DISCRETE = ACTION_SPACES["Discrete"]
ANOTHER_WAY = {
    "forward": lambda: Autograd(VECTOR, DISCRETE, lambda _: 1e-3),
    "extract_features": lambda: DoubledFeatures(VECTOR, DISCRETE, lambda _: 1e-3),
    "get_distribution": lambda: OwnDistribution(VECTOR, DISCRETE, lambda _: 1e-3),
    "_latent": lambda: OwnLatent(VECTOR, DISCRETE, lambda _: 1e-3),
    "tied weights": lambda: tied(make_policy(DISCRETE, net_arch=[8, 8, 8])),
    "hook on an accumulated gradient": lambda: with_accumulate_hook(make_policy(DISCRETE)),
    "forward of a layer": lambda: with_own_forward(make_policy(DISCRETE)),
    "a method of the object": lambda: with_method(make_policy(DISCRETE)),
    "activation": lambda: make_policy(DISCRETE, activation_fn=nn.ELU),
    "mixed activations": lambda: replaced(
        make_policy(DISCRETE),
        "policy_net",
        nn.Sequential(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU()),
    ),
    "normalisation": lambda: replaced(
        make_policy(DISCRETE), "policy_net", nn.Sequential(nn.Linear(3, 64), nn.LayerNorm(64), nn.Tanh())
    ),
    "residual": lambda: replaced(make_policy(DISCRETE), "policy_net", Residual(nn.Linear(3, 3), nn.Tanh())),
    "no bias": lambda: replaced(make_policy(DISCRETE), "action_net", nn.Linear(64, 4, bias=False)),
    "two linear layers": lambda: replaced(
        make_policy(DISCRETE), "policy_net", nn.Sequential(nn.Linear(3, 64), nn.Linear(64, 64))
    ),
    "frozen weight": lambda: frozen(make_policy(DISCRETE)),
    "weight of its own": lambda: replaced(make_policy(DISCRETE), "bonus", nn.Linear(1, 1)),
    "gradient hook": lambda: with_gradient_hook(make_policy(DISCRETE)),
    "hook on the policy": lambda: (lambda policy: listened_to(policy, policy))(make_policy(DISCRETE)),
    "hook on a layer": lambda: (lambda policy: listened_to(policy, policy.action_net))(make_policy(DISCRETE)),
    "hook on the extractor": lambda: (lambda policy: listened_to(policy, policy.features_extractor))(make_policy(DISCRETE)),
    "gSDE": lambda: make_policy(ACTION_SPACES["Box"], use_sde=True),
    "MultiDiscrete": lambda: make_policy(spaces.MultiDiscrete([2, 3])),
    "MultiBinary": lambda: make_policy(spaces.MultiBinary(2)),
    "Dict observations": lambda: MultiInputActorPolicy(spaces.Dict({"a": VECTOR}), DISCRETE, lambda _: 1e-3),
}


@pytest.mark.parametrize("make", ANOTHER_WAY.values(), ids=ANOTHER_WAY)
def test_there_is_no_closed_form_of_an_actor_that_goes_another_way(make):
    assert make_policy(DISCRETE).closed_form() is not None
    assert make().closed_form() is None


@pytest.mark.parametrize("name", ["forward", "extract_features", "get_distribution", "_latent", "hook on the policy"])
def test_a_policy_with_its_own_way_to_actions_is_called_as_a_whole(name):
    assert make_policy(DISCRETE).actor() is not None
    assert ANOTHER_WAY[name]().actor() is None


# --- in the algorithm -------------------------------------------------------------------------------------------------


class Actions(BaseCallback):
    """Remembers actions and log-probabilities of all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: list[np.ndarray] = []
        self.log_probs: list[np.ndarray] = []

    def _on_step(self) -> bool:
        self.actions.append(self.locals["actions"])
        self.log_probs.append(self.locals["log_probs"].numpy())
        return True


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"ent_coef": 0.01, "loss_aggregation": "trajectory"}, id="entropy, weights"),
        pytest.param({"clip_range_high": 0.3, "dual_clip": 2.0, "target_kl": 0.5}, id="clipping"),
        pytest.param({"importance_sampling_level": "trajectory", "ent_coef": 0.01}, id="GSPO"),
    ],
)
def test_runs_are_the_same_with_autograd_and_without(env, options):
    # Few and small steps: rounding grows with every update, and a single other action would make another run
    settings: dict[str, Any] = dict(n_steps=64, batch_size=32, n_epochs=4, seed=3, device="cpu", **options)
    watchers = [Actions(), Actions()]
    models = [
        GRPO(policy, env, **settings).learn(192, callback=watcher)
        for policy, watcher in zip(("MlpPolicy", Autograd), watchers, strict=True)
    ]
    assert models[0].policy.closed_form() is not None and models[1].policy.closed_form() is None
    np.testing.assert_allclose(watchers[0].actions, watchers[1].actions, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(watchers[0].log_probs, watchers[1].log_probs, rtol=1e-3, atol=1e-4)
    th.testing.assert_close(*(dict(model.policy.named_parameters()) for model in models), rtol=1e-3, atol=1e-5)
    figures = [model.update_metrics for model in models]
    assert figures[0] == pytest.approx(figures[1], rel=1e-2, abs=1e-4)
    initial = GRPO("MlpPolicy", env, **settings).policy
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(initial.parameters(), models[0].policy.parameters(), strict=True))


@pytest.mark.parametrize("ent_coef", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_gradient_of_a_minibatch_is_that_of_its_loss(ent_coef, weighted):
    model = GRPO("MlpPolicy", "CartPole-v1", n_steps=64, ent_coef=ent_coef, seed=0, device="cpu").learn(64)
    samples = next(model.rollout_buffer.get(32))
    # Away from the policy that sampled, so that some transitions are clipped
    samples = samples._replace(old_log_prob=samples.old_log_prob + 0.3 * th.randn(32))
    if weighted:
        samples = samples._replace(weights=th.rand(32))
    found = []
    for closed_form in (None, model.policy.closed_form()):
        with th.set_grad_enabled(closed_form is None):
            losses = model._minibatch_loss(samples, ClipRange(0.2, 0.2), closed_form)
            norm = model._set_gradient(losses, samples.weights, closed_form)
        found.append([norm, losses.loss.detach(), *gradients(model.policy)])
    th.testing.assert_close(found[1], found[0])
    assert 0 < (samples.advantages != 0).sum() and found[0][0] > 0.01


def test_minibatches_of_flat_observations_share_the_memory_of_one_permuted_copy():
    model = GRPO("MlpPolicy", "CartPole-v1", n_steps=64, seed=0, device="cpu").learn(64)
    batches = list(model.rollout_buffer.get(20))
    assert [len(batch.advantages) for batch in batches] == [20, 20, 20, 4]

    def storage(batch: GroupRolloutBufferSamples) -> int:
        assert isinstance(batch.observations, th.Tensor)
        return batch.observations.untyped_storage().data_ptr()

    assert len({storage(batch) for batch in batches}) == 1
    assert model.rollout_buffer._update is not None
    everything = th.cat([batch.advantages for batch in batches])
    th.testing.assert_close(everything.sort().values, model.rollout_buffer._update.advantages.sort().values)
    assert not th.equal(everything, model.rollout_buffer._update.advantages)


def make_image_model(**kwargs: Any) -> GRPO:
    env = FakeImageEnv(screen_height=40, screen_width=40, n_channels=1)
    return GRPO("CnnPolicy", env, n_epochs=1, share_starts=False, seed=0, device="cpu", **kwargs)


class CountingEncoder(nn.Module):
    """Counts the frames that pass."""

    def __init__(self, encoder: nn.Module):
        super().__init__()
        self.encoder = encoder
        self.frames = 0

    def forward(self, obs: th.Tensor) -> th.Tensor:
        self.frames += len(obs)
        return self.encoder(obs)


def test_the_kernel_encodes_no_frame_a_second_time():
    model = make_image_model(n_steps=16, batch_size=16)
    model.policy.features_extractor.cnn = CountingEncoder(model.policy.features_extractor.cnn)
    counter = model.policy.features_extractor.cnn
    asked_for: list[int] = []
    original = model._actor_features

    def actor_features(observations: Any) -> np.ndarray:
        asked_for.append(len(observations))
        return original(observations)

    model._actor_features = actor_features
    model.learn(16)
    cuts = sum(asked_for)
    assert cuts <= 2  # the end of the rollout, and of an episode if it fell into it
    assert counter.frames == 16 + cuts + 16


def test_the_features_that_the_kernel_keeps_are_those_of_the_observations():
    model = make_image_model(n_steps=32, learning_rate=0.0).learn(64)
    observations = model.rollout_buffer._flatten(32).observations
    kept = model.rollout_buffer._features.flatten(end_dim=1)
    th.testing.assert_close(kept.double(), th.as_tensor(model._actor_features(observations)), rtol=1e-4, atol=1e-5)
    assert kept.std() > 0.01
