"""The formulas of the loss, compared with numbers worked out by hand, limits, gradients, PPO and slow, obvious loops."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import pytest
import torch as th
from hypothesis import given
from hypothesis import strategies as st
from stable_baselines3.common.distributions import (
    BernoulliDistribution,
    CategoricalDistribution,
    DiagGaussianDistribution,
    Distribution,
    MultiCategoricalDistribution,
    SquashedDiagGaussianDistribution,
    StateDependentNoiseDistribution,
)

from sb3_grpo import losses
from sb3_grpo.arithmetic.kl_penalty import KL_COEF_BOUNDS, adapted_kl_coef

CLIP = 0.2
LN2 = math.log(2.0)
SEEDS = range(3)
BOTH_DTYPES = pytest.mark.parametrize("dtype", [pytest.param(th.float32, id="single"), pytest.param(th.float64, id="double")])


def draw_trajectories(seed: int) -> tuple[th.Tensor, th.Tensor]:
    """Lengths of some trajectories, and the trajectory of each of their transitions, in no order."""
    th.manual_seed(seed)
    lengths = th.randint(1, 9, (30,))
    trajectories = th.repeat_interleave(th.arange(30), lengths)
    return lengths, trajectories[th.randperm(len(trajectories))]


def gradient_of(loss: th.Tensor, parameter: th.Tensor) -> th.Tensor:
    return th.autograd.grad(loss.sum(), parameter, retain_graph=True)[0]


# --- the loss of a minibatch ------------------------------------------------------------------------------------------


def test_the_loss_of_a_minibatch_is_as_worked_out_by_hand():
    # Ratios 1.2 and 0.5: -min(1.2 * 2, 1.2 * 2) = -2.4 and -min(0.5 * -1, 0.8 * -1) = 0.8, their mean with weights -1
    log_prob, old_log_prob = th.tensor([0.6, 0.2]).log(), th.tensor([0.5, 0.4]).log()
    ratios = log_prob, old_log_prob, th.tensor([2.0, -1.0]), CLIP, 0.5
    weights, entropy, kl = th.tensor([1.0, 0.5]), th.tensor([1.0, 0.5]), th.tensor([0.2, 0.4])
    loss = losses.minibatch_loss(*ratios, entropy=entropy, ent_coef=0.1, kl=kl, kl_coef=0.5, weights=weights)
    # -1 - 0.1 * (1 + 0.25) / 2 + 0.5 * (0.2 + 0.2) / 2 = -1 - 0.0625 + 0.1
    assert loss.loss.item() == pytest.approx(-0.9625) and loss.policy_gradient_loss.item() == pytest.approx(-1.0)
    # Without weights, entropies and penalty: (-2.4 + 0.8) / 2 = -0.8, and the entropy is estimated by -log pi
    loss = losses.minibatch_loss(*ratios)
    assert loss.loss.item() == pytest.approx(-0.8) and th.equal(loss.entropy, -log_prob) and len(loss.kl) == 0
    # One trajectory: the ratio is sqrt(1.2 * 0.5) = 0.7746, so (-0.7746 * 2 + 0.8) / 2 = -0.3746
    loss = losses.minibatch_loss(*ratios, trajectories=th.zeros(2, dtype=th.int64))
    assert loss.loss.item() == pytest.approx(-0.3746, abs=1e-4) and th.equal(loss.log_ratio, log_prob - old_log_prob)


# --- importance ratios ------------------------------------------------------------------------------------------------


def test_log_ratios_are_as_worked_out_by_hand():
    log_ratio = th.tensor([1.0, 0.5, 2.0], dtype=th.float64, requires_grad=True)
    trajectories = th.tensor([7, -3, 7])
    of_trajectory = losses.trajectory_log_ratio(log_ratio, trajectories)
    # (1 + 2) / 2 = 1.5 for the first and the last, 0.5 for the one between
    assert of_trajectory.tolist() == [1.5, 0.5, 1.5]
    # Each entry has slope 1 in its own step and 0 in the others, not 1/2 in both steps of the trajectory
    weights = th.tensor([1.0, 10.0, 100.0], dtype=th.float64)
    assert gradient_of(weights * of_trajectory, log_ratio).tolist() == [1.0, 10.0, 100.0]


def test_the_log_ratio_of_a_trajectory_is_the_same_for_all_of_its_steps_bit_for_bit():
    # 0.1 + (mean - 0.1) would not be the mean
    log_ratio = losses.trajectory_log_ratio(th.logspace(-3, 3, 50), th.zeros(50, dtype=th.int64))
    assert len(set(log_ratio.tolist())) == 1


def loop_gspo(
    log_ratio: th.Tensor, trajectories: th.Tensor, advantages: th.Tensor, clip_range: float, clip_range_high: float
) -> th.Tensor:
    """``-1/m sum_i min(s_i A_i, clip(s_i) A_i)``: GSPO, https://arxiv.org/abs/2507.18071, equations 5 to 7."""
    objective = th.zeros((), dtype=log_ratio.dtype)
    for i, advantage in enumerate(advantages):
        ratio = th.exp(log_ratio[trajectories == i].mean())
        clipped = th.clamp(ratio, 1.0 - clip_range, 1.0 + clip_range_high)
        objective = objective + th.min(ratio * advantage, clipped * advantage)
    return -objective / len(advantages)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("clip_range_high", [CLIP, 0.4])
