"""CUDA graphs: on a GPU, and on a CPU with a stand-in that repeats the function in place of the operations."""

import copy
import io
import warnings
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch as th
from gymnasium import spaces
from helpers import CHW, HWC, VECTOR, AnyEnv
from stable_baselines3.common.env_util import make_vec_env
from torch import nn

from sb3_grpo import GRPO, CnnPolicy
from sb3_grpo.arithmetic import conditions, graphs

pytestmark = pytest.mark.filterwarnings("ignore:batch_size=16 does not divide")
NEEDS_GPU = pytest.mark.skipif(not th.cuda.is_available(), reason="there is no GPU")
EYE_AND_SPEED = spaces.Dict(eye=HWC, speed=VECTOR)


class StandIn(graphs.Captured):
    """Calls the function of the graph anew, with arguments in the same memory each time."""

    captures: ClassVar[list["StandIn"]] = []

    def __init__(self, function: Any, arguments: Any, warm_up: Any):
        self._function, self._arguments, self.n_calls = function, [argument.clone() for argument in arguments], 0
        warm_up(*self._arguments)
        self.captures.append(self)

    def __call__(self, arguments: Any) -> list[th.Tensor]:
        self.n_calls += 1
        for own, given in zip(self._arguments, arguments, strict=True):
            own.copy_(given)
        return [result.clone() for result in self._function(*self._arguments)]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "cpu":
        monkeypatch.setattr(conditions, "DEVICES", {"cpu"})
        monkeypatch.setattr(graphs, "Captured", StandIn)
        monkeypatch.setattr(StandIn, "captures", [])
    return request.param


def make_model(device: str, policy: Any = "CnnPolicy", space: Any = CHW, actions: Any = None, **options: Any) -> GRPO:
    """:return: A model whose minibatches are two full ones and one with half as many transitions"""
    env = make_vec_env(lambda: AnyEnv(space, actions or spaces.Discrete(3)), 2, seed=0)
    return GRPO(policy, env, **{"n_steps": 20, "batch_size": 16, "seed": 0, "device": device, **options})


def captured(model: GRPO) -> set[str]:
    """:return: Names of the graphs that the policy has"""
    return {name for name, (_, graph) in graphs.graphs_of(model.policy)._kept.items() if graph is not None}


def update(model: GRPO) -> th.Tensor:
    """:return: Weights after an update with the present rollout, in an order of the transitions that is always the same"""
    np.random.seed(1)
    model.train()
    return th.cat([parameter.detach().flatten() for parameter in model.policy.parameters()]).clone()


def twin(model: GRPO, **options: Any) -> GRPO:
    """:return: A model with the same weights, moments and transitions"""
    file = io.BytesIO()
    model.save(file)
    file.seek(0)
    other = GRPO.load(file, env=model.env, device=model.device, **options)
    other.rollout_buffer = model.rollout_buffer
    other.set_logger(model.logger)
    return other


BY_TRAJECTORY = dict(loss_aggregation="trajectory")


@pytest.mark.parametrize(
    ("policy", "space", "actions", "options"),
    [
        ("CnnPolicy", CHW, spaces.Discrete(3), dict(ent_coef=0.01)),
        ("CnnPolicy", CHW, spaces.MultiDiscrete([2, 3]), dict(learning_rate=lambda left: 1e-3 * (left + 0.5))),
        ("CnnPolicy", HWC, spaces.Box(-1.0, 1.0, (2,)), dict(learning_rate=1e-3, policy_kwargs=dict(log_std_lr_factor=2.0))),
        ("MultiInputPolicy", EYE_AND_SPEED, spaces.MultiBinary(2), dict(clip_range=lambda left: left + 0.1)),
        ("MultiInputPolicy", EYE_AND_SPEED, spaces.Discrete(3), dict(objective=BY_TRAJECTORY, max_grad_norm=0.01)),
    ],
)  # fmt: skip
def test_an_update_by_a_graph_is_that_of_torch(
    policy: str, space: spaces.Space, actions: spaces.Space, options: dict[str, Any], device: str, monkeypatch: Any
):
    model = make_model(device, policy, space, actions, **options).learn(80)
    assert captured(model) == {"acting", "gradient steps"}
    in_torch = twin(model)
    before = th.cat([parameter.detach().flatten() for parameter in model.policy.parameters()])
    ours = update(model)
    monkeypatch.setattr(conditions, "DEVICES", set())
    theirs = update(in_torch)
    assert not captured(in_torch) and (ours - before).abs().max() > 1e-4
    th.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    for name, value in in_torch.update_metrics.items():
        assert model.update_metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_a_graph_is_captured_once_and_again_when_something_in_it_has_changed(device: str):
    if device != "cpu":
        pytest.skip("the stand-in counts captures")
    model = make_model(device, learning_rate=lambda left: 1e-3 * left, clip_range=lambda left: 0.2 * left).learn(160)
    acting, steps = StandIn.captures
    assert acting.n_calls == 160 // 2
    # The first minibatch of all prepares the optimizer, and the last of each epoch is not full
    assert steps.n_calls == 160 // 40 * model.n_epochs * 2 - 1
    model.ent_coef = 0.1
    update(model)
    assert len(StandIn.captures) == 3 and StandIn.captures[2].n_calls == model.n_epochs * 2
    moments = copy.deepcopy(model.policy.optimizer.state_dict())
    model.policy.optimizer.load_state_dict(moments)  # as after an update that failed
    update(model)
    assert len(StandIn.captures) == 4
    model.learn(40)
    assert len(StandIn.captures) == 4


