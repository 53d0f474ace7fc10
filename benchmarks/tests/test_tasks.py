"""The input-driven environments: what every one of them keeps, and rewards worked out by hand on tiny instances."""

import csv
import math
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from stable_baselines3.common.env_checker import check_env as check_env_for_sb3
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import SubprocVecEnv

from benchmarks.references import BUDGETS, HEURISTICS, RESULTS, returns
from benchmarks.tasks import TASKS
from benchmarks.tasks.answers import AnswersEnv
from benchmarks.tasks.bit_rate import STATES, BitRateEnv, _next_state
from benchmarks.tasks.energy_storage import LOG_PRICE_MEAN, EnergyStorageEnv
from benchmarks.tasks.load_balancing import FullServersEnv, LoadBalancingEnv
from benchmarks.tasks.lost_sales import LostSalesEnv
from benchmarks.tasks.queueing import QueueingEnv
from sb3_grpo import check_shared_inputs

ROOT = pathlib.Path(__file__).resolve().parents[2]

every_task = pytest.mark.parametrize("env_id", TASKS)
NUMPY_TASKS = [env_id for env_id in TASKS if "Cheetah" not in env_id]


def play(env: gym.Env, actions: list[Any], inputs: dict[str, Any] | None = None) -> tuple[list[float], bool, bool]:
    """
    :param env: The environment
    :param actions: What to do, one entry a step
    :param inputs: The stream of inputs, by name
    :return: the rewards, and whether the last step terminated and truncated the episode
    """
    env.reset(seed=0, options={"inputs": inputs} if inputs else None)
    rewards, terminated, truncated = [], False, False
    for action in actions:
        assert not terminated and not truncated
        _, reward, terminated, truncated, _ = env.step(action)
        rewards.append(float(reward))
    return rewards, terminated, truncated


# -- what every environment keeps -------------------------------------------------------------------------------------


@every_task
def test_the_checkers_of_gymnasium_and_sb3_have_nothing_to_say(env_id: str, recwarn: pytest.WarningsRecorder) -> None:
    env = gym.make(env_id).unwrapped
    check_env(env, skip_render_check=True)
    check_env_for_sb3(env)
    # About the observations of HalfCheetah, which are Gymnasium's
    assert [str(w.message) for w in recwarn if "infinity" not in str(w.message)] == []


@every_task
def test_the_time_limit_is_the_length_of_an_episode_and_there_is_no_threshold(env_id: str) -> None:
    env = gym.make(env_id)
    env.action_space.seed(0)
    env.reset(seed=0)
    n_steps, done = 0, False
    while not done:
        _, _, terminated, truncated, _ = env.step(env.action_space.sample())
        n_steps, done = n_steps + 1, terminated or truncated
    assert env.spec is not None
    assert env.get_wrapper_attr("_max_episode_steps") == n_steps and env.spec.reward_threshold is None


@pytest.mark.parametrize(
    ("env_id", "length", "n_steps"),
    [
        ("LoadBalancing-v0", dict(n_jobs=300), 300),
        ("LostSales-v0", dict(n_periods=300), 300),
        ("EnergyStorage-v0", dict(n_hours=200), 200),
        ("BitRate-v0", dict(n_chunks=60), 60),
        ("Queueing-v0", dict(n_events=1200), 1200),
    ],
)
def test_an_episode_has_the_length_that_was_asked_for(env_id: str, length: dict[str, Any], n_steps: int) -> None:
    env = gym.make(f"sb3_grpo/{env_id}", **length)
    _, terminated, truncated = play(env, [0] * n_steps)
    assert terminated or truncated
    assert env.get_wrapper_attr("_max_episode_steps") == n_steps


@every_task
def test_members_that_act_differently_live_through_the_same_inputs(env_id: str) -> None:
    report = check_shared_inputs(gym.make(env_id), n_steps=100)
    assert report.verdict == "shared" and "`inputs`" in report.message


@every_task
def test_the_seed_alone_fixes_the_inputs(env_id: str) -> None:
    one, other = gym.make(env_id), gym.make(env_id)
    streams = []
    for env, seed in ((one, 3), (other, 3), (other, 4)):
        env.reset(seed=seed)
        streams.append(np.concatenate([np.ravel(values) for values in env.get_wrapper_attr("inputs").values()]))
    np.testing.assert_array_equal(streams[0], streams[1])
    assert not np.array_equal(streams[0], streams[2])


