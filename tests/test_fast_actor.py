"""The actor without autograd gives the numbers of autograd and of SB3's distributions, and only for ordinary policies."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.distributions import CategoricalDistribution, DiagGaussianDistribution
from stable_baselines3.common.envs import FakeImageEnv
from torch import nn

from sb3_grpo import GRPO, ActorPolicy, MultiInputPolicy
from sb3_grpo.fast_actor import FAST_DISTRIBUTIONS, FastActor, FastCategorical, FastGaussian, actor, fast_actor
from sb3_grpo.update import ClipRange, Objective

VECTOR = spaces.Box(-1.0, 1.0, (3,))
DISCRETE = spaces.Discrete(4)
BOX = spaces.Box(-1.0, 1.0, (2,))
MATRIX = spaces.Box(-1.0, 1.0, (2, 2))
N = 40


class Slow(ActorPolicy):
    """The same policy on the ordinary path: with autograd and SB3's distribution objects."""

    def get_distribution(self, *args: Any) -> Any:
        return super().get_distribution(*args)


def make_policy(action_space: spaces.Space = DISCRETE, cls: type[ActorPolicy] = ActorPolicy, **kwargs: Any) -> ActorPolicy:
    # With orthogonal initialisation, the action layer and most gradients start near zero.
    return cls(VECTOR, action_space, lambda _: 1e-3, **{"ortho_init": False, **kwargs})


def fast_and_slow(action_space: spaces.Space, **kwargs: Any) -> tuple[ActorPolicy, FastActor, ActorPolicy]:
    """A policy, its fast actor, and the same policy on the ordinary path."""
    policy, slow = (make_policy(action_space, cls, **kwargs) for cls in (ActorPolicy, Slow))
    if hasattr(policy, "log_std"):
        nn.init.normal_(policy.log_std)
    slow.load_state_dict(policy.state_dict())
    fast = fast_actor(policy)
    assert fast is not None and fast_actor(slow) is None
    return policy, fast, slow


def gradients(policy: ActorPolicy) -> list[th.Tensor]:
    return [parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None]


# --- distributions ---


def test_a_gaussian_agrees_with_numbers_worked_out_by_hand():
    # Standard deviations 1 and 2, each action one deviation from the mean: -1/2 - 1/2 - log 1 - log 2 - log(2 pi)
    log_std = th.tensor([0.0, math.log(2.0)])
    log_prob, entropy = FastGaussian().evaluate(th.zeros(1, 2), log_std, th.tensor([[1.0, -2.0]]))
    assert log_prob.item() == pytest.approx(-1.0 - math.log(2.0) - math.log(2 * math.pi), abs=1e-6)
    assert entropy.item() == pytest.approx(1.0 + math.log(2 * math.pi) + math.log(2.0), abs=1e-6)


def test_a_categorical_agrees_with_numbers_worked_out_by_hand():
    logits = th.tensor([[0.25, 0.25, 0.5]]).log() + 3.0
    log_prob, entropy = FastCategorical().evaluate(logits, None, th.tensor([2]))
    assert log_prob.item() == pytest.approx(-math.log(2.0))
    assert entropy.item() == pytest.approx(1.5 * math.log(2.0))


def test_actions_are_as_frequent_as_they_are_probable():
    logits = th.tensor([[0.1, 0.2, 0.7]]).log().expand(40_000, 3)
    actions, log_prob = FastCategorical().sample(logits, None)
    th.testing.assert_close(th.bincount(actions) / len(actions), th.tensor([0.1, 0.2, 0.7]), atol=0.01, rtol=0)
    th.testing.assert_close(log_prob.exp(), th.tensor([0.1, 0.2, 0.7])[actions])


def test_a_forbidden_action_is_never_taken_and_spoils_neither_entropy_nor_gradient():
    policy, fast, _ = fast_and_slow(spaces.Discrete(3), net_arch=[])
    with th.no_grad():
        policy.action_net.weight.zero_()
        policy.action_net.bias.copy_(th.tensor([0.0, 0.0, -th.inf]))
        obs = th.randn(1000, 3)
        actions = fast.sample(obs).actions
        assert set(actions.tolist()) == {0, 1}
        th.testing.assert_close(fast.evaluate(obs, actions).entropy, th.full((1000,), math.log(2.0)))
        fast.backward(th.rand(1000), th.ones(1000))
    weight, bias = gradients(policy)
    assert th.isfinite(weight).all() and weight[:2].abs().min() > 0
    assert weight[2].tolist() == [0.0, 0.0, 0.0] and bias[2] == 0.0