def test_equal_advantages_within_trajectories_give_gspo_at_the_level_of_trajectories(seed: int, clip_range_high: float):
    lengths, trajectories = draw_trajectories(seed)
    log_ratio = (0.5 * th.randn(len(trajectories), dtype=th.float64)).requires_grad_()
    advantages = th.randn(len(lengths), dtype=th.float64)
    weights = losses.trajectory_loss_weights(lengths.double())[trajectories]

    def loss_of(level: str) -> th.Tensor:
        ratios = losses.trajectory_log_ratio(log_ratio, trajectories) if level == "trajectory" else log_ratio
        surrogate = losses.clipped_surrogate(ratios, advantages[trajectories], CLIP, clip_range_high)
        return losses.weighted_mean(surrogate.loss, weights)

    expected = loop_gspo(log_ratio, trajectories, advantages, CLIP, clip_range_high)
    expected_gradient = gradient_of(expected, log_ratio)
    assert (expected_gradient == 0.0).any() and (expected_gradient != 0.0).any()
    th.testing.assert_close(loss_of("trajectory"), expected, rtol=1e-12, atol=1e-12)
    th.testing.assert_close(gradient_of(loss_of("trajectory"), log_ratio), expected_gradient, rtol=1e-12, atol=1e-12)
    assert not th.allclose(gradient_of(loss_of("step"), log_ratio), expected_gradient, rtol=0.01)


# --- the clipped surrogate --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clip_range_high", "ratio", "advantage", "loss", "slope", "clipped"),
    [
        # -min(1.5 * 2, 1.2 * 2) = -2.4, flat
        pytest.param(CLIP, 1.5, 2.0, -2.4, 0.0, 1.0, id="good action, above: clipped"),
        # -min(0.5 * 2, 0.8 * 2) = -1.0, still pulled up
        pytest.param(CLIP, 0.5, 2.0, -1.0, -2.0, 1.0, id="good action, below: pulled back"),
        # -min(1.5 * -2, 1.2 * -2) = 3.0, still pushed down
        pytest.param(CLIP, 1.5, -2.0, 3.0, 2.0, 1.0, id="bad action, above: pulled back"),
        # -min(0.5 * -2, 0.8 * -2) = 1.6, flat
        pytest.param(CLIP, 0.5, -2.0, 1.6, 0.0, 1.0, id="bad action, below: clipped"),
        # -min(1.1 * 2, 1.1 * 2) = -2.2
        pytest.param(CLIP, 1.1, 2.0, -2.2, -2.0, 0.0, id="good action, inside"),
        # -min(1.6 * 2, 1.5 * 2) = -3.0, flat
        pytest.param(0.5, 1.6, 2.0, -3.0, 0.0, 1.0, id="clip higher: good action, above: clipped"),
        # -min(0.7 * -2, 0.8 * -2) = 1.6, flat: below, the range is the lower one
        pytest.param(0.5, 0.7, -2.0, 1.6, 0.0, 1.0, id="clip higher: bad action, below: clipped"),
    ],
)
def test_the_clipped_surrogate_and_its_slope_are_as_worked_out_by_hand(
    clip_range_high: float, ratio: float, advantage: float, loss: float, slope: float, clipped: float
):
    log_ratio = th.tensor([math.log(ratio)], dtype=th.float64, requires_grad=True)
    surrogate = losses.clipped_surrogate(log_ratio, th.tensor([advantage], dtype=th.float64), CLIP, clip_range_high)
    assert surrogate.loss.item() == pytest.approx(loss, abs=1e-12)
    assert gradient_of(surrogate.loss, log_ratio).item() / ratio == pytest.approx(slope, abs=1e-12)
    assert float(sum(losses.clip_fractions(surrogate.ratio, CLIP, clip_range_high))) == clipped


