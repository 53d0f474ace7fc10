"""Policies with memory: steps and sequences agree, states begin with episodes and outlast rollouts, and memory is learned."""

import io
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from helpers import BOX, CHW, SMALL, SMALL_CNN, VECTOR, Watcher, make_envs, samples, saved, weights
from rl_zoo3.wrappers import MaskVelocityWrapper
from sb3_contrib import RecurrentPPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.evaluation import evaluate_policy
from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv
from test_masks import Rules, n_forbidden

from benchmarks.tasks.t_maze import TMazeEnv
from sb3_grpo import GRPO, ActorPolicy, MaskableGRPO, RecurrentGRPO, export_onnx, fit_inputs, load_actor
from sb3_grpo.arithmetic.choice import choose_actor
from sb3_grpo.buffers import BUFFERS
from sb3_grpo.distributed import RayVecEnv
from sb3_grpo.recurrent import MlpLstmPolicy, blocks_of

TINY: dict[str, Any] = dict(SMALL, lstm_hidden_size=6)
CELLS = [
    pytest.param(dict(cell="lstm"), id="LSTM"),
    pytest.param(dict(cell="gru"), id="GRU"),
    pytest.param(dict(n_lstm_layers=2), id="two layers"),
]
LENGTHS = [1, 7, 3, 3, 12, 2]
SEQUENCES = np.repeat(np.arange(len(LENGTHS)), LENGTHS)


def make_model(env: Any = None, policy: str = "MlpLstmPolicy", **kwargs: Any) -> Any:
    small: dict[str, Any] = dict(n_steps=16, batch_size=16, n_epochs=2, learning_rate=0.01, seed=0, device="cpu")
    return RecurrentGRPO(policy, make_envs() if env is None else env, **{**small, "policy_kwargs": TINY, **kwargs})


def make_policy(space: spaces.Space = BOX, **kwargs: Any) -> Any:
    policy: Any = MlpLstmPolicy(VECTOR, space, lambda _: 0.01, **{**TINY, **kwargs})
    with th.no_grad():  # the small last layer would hide differences
        policy.action_net.weight.normal_()
    return policy


def rows(policy: Any) -> tuple[th.Tensor, th.Tensor, th.Tensor, th.Tensor]:
    """:return: Observations, actions, states before them, and labels of sequences of different lengths"""
    n = len(SEQUENCES)
    return th.randn(n, 3), th.randn(n, 2), th.randn(n, policy.state_size).tanh(), th.as_tensor(SEQUENCES)


def stepwise(policy: Any, obs: th.Tensor, actions: th.Tensor, states: th.Tensor) -> th.Tensor:
    """:return: Log-probabilities from a loop over the steps of one sequence after another"""
    log_probs, state = [], states[:1]
    for i in range(len(obs)):
        if i == 0 or SEQUENCES[i] != SEQUENCES[i - 1]:
            state = states[i : i + 1]
        log_probs.append(policy.evaluate_actions(obs[i : i + 1], actions[i : i + 1], states=state)[0])
        state = policy(obs[i : i + 1], states=state)[2]
    return th.cat(log_probs)


# --- sequences and steps ---


def test_blocks_have_each_row_once_and_less_padding_than_rows():
    first, blocks = blocks_of(SEQUENCES)
    assert first.tolist() == [14, 1, 8, 11, 26, 0]  # the longest first, in the order in which they came
    assert sorted(row for block in blocks for row in block.rows[block.is_real]) == list(range(len(SEQUENCES)))
    assert all(2 * block.is_real.sum() > block.is_real.size for block in blocks)
    assert sum(block.is_real.size for block in blocks) < len(LENGTHS) * max(LENGTHS)