def test_a_subclass_of_a_distribution_is_not_taken_for_it():
    for distribution in (CategoricalDistribution, DiagGaussianDistribution):
        assert distribution in FAST_DISTRIBUTIONS
        assert type("Other", (distribution,), {}) not in FAST_DISTRIBUTIONS


# --- the same numbers ---


@pytest.mark.parametrize("space", [DISCRETE, BOX, MATRIX], ids=["Discrete", "Box", "matrix of actions"])
def test_the_same_random_numbers_give_the_same_actions(space: spaces.Space):
    policy, fast, slow = fast_and_slow(space)
    obs = th.randn(500, 3)
    results = []
    for act in (slow, policy, actor(policy), fast.sample):
        th.manual_seed(1)
        with th.no_grad():
            results.append(act(obs)[:2])
    (expected_actions, expected_log_prob), *others = results
    assert len(expected_actions.unique()) > 1
    for actions, log_prob in others:
        th.testing.assert_close(actions.reshape(expected_actions.shape), expected_actions)
        th.testing.assert_close(log_prob, expected_log_prob)
    th.testing.assert_close(policy(obs, deterministic=True), slow(obs, deterministic=True))


@pytest.mark.parametrize("space", [DISCRETE, BOX], ids=["Discrete", "Box"])
@pytest.mark.parametrize("activation_fn", [nn.Tanh, nn.ReLU])
@pytest.mark.parametrize("net_arch", [[], [8, 5, 7]], ids=str)
def test_values_and_gradients_are_those_of_autograd(space: spaces.Space, activation_fn: type[nn.Module], net_arch: list[int]):
    policy, fast, slow = fast_and_slow(space, net_arch=net_arch, activation_fn=activation_fn)
    obs, of_log_prob = th.randn(N, 3), th.randn(N)
    actions = slow(obs)[0].detach()
    for of_entropy in (None, th.randn(N)):
        expected: Any = slow.evaluate_actions(obs, actions)
        loss = (of_log_prob * expected[0]).sum() + (0.0 if of_entropy is None else (of_entropy * expected[1]).sum())
        slow.optimizer.zero_grad()
        loss.backward()
        assert all(gradient.abs().max() > 0.01 for gradient in gradients(slow))
        with th.no_grad():
            evaluation = fast.evaluate(obs, actions)
            fast.backward(of_log_prob, of_entropy)
        th.testing.assert_close(tuple(evaluation), expected)
        th.testing.assert_close(policy.evaluate_actions(obs, actions), expected)
        th.testing.assert_close(gradients(policy), gradients(slow))


def test_the_gradient_is_clipped_as_torch_does_it():
    policy, fast, slow = fast_and_slow(BOX)
    for max_norm in (0.1, 1e6):
        with th.no_grad():
            fast.evaluate(th.randn(N, 3), th.randn(N, 2))
            fast.backward(th.randn(N), None)
        for copy, gradient in zip(slow.parameters(), gradients(policy), strict=True):
            copy.grad = gradient
        th.testing.assert_close(fast.clip_gradient(max_norm), nn.utils.clip_grad_norm_(slow.parameters(), max_norm))
        th.testing.assert_close(gradients(policy), gradients(slow))


def test_a_gradient_replaces_the_one_before_it():
    policy, fast, _ = fast_and_slow(DISCRETE)
    found = []
    for _ in range(3):
        with th.no_grad():
            fast.evaluate(th.ones(N, 3), th.ones(N, dtype=th.long))
            fast.backward(th.ones(N), None)
        found.append(gradients(policy))
        if len(found) == 1:
            policy.optimizer.zero_grad()  # removes the gradients
    th.testing.assert_close(found[1], found[0])
    th.testing.assert_close(found[2], found[0])


# --- eligibility ---


class OwnForward(ActorPolicy):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class OwnFeatures(ActorPolicy):
    def extract_features(self, *args: Any) -> Any:
        return 2.0 * super().extract_features(*args)


class OwnLatent(ActorPolicy):
    def _latent(self, obs: Any) -> Any:
        return super()._latent(2.0 * obs)


class OwnEvaluation(ActorPolicy):
    def evaluate_distribution(self, *args: Any) -> Any:
        log_prob, entropy = super().evaluate_distribution(*args)
        assert entropy is not None
        return log_prob, 2.0 * entropy


class Residual(nn.Sequential):
    def forward(self, x: th.Tensor) -> th.Tensor:
        return x + super().forward(x)


def altered(change: Callable[[Any], Any], **kwargs: Any) -> Callable[[], ActorPolicy]:
    """
    :param change: Function that changes a policy in place
    :return: Function that makes a policy and changes it
    """

    def make() -> ActorPolicy:
        policy = make_policy(**kwargs)
        change(policy)
        return policy

    return make