def test_the_clipped_surrogate_and_its_gradient_equal_those_of_ppo():
    log_prob = th.randn(1000, dtype=th.float64, requires_grad=True)
    old_log_prob, advantages = th.randn(2, 1000, dtype=th.float64)
    loss, our_ratio = losses.clipped_surrogate(log_prob - old_log_prob, advantages, CLIP, CLIP)

    ratio = th.exp(log_prob - old_log_prob)
    policy_loss_1 = advantages * ratio
    policy_loss_2 = advantages * th.clamp(ratio, 1 - CLIP, 1 + CLIP)
    ppo_loss = -th.min(policy_loss_1, policy_loss_2).mean()
    ppo_clip_fraction = th.mean((th.abs(ratio - 1) > CLIP).float()).item()
    assert loss.shape == our_ratio.shape == (1000,)
    assert loss.mean().item() == pytest.approx(ppo_loss.item(), rel=1e-12)
    assert float(sum(losses.clip_fractions(our_ratio, CLIP, CLIP))) == pytest.approx(ppo_clip_fraction, rel=1e-6)
    th.testing.assert_close(gradient_of(loss.mean(), log_prob), gradient_of(ppo_loss, log_prob))


def log_ratios(largest: float) -> st.SearchStrategy[float]:
    """Close to zero, at the edge of the clamp and far beyond."""
    edge = losses.MAX_LOG_RATIO
    return st.one_of(
        st.floats(-1.0, 1.0, width=32),
        st.sampled_from([-edge, edge, -largest, largest]),
        st.floats(-largest, largest, allow_subnormal=False),
    )


class Update(NamedTuple):
    log_ratio: list[float]
    advantages: list[float]
    clip_range: float
    clip_range_high: float


@st.composite
def updates(draw: st.DrawFn) -> Update:
    # Single precision ends at 3.4e38, and the largest ratio is exp(20) = 4.9e8: advantages beyond 7e29 have no finite loss
    signed = st.one_of(
        st.floats(-3.0, 3.0, allow_subnormal=False), st.floats(-1e29, 1e29, allow_subnormal=False), st.just(0.0)
    )
    pairs = draw(st.lists(st.tuples(log_ratios(1e38), signed), min_size=1, max_size=10))
    clip_range = draw(st.floats(0.01, 0.99))
    high = draw(st.one_of(st.just(clip_range), st.floats(0.0, 2.0)))
    return Update([d for d, _ in pairs], [a for _, a in pairs], clip_range, high)


