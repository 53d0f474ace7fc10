"""
The private parts of Stable-Baselines3, Gymnasium and PyTorch that the package uses, each with what it relies on.

``test_adapters.py`` tests those of ``sb3_grpo.starts``.
"""

import ast
import inspect
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch as th
from helpers import SMALL, AnyEnv, make_envs
from stable_baselines3 import PPO
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.buffers import BaseBuffer
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm
from stable_baselines3.common.policies import ActorCriticPolicy, BasePolicy
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv
from torch import nn

PACKAGE = Path(__file__).parents[1] / "sb3_grpo"

#: Names, and what the package relies on.
PRIVATE = {
    # stable_baselines3.common.base_class.BaseAlgorithm, on_policy_algorithm.OnPolicyAlgorithm
    "_wrap_env": "static method (env, verbose, monitor_wrapper) that makes a VecEnv of any environment",
    "_setup_model": "seeds the model, builds policy and rollout buffer; load() calls it",
    "_setup_lr_schedule": "makes the schedule of the learning rate from the argument",
    "_update_learning_rate": "hook that sets the rate of optimizers before an update, which users override",
    "_setup_learn": "resets the environment if the run is new, and stores the observation",
    "_maybe_recommend_cpu": "warns about networks on a GPU, and takes the name of the MLP policy",
    "_last_obs": "observations in which the next actions are chosen; None asks for a reset",
    "_last_original_obs": "the same before VecNormalize, which is not saved without the state of the run",
    "_last_episode_starts": "whether the last step ended the episode",
    "_update_info_buffer": "stores the returns of finished episodes",
    "_current_progress_remaining": "falls from 1 to 0 over a run, and enters schedules",
    "_n_updates": "number of epochs so far",
    "_stats_window_size": "number of episodes that logged means are over",
    "_excluded_save_params": "names of attributes that are not pickled",
    # stable_baselines3.common.vec_env.VecEnv
    "_reset_seeds": "forgets the seeds of the next reset",
    "_reset_options": "forgets its options",
    "_get_indices": "makes a list of the argument `indices`",
    # stable_baselines3.common.policies, buffers
    "_dummy_schedule": "stands for the schedule in a saved policy",
    "_get_constructor_parameters": "arguments with which a saved policy is built again",
    "_predict": "hook of predict()",
    "_build_mlp_extractor": "hook of actor-critic policies, which users override",
    "_get_action_dist_from_latent": "another",
    "_build": "name of the method that builds the layers of SB3's policies",
    "_get_samples": "abstract method of buffers",
    # stable_baselines3.common.callbacks.BaseCallback
    "_on_training_start": "hook",
    "_on_rollout_start": "hook that comes after the update of the rollout before",
    "_on_step": "hook",
    # torch.nn.Module, torch.Tensor, torch.nn.modules.module
    "_forward_hooks": "hooks of a module",
    "_forward_pre_hooks": "hooks of a module",
    "_backward_hooks": "hooks of a module, and of a tensor",
    "_backward_pre_hooks": "hooks of a module",
    "_post_accumulate_grad_hooks": "hooks of a tensor",
    "_has_any_global_hook": "whether there is a hook on all modules",
    # gymnasium.wrappers.TimeLimit
    "_max_episode_steps": "the time limit",
}
#: Attributes of the package's own classes that happen to have the name of an attribute of a module or a tensor.
OWN = {"_parameters", "_base"}
#: Names that ``sb3_grpo.starts`` uses, which ``test_adapters.py`` tests.
OF_STARTS = {"_seeds", "_options", "_save_obs", "_obs_from_buf"}


def names_in_the_package() -> set[str]:
    """:return: All private names of attributes, methods and strings in the source of the package"""
    names: set[Any] = set()
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Constant):
                names.add(node.value)
    return {name for name in names if isinstance(name, str) and name.startswith("_") and not name.startswith("__")}


def foreign_names() -> set[str]:
    """:return: All attributes of SB3's, Gymnasium's and PyTorch's objects that the package derives from or looks into"""
    ppo = PPO("MlpPolicy", "CartPole-v1", n_steps=8, batch_size=8, policy_kwargs=SMALL, device="cpu")
    env = make_envs()
    objects = [ppo, BasePolicy, ppo.policy, BaseBuffer, BaseCallback, env, env.envs[0], gym.make("CartPole-v1")]
    objects += [nn.Linear(1, 1), nn.Parameter(th.zeros(1)), nn.modules.module, gym.Wrapper(AnyEnv())]
    return {name for each in objects for name in dir(each)}


def test_the_table_lists_the_private_names_that_the_package_shares_with_its_libraries():
    assert names_in_the_package() & foreign_names() == {*PRIVATE, *OF_STARTS, *OWN}


# --- Stable-Baselines3 ------------------------------------------------------------------------------------------------