@pytest.mark.parametrize("env_id", NUMPY_TASKS)
def test_observations_are_of_about_unit_size(env_id: str) -> None:
    env = gym.make(env_id)
    observations = []
    for seed in range(5):
        observations.append(env.reset(seed=seed)[0])
        done = False
        while not done:
            # The heuristic: random orders or jobs would fill the system
            observation, _, terminated, truncated, _ = env.step(next(iter(HEURISTICS[env_id].values()))(env.unwrapped))
            observations.append(observation)
            done = terminated or truncated
    assert np.mean(np.abs(observations), axis=0).max() < 4
    assert np.abs(observations).max() < 10


@pytest.mark.slow
def test_the_environments_are_registered_by_an_import_and_imported_when_they_are_made() -> None:
    code = """
import sys, gymnasium
gymnasium.make("benchmarks.tasks:sb3_grpo/LostSales-v0")
print(*(name for name in sys.modules if name.startswith(("benchmarks.tasks.", "mujoco"))))
"""
    command = [sys.executable, "-c", code]
    modules = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    assert modules == ["benchmarks.tasks.lost_sales"]


def test_inputs_of_another_length_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must have these arrays and shapes: {'event': \(1000,\)}"):
        QueueingEnv().reset(options={"inputs": {"event": [0, 1]}})


@every_task
def test_sb3_makes_it_without_a_warning(env_id: str, recwarn: pytest.WarningsRecorder) -> None:
    make_vec_env(env_id, n_envs=2)
    assert [str(w.message) for w in recwarn] == []