@BOTH_DTYPES
@given(update=updates(), wider=st.floats(0.0, 2.0))
def test_the_surrogate_and_its_gradient_are_finite_and_bounded(update: Update, wider: float, dtype: th.dtype):
    log_ratio = th.tensor(update.log_ratio, dtype=dtype, requires_grad=True)
    advantages = th.tensor(update.advantages, dtype=dtype)
    surrogate = losses.clipped_surrogate(log_ratio, advantages, update.clip_range, update.clip_range_high)
    gradient = gradient_of(surrogate.loss, log_ratio)
    for values in (*surrogate, gradient):
        assert values.shape == log_ratio.shape and values.dtype == dtype and values.isfinite().all()
    assert (surrogate.ratio > 0).all() and not surrogate.ratio.requires_grad
    assert (gradient[log_ratio.detach().abs() > losses.MAX_LOG_RATIO] == 0).all()
    # Descent never makes a good action less likely, nor a bad one more
    assert (gradient * advantages <= 0).all()
    # A good action gains from nothing to 1 + c_high; a bad one costs 1 - c or more, however unlikely it has become
    loss, ratio, rounding = surrogate.loss.detach(), surrogate.ratio, 1e-5 * advantages.abs()
    high = update.clip_range_high
    good = advantages >= 0
    assert (-loss <= ratio * advantages).all()
    assert (loss[good] <= 0).all() and (-loss <= (1.0 + high) * advantages + rounding)[good].all()
    assert (loss >= (1.0 - update.clip_range) * -advantages - rounding)[~good].all()
    # A wider range above never costs more
    wide = losses.clipped_surrogate(log_ratio.detach(), advantages, update.clip_range, high + wider)
    assert (wide.loss <= loss).all()
    # The policy that sampled has the plain policy gradient
    equal = th.zeros_like(advantages, requires_grad=True)
    unchanged = losses.clipped_surrogate(equal, advantages, update.clip_range, update.clip_range_high)
    assert th.equal(unchanged.loss, -advantages) and th.equal(gradient_of(unchanged.loss, equal), -advantages)


def test_nan_shows_in_the_loss():
    log_ratio, advantages = th.tensor([0.0, float("nan"), 0.0]), th.tensor([float("nan"), 1.0, 1.0])
    assert losses.clipped_surrogate(log_ratio, advantages, CLIP, CLIP).loss.isnan().tolist() == [True, True, False]


# --- the mean over transitions ----------------------------------------------------------------------------------------


def test_weights_are_as_worked_out_by_hand():
    # mean length (1 + 2 + 6) / 3 = 3: 3 / 1, 3 / 2, 3 / 6, and 3 / 12 where trajectories may have 12 steps
    lengths = th.tensor([1.0, 2.0, 6.0], dtype=th.float64)
    assert losses.trajectory_loss_weights(lengths).tolist() == [3.0, 1.5, 0.5]
    assert losses.constant_loss_weights(lengths, 12).tolist() == [0.25, 0.25, 0.25]


def test_a_weighted_mean_is_as_worked_out_by_hand_and_not_divided_by_the_sum_of_the_weights():
    # (1 * 4 + 2 * 10 + 0 * 100) / 3 = 8; (2 * 1 + 2 * 3) / 2 = 4; (4 + 10 + 100) / 3 = 38
    values = th.tensor([4.0, 10.0, 100.0], requires_grad=True)
    weighted = losses.weighted_mean(values, th.tensor([1.0, 2.0, 0.0]))
    assert weighted.item() == pytest.approx(8.0)
    th.testing.assert_close(gradient_of(weighted, values), th.tensor([1 / 3, 2 / 3, 0.0]))
    assert losses.weighted_mean(th.tensor([1.0, 3.0]), th.tensor([2.0, 2.0])).item() == pytest.approx(4.0)
    assert losses.weighted_mean(values, None).item() == pytest.approx(38.0)


def weights_of(aggregation: str, lengths: th.Tensor, horizon: int) -> th.Tensor:
    if aggregation == "trajectory":
        return losses.trajectory_loss_weights(lengths)
    return losses.constant_loss_weights(lengths, horizon)


BUDGET = 10
LOOPS: dict[str, Callable[[list[th.Tensor]], th.Tensor]] = {
    "step": lambda parts: th.stack([x for part in parts for x in part]).sum() / sum(map(len, parts)),
    "trajectory": lambda parts: th.stack([part.sum() / len(part) for part in parts]).sum() / len(parts),
    "constant": lambda parts: th.stack([part.sum() / BUDGET for part in parts]).sum() / len(parts),
}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("aggregation", LOOPS)
def test_weighted_means_and_their_gradients_equal_a_double_loop(aggregation: str, seed: int):
    lengths, trajectories = draw_trajectories(seed)
    values = th.randn(len(trajectories), dtype=th.float64, requires_grad=True)
    weights = None if aggregation == "step" else weights_of(aggregation, lengths.double(), BUDGET)[trajectories]
    mean = losses.weighted_mean(values, weights)
    expected = LOOPS[aggregation]([values[trajectories == i] for i in range(len(lengths))])
    th.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-12)
    th.testing.assert_close(gradient_of(mean, values), gradient_of(expected, values), rtol=1e-12, atol=1e-12)