PARAMETERS: dict[Any, list[str]] = {
    BaseAlgorithm._wrap_env: ["env", "verbose", "monitor_wrapper"],
    BaseAlgorithm._setup_learn: ["total_timesteps", "callback", "reset_num_timesteps", "tb_log_name", "progress_bar"],
    BaseAlgorithm._setup_lr_schedule: [],
    OnPolicyAlgorithm._setup_model: [],
    OnPolicyAlgorithm._maybe_recommend_cpu: ["mlp_class_name"],
    OnPolicyAlgorithm.collect_rollouts: ["env", "callback", "rollout_buffer", "n_rollout_steps"],
    BaseAlgorithm._update_info_buffer: ["infos", "dones"],
    BaseAlgorithm._excluded_save_params: [],
    VecEnv._get_indices: ["indices"],
    ActorCriticPolicy._build_mlp_extractor: [],
    ActorCriticPolicy._get_action_dist_from_latent: ["latent_pi"],
    BasePolicy._predict: ["observation", "deterministic"],
    BasePolicy._get_constructor_parameters: [],
    BaseBuffer._get_samples: ["batch_inds", "env"],
}


def test_methods_that_are_overridden_or_called_have_these_parameters():
    for method, expected in PARAMETERS.items():
        assert [name for name in inspect.signature(method).parameters if name != "self"] == expected, method


def ppo(env: Any = None, **kwargs: Any) -> Any:
    settings: dict[str, Any] = dict(n_steps=8, batch_size=8, n_epochs=1, policy_kwargs=SMALL, device="cpu")
    return PPO("MlpPolicy", env or Monitor(AnyEnv()), **{**settings, **kwargs})


def test_setup_learn_resets_the_environment_if_the_run_is_new_or_no_observation_is_known():
    model = ppo().learn(8)
    observation = model._last_obs
    model._setup_learn(8, reset_num_timesteps=False)
    assert model._last_obs is observation
    model._setup_learn(8, reset_num_timesteps=True)
    assert model._last_obs is not observation and model._last_episode_starts.all()
    model._last_obs = None
    model._setup_learn(8, reset_num_timesteps=False)
    assert model._last_obs is not None


def test_wrap_env_makes_a_vec_env_of_any_environment():
    assert isinstance(OnPolicyAlgorithm._wrap_env(AnyEnv(), 0, True), DummyVecEnv)
    env = make_envs()
    assert OnPolicyAlgorithm._wrap_env(env, 0, True) is env and isinstance(env, VecEnv)


def test_seeds_and_options_are_forgotten_and_indices_become_a_list():
    env: Any = make_envs()
    env.seed(3)
    env.set_options({"level": 1})
    env._reset_seeds(), env._reset_options()
    assert env._seeds == [None, None] and env._options == [{}, {}]
    assert [list(env._get_indices(indices)) for indices in (None, 1, [1, 0])] == [[0, 1], [1], [1, 0]]


def test_excluded_attributes_are_not_saved_and_the_number_of_updates_is(tmp_path: Path):
    model = ppo().learn(8)
    assert {"policy", "env", "rollout_buffer"} <= set(model._excluded_save_params())
    model.save(tmp_path / "model")
    assert PPO.load(tmp_path / "model", device="cpu")._n_updates == model._n_updates == 1


def test_a_policy_is_saved_with_a_dummy_schedule_and_its_constructor_parameters(tmp_path: Path):
    policy = ppo().policy
    assert policy._get_constructor_parameters()["lr_schedule"](0.5) == policy._dummy_schedule(0.5) == 0.0
    policy.save(tmp_path / "policy")
    assert type(policy).load(tmp_path / "policy").net_arch == policy.net_arch


# --- PyTorch and Gymnasium --------------------------------------------------------------------------------------------


HOOKS: list[tuple[Any, str, str]] = [
    (nn.Linear(1, 1), "_forward_hooks", "register_forward_hook"),
    (nn.Linear(1, 1), "_forward_pre_hooks", "register_forward_pre_hook"),
    (nn.Linear(1, 1), "_backward_hooks", "register_full_backward_hook"),
    (nn.Linear(1, 1), "_backward_pre_hooks", "register_full_backward_pre_hook"),
    (nn.Parameter(th.zeros(1)), "_backward_hooks", "register_hook"),
    (nn.Parameter(th.zeros(1)), "_post_accumulate_grad_hooks", "register_post_accumulate_grad_hook"),
]


def test_hooks_of_modules_and_parameters_stand_under_these_names():
    for part, name, register in HOOKS:
        assert not getattr(part, name)
        handle = getattr(part, register)(lambda *_: None)
        assert getattr(part, name), name
        handle.remove()
        assert not getattr(part, name)


def test_the_time_limit_of_an_environment_stands_under_this_name():
    assert DummyVecEnv([lambda: Monitor(gym.make("CartPole-v1"))]).get_attr("_max_episode_steps") == [500]