def with_net(*modules: nn.Module) -> Callable[[], ActorPolicy]:
    return altered(lambda policy: setattr(policy, "policy_net", nn.Sequential(*modules)))


def listen(module: nn.Module) -> None:
    module.register_forward_hook(lambda *_: None)


ACTS_IN_ITS_OWN_WAY = {
    "forward": lambda: make_policy(cls=OwnForward),
    "extract_features": lambda: make_policy(cls=OwnFeatures),
    "get_distribution": lambda: make_policy(cls=Slow),
    "_latent": lambda: make_policy(cls=OwnLatent),
    "hook on the policy": altered(listen),
    "compiled": lambda: th.compile(make_policy(), backend="eager"),
}
NOT_ELIGIBLE = {
    **ACTS_IN_ITS_OWN_WAY,
    "evaluate_distribution": lambda: make_policy(cls=OwnEvaluation),
    "compiled layers": altered(lambda policy: setattr(policy, "policy_net", th.compile(policy.policy_net, backend="eager"))),
    "method of the object": altered(lambda policy: setattr(policy, "evaluate_actions", lambda obs, actions: None)),
    "activation": lambda: make_policy(activation_fn=nn.ELU),
    "several activations": with_net(nn.Linear(3, 64), nn.Tanh(), nn.Linear(64, 64), nn.ReLU()),
    "normalisation": with_net(nn.Linear(3, 64), nn.LayerNorm(64), nn.Tanh()),
    "two linear layers": with_net(nn.Linear(3, 64), nn.Linear(64, 64)),
    "residual": altered(lambda policy: setattr(policy, "policy_net", Residual(nn.Linear(3, 3), nn.Tanh()))),
    "no bias": altered(lambda policy: setattr(policy, "action_net", nn.Linear(64, 4, bias=False))),
    "tied weights": altered(
        lambda policy: setattr(policy.policy_net[4], "weight", policy.policy_net[2].weight), net_arch=[8] * 3
    ),
    "frozen weight": altered(lambda policy: policy.policy_net[0].requires_grad_(False)),
    "another parameter": altered(lambda policy: setattr(policy, "bonus", nn.Linear(1, 1))),
    "forward of a layer": altered(lambda policy: setattr(policy.policy_net[0], "forward", lambda x: x)),
    "hook on a layer": altered(lambda policy: listen(policy.action_net)),
    "hook on the extractor": altered(lambda policy: listen(policy.features_extractor)),
    "hook on a gradient": altered(lambda policy: policy.action_net.weight.register_hook(lambda gradient: gradient)),
    "hook on an accumulated gradient": altered(
        lambda policy: policy.action_net.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    ),
    "gSDE": lambda: make_policy(BOX, use_sde=True),
    "MultiDiscrete": lambda: make_policy(spaces.MultiDiscrete([2, 3])),
    "MultiBinary": lambda: make_policy(spaces.MultiBinary(2)),
    "Dict observations": lambda: MultiInputPolicy(spaces.Dict({"a": VECTOR}), DISCRETE, lambda _: 1e-3),
}


@pytest.mark.parametrize("make", NOT_ELIGIBLE.values(), ids=NOT_ELIGIBLE)
def test_an_unusual_policy_has_no_fast_actor(make: Callable[[], ActorPolicy]):
    assert fast_actor(make_policy()) is not None
    assert fast_actor(make()) is None


def test_a_policy_that_evaluates_in_its_own_way_is_asked_itself():
    obs, actions = th.randn(N, 3), th.randint(4, (N,))
    th.manual_seed(0)
    plain = make_policy()
    th.manual_seed(0)
    own = make_policy(cls=OwnEvaluation)
    th.testing.assert_close(own.evaluate_actions(obs, actions)[1], 2.0 * plain.evaluate_actions(obs, actions)[1])


def test_a_hook_on_all_modules_is_noticed():
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert fast_actor(make_policy()) is None
    finally:
        handle.remove()
    assert fast_actor(make_policy()) is not None


@pytest.mark.parametrize("make", ACTS_IN_ITS_OWN_WAY.values(), ids=ACTS_IN_ITS_OWN_WAY)
def test_a_policy_that_acts_in_its_own_way_is_asked_itself(make: Callable[[], ActorPolicy]):
    policy, obs = make(), th.randn(N, 3)
    results = []
    for act in (actor(policy), policy):
        th.manual_seed(1)
        results.append(act(obs)[:2])
    th.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    # Its features may not be those that the extractor gives.
    assert actor(policy)(obs)[2] is None
    assert actor(make_policy())(obs)[2] is not None


# --- in the algorithm ---


