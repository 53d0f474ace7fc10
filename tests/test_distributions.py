"""The lean distributions: the actions, log-probabilities and entropies of SB3's, drawn from the same random numbers."""

from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import CategoricalDistribution, DiagGaussianDistribution
from stable_baselines3.common.type_aliases import PyTorchObs
from test_grpo import VECTOR, AnyEnv, make_envs, same, weights

from sb3_grpo import GRPO, ActorPolicy
from sb3_grpo.fast_actor import LEAN_DISTRIBUTIONS, LeanCategorical, LeanGaussian

BOX = spaces.Box(np.array([[-2.0, 0.0]], np.float32), np.array([[2.0, 1.0]], np.float32))
SPACES = [
    pytest.param(spaces.Discrete(5), id="Discrete"),
    pytest.param(spaces.Discrete(2, start=0), id="two actions"),
    pytest.param(BOX, id="Box-matrix"),
    pytest.param(spaces.Box(-1.0, 1.0, (3,), np.float32), id="Box"),
]


class SB3sDistribution(ActorPolicy):
    """The same policy by way of SB3's distribution objects, as any policy with a distribution of its own."""

    def get_distribution(self, obs: PyTorchObs) -> Any:
        return super().get_distribution(obs)


def policies(space: spaces.Space) -> tuple[ActorPolicy, SB3sDistribution]:
    """:return: a policy on the lean path and one on SB3's, with the same, non-trivial weights"""
    lean, slow = (policy(VECTOR, space, lambda _: 1e-3, net_arch=[8]) for policy in (ActorPolicy, SB3sDistribution))
    with th.no_grad():
        for parameter in lean.parameters():
            parameter.add_(0.5 * th.randn_like(parameter))
    slow.load_state_dict(lean.state_dict())
    assert lean._lean_distribution() is not None and slow._lean_distribution() is None
    return lean, slow  # type: ignore[return-value]


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("deterministic", [False, True], ids=["sampled", "mode"])
def test_the_same_random_numbers_give_the_same_actions_as_sb3s(space: spaces.Space, deterministic: bool):
    lean, slow = policies(space)
    observations = th.randn(500, 3)
    results = []
    for policy in (lean, slow):
        th.manual_seed(1)
        with th.no_grad():
            results.append(policy(observations, deterministic))
    (actions, log_prob), (expected_actions, expected_log_prob) = results
    assert actions.shape == expected_actions.shape == (500, *space.shape)  # type: ignore[misc]
    assert actions.dtype == expected_actions.dtype
    if isinstance(space, spaces.Discrete):
        assert len(actions.unique()) > 1
        assert th.equal(actions, expected_actions)
    th.testing.assert_close(actions, expected_actions)
    th.testing.assert_close(log_prob, expected_log_prob)


@pytest.mark.parametrize("space", SPACES)
def test_log_probabilities_entropies_and_their_gradients_are_sb3s(space: spaces.Space):
    lean, slow = policies(space)
    observations = th.randn(200, 3)
    space.seed(0)  # some draws cancel so well in the sums below that rounding shows
    actions = th.as_tensor(np.array([space.sample() for _ in range(200)])).float().reshape(200, -1)
    gradients, values = [], []
    for policy in (lean, slow):
        log_prob, entropy = policy.evaluate_actions(observations, actions)
        assert entropy is not None and log_prob.shape == entropy.shape == (200,)
        values.append((log_prob.detach(), entropy.detach()))
        loss = (log_prob * th.linspace(-1, 1, 200)).sum() + 0.3 * entropy.sum()
        gradients.append(th.autograd.grad(loss, list(policy.parameters())))
    for ours, expected in zip((*values[0], *gradients[0]), (*values[1], *gradients[1]), strict=True):
        assert expected.abs().max() > 1e-3
        th.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("space", SPACES)
def test_a_run_on_the_lean_path_takes_the_actions_and_comes_to_the_weights_of_one_without(space: spaces.Space):
    runs = [
        GRPO(policy, make_envs(action_space=space), n_steps=32, batch_size=32, n_epochs=3, seed=0, device="cpu").learn(512)
        for policy in (ActorPolicy, SB3sDistribution)
    ]
    ours, expected = (weights(run) for run in runs)
    untrained = weights(GRPO(ActorPolicy, make_envs(action_space=space), seed=0, device="cpu"))
    assert not same(ours, untrained)
    buffers = [run.rollout_buffer for run in runs]
    np.testing.assert_array_equal(buffers[0].steps, buffers[1].steps)
    if isinstance(space, spaces.Discrete):
        np.testing.assert_array_equal(buffers[0].actions, buffers[1].actions)
    for name, value in expected.items():
        th.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-4)


def test_frequencies_are_the_probabilities():
    logits = th.tensor([[0.1, 0.2, 0.7]]).log().expand(40_000, 3)
    actions, log_prob = LeanCategorical().sample(logits, None, deterministic=False)
    frequencies = th.bincount(actions, minlength=3) / len(actions)
    th.testing.assert_close(frequencies, th.tensor([0.1, 0.2, 0.7]), atol=0.01, rtol=0)
    th.testing.assert_close(log_prob.exp(), th.tensor([0.1, 0.2, 0.7])[actions])


def test_a_forbidden_action_is_never_taken_and_adds_nothing_to_the_entropy():
    logits = th.tensor([[0.0, -th.inf, 0.0]]).expand(1000, 3)
    actions, _ = LeanCategorical().sample(logits, None, deterministic=False)
    assert set(actions.tolist()) == {0, 2}
    _, entropy = LeanCategorical().evaluate(logits, None, actions)
    th.testing.assert_close(entropy, th.full((1000,), float(np.log(2.0))))


def test_a_gaussian_is_as_worked_out_by_hand():
    # Standard deviations 1 and 2, action one deviation off in each: -1/2 - 1/2 - log 1 - log 2 - log(2 pi)
    log_std = th.tensor([0.0, np.log(2.0)], dtype=th.float32)
    log_prob, entropy = LeanGaussian().evaluate(th.zeros(1, 2), log_std, th.tensor([[1.0, -2.0]]))
    assert log_prob.item() == pytest.approx(-1.0 - np.log(2.0) - np.log(2 * np.pi), abs=1e-6)
    assert entropy.item() == pytest.approx(1.0 + np.log(2 * np.pi) + np.log(2.0), abs=1e-6)


@pytest.mark.parametrize("distribution", [CategoricalDistribution, DiagGaussianDistribution])
def test_a_subclass_of_a_distribution_is_not_taken_for_it(distribution: Any):
    assert LEAN_DISTRIBUTIONS.get(distribution) is not None
    assert LEAN_DISTRIBUTIONS.get(type("Other", (distribution,), {})) is None


@pytest.mark.parametrize(
    "space",
    [pytest.param(spaces.MultiDiscrete([2, 3]), id="MultiDiscrete"), pytest.param(spaces.MultiBinary(3), id="MultiBinary")],
)
def test_spaces_without_a_lean_distribution_take_sb3s(space: spaces.Space):
    assert ActorPolicy(VECTOR, space, lambda _: 1e-3)._lean_distribution() is None
    GRPO("MlpPolicy", AnyEnv(action_space=space), n_steps=16).learn(32)


def test_an_update_that_spoils_the_policy_is_reported():
    model = GRPO("MlpPolicy", AnyEnv(), n_steps=16, batch_size=16, learning_rate=1e38, max_grad_norm=np.inf, device="cpu")
    with pytest.raises(
        ValueError, match=r"gradient of update \d+ is not finite. The policy is what it was before: .*Lower `learning_rate`"
    ):
        model.learn(64)
