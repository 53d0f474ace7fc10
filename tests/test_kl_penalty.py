"""The KL penalty alone: its reference, and what is estimated. Runs with a penalty are in ``test_options.py``."""

import threading
from typing import Any

import pytest
import torch as th
from gymnasium import spaces
from helpers import OBSERVED, VECTOR, make_model
from stable_baselines3.common.torch_layers import FlattenExtractor

from sb3_grpo import ActorPolicy
from sb3_grpo.arithmetic.kl_penalty import KLEstimator, KLPenalty
from sb3_grpo.buffers import GroupRolloutBufferSamples
from sb3_grpo.losses import exact_kl


def make_policy(action_space: spaces.Space = spaces.Discrete(3), **kwargs: Any) -> Any:  # noqa: B008
    return ActorPolicy(VECTOR, action_space, lambda _: 1e-3, net_arch=[8], ortho_init=False, **kwargs)


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


def test_estimates_of_the_divergence_from_the_old_policy_need_no_second_policy():
    policy = make_policy()
    batch = sample(policy)
    penalty = KLPenalty("old", "k3")
    penalty.renew(policy)
    assert penalty.policy is None
    assert penalty.mean(policy, [batch]) == pytest.approx(0.0, abs=1e-6)
    assert penalty.mean(perturb(policy, 0.3), [batch]) > 1e-3


def test_renewal_draws_no_random_number_and_the_reference_gets_no_gradient():
    for estimator in ("exact", "k3"):
        penalty, policy = KLPenalty("initial", estimator), make_policy()
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
    tolerances: dict[KLEstimator, float] = {"exact": 1e-4, "k3": 0.06}
    for estimator, tolerance in tolerances.items():
        penalty = KLPenalty("initial", estimator)
        penalty.renew(reference)
        assert penalty.mean(policy, [batch]) == pytest.approx(forward, rel=tolerance)
    assert forward != pytest.approx(backward, rel=0.12)


def test_the_exact_divergence_is_that_from_the_policy_to_the_reference():
    reference, policy = make_policy(), make_policy()
    penalty = KLPenalty("initial", "exact")
    penalty.renew(reference)
    log_p, log_q = (th.log_softmax(each.action_net(each.policy_net(OBSERVED)), dim=1) for each in (policy, reference))
    by_hand = (log_p.exp() * (log_p - log_q)).sum(dim=1)
    batch = sample(policy)
    distribution = policy.get_distribution(OBSERVED)
    th.testing.assert_close(penalty.estimate(batch, distribution.log_prob(batch.actions), distribution), by_hand)
    assert penalty.mean(policy, batch.split(64)) == pytest.approx(by_hand.mean().item(), rel=1e-5)