class Actions(BaseCallback):
    """Remembers the actions and the log-probabilities of all steps."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: list[np.ndarray] = []
        self.log_probs: list[np.ndarray] = []

    def _on_step(self) -> bool:
        self.actions.append(self.locals["actions"])
        self.log_probs.append(self.locals["log_probs"].numpy())
        return True


@pytest.mark.parametrize(
    ("env", "options"),
    [
        pytest.param("CartPole-v1", dict(ent_coef=0.01, loss_aggregation="trajectory"), id="Discrete, entropy, weights"),
        pytest.param("CartPole-v1", dict(importance_sampling_level="trajectory", ent_coef=0.01), id="Discrete, GSPO"),
        pytest.param("Pendulum-v1", dict(clip_range_high=0.3, target_kl=0.5), id="Box, clipping"),
        pytest.param("Pendulum-v1", dict(ent_coef=0.01, loss_aggregation="constant"), id="Box, entropy, weights"),
    ],
)
def test_runs_are_the_same_with_autograd_and_without(env: str, options: dict[str, Any]):
    # Few and small steps: rounding grows with every update, and a single other action would make another run.
    settings: dict[str, Any] = dict(n_steps=64, batch_size=32, n_epochs=4, seed=3, device="cpu", **options)
    watchers = [Actions(), Actions()]
    fast = GRPO("MlpPolicy", env, **settings).learn(192, callback=watchers[0])
    slow = GRPO(Slow, env, **settings).learn(192, callback=watchers[1])
    assert fast_actor(fast.policy) is not None and fast_actor(slow.policy) is None
    np.testing.assert_allclose(watchers[0].actions, watchers[1].actions, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(watchers[0].log_probs, watchers[1].log_probs, rtol=1e-3, atol=1e-4)
    th.testing.assert_close(*(dict(model.policy.named_parameters()) for model in (fast, slow)), rtol=1e-3, atol=1e-5)
    assert fast.update_metrics == pytest.approx(slow.update_metrics, rel=1e-2, abs=1e-4)
    initial = GRPO("MlpPolicy", env, **settings).policy
    assert any((a - b).abs().max() > 1e-3 for a, b in zip(initial.parameters(), fast.policy.parameters(), strict=True))


@pytest.mark.parametrize("ent_coef", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_gradient_of_a_minibatch_is_that_of_its_loss(ent_coef: float, weighted: bool):
    model = GRPO("MlpPolicy", "CartPole-v1", n_steps=64, ent_coef=ent_coef, seed=0, device="cpu").learn(64)
    samples = next(model.rollout_buffer.get(32))
    # Away from the policy that sampled, so that some transitions are clipped.
    samples = samples._replace(old_log_prob=samples.old_log_prob + 0.3 * th.randn(32))
    if weighted:
        samples = samples._replace(weights=th.rand(32))
    objective = Objective(ClipRange(0.2, 0.2), "step", ent_coef, 0.0, model.kl_penalty, 0.5)
    found = []
    for fast in (None, fast_actor(model.policy)):
        with th.set_grad_enabled(fast is None):
            minibatch = objective.evaluate(model.policy, samples, fast)
            norm = objective.set_gradient(model.policy, minibatch, samples.weights, fast)
        found.append([norm, minibatch.loss.detach(), *gradients(model.policy)])
    assert 0 < (minibatch.slope == 0).sum() < 32
    assert found[0][0] > 0.01
    th.testing.assert_close(found[1], found[0])


def test_minibatches_of_vectors_share_the_memory_of_one_permuted_copy():
    model = GRPO("MlpPolicy", "CartPole-v1", n_steps=64, seed=0, device="cpu").learn(64)
    batches = list(model.rollout_buffer.get(20))
    assert [len(batch.advantages) for batch in batches] == [20, 20, 20, 4]
    assert len({batch.observations.untyped_storage().data_ptr() for batch in batches}) == 1


class CountingNet(nn.Sequential):
    """Counts the observations that pass."""

    n_observations = 0

    def forward(self, obs: th.Tensor) -> th.Tensor:
        self.n_observations += len(obs)
        return super().forward(obs)


def test_the_kernel_buffer_encodes_no_image_a_second_time():
    env = FakeImageEnv(screen_height=40, screen_width=40, n_channels=1)
    model = GRPO("CnnPolicy", env, n_steps=16, batch_size=16, n_epochs=1, share_starts=False, seed=0, device="cpu")
    counter = CountingNet(*model.policy.features_extractor.cnn)
    model.policy.features_extractor.cnn = counter
    model.learn(16)
    # 16 of the rollout, 16 of the update, and the end of the rollout or of an episode, where the trajectory is cut.
    assert 32 < counter.n_observations <= 34
