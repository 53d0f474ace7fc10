"""The KL penalty: when the reference is renewed, what is estimated, and how the coefficient adapts."""

import itertools
import pathlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from helpers import same
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.torch_layers import FlattenExtractor

from sb3_grpo import GRPO, ActorPolicy
from sb3_grpo.arithmetic.kl_penalty import KL_COEF_BOUNDS, KLPenalty, adapted_kl_coef
from sb3_grpo.buffers import GroupRolloutBufferSamples
from sb3_grpo.losses import exact_kl

VECTOR = spaces.Box(-1.0, 1.0, (3,))
OBSERVED = th.as_tensor(np.random.default_rng(0).uniform(-1.0, 1.0, (200, 3)).astype(np.float32))


def make_policy(action_space: spaces.Space = spaces.Discrete(3), **kwargs: Any) -> Any:  # noqa: B008
    return ActorPolicy(VECTOR, action_space, lambda _: 1e-3, net_arch=[8], ortho_init=False, **kwargs)


def make_penalty(reference: Any = "initial", estimator: Any = "exact") -> KLPenalty:
    return KLPenalty(reference, estimator)


def weights(policy: th.nn.Module) -> dict[str, th.Tensor]:
    return {name: value.clone() for name, value in policy.state_dict().items()}


def perturb(policy: th.nn.Module, scale: float = 0.1) -> Any:
    with th.no_grad():
        for parameter in policy.parameters():
            parameter.add_(scale * th.randn_like(parameter))
    return policy


def sample(policy: Any, observations: th.Tensor = OBSERVED) -> GroupRolloutBufferSamples:
    """Transitions whose actions a policy has chosen."""
    with th.no_grad():
        actions, log_prob = policy(observations)
    n = len(observations)
    return GroupRolloutBufferSamples(observations, actions, log_prob, th.zeros(n), th.zeros(n, dtype=th.long))


# --- the reference ---