@pytest.mark.parametrize("kwargs", CELLS)
def test_a_sequence_gives_the_log_probabilities_and_the_gradient_of_a_loop_over_its_steps(kwargs: dict[str, Any]):
    policy = make_policy(**kwargs)
    obs, actions, states, sequences = rows(policy)
    found = {}
    for name, log_probs in (
        ("sequences", policy.evaluate_actions(obs, actions, states=states, sequences=sequences)[0]),
        ("loop", stepwise(policy, obs, actions, states)),
        ("steps alone", policy.evaluate_actions(obs, actions, states=states)[0]),
    ):
        policy.zero_grad()
        log_probs.mul(th.linspace(-1, 1, len(obs))).sum().backward()
        found[name] = log_probs.detach(), th.cat([each.grad.flatten() for each in policy.parameters()])
    for i in range(2):
        th.testing.assert_close(found["sequences"][i], found["loop"][i], rtol=1e-4, atol=1e-4)
        assert not th.allclose(found["sequences"][i], found["steps alone"][i], rtol=0.1)


@pytest.mark.parametrize("kwargs", CELLS)
def test_predict_step_by_step_gives_the_actions_of_the_batch(kwargs: dict[str, Any]):
    policy = make_policy(**kwargs)
    obs, _, _, sequences = rows(policy)
    whole = policy.get_distribution(obs, sequences=sequences).mode().detach().numpy()
    assert not np.allclose(whole, policy.get_distribution(obs).mode().detach().numpy(), atol=0.01)
    state, starts = None, np.append(True, np.diff(SEQUENCES) != 0)
    for i, start in enumerate(starts):
        action, state = policy.predict(obs[i].numpy(), state, np.array([start]), deterministic=True)
        np.testing.assert_allclose(action, np.clip(whole[i], BOX.low, BOX.high), rtol=1e-4, atol=1e-5)


def test_a_start_of_an_episode_clears_the_state_of_its_environment_and_of_no_other():
    model = make_model()
    obs = samples(VECTOR, 3)
    _, state = model.predict(obs)
    _, fresh = model.predict(obs)
    _, carried = model.predict(obs, state, np.zeros(3, bool))
    _, mixed = model.predict(obs, state, np.array([False, True, False]))
    for part, zeroed, kept in zip(mixed, fresh, carried, strict=True):
        assert part.shape == (1, 3, 6)
        np.testing.assert_array_equal(part[:, 1], zeroed[:, 1])
        np.testing.assert_array_equal(part[:, [0, 2]], kept[:, [0, 2]])
        assert not np.allclose(zeroed, kept)