class OwnForward(CnnPolicy):
    """Acts in its own way."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class Dropout(nn.Module):
    """Makes a network random."""

    def __new__(cls) -> Any:
        return nn.Dropout(0.1)


@pytest.mark.parametrize(
    ("policy", "options", "expected"),
    [
        (OwnForward, {}, set()),
        ("CnnPolicy", dict(policy_kwargs=dict(net_arch=[8], activation_fn=Dropout)), set()),
        ("CnnPolicy", dict(actions=spaces.Box(-1.0, 1.0, (2,)), use_sde=True), set()),
        ("CnnPolicy", dict(policy_kwargs=dict(optimizer_class=th.optim.SGD)), {"acting"}),
        ("CnnPolicy", dict(objective=dict(kl_coef=0.1)), {"acting"}),
        ("CnnPolicy", dict(target_kl=10.0), {"acting"}),
        ("CnnPolicy", dict(objective=dict(importance_sampling_level="trajectory")), {"acting"}),
        ("CnnPolicy", dict(update_rule="natural"), {"acting"}),
    ],
)
def test_there_is_no_graph_of_what_could_change_without_notice(policy: Any, options: Any, expected: set[str], device: str):
    assert captured(make_model(device, policy, **options).learn(80)) == expected


def test_a_frozen_weight_and_a_hook_are_respected(device: str):
    model = make_model(device).learn(40)
    frozen = next(model.policy.action_net.parameters()).requires_grad_(False)
    before, seen = frozen.clone(), []
    update(model)
    assert th.equal(frozen, before)
    frozen.requires_grad_(True)
    handle = model.policy.action_net.register_forward_hook(lambda *_: seen.append(1))
    update(model)
    assert seen and not th.equal(frozen, before)
    handle.remove()


def test_a_copy_and_a_saved_policy_have_no_graphs_and_act_the_same(device: str):
    model = make_model(device).learn(80)
    pictures = np.stack([CHW.sample() for _ in range(5)])
    model.predict(pictures)  # a policy keeps the last distribution, and one with gradients cannot be copied
    copies = [copy.deepcopy(model.policy), twin(model).policy]
    for policy in copies:
        assert not graphs.graphs_of(policy)._kept
        np.testing.assert_array_equal(
            policy.predict(pictures, deterministic=True)[0], model.predict(pictures, deterministic=True)[0]
        )


def test_a_failed_capture_is_warned_of_once_and_training_goes_on(device: str, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    def linear(self: Any, inputs: th.Tensor) -> th.Tensor:
        return nn.functional.linear(inputs, self.weight, self.bias * float(inputs.isfinite().all()))  # waits for the GPU

    if device == "cpu":
        monkeypatch.setattr(graphs.Captured, "__init__", fail)
    else:
        monkeypatch.setattr(nn.Linear, "forward", linear)
    model = make_model(device)
    with pytest.warns(UserWarning, match="There is no CUDA graph for .*, which goes on without one, more slowly") as all_:
        model.learn(120)
    found = [str(each.message) for each in all_ if "CUDA graph" in str(each.message)]
    assert len(found) == 2 and "for gradient steps" in found[1] and model.num_timesteps == 120
    assert all(th.isfinite(parameter).all() for parameter in model.policy.parameters())


@NEEDS_GPU
def test_an_update_on_a_gpu_waits_as_often_for_many_minibatches_as_for_few():
    counts = []
    for batch_size in (32, 8):
        model = make_model("cuda", n_steps=16, batch_size=batch_size).learn(64)
        assert captured(model) == {"acting", "gradient steps"}
        th.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as waits:
                warnings.simplefilter("always")
                update(model)
        finally:
            th.cuda.set_sync_debug_mode("default")
        counts.append(len(waits))
    assert counts[0] == counts[1]