# --- diagnostics of ratios --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("clip_range_high", "low", "high"),
    [
        # below 0.8: 0.5 and 0.7; above 1.2: 1.3, 1.6 and 2
        (CLIP, 2 / 8, 3 / 8),
        # above 1.5: 1.6 and 2
        (0.5, 2 / 8, 2 / 8),
        # above 1: 1.1, 1.3, 1.6 and 2
        (0.0, 2 / 8, 4 / 8),
    ],
)
def test_clip_fractions_are_as_worked_out_by_hand(clip_range_high: float, low: float, high: float):
    ratio = th.tensor([0.5, 0.9, 1.0, 1.1, 1.3, 1.6, 2.0, 0.7])
    assert losses.clip_fractions(ratio, CLIP, clip_range_high) == (low, high)
    # The edges, which are exact here, do not count
    assert losses.clip_fractions(th.tensor([0.75, 1.0, 1.25, 1.5]), 0.25, 0.5) == (0.0, 0.0)


def test_the_effective_sample_size_is_as_worked_out_by_hand_and_has_its_limits():
    # (1 + 3)^2 / (2 * (1 + 9)) = 0.8; (1 + 1 + 2)^2 / (3 * (1 + 1 + 4)) = 16 / 18 = 0.888889
    assert losses.effective_sample_size(th.tensor([1.0, 3.0])).item() == pytest.approx(0.8, rel=1e-6)
    assert losses.effective_sample_size(th.tensor([1.0, 1.0, 2.0])).item() == pytest.approx(0.888889, abs=1e-6)
    for log_ratio in (-losses.MAX_LOG_RATIO, 0.1, losses.MAX_LOG_RATIO):
        assert losses.effective_sample_size(th.full((1000,), math.exp(log_ratio))).item() == pytest.approx(1.0, rel=1e-6)
    # One ratio has all the weight
    dominated = th.full((1000,), -losses.MAX_LOG_RATIO).index_fill(0, th.tensor([500]), losses.MAX_LOG_RATIO).exp()
    assert losses.effective_sample_size(dominated).item() == pytest.approx(1 / 1000, rel=1e-6)
    # The squares of these would overflow
    assert losses.effective_sample_size(th.tensor([1e30, 3e30])).item() == pytest.approx(0.8, rel=1e-6)


# --- estimates of the divergence --------------------------------------------------------------------------------------


def test_k3_and_its_slope_are_as_worked_out_by_hand():
    # pi = 1/4, ref = 1/2: d = log 2 = 0.693147; 2 - 0.693147 - 1 = 0.306853; slope 1 - exp(d) = 1 - 2
    log_prob = th.tensor([math.log(0.25)], dtype=th.float64, requires_grad=True)
    estimate = losses.k3(log_prob, th.tensor([math.log(0.5)], dtype=th.float64))
    assert estimate.item() == pytest.approx(0.306853, abs=1e-6)
    assert gradient_of(estimate, log_prob).item() == pytest.approx(-1.0, abs=1e-6)


# The square of more than 1.8e19 overflows in single precision
LOG_PROBS = st.one_of(
    *(st.floats(-size, size, allow_subnormal=False) for size in (3.0, 1e18)), st.floats(-1e-6, 1e-6, allow_subnormal=False)
)
PAIRS = st.lists(st.tuples(LOG_PROBS, LOG_PROBS), min_size=1, max_size=20)


@BOTH_DTYPES
@given(pairs=PAIRS)
def test_k3_is_finite_and_zero_for_equal_policies_and_pulls_policies_together(
    pairs: list[tuple[float, float]], dtype: th.dtype
):
    log_prob, reference = (values.clone() for values in th.tensor(pairs, dtype=dtype).T)
    log_prob.requires_grad_()
    estimate = losses.k3(log_prob, reference)
    gradient = gradient_of(estimate, log_prob)
    assert estimate.shape == log_prob.shape and estimate.isfinite().all() and gradient.isfinite().all()
    assert (losses.k3(log_prob, log_prob) == 0).all()
    assert (estimate >= 0).all() and (gradient.sign() * (log_prob - reference).sign() >= 0).all()