@pytest.mark.slow
@every_task
def test_workers_return_what_environments_in_this_process_return(env_id: str) -> None:
    vec_envs = [make_vec_env(f"benchmarks.tasks:{env_id}", n_envs=2, seed=5, vec_env_cls=cls) for cls in (None, SubprocVecEnv)]
    for vec_env in vec_envs:
        vec_env.action_space.seed(0)
    results = []
    for vec_env in vec_envs:
        outcome: list[Any] = [vec_env.reset()]
        for _ in range(60):
            observations, rewards, dones, _ = vec_env.step(np.array([vec_env.action_space.sample() for _ in range(2)]))
            outcome += [observations, rewards, dones]
        vec_env.close()
        results.append(np.concatenate([np.ravel(part) for part in outcome]))
    # Rewards come as float32 from one and as float64 from the other
    np.testing.assert_allclose(results[0], results[1], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("env_id", NUMPY_TASKS)
def test_a_core_makes_twenty_thousand_steps_in_a_second_of_its_time(env_id: str) -> None:
    env = gym.make(env_id)
    env.action_space.seed(0)
    actions = [env.action_space.sample() for _ in range(5_000)]
    seconds = []
    for _ in range(3):
        env.reset(seed=0)
        start = time.process_time()
        for action in actions:
            _, _, terminated, truncated, _ = env.step(action)
            if terminated or truncated:
                env.reset()
        seconds.append(time.process_time() - start)
    assert len(actions) / min(seconds) > 20_000


# -- rewards worked out by hand ---------------------------------------------------------------------------------------


def test_load_balancing_counts_the_jobs_in_the_system() -> None:
    # Server 0 works at rate 1, server 1 at rate 2; two servers and a mean gap of 1 make the unit 2
    env = LoadBalancingEnv(service_rates=(1.0, 2.0), n_jobs=3, mean_gap=1.0, size_scale=1.0)
    inputs = {"gaps": [2.0, 0.5], "sizes": [3.0, 4.0, 2.0]}
    rewards, terminated, _ = play(env, [0, 0, 1], inputs)
    # Job 0 runs from 0 to 3 and job 1 from 3 to 7 on server 0; job 2 arrives at 2.5 and runs until 3.5 on server 1.
    # Until 2: one job. From 2 to 2.5: two. From 2.5 on: job 0 for 0.5, job 1 for 4.5, job 2 for 1.
    assert rewards == pytest.approx([-2 / 2, -1 / 2, -6 / 2])
    assert terminated and env.n_queued == [0, 0]


def test_load_balancing_shows_work_jobs_and_size() -> None:
    env = LoadBalancingEnv(service_rates=(1.0, 2.0), n_jobs=3, mean_gap=1.0, size_shape=2.0, size_scale=1.0)
    env.reset(options={"inputs": {"gaps": [1.0, 1.0], "sizes": [5.0, math.e, 2.0]}})
    observation = env.step(0)[0]
    # Four units of work are left after one unit of time; the mean size is 2
    assert observation == pytest.approx([math.log(3), 0, math.log(2), 0, 1, 2 / 3], abs=1e-6)
    assert env.completion_times() == pytest.approx([4 + math.e, math.e / 2])


def test_load_balancing_draws_jobs_of_the_published_size_and_rate() -> None:
    env = LoadBalancingEnv(n_jobs=200_000)
    env.reset(seed=0)
    assert env.inputs["gaps"].mean() == pytest.approx(55, rel=0.02)
    assert env.inputs["sizes"].min() >= 100
    # The median of a Pareto distribution with shape 1.5 and scale 100; its variance is infinite
    assert np.median(env.inputs["sizes"]) == pytest.approx(100 * 2 ** (1 / 1.5), rel=0.02)


def test_an_order_needs_a_lead_time() -> None:
    with pytest.raises(ValueError, match="`lead_time` must be an integer of at least 1, not 0"):
        LostSalesEnv(lead_time=0)
    assert play(LostSalesEnv(lead_time=1), [3])[1:] == (False, False)


def test_lost_sales_charges_what_is_left_and_what_is_lacking() -> None:
    # A lead time of 3: the order of a period arrives three periods later
    env = LostSalesEnv(lead_time=3, n_periods=5)
    rewards, terminated, truncated = play(env, [4, 0, 0, 0, 0], {"demand": [3, 10, 1, 5, 5]})
    # 5 on hand, 5 and 5 to come: 2 left | 2 + 5, 3 lost | 0 + 5, 4 left | 4 + 4, 3 left | 3 + 0, 2 lost; the unit is 4 * 5
    assert rewards == pytest.approx([-2 / 20, -12 / 20, -4 / 20, -3 / 20, -8 / 20])
    assert truncated and not terminated


def test_lost_sales_shows_sales_and_not_demand() -> None:
    env = LostSalesEnv(lead_time=2, n_periods=2)
    env.reset(options={"inputs": {"demand": [9, 0]}})
    # On hand 5: sales of 5; 5 units arrive; smoothed sales stay at 5; units are 20 for stock on hand and 10 for the rest
    assert env.step(7)[0] == pytest.approx([5 / 20, 7 / 10, 5 / 10, 5 / 10])


def test_lost_sales_cuts_an_order_that_would_exceed_the_position() -> None:
    env = LostSalesEnv(lead_time=2, n_periods=2, max_position=12)
    env.reset(options={"inputs": {"demand": [0, 0]}})
    env.step(7)
    assert (env.position, env.under_way) == (12, [2])


def test_nothing_is_sent_back_if_more_is_under_way_than_fits() -> None:
    env = LostSalesEnv(lead_time=21, n_periods=30)
    env.reset(options={"inputs": {"demand": [0] * 30}})
    before = env.position
    assert before > env.max_position
    observation, *_ = env.step(0)
    assert env.position == before and min(env.under_way) == 0 and (observation >= 0).all()


def test_the_demand_of_lost_sales_wanders_around_its_mean() -> None:
    env = LostSalesEnv()
    demands = []
    for seed in range(400):
        env.reset(seed=seed)
        demands.append(env.inputs["demand"])
    array = np.array(demands, dtype=float)
    assert array.mean() == pytest.approx(5, rel=0.06)
    # The covariance of two periods is that of their levels: 25 * (exp(0.25 * 0.98^lag) - 1)
    deviations = array - array.mean()
    assert np.mean(deviations[:, 10:] * deviations[:, :-10]) == pytest.approx(25 * math.expm1(0.25 * 0.98**10), rel=0.15)


def test_the_battery_buys_and_sells_at_the_price_of_the_hour() -> None:
    env = EnergyStorageEnv(n_hours=6)
    prices = np.array([20.0, 10.0, 30.0, 100.0, 50.0, 40.0, 30.0])
    rewards, terminated, _ = play(env, [1, 1, 1, 2, 0, 2], {"price": prices})
    # Half full: two hours fill it and the third buys nothing; a quarter sold earns 0.9 * 0.25 of the price
    unit = math.exp(LOG_PRICE_MEAN)
    expected = np.array([-20 * 0.25 / 0.9, -10 * 0.25 / 0.9, 0, 100 * 0.25 * 0.9, 0, 40 * 0.25 * 0.9]) / unit
    assert rewards == pytest.approx(expected)
    assert terminated and env.content == pytest.approx(0.5)


def test_an_empty_battery_sells_nothing() -> None:
    rewards, _, _ = play(EnergyStorageEnv(n_hours=3), [2, 2, 2])
    assert rewards[0] > 0 and rewards[1] > 0 and rewards[2] == 0


def test_log_prices_have_the_stationary_deviation_of_their_process() -> None:
    env = EnergyStorageEnv(n_hours=24 * 4000)
    env.reset(seed=0)
    by_hour = np.log(env.inputs["price"][:-1]).reshape(-1, 24)
    variance = (0.290**2 + 0.016 * 1.1**2) / (1 - 0.554**2)
    assert by_hour.var(axis=0).mean() == pytest.approx(variance, rel=0.05)
    # Cheapest in the night, dearest in the evening
    assert by_hour.mean() == pytest.approx(LOG_PRICE_MEAN, abs=0.02)
    assert by_hour.mean(axis=0).argmin() in (2, 3, 4, 5) and by_hour.mean(axis=0).argmax() in (17, 18, 19, 20)


def test_a_chunk_takes_its_size_over_the_bandwidth_and_stalls_an_empty_buffer() -> None:
    env = BitRateEnv(n_chunks=3, trace_seconds=4)
    # 0.95 of 2 Mbit/s carries the video in the first two seconds, 0.95 of 4 Mbit/s in the next two
    inputs = {"bandwidth": [2.0, 2.0, 4.0, 4.0], "relative_sizes": [1.0, 1.0, 0.5]}
    rewards, terminated, _ = play(env, [1, 1, 2], inputs)
    # Chunk 0: 3 Mbit take 3 / 1.9 s and a round trip, all of it a stall. Chunk 1, from 1.659 s on: 0.648 Mbit within the first
    # two seconds, the other 2.352 at 3.8 Mbit/s, and a round trip: less than the 4 s in the buffer, no stall
    assert rewards[0] == pytest.approx(0.75 - 4.3 * (3 / 1.9 + 0.08))
    assert rewards[1] == pytest.approx(0.75)
    assert rewards[2] == pytest.approx(1.2 - 0.45)
    first, rest = 3 / 1.9 + 0.08, 3 - (2 - 3 / 1.9 - 0.08) * 1.9
    second = 2 - first + rest / 3.8 + 0.08
    third = 1.2 * 4 * 0.5 / 3.8 + 0.08
    assert 2 + rest / 3.8 + 0.08 + third - 0.08 > 3  # within the faster seconds, up to the end of the trace
    assert terminated and env.buffer == pytest.approx(4 - second + 4 - third + 4)


def test_a_trace_starts_anew_when_it_ends() -> None:
    env = BitRateEnv(n_chunks=1, trace_seconds=2)
    # 17.2 Mbit: 5.7 arrive in each round of two seconds, three rounds make 17.1, and the rest takes 0.1 / 1.9 s
    rewards, _, _ = play(env, [5], {"bandwidth": [2.0, 4.0], "relative_sizes": [1.0]})
    assert rewards[0] == pytest.approx(4.3 - 4.3 * (6 + 0.1 / 1.9 + 0.08) - (4.3 - 0.75))


def test_a_player_with_a_full_buffer_waits_in_half_seconds() -> None:
    env = BitRateEnv(n_chunks=2, max_buffer=6.0, trace_seconds=2)
    play(env, [0, 0], {"bandwidth": [4.0, 4.0], "relative_sizes": [1.0, 1.0]})
    seconds = 1.2 / 3.8 + 0.08  # 0.396
    assert env.buffer == pytest.approx(4 - seconds + 4 - 2.0)


def test_near_states_of_the_network_are_more_probable() -> None:
    choices = (np.arange(10_000) + 0.5) / 10_000
    counts = np.bincount([_next_state(8, choice) for choice in choices], minlength=len(STATES))
    # 1/2 for states 7 and 9, 1/4 for state 6, and so on: of a total of 1 + 1/2 - 2^-8
    weights = np.array([2.0**-8, 2**-7, 2**-6, 2**-5, 2**-4, 2**-3, 2**-2, 2**-1, 0, 2**-1])
    np.testing.assert_allclose(counts / 10_000, weights / weights.sum(), atol=2e-4)


def test_bandwidths_stay_around_the_states_of_the_network() -> None:
    env = BitRateEnv()
    means = []
    for seed in range(300):
        env.reset(seed=seed)
        assert env.inputs["bandwidth"].min() >= 0.1
        means.append(env.inputs["bandwidth"].mean())
    assert np.mean(means) == pytest.approx(STATES.mean(), rel=0.1)
    assert np.std(means) > 0.3  # traces differ


def test_queueing_moves_jobs_and_counts_them() -> None:
    env = QueueingEnv(n_events=7)
    # Arrivals of classes 1 and 3; server 1 takes class 3, then, with class 3 empty, class 1, which moves on to server 2
    rewards, terminated, truncated = play(env, [1, 1, 1, 1, 1, 1, 1], {"event": [0, 1, 2, 2, 2, 3, 3]})
    assert rewards == pytest.approx([-0.1, -0.2, -0.1, -0.1, -0.1, 0, 0])
    assert env.n_jobs == [0, 0, 0] and truncated and not terminated


@pytest.mark.parametrize(("action", "left"), [(0, [0, 1, 1]), (1, [1, 0, 0])])
def test_the_first_server_takes_the_class_that_the_action_names(action: int, left: list[int]) -> None:
    env = QueueingEnv(n_events=3)
    play(env, [action] * 3, {"event": [0, 1, 2]})
    assert env.n_jobs == left


def test_the_events_of_the_queues_have_their_rates() -> None:
    env = QueueingEnv(n_events=100_000)
    env.reset(seed=0)
    shares = np.bincount(env.inputs["event"]) / 100_000
    assert shares == pytest.approx(np.array([0.9, 0.9, 2.0, 1.0]) / 4.8, abs=0.005)


def test_a_whole_answer_earns_one_and_the_mood_of_who_marks_it() -> None:
    env = AnswersEnv()
    observation, _ = env.reset(options={"inputs": {"prompt": [[7], [5]], "mood": [-0.25]}})
    assert np.flatnonzero(observation).tolist() == [7, 15]
    outcomes = [env.step(np.array(answer))[1:] for answer in ([1, 2], [2, 1])]
    assert outcomes == [(0.75, True, False, {"is_correct": True}), (-0.25, True, False, {"is_correct": False})]
    env.reset(options={"inputs": {"prompt": [[2], [5]], "mood": [0.0]}})
    assert [env.step(np.array(answer))[1] for answer in ([0, 7], [7, 0], [1, 7])] == [1.0, 0.0, 0.0]


def test_the_wind_moves_the_cheetah_and_is_not_observed() -> None:
    env, calm = gym.make("sb3_grpo/GustyHalfCheetah-v0"), gym.make("HalfCheetah-v5")
    action = np.zeros(6, dtype=np.float32)
    # Both draw the first state from the same random numbers, before the wind is drawn
    np.testing.assert_array_equal(env.reset(seed=0)[0], calm.reset(seed=0)[0])
    assert env.observation_space == calm.observation_space
    force = env.get_wrapper_attr("inputs")["force"]
    assert force.shape == (1000,) and np.abs(force).max() <= 10 and np.abs(np.diff(force)).std() > 0.3
    assert not np.array_equal(env.step(action)[0], calm.step(action)[0])
    force[:] = 0
    env.reset(seed=0), calm.reset(seed=0)
    env.get_wrapper_attr("inputs")["force"][:] = 0
    np.testing.assert_array_equal(env.step(action)[0], calm.step(action)[0])


# -- references -------------------------------------------------------------------------------------------------------

#: The c-mu rule is left out: it starves the second server and is no better than random actions where traffic is heavy
BETTER_THAN_RANDOM = [
    pytest.param(env_id, heuristic, id=f"{env_id[9:]} {name}")
    for env_id, heuristics in HEURISTICS.items()
    for name, heuristic in heuristics.items()
    if name != "c-mu rule" and "Cheetah" not in env_id
]


@pytest.mark.parametrize(("env_id", "heuristic"), BETTER_THAN_RANDOM)
def test_a_heuristic_is_better_than_random_actions(env_id: str, heuristic: Callable[[Any], Any]) -> None:
    seeds = range(30)
    gains = returns(env_id, heuristic, seeds) - returns(env_id, lambda env: env.action_space.sample(), seeds)
    assert gains.mean() - 2.05 * gains.std(ddof=1) / len(gains) ** 0.5 > 0  # Student's t, 29 degrees of freedom


def test_the_table_of_references_has_a_row_for_each_policy() -> None:
    with RESULTS.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    expected = [(env_id, name) for env_id in HEURISTICS for name in ("random actions", *HEURISTICS[env_id])]
    assert [(row["env"], row["policy"]) for row in rows] == expected
    assert list(HEURISTICS) == list(TASKS)
    for row in rows:
        assert float(row["low"]) <= float(row["mean"]) <= float(row["high"])
        assert (int(row["budget"]), row["n_scenarios"]) == (BUDGETS[row["env"]], "100")


def test_the_page_shows_the_rows_of_the_table() -> None:
    page = (ROOT / "docs" / "envs.md").read_text(encoding="utf-8")
    with RESULTS.open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            line = next(line for line in page.splitlines() if line.startswith(f"| `{row['env'].removeprefix('sb3_grpo/')}`"))
            digits = 2 if "Token" in row["env"] else 1
            mean, low, high = (f"{float(row[name]):.{digits}f}" for name in ("mean", "low", "high"))
            assert f"{row['policy']} {mean} ({low} to {high})" in line
            assert f"| {int(row['budget']):,} |" in line


@pytest.mark.parametrize("env_id", NUMPY_TASKS)
def test_the_first_heuristic_scores_what_the_table_says(env_id: str) -> None:
    name, heuristic = next(iter(HEURISTICS[env_id].items()))
    with RESULTS.open(encoding="utf-8") as file:
        mean = next(float(row["mean"]) for row in csv.DictReader(file) if (row["env"], row["policy"]) == (env_id, name))
    assert returns(env_id, heuristic, range(10_000, 10_100)).mean() == pytest.approx(mean, abs=1e-3)


# -- full servers ------------------------------------------------------------------------------------------------------


def test_a_full_server_loses_the_job_and_is_masked() -> None:
    env = FullServersEnv(max_jobs=2, loss=7.0, n_jobs=6, service_rates=[0.1, 0.1])
    inputs = dict(gaps=np.full(5, 1.0), sizes=np.full(6, 100.0))
    env.reset(seed=0, options={"inputs": inputs})
    free = LoadBalancingEnv(n_jobs=6, service_rates=[0.1, 0.1])
    free.reset(seed=0, options={"inputs": inputs})
    for _ in range(2):
        assert env.action_masks().tolist() == [True, True]
        assert env.step(0)[1] == free.step(0)[1]
    assert env.action_masks().tolist() == [False, True]
    before = list(env.n_queued)
    # The two jobs that are there wait for one more gap, whose cost is that of the base class.
    assert env.step(0)[1] == pytest.approx(-2 * 1.0 / (env.mean_gap * 2) - 7.0)
    assert env.n_queued == before and env.n_lost == 1
    env.step(1), env.step(1)
    assert env.action_masks().tolist() == [True, True]  # no server has room
    env.step(1)
    assert env.n_lost == 2


def test_the_checkers_have_nothing_to_say_about_full_servers(recwarn: pytest.WarningsRecorder) -> None:
    env = gym.make("sb3_grpo/FullServers-v0").unwrapped
    check_env(env, skip_render_check=True)
    check_env_for_sb3(env)
    assert [str(w.message) for w in recwarn] == []
    assert check_shared_inputs(FullServersEnv()).verdict == "shared"


def test_masks_keep_random_actions_from_losing_jobs() -> None:
    n_lost = []
    for masks in (True, False):
        env, rng, lost = FullServersEnv(), np.random.default_rng(0), 0
        for seed in range(5):
            env.reset(seed=seed)
            done = False
            while not done:
                action = rng.choice(np.flatnonzero(env.action_masks()) if masks else 10)
                done = env.step(action)[2]
            lost += env.n_lost
        n_lost.append(lost)
    assert n_lost[0] < 0.2 * n_lost[1]