@pytest.mark.parametrize(
    ("state", "episode_start", "message"),
    [
        pytest.param((np.zeros((1, 2, 6)),) * 2, None, r"`state` has the shapes .* and 3 observation\(s\) need", id="n"),
        pytest.param((np.zeros((1, 3, 6)),), None, r"\[\(1, 3, 6\)\], .* need \[\(1, 3, 6\), \(1, 3, 6\)\]", id="parts"),
        pytest.param((np.zeros((1, 3, 6)),) * 2, [True], r"`episode_start` has 1 entries for 3", id="starts"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(state: Any, episode_start: Any, message: str):
    with pytest.raises(ValueError, match=message):
        make_model().predict(samples(VECTOR, 3), state, episode_start)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        pytest.param(dict(lstm_hidden_size=0), "`lstm_hidden_size` must be an integer of at least 1", id="units"),
        pytest.param(dict(cell="rnn"), "`cell` must be 'lstm' or 'gru', not 'rnn'", id="cell"),
        pytest.param(dict(lstm_kwargs=dict(bidirectional=True)), r"lstm_kwargs=.* has \['bidirectional'\]", id="kwargs"),
        pytest.param(dict(chrono_init=1), "`chrono_init` must be an integer of at least 2 or None, not 1", id="chrono"),
        pytest.param(
            dict(chrono_init=9, lstm_kwargs=dict(bias=False)), "chrono_init=9 sets biases, and .* drop one", id="bias"
        ),
    ],
)
def test_wrong_arguments_of_the_memory_are_refused(kwargs: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        make_model(policy_kwargs=kwargs)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_with_chrono_init_units_forget_over_so_many_steps_and_otherwise_at_once(cell: str):
    kept = {}
    for chrono_init in (None, 10, 100):
        th.manual_seed(0)
        policy = MlpLstmPolicy(VECTOR, BOX, lambda _: 0.01, cell=cell, lstm_hidden_size=200, chrono_init=chrono_init)  # type: ignore[arg-type]
        start, still = th.ones(1, policy.state_size), th.zeros(1, policy.state_size)
        with th.no_grad():
            for _ in range(30):
                start, still = (policy.remember(th.zeros(1, 3), state)[1] for state in (start, still))
        kept[chrono_init] = float((start - still)[0, -200:].mean())  # the cell states of an LSTM
    assert abs(kept[None]) < 0.01 and abs(kept[10]) < 0.1 and 0.3 < kept[100] < 0.7, kept


# --- rollouts ---


class Rollouts(Watcher):
    """Keeps a copy of some columns of each rollout, environments first."""

    def __init__(self) -> None:
        super().__init__()
        self.columns: list[list[np.ndarray]] = []

    def _on_rollout_end(self) -> None:
        buffer = self.model.rollout_buffer  # type: ignore[attr-defined]
        self.columns.append([getattr(buffer, name).copy() for name in ("steps", "states", "observations")])


@pytest.mark.parametrize(
    "cls", [DummyVecEnv, pytest.param(RayVecEnv, marks=pytest.mark.xdist_group("ray"))], ids=["this process", "Ray"]
)
def test_states_are_zero_where_episodes_begin_and_go_on_elsewhere_also_in_the_next_rollout(cls: Any):
    env, watcher = make_vec_env("CartPole-v1", 2, seed=0, vec_env_cls=cls), Rollouts()
    model = make_model(env, learning_rate=0.0, normalize_observations=False).learn(64, callback=watcher)
    env.close()
    steps, states, observations = (np.concatenate(each, axis=1) for each in zip(*watcher.columns, strict=True))
    assert (steps[:, 16] > 0).any()  # an episode goes on from the first rollout into the second
    assert not states[steps == 0].any() and states[steps > 0].any(axis=-1).all()
    for env_idx in range(2):
        after = model.policy.remember(th.as_tensor(observations[env_idx]), states[env_idx])[1].detach().numpy()
        goes_on = np.flatnonzero(steps[env_idx, 1:] > 0)
        np.testing.assert_allclose(states[env_idx, 1:][goes_on], after[:-1][goes_on], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("longest", [None, 4])
def test_an_update_begins_with_the_log_probabilities_that_were_sampled(longest: int | None):
    still: dict[str, Any] = dict(learning_rate=0.0, normalize_observations=False)
    model = make_model(make_envs(lengths=(5, 40)), **still, rollout_buffer_kwargs=dict(sequence_length=longest)).learn(64)
    update, n = model.rollout_buffer.update, 0
    for batch in model.rollout_buffer.get(16):
        log_prob, _ = model.policy.evaluate_actions(batch.observations, batch.actions, **batch.context)
        th.testing.assert_close(log_prob, batch.old_log_prob, rtol=1e-3, atol=1e-4)
        lengths = np.bincount(batch.sequences)[np.unique(batch.sequences)]
        assert lengths.tolist() == [int((update.sequences == each).sum()) for each in np.unique(batch.sequences)]
        assert lengths.max() <= (longest or 16)
        n += len(log_prob)
    assert n == 32


@pytest.mark.parametrize("buffer", BUFFERS)
def test_every_buffer_and_both_updates_train_the_memory(buffer: str):
    for rule in ("clipped", "natural"):
        model = make_model(rollout_buffer_class=buffer, update_rule=rule)
        before = weights(model)
        model.learn(128)
        assert not th.equal(before["memory.weight_hh_l0"], weights(model)["memory.weight_hh_l0"])


@pytest.mark.parametrize(
    ("policy", "space", "kwargs"),
    [
        pytest.param("CnnLstmPolicy", CHW, SMALL_CNN, id="image"),
        pytest.param("MultiInputLstmPolicy", spaces.Dict({"a": VECTOR, "b": spaces.Discrete(3)}), SMALL, id="Dict"),
    ],
)
def test_images_and_dicts_have_a_memory_too(policy: str, space: spaces.Space, kwargs: dict[str, Any]):
    model = make_model(make_envs(observation_space=space), policy, policy_kwargs=dict(kwargs, lstm_hidden_size=6))
    before = weights(model)
    model.learn(32)
    assert not th.equal(before["memory.weight_hh_l0"], weights(model)["memory.weight_hh_l0"])
    assert model.predict(space.sample())[1][0].shape == (1, 1, 6)


def test_an_interrupted_rollout_and_the_next_are_different_sequences():
    model = make_model(make_envs(n_envs=2, lengths=(12, 13)), rollout_buffer_class="outcome", seed=1)
    model.learn(64, callback=lambda names, _: names["self"].num_timesteps < 2 * 5)
    model.learn(32, reset_num_timesteps=False)
    sequences = model.rollout_buffer.update.sequences
    assert sorted(np.unique(sequences, return_counts=True)[1]) == [5, 5, 7, 7]


def test_processes_give_the_weights_of_environments_in_one_process():
    runs = []
    for cls in (DummyVecEnv, SubprocVecEnv):
        env = make_vec_env("CartPole-v1", 2, seed=0, vec_env_cls=cls)
        runs.append(weights(make_model(env).learn(96)))
        env.close()
    assert all(th.equal(runs[0][name], runs[1][name]) for name in runs[0])


@pytest.mark.parametrize("kwargs", [dict(cell="lstm"), dict(cell="gru")], ids=["LSTM", "GRU"])
def test_a_saved_run_continues_bit_for_bit(kwargs: dict[str, Any]):
    def go_on(file: io.BytesIO) -> dict[str, th.Tensor]:
        file.seek(0)
        model = RecurrentGRPO.load(file, env=make_envs(), device="cpu")
        return weights(model.learn(64, reset_num_timesteps=False))

    model = make_model(policy_kwargs=dict(TINY, **kwargs)).learn(64)
    file = saved(model)
    model.env.seed(0)
    model._last_obs = None  # a file continues from a reset
    expected, found = weights(model.learn(64, reset_num_timesteps=False)), go_on(file)
    assert all(th.equal(expected[name], found[name]) for name in expected)
    assert not th.equal(expected["memory.weight_hh_l0"], th.zeros(1)) and go_on(file).keys() == found.keys()


@pytest.mark.parametrize("kwargs", CELLS[:2])
def test_an_exported_policy_acts_as_predict_with_its_states(kwargs: dict[str, Any], tmp_path: pathlib.Path):
    ort = pytest.importorskip("onnxruntime")
    model = make_model(make_envs(action_space=BOX), policy_kwargs=dict(TINY, log_std_init=0.0, **kwargs)).learn(64)
    export_onnx(model, tmp_path / "policy.onnx")
    session, state = ort.InferenceSession(tmp_path / "policy.onnx"), None
    states = np.zeros((5, model.policy.state_size), np.float32)
    for observation in samples(VECTOR, 20).reshape(4, 5, 3):
        expected, state = model.predict(observation, state, deterministic=True)
        action, states = session.run(["action", "next_state"], {"observation": observation, "state": states})
        np.testing.assert_allclose(action, expected, rtol=1e-4, atol=1e-5)


def test_a_file_has_masks_as_an_input_only_where_the_environments_have_them(tmp_path: pathlib.Path):
    ort = pytest.importorskip("onnxruntime")
    export_onnx(make_model(), tmp_path / "policy.onnx")  # of a model that has not learned
    inputs = ort.InferenceSession(tmp_path / "policy.onnx").get_inputs()
    assert [each.name for each in inputs] == ["observation", "state"]


# --- masks ---


@pytest.mark.parametrize("masked", [True, False])
def test_masks_are_respected_where_environments_have_them_and_are_asked(masked: bool):
    env = DummyVecEnv([lambda: Rules(spaces.Discrete(5))] * 2)
    model = make_model(env).learn(64, use_masking=masked)
    assert (n_forbidden(env) == 0) == masked
    obs, masks = env.reset(), np.stack(env.env_method("action_masks"))
    for _ in range(20):
        actions, state = model.predict(obs, action_masks=masks)
        assert masks[range(2), actions].all() and state[0].shape == (1, 2, 6)


# --- what users bring ---


@pytest.mark.parametrize("hook", ["get_distribution", "_latent"])
def test_a_hook_that_acting_would_not_call_is_refused(hook: str):
    own: Any = type("Own", (MlpLstmPolicy,), {hook: lambda self, obs, **context: None})
    with pytest.raises(TypeError, match=f"Own overrides `{hook}`.*override `remember` or `_distribution`"):
        own(VECTOR, BOX, lambda _: 0.01)


class Triples(MlpLstmPolicy):
    def preprocess(self, obs: Any) -> Any:
        return super().preprocess(3.0 * obs)


def test_a_policy_that_preprocesses_in_its_own_way_acts_and_learns_in_that_way():
    policy = Triples(VECTOR, BOX, lambda _: 0.01, **TINY)
    with th.no_grad():
        policy.action_net.weight.normal_()
        obs = th.randn(5, 3)
        assert not th.equal(MlpLstmPolicy.preprocess(policy, obs), policy.preprocess(obs))
        actions, log_prob, _ = policy(obs)
        th.testing.assert_close(policy.evaluate_actions(obs, actions)[0], log_prob)
        acted = choose_actor(policy)(obs.numpy(), obs, states=np.zeros((5, policy.state_size), np.float32))
        th.testing.assert_close(policy.evaluate_actions(obs, th.as_tensor(acted[0]))[0], th.as_tensor(acted[1]))


def test_states_in_the_form_of_recurrent_ppo_are_refused():
    policy, obs = make_policy(), th.randn(2, 3)
    with pytest.raises(ValueError, match=r"`states` must be an array of shape \(n, 12\), .* not tuple"):
        policy.get_distribution(obs, (th.zeros(1, 2, 6), th.zeros(1, 2, 6)))


def test_policies_without_a_memory_are_refused():
    for policy in ("MlpPolicy", ActorPolicy):
        with pytest.raises(ValueError, match=r"or a subclass of `sb3_grpo\.recurrent\.RecurrentActorPolicy`"):
            make_model(policy=policy)


def test_choices_as_observations_have_a_memory_too():
    space = spaces.MultiDiscrete([3, 4])
    assert make_model(make_envs(observation_space=space)).learn(32).num_timesteps == 32


def test_the_actor_of_recurrent_ppo_can_be_taken_over():
    theirs = RecurrentPPO("MlpLstmPolicy", make_envs(), n_steps=16, policy_kwargs=dict(lstm_hidden_size=6, net_arch=[8]))
    ours = make_model(policy_kwargs=dict(lstm_hidden_size=6, net_arch=[8]), normalize_observations=False)
    load_actor(ours, theirs)
    obs, states = samples(VECTOR, 4), (None, None)
    for _ in range(3):
        (a, s), (b, r) = (m.predict(obs, each, deterministic=True) for m, each in zip((ours, theirs), states, strict=True))
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(s[0], r[0], rtol=1e-4, atol=1e-6)
        states = s, r


def test_statistics_of_observations_do_not_become_a_part_of_a_layer_behind_the_memory():
    theirs = RecurrentPPO("MlpLstmPolicy", make_envs(), n_steps=16, policy_kwargs=dict(lstm_hidden_size=3, net_arch=[8]))
    ours = make_model(policy_kwargs=dict(lstm_hidden_size=3, net_arch=[8]))  # as many units as numbers in an observation
    with pytest.raises(ValueError, match=r"cannot become part of the target's first layer"):
        load_actor(theirs, ours)


def test_a_fit_that_saw_no_changes_is_not_gone_on_with():
    state = make_model().learn(64).rollout_buffer.get_state()
    del state["options"]["n_changes"]
    with pytest.warns(UserWarning, match="starts with a new fit"):
        make_model().rollout_buffer.set_state(state)


# --- learning ---


def without_velocities(seed: int, n: int = 8) -> Any:
    return make_vec_env("CartPole-v1", n, seed=seed, wrapper_class=MaskVelocityWrapper)


@pytest.mark.slow
def test_with_a_memory_the_value_estimate_knows_velocities_that_observations_hide(monkeypatch: pytest.MonkeyPatch):
    def explained() -> Any:
        env, watcher = make_vec_env("Pendulum-v1", 8, seed=0, wrapper_class=MaskVelocityWrapper), Watcher()
        make_model(env, n_steps=256, policy_kwargs={}, update_rule="natural").learn(10 * 2048, callback=watcher)
        return np.median([logged["train/explained_variance"] for logged in watcher.logged[2:]])

    assert explained() > 0.6
    monkeypatch.setattr(fit_inputs, "past_changes", lambda inputs, steps: np.zeros((*steps.shape, 2 * inputs.shape[2])))
    assert explained() < 0.45


@pytest.mark.slow
def test_memory_balances_the_pole_without_seeing_velocities(record_property: Callable[[str, object], None]):
    scores = {}
    for name, cls, policy in (("memory", RecurrentGRPO, "MlpLstmPolicy"), ("none", GRPO, "MlpPolicy")):
        model = cls(policy, without_velocities(0), seed=0, device="cpu").learn(24_576)
        scores[name] = float(np.mean(evaluate_policy(model, without_velocities(1000), 20)[0]))
    record_property("CartPole without velocities", scores)
    assert scores["memory"] > 120 and scores["none"] < 70


def t_maze_score(cls: type[GRPO], policy: str, n: int, **kwargs: Any) -> float:
    env = DummyVecEnv([lambda: TMazeEnv(length=5)] * 8)
    model: Any = cls(policy, env, seed=0, device="cpu").learn(n, **kwargs)
    state, starts, rewards, obs = None, np.ones(8, bool), [], env.reset()
    for _ in range(60):
        masking = dict(action_masks=np.stack(env.env_method("action_masks"))) if kwargs.get("use_masking", True) else {}
        action, state = model.predict(obs, state, starts, deterministic=True, **masking)
        obs, reward, starts, _ = env.step(action)
        rewards += reward[starts].tolist()
    return float(np.mean(rewards))


@pytest.mark.slow
def test_a_maze_that_needs_masks_and_memory_is_learned_with_both_and_not_with_one_of_them():
    assert t_maze_score(RecurrentGRPO, "MlpLstmPolicy", 12_000) > 0.95
    assert t_maze_score(MaskableGRPO, "MlpPolicy", 12_000) < 0.75


@pytest.mark.parametrize(
    ("env_id", "arguments", "rule"),
    [
        ("Pendulum-v1", {}, "natural"),
        ("Pendulum-v1", dict(learning_rate=3e-4), "clipped"),
        ("Pendulum-v1", dict(batch_size=64), "clipped"),
        ("CartPole-v1", {}, "clipped"),
    ],
)
def test_continuous_actions_have_natural_steps_unless_an_argument_is_for_others(
    env_id: str, arguments: dict[str, Any], rule: str
) -> None:
    assert RecurrentGRPO("MlpLstmPolicy", env_id, device="cpu", **arguments).update_rule == rule


def test_a_changed_policy_sees_whole_sequences(monkeypatch: pytest.MonkeyPatch):
    model = make_model().learn(32)
    buffer, found = model.rollout_buffer, []
    for size in (5, 1000):
        monkeypatch.setattr("sb3_grpo.policies.ENCODING_BATCH", size)
        buffer.pos = buffer.buffer_size  # as before the end of a rollout
        buffer.policy_changed(model.policy)
        found.append(buffer.log_probs.copy())
    np.testing.assert_allclose(found[0], found[1], rtol=1e-6)