def test_k3_is_exact_far_above_the_reference_and_finite_far_below():
    # d = -30: exp(-30) + 30 - 1 = 29 + 9.4e-14, slope 1 - exp(-30); d = 1000 is clamped
    log_prob = th.tensor([30.0, -1000.0], dtype=th.float64, requires_grad=True)
    estimate = losses.k3(log_prob, th.zeros(2, dtype=th.float64))
    assert estimate[0].item() == pytest.approx(29.0, abs=1e-12)
    assert gradient_of(estimate, log_prob).tolist() == [pytest.approx(1.0, abs=1e-12), 0.0]
    assert estimate[1].item() == pytest.approx(math.exp(losses.MAX_LOG_RATIO) - losses.MAX_LOG_RATIO - 1)


def mean_estimate(estimator: Callable, policy: th.distributions.Normal, reference: th.distributions.Normal) -> float:
    actions = policy.sample(th.Size((400_000,)))
    return float(estimator(policy.log_prob(actions), reference.log_prob(actions)).mean())


# KL(pi || ref) = log(1 / 2) + (2^2 + 1^2) / (2 * 1^2) - 1/2 = 1.306853; KL(ref || pi) = log(2 / 1) + (1 + 1) / (2 * 4) - 1/2
# = 0.443147. pi is the wider one: the other way round the ratio, and so the variance of k3, is unbounded.
WIDE, NARROW = th.distributions.Normal(0.0, 2.0), th.distributions.Normal(1.0, 1.0)


@pytest.mark.parametrize(
    "estimator",
    [
        pytest.param(losses.k3, id="k3"),
        # The divergence that SB3 logs is that of the policy that sampled from the new one
        pytest.param(lambda old, new: losses.approximate_kl(new - old), id="approximate_kl"),
    ],
)
def test_samples_estimate_the_divergence_of_the_policy_that_sampled_and_not_the_reverse(estimator: Callable):
    assert mean_estimate(estimator, WIDE, NARROW) == pytest.approx(1.306853, abs=0.03)


def test_the_expected_gradient_of_k3_used_as_a_loss_is_that_of_the_reverse_divergence():
    # A mean over sampled actions has fixed weights: see https://arxiv.org/abs/2506.09477 for what follows from this
    logits = th.tensor([0.3, -1.0, 0.5], dtype=th.float64, requires_grad=True)
    reference = th.tensor([0.2, 0.3, 0.5], dtype=th.float64)
    policy = logits.softmax(dim=0)
    gradient = gradient_of(policy.detach() * losses.k3(policy.log(), reference.log()), logits)
    expected = gradient_of((reference * (reference / policy).log()).sum(), logits)
    th.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-12)


def test_the_approximate_divergence_is_as_worked_out_by_hand_and_that_of_ppo():
    # ratio 2: 2 - 1 - log 2 = 0.306853; ratio 1/2: -1/2 + log 2 = 0.193147; ratio 1: 0; (0.306853 + 0.193147 + 0) / 3
    assert losses.approximate_kl(th.tensor([LN2, -LN2, 0.0])).item() == pytest.approx(0.166667, abs=1e-6)
    assert losses.approximate_kl(th.tensor([LN2])).item() == pytest.approx(0.306853, abs=1e-6)
    log_ratio = 0.1 * th.randn(1000, dtype=th.float64)
    ppo = th.mean((th.exp(log_ratio) - 1) - log_ratio).item()
    assert losses.approximate_kl(log_ratio).item() == pytest.approx(ppo, rel=1e-9)
    for overflow in (1000.0, 25.0, -1000.0):
        divergence = losses.approximate_kl(th.tensor([overflow, 0.0]))
        assert divergence.isfinite() and divergence > 1.0


# --- the divergence in closed form ------------------------------------------------------------------------------------