@pytest.mark.parametrize(
    ("reference", "lifetime"),
    [("old", 1), (1, 1), (2, 2), (3, 3), ("initial", 100)],
    ids=["old", "every update", "every second", "every third", "initial"],
)
def test_the_reference_is_renewed_when_it_is_due(reference: Any, lifetime: int):
    penalty, policy = make_penalty(reference), make_policy()
    assert penalty.policy is None
    before_update = []
    for update in range(7):
        before_update.append(weights(policy))
        penalty.renew(policy)
        assert same(weights(penalty.policy), before_update[update // lifetime * lifetime])  # type: ignore[arg-type]
        perturb(policy)
    assert not any(same(*pair) for pair in itertools.pairwise(before_update))


def test_estimates_of_the_divergence_from_the_old_policy_need_no_second_policy():
    policy = make_policy()
    batch = sample(policy)
    for estimator in ("k1", "k2", "k3"):
        penalty = make_penalty("old", estimator)
        penalty.renew(policy)
        assert penalty.policy is None
        assert penalty.mean(policy, [batch]) == pytest.approx(0.0, abs=1e-6)
    assert penalty.mean(perturb(policy, 0.3), [batch]) > 1e-3


def test_renewal_draws_no_random_number_and_the_reference_gets_no_gradient():
    for estimator in ("exact", "k3"):
        penalty, policy = make_penalty("initial", estimator), make_policy()
        state = th.get_rng_state()
        penalty.renew(policy)
        assert th.equal(th.get_rng_state(), state)
        batch = sample(policy)
        distribution = policy.get_distribution(batch.observations)
        penalty.estimate(batch, distribution.log_prob(batch.actions), distribution).sum().backward()
        assert all(parameter.grad is not None for parameter in policy.parameters())
        assert all(parameter.grad is None for parameter in penalty.policy.parameters())


class Locked(FlattenExtractor):
    """Holds an object that cannot be copied."""

    def __init__(self, observation_space: spaces.Box):
        super().__init__(observation_space)
        self.lock = threading.Lock()


def test_a_policy_that_cannot_be_copied_learns_without_a_penalty_and_is_refused_with_one():
    policy_kwargs = dict(net_arch=[8], features_extractor_class=Locked)
    make_model(policy_kwargs=policy_kwargs).learn(64)
    with pytest.raises(TypeError, match=r"needs a copy of the policy .* failed with TypeError.* or pass kl_coef=0"):
        make_model(policy_kwargs=policy_kwargs, objective=dict(kl_coef=0.1)).learn(64)


# --- the estimates ---


@pytest.mark.parametrize(
    "action_space",
    [spaces.Discrete(3), spaces.Box(-1.0, 1.0, (2,)), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2)],
    ids=lambda space: type(space).__name__,
)
def test_estimates_average_to_the_divergence_from_the_policy_to_the_reference(action_space: Any):
    reference, policy = make_policy(action_space), make_policy(action_space)
    policy.load_state_dict(reference.state_dict())
    with th.no_grad():
        if isinstance(action_space, spaces.Box):
            policy.log_std.sub_(0.7)
        else:
            policy.action_net.bias[0] += 2.5
        distributions = [each.get_distribution(OBSERVED) for each in (policy, reference)]
    forward, backward = (exact_kl(*pair).mean().item() for pair in (distributions, distributions[::-1]))
    batch = sample(policy, OBSERVED.repeat(200, 1))
    for estimator, tolerance in (("exact", 1e-4), ("k1", 0.06), ("k3", 0.06)):
        penalty = make_penalty("initial", estimator)
        penalty.renew(reference)
        assert penalty.mean(policy, [batch]) == pytest.approx(forward, rel=tolerance)
    assert forward != pytest.approx(backward, rel=0.12)


def test_the_exact_divergence_is_that_from_the_policy_to_the_reference():
    reference, policy = make_policy(), make_policy()
    penalty = make_penalty("initial", "exact")
    penalty.renew(reference)
    log_p, log_q = (th.log_softmax(each.action_net(each.policy_net(OBSERVED)), dim=1) for each in (policy, reference))
    by_hand = (log_p.exp() * (log_p - log_q)).sum(dim=1)
    batch = sample(policy)
    distribution = policy.get_distribution(OBSERVED)
    th.testing.assert_close(penalty.estimate(batch, distribution.log_prob(batch.actions), distribution), by_hand)
    assert penalty.mean(policy, batch.split(64)) == pytest.approx(by_hand.mean().item(), rel=1e-5)


@pytest.mark.parametrize(
    ("estimator", "reference"), [("exact", "initial"), ("k1", "initial"), ("k2", "initial"), ("k3", "initial"), ("k3", "old")]
)
def test_steps_against_the_gradient_lead_back_to_the_reference(estimator: Any, reference: Any):
    old = make_policy()
    policy = make_policy()
    policy.load_state_dict(old.state_dict())
    penalty = make_penalty(reference, estimator)
    penalty.renew(old)
    batch = sample(old, OBSERVED.repeat(20, 1))
    perturb(policy, 0.3)
    optimizer = th.optim.Adam(policy.parameters(), lr=3e-3)

    def divergence() -> float:
        with th.no_grad():
            return exact_kl(policy.get_distribution(OBSERVED), old.get_distribution(OBSERVED)).mean().item()

    before = divergence()
    for _ in range(60):
        distribution = policy.get_distribution(batch.observations)
        log_prob, _ = policy.evaluate_distribution(distribution, batch.actions)
        optimizer.zero_grad()
        penalty.estimate(batch, log_prob, distribution).mean().backward()
        optimizer.step()
    assert divergence() < 0.2 * before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("first",), "`kl_reference` must be 'old' or 'initial', not 'first'"),
        ((0,), "`kl_reference` must be an integer of at least 1 or 'old' or 'initial', not 0"),
        ((True,), "`kl_reference` must be an integer .*not True"),
        (("initial", "k4"), "`kl_estimator` must be 'exact', 'k1', 'k2' or 'k3', not 'k4'"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_and_quoted(arguments: tuple[Any, ...], message: str):
    with pytest.raises(ValueError, match=message):
        make_penalty(*arguments)


# --- the coefficient ---


def test_the_coefficient_doubles_above_the_target_and_halves_below():
    for kl, expected in ((0.151, 0.4), (0.149, 0.2), (0.067, 0.2), (0.066, 0.1), (0.0, 0.1)):
        assert adapted_kl_coef(0.2, kl, target=0.1) == pytest.approx(expected)


def test_the_coefficient_stays_within_its_bounds():
    low, high = KL_COEF_BOUNDS
    assert adapted_kl_coef(low, 0.0, 0.1) == low
    assert adapted_kl_coef(high, 1.0, 0.1) == high


# --- in the algorithm ---


class Watcher(BaseCallback):
    """Weights of the policy and of the reference, coefficients and logs before each update and after the last."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[dict[str, th.Tensor]] = []
        self.actions: list[np.ndarray] = []
        self.kl_coefs: list[float] = []
        self.logged: list[dict[str, Any]] = []

    def _on_rollout_start(self) -> None:
        self.weights.append(weights(self.model.policy))
        self.kl_coefs.append(self.model.kl_coef)  # type: ignore[attr-defined]
        self.logged.append(dict(self.logger.name_to_value))

    _on_training_end = _on_rollout_start

    def _on_step(self) -> bool:
        self.actions.append(self.locals["actions"])
        return True


def make_model(n_envs: int = 2, **kwargs: Any) -> GRPO:
    small: dict[str, Any] = dict(n_steps=32, batch_size=32, n_epochs=2, learning_rate=0.01, policy_kwargs=dict(net_arch=[8]))
    return GRPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs), seed=0, device="cpu", **{**small, **kwargs})


def distance(model: GRPO, initial: dict[str, th.Tensor]) -> float:
    other = make_model()
    other.policy.load_state_dict(initial)
    observations = OBSERVED @ th.eye(3, 4)
    with th.no_grad():
        return exact_kl(*(each.policy.get_distribution(observations) for each in (model, other))).mean().item()


def test_a_large_penalty_keeps_the_policy_near_the_initial_one():
    distances = []
    for kl_coef in (0.0, 20.0):
        model = make_model(4, objective=dict(kl_coef=kl_coef), n_epochs=4)
        initial = weights(model.policy)
        distances.append(distance(model.learn(1024), initial))
    assert distances[0] > 0.02 and 0.0 < distances[1] < 0.1 * distances[0]


def test_a_tiny_penalty_changes_no_action_but_is_logged():
    watchers = [Watcher(), Watcher()]
    models = [
        make_model(objective=dict(kl_coef=kl_coef)).learn(192, callback=watcher)
        for kl_coef, watcher in zip((0.0, 1e-30), watchers, strict=True)
    ]
    np.testing.assert_array_equal(*(watcher.actions for watcher in watchers))
    # Up to rounding, which differs between autograd and the fast actor.
    th.testing.assert_close(*(weights(model.policy) for model in models))
    assert models[0].kl_penalty.policy is None
    assert "train/kl_loss" not in watchers[0].logged[-1] and watchers[1].logged[-1]["train/kl_loss"] > 0


@pytest.mark.parametrize(("target", "factor"), [(1e-9, 2.0), (1e3, 0.5)], ids=["above the target", "below the target"])
def test_the_coefficient_adapts_after_each_update_and_survives_a_file(target: float, factor: float, tmp_path: pathlib.Path):
    watcher = Watcher()
    model = make_model(objective=dict(kl_coef=0.1, adaptive_kl_target=target)).learn(64 * 3, callback=watcher)
    assert watcher.kl_coefs == pytest.approx([0.1 * factor**update for update in range(4)])
    model.save(tmp_path / "model")
    loaded = GRPO.load(tmp_path / "model", env=make_vec_env("CartPole-v1", 2), device="cpu")
    assert loaded.kl_coef == model.kl_coef
    assert loaded.learn(64).kl_coef == pytest.approx(0.1 * factor**4)


def test_the_coefficient_goes_by_the_divergence_after_the_update():
    # With one minibatch, the policy is still its own reference when the loss is computed.
    model = make_model(objective=dict(kl_coef=0.1, adaptive_kl_target=1e-9), n_epochs=1, batch_size=64).learn(64)
    assert model.update_metrics["train/kl_loss"] == pytest.approx(0.0, abs=1e-7)
    assert model.update_metrics["train/kl_to_reference"] > 1e-6
    assert model.kl_coef == pytest.approx(0.2)


def test_without_a_target_or_without_an_update_the_coefficient_stays():
    assert make_model(objective=dict(kl_coef=0.1)).learn(128).kl_coef == 0.1
    # No group is completed.
    lonely = make_model(
        1, n_steps=2, batch_size=2, objective=dict(kl_coef=0.1, adaptive_kl_target=1e3), rollout_buffer_class="outcome"
    )
    assert lonely.learn(4).kl_coef == 0.1


@pytest.mark.parametrize("reference", ["initial", 3])
def test_reference_and_age_survive_a_file(reference: Any, tmp_path: pathlib.Path):
    model = make_model(objective=dict(kl_coef=0.1, kl_reference=reference))
    perturb(model.policy)  # the weights do not follow from the seed
    model.learn(64 * 2)
    model.save(tmp_path / "model")
    loaded = GRPO.load(tmp_path / "model", env=make_vec_env("CartPole-v1", 2), device="cpu")
    assert same(weights(loaded.kl_penalty.policy), weights(model.kl_penalty.policy))  # type: ignore[arg-type]
    assert not same(weights(loaded.kl_penalty.policy), weights(loaded.policy))  # type: ignore[arg-type]
    for penalty in (model.kl_penalty, loaded.kl_penalty):
        for _ in range(2):  # the second is the fourth renewal of all
            penalty.renew(loaded.policy)
    assert same(weights(loaded.kl_penalty.policy), weights(model.kl_penalty.policy))  # type: ignore[arg-type]
    renewed = reference == 3
    assert same(weights(loaded.kl_penalty.policy), weights(loaded.policy)) == renewed  # type: ignore[arg-type]


def test_a_model_saved_without_a_penalty_can_be_loaded_with_one(tmp_path: pathlib.Path):
    make_model().learn(64).save(tmp_path / "model")
    loaded = GRPO.load(tmp_path / "model", env=make_vec_env("CartPole-v1", 2), device="cpu", objective=dict(kl_coef=0.1))
    before = weights(loaded.policy)
    loaded.learn(64)
    assert same(weights(loaded.kl_penalty.policy), before)  # type: ignore[arg-type]


@pytest.mark.parametrize("reference", ["old", 2])
def test_an_update_that_fails_leaves_reference_and_counter_as_they_were(reference: Any, monkeypatch: pytest.MonkeyPatch):
    model = make_model(objective=dict(kl_coef=0.1, kl_reference=reference)).learn(128)
    before = (weights(model.kl_penalty.policy), model.kl_penalty.age, model._n_updates)  # type: ignore[arg-type]
    n_steps, step = itertools.count(1), model.policy.optimizer.step

    def fail_in_the_second_epoch(*args: Any) -> Any:
        if next(n_steps) > 2:
            raise KeyboardInterrupt
        return step(*args)

    with monkeypatch.context() as patch:
        patch.setattr(model.policy.optimizer, "step", fail_in_the_second_epoch)
        with pytest.raises(KeyboardInterrupt):
            model.train()
    assert same(weights(model.kl_penalty.policy), before[0])  # type: ignore[arg-type]
    assert (model.kl_penalty.age, model._n_updates) == before[1:]
    model.train()
    assert not same(weights(model.kl_penalty.policy), before[0])  # type: ignore[arg-type]


def count_passes(policy: ActorPolicy) -> Callable[[], int]:
    passes = []
    policy.action_net.register_forward_hook(lambda *_: passes.append(1))
    return lambda: len(passes)


def test_the_exact_divergence_runs_the_policy_once_per_minibatch():
    model = make_model(objective=dict(kl_coef=0.1), n_epochs=1, batch_size=16).learn(64)
    n_passes = count_passes(model.policy)
    model.train()
    assert n_passes() == 4
