"""The search space of ``grpo`` for rl-zoo3's hyperparameter search (Optuna)."""

from typing import Any

import optuna
from rl_zoo3.hyperparams_opt import convert_onpolicy_params

from sb3_grpo.buffers import buffer_options, resolve_buffer_class


def sample_grpo_params(trial: optuna.Trial, n_actions: int, n_envs: int, additional_args: dict[str, Any]) -> dict[str, Any]:
    """:return: Keyword arguments of :class:`~sb3_grpo.grpo.GRPO`, of which all combinations are valid"""
    n_steps_pow = trial.suggest_int("n_steps_pow", 5, 11)
    trial.suggest_float("one_minus_gamma", 0.0001, 0.1, log=True)
    trial.suggest_float("ent_coef", 1e-8, 0.1, log=True)
    if trial.suggest_categorical("update_rule", ["clipped", "natural"]) == "natural":
        trial.suggest_float("target_kl", 0.001, 0.1, log=True)
    else:
        trial.suggest_int("batch_size_pow", 5, 10)
        trial.suggest_float("learning_rate", 1e-5, 0.003, log=True)
        trial.suggest_categorical("clip_range", [0.1, 0.2, 0.3, 0.4])
        trial.suggest_categorical("n_epochs", [1, 5, 10, 20])
        trial.suggest_float("max_grad_norm", 0.3, 2.0)
    trial.suggest_categorical("net_arch", ["tiny", "small", "medium"])
    trial.suggest_categorical("activation_fn", ["tanh", "relu"])
    trial.suggest_categorical("group_size", [2, 4, 8])

    buffer = trial.suggest_categorical("rollout_buffer_class", ["kernel", "return_to_go", "stepwise", "outcome", "process"])
    if buffer == "kernel":
        trial.suggest_float("one_minus_gae_lambda", 0.001, 0.2, log=True)
        trial.suggest_categorical("n_features", [64, 128, 256, 512])
        trial.suggest_float("bandwidth", 0.3, 5.0, log=True)
        trial.suggest_float("ridge", 1e-6, 0.1, log=True)
        trial.suggest_float("forgetting", 0.0, 0.98)
        trial.suggest_categorical("learn_metric", [True, False])
        trial.suggest_categorical("use_time", [True, False])
    else:
        trial.suggest_categorical("scale", ["group", "batch", "none"])
        trial.suggest_categorical("tied_groups", ["keep", "skip"])
    if buffer == "outcome":
        trial.suggest_categorical("leave_one_out", [True, False])

    hyperparams = convert_grpo_params(trial.params)
    # Values as GRPO takes them, for display.
    for name in hyperparams.keys() & {"gamma", "n_steps", "batch_size"}:
        trial.set_user_attr(name, hyperparams[name])
    trial.set_user_attr("transitions per rollout", 2**n_steps_pow * n_envs)
    return hyperparams


def convert_grpo_params(sampled_params: dict[str, Any]) -> dict[str, Any]:
    """:return: Keyword arguments of :class:`~sb3_grpo.grpo.GRPO` from the parameters of a trial"""
    # Lambda concerns the kernel baseline. Other buffers ignore the value given here.
    hyperparams = convert_onpolicy_params({"one_minus_gae_lambda": 0.02, **sampled_params})
    del hyperparams["policy_kwargs"]["net_arch"]["vf"]
    options = buffer_options(resolve_buffer_class(hyperparams["rollout_buffer_class"])) & hyperparams.keys()
    hyperparams["rollout_buffer_kwargs"] = {name: hyperparams.pop(name) for name in sorted(options)}
    return hyperparams