Pair = tuple[Distribution, Distribution]
LOG_STD, REFERENCE_LOG_STD = th.tensor([-0.5, 0.2], dtype=th.float64), th.tensor([0.1, -0.3], dtype=th.float64)
EXPLORATION = th.tensor([[-0.5, 0.2], [0.1, -0.4], [-1.0, 0.3]], dtype=th.float64)
LATENT = th.tensor([[0.5, -1.0, 0.3]], dtype=th.float64)
REFERENCE_SHIFT = 0.7
# The noise of gSDE has variance sum_j latent_j^2 std_j^2, plus SB3's 1e-6
EXPLORATION_STDS = [
    ((LATENT**2 @ (EXPLORATION + shift).exp() ** 2)[0] + 1e-6).sqrt().tolist() for shift in (0.0, REFERENCE_SHIFT)
]


def gaussian_pair(distribution: type[DiagGaussianDistribution], p: th.Tensor, q: th.Tensor) -> Pair:
    return distribution(2).proba_distribution(p, LOG_STD), distribution(2).proba_distribution(q, REFERENCE_LOG_STD)


def gsde_pair(squash_output: bool, p: th.Tensor, q: th.Tensor) -> Pair:
    def make(mean: th.Tensor, log_std: th.Tensor) -> Distribution:
        distribution = StateDependentNoiseDistribution(2, squash_output=squash_output)
        distribution.sample_weights(log_std, batch_size=len(mean))
        return distribution.proba_distribution(mean, log_std, LATENT.expand(len(mean), -1))

    return make(p, EXPLORATION), make(q, EXPLORATION + REFERENCE_SHIFT)


def discrete_pair(make: Callable[[], Distribution], p: th.Tensor, q: th.Tensor) -> Pair:
    return make().proba_distribution(p), make().proba_distribution(q)


def normal_kl(mean: float, std: float, reference_mean: float, reference_std: float) -> float:
    return math.log(reference_std / std) + (std**2 + (mean - reference_mean) ** 2) / (2 * reference_std**2) - 1 / 2


def gaussian_kl(p: list[float], q: list[float], stds: list[list[float]]) -> float:
    return sum(normal_kl(p[k], stds[0][k], q[k], stds[1][k]) for k in range(2))


def categorical_kl(p: list[float], q: list[float]) -> float:
    p, q = ([math.exp(x) / sum(map(math.exp, logits)) for x in logits] for logits in (p, q))
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def multi_categorical_kl(p: list[float], q: list[float]) -> float:
    return categorical_kl(p[:2], q[:2]) + categorical_kl(p[2:], q[2:])


def bernoulli_kl(p: list[float], q: list[float]) -> float:
    return sum(categorical_kl([a, 0.0], [b, 0.0]) for a, b in zip(p, q, strict=True))


GAUSSIAN = partial(gaussian_kl, stds=[LOG_STD.exp().tolist(), REFERENCE_LOG_STD.exp().tolist()])
GSDE = partial(gaussian_kl, stds=EXPLORATION_STDS)
MEANS = [[0.5, -0.2], [-0.4, 0.3], [0.0, 0.0]], [[0.1, 0.4], [0.2, -0.3], [0.0, 0.0]]
LOGITS = [[1.0, -0.5, 0.3, 2.0, 0.0], [0.2, 0.9, -1.0, 0.5, 0.7]], [[0, 1, 0, -1, 0.5], [1, 1, 1, 0, -1]]
FIVE_WAY, TWO_AND_THREE_WAY = partial(CategoricalDistribution, 5), partial(MultiCategoricalDistribution, [2, 3])
FIVE_FLAGS = partial(BernoulliDistribution, 5)
KINDS = pytest.mark.parametrize(
    ("pair", "closed_form", "params"),
    [
        pytest.param(partial(gaussian_pair, DiagGaussianDistribution), GAUSSIAN, MEANS, id="DiagGaussian"),
        pytest.param(partial(gaussian_pair, SquashedDiagGaussianDistribution), GAUSSIAN, MEANS, id="squashed"),
        pytest.param(partial(gsde_pair, False), GSDE, MEANS, id="gSDE"),
        pytest.param(partial(gsde_pair, True), GSDE, MEANS, id="squashed gSDE"),
        pytest.param(partial(discrete_pair, FIVE_WAY), categorical_kl, LOGITS, id="Categorical"),
        pytest.param(partial(discrete_pair, TWO_AND_THREE_WAY), multi_categorical_kl, LOGITS, id="MultiCategorical"),
        pytest.param(partial(discrete_pair, FIVE_FLAGS), bernoulli_kl, LOGITS, id="Bernoulli"),
    ],
)


@KINDS
def test_the_exact_divergence_is_the_closed_form_and_not_its_reverse(
    pair: Callable[..., Pair], closed_form: Callable[..., float], params: tuple[list, list]
):
    policy, reference = pair(*(th.tensor(rows, dtype=th.float64) for rows in params))
    expected = th.tensor([closed_form(p, q) for p, q in zip(*params, strict=True)], dtype=th.float64)
    divergence = losses.exact_kl(policy, reference)
    th.testing.assert_close(divergence, expected, rtol=1e-6, atol=1e-9)
    assert not th.allclose(divergence, losses.exact_kl(reference, policy), rtol=1e-3)
    # One observation keeps its shape
    single = pair(*(th.tensor(rows[:1], dtype=th.float64) for rows in params))
    th.testing.assert_close(losses.exact_kl(*single), expected[:1], rtol=1e-6, atol=1e-9)


def test_the_exact_divergence_of_normals_and_its_gradient_are_as_worked_out_by_hand():
    # N(1, 1) from N(0, 2): log(2 / 1) + (1 + 1) / (2 * 4) - 1/2 = 0.443147; the second dimension N(0, 2) from N(1, 1):
    # log(1 / 2) + (4 + 1) / 2 - 1/2 = 1.306853; together 1.75
    mean, log_std = th.tensor([[1.0, 0.0]], requires_grad=True), th.tensor([0.0, LN2], requires_grad=True)
    policy = DiagGaussianDistribution(2).proba_distribution(mean, log_std)
    reference = DiagGaussianDistribution(2).proba_distribution(th.tensor([[0.0, 1.0]]), th.tensor([LN2, 0.0]))
    divergence = losses.exact_kl(policy, reference)
    th.testing.assert_close(divergence, th.tensor([1.75]))
    # by the means: (1 - 0) / 2^2 = 0.25 and (0 - 1) / 1^2 = -1; by log std: -1 + 1^2 / 2^2 = -0.75 and -1 + 2^2 / 1^2 = 3
    th.testing.assert_close(gradient_of(divergence, mean), th.tensor([[0.25, -1.0]]))
    th.testing.assert_close(gradient_of(divergence, log_std), th.tensor([-0.75, 3.0]))


# --- the adaptive coefficient -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kl", "target", "expected"),
    [
        # 1.5 * 0.5 = 0.75 and 0.75 / 1.5 = 0.5 are exact
        pytest.param(0.75, 0.5, 0.3, id="kept at the upper edge"),
        pytest.param(math.nextafter(0.75, 1.0), 0.5, 0.6, id="doubled just above the upper edge"),
        pytest.param(0.5, 0.75, 0.3, id="kept at the lower edge"),
        pytest.param(math.nextafter(0.5, 0.0), 0.75, 0.15, id="halved just below the lower edge"),
        pytest.param(-0.001, 0.02, 0.15, id="halved where an estimate is negative"),
        pytest.param(math.inf, 0.02, 0.6, id="doubled where the policies have nothing in common"),
    ],
)
def test_the_adapted_coefficient_is_as_worked_out_by_hand(kl: float, target: float, expected: float):
    assert adapted_kl_coef(0.3, kl, target) == expected


def test_the_adapted_coefficient_stays_within_its_bounds_and_finds_its_way_back():
    low, high = KL_COEF_BOUNDS
    # the last step is shortened: 2 * 6e5 = 1.2e6, 1.5e-6 / 2 = 7.5e-7
    assert adapted_kl_coef(6e5, 1.0, 0.01) == high and adapted_kl_coef(1.5e-6, 0.0, 0.01) == low
    assert adapted_kl_coef(high, 1.0, 0.01) == high and adapted_kl_coef(high, 0.0, 0.01) == 0.5 * high
    assert adapted_kl_coef(low, 0.0, 0.01) == low and adapted_kl_coef(low, 1.0, 0.01) == 2.0 * low
