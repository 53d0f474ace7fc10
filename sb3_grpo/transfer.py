"""Copying an actor from one model to another, with or without a critic."""

import io
import pathlib
from typing import Any

import torch as th
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.save_util import load_from_zip_file
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor
from torch import nn

from sb3_grpo.policies import COMPILED, plain_name

_CRITIC_PREFIXES = ("value_net.", "mlp_extractor.value_net.", "vf_features_extractor.", "lstm_critic.", "critic.")
_ACTOR_PREFIXES = {
    "mlp_extractor.policy_net.": "policy_net.",
    "pi_features_extractor.": "features_extractor.",
    "lstm_actor.": "memory.",
}
_NORMALIZER = "normalizer."

Source = BaseAlgorithm | BasePolicy | str | pathlib.Path | io.BufferedIOBase


def load_actor(target: BaseAlgorithm, source: Source) -> None:
    """
    Copy an actor (features extractor, hidden layers, action layer, ``log_std``) into a model, in place.

    Both models may be GRPO, PPO or A2C, or with memory RecurrentGRPO or RecurrentPPO, so an actor can move between algorithms
    in either direction. The critic of a target stays as it is, except for a features extractor that it shares with the actor.
    With gSDE, the exploration matrices of the target are sampled again from the copied ``log_std``.

    The copy maps the same observations to the same actions. If the source standardises observations and the target does not,
    the statistics become part of the first layer, which does not clip. If only the target does, it no longer does so. The
    learning rate of a GRPO target then falls with the copied ``log_std``, relative to the initial one of the target
    (``lr_follows_std``).

    Not copied are the state of the optimizer and the statistics of a ``VecNormalize``. Only names and shapes of weights are
    compared: make sure that the activation function, ``squash_output``, ``use_expln`` and the kind of action space agree, and
    that the features extractor of a file whose statistics become part of the first layer is not one of your own.

    :param target: Model to write into
    :param source: Model or policy to read from, or the path of a saved model (``.zip``), or a file-like object. For a file of
        ``policy.save``, load the policy with its class and pass it
    :raises ValueError: If the actors differ in names or shapes; nothing is copied then
    """
    policy = _policy_of(target, "target")
    target_state, source_state = policy.state_dict(), _source_state(source)
    source_standardises, target_standardises = (f"{_NORMALIZER}mean" in state for state in (source_state, target_state))
    needs_folding = source_standardises and not target_standardises
    extractor = getattr(getattr(source, "policy", source), "features_extractor", None)
    # As far as can be seen, the features are the observations.
    if needs_folding and (extractor is None or type(extractor) in (FlattenExtractor, CombinedExtractor)):
        source_state = _fold_statistics(source_state)
    elif target_standardises and not source_standardises:
        target_state = {key: value for key, value in target_state.items() if not key.startswith(_NORMALIZER)}
    ours, theirs = _actor_weights(target_state), _actor_weights(source_state)
    shapes = [{name: tuple(weight.shape) for name, weight in weights.items()} for weights in (ours, theirs)]
    differences = [
        f"{name}: {shapes[1].get(name, 'absent')} in the source, {shapes[0].get(name, 'absent')} in the target"
        for name in sorted(set().union(*shapes))
        if shapes[0].get(name) != shapes[1].get(name)
    ]
    if needs_folding and any(difference.startswith(_NORMALIZER) for difference in differences):
        raise ValueError(
            "The source standardises observations, and its statistics cannot become part of the target's first layer, so "
            "nothing was copied. Make the target a GRPO with the same spaces, or train the source with "
            "normalize_observations=False."
        )
    if differences:
        raise ValueError(
            "The actors differ, so nothing was copied. Make the target with the same spaces, net_arch, features extractor and "
            "use_sde as the source:\n  " + "\n  ".join(differences)
        )

    actor = {key: theirs[name] for key in target_state if (name := _name_in_actor(key)) is not None}
    if target_standardises and not source_standardises:
        policy.normalizer = None  # type: ignore[assignment]
        policy.normalize_observations = target.normalize_observations = False  # type: ignore[assignment, attr-defined]
        if hasattr(target, "kl_penalty"):
            target.kl_penalty.forget()
            target._settings["normalize_observations"] = False  # type: ignore[attr-defined]
    policy.load_state_dict(actor, strict=False)
    if getattr(policy, "use_sde", False):
        policy.reset_noise()  # type: ignore[operator]


def _source_state(source: Source) -> dict[str, th.Tensor]:
    """:return: The state dict of the policy of a model or file"""
    if isinstance(source, (str, pathlib.Path, io.BufferedIOBase)):
        # The weights alone, because the rest of the archive is pickled.
        _, params, _ = load_from_zip_file(source, load_data=False, device="cpu")
        if "policy" not in params:
            raise ValueError(
                f"source={source!r} contains {sorted(params)} but no policy: pass a model saved by GRPO, PPO or A2C. For a "
                "file of `policy.save`, load the policy with its class and pass it."
            )
        state: Any = params["policy"]
    else:
        state = _policy_of(source, "source").state_dict()
    return {plain_name(key): value for key, value in state.items()}


def _policy_of(model: BaseAlgorithm | BasePolicy, argument: str) -> nn.Module:
    """:return: The policy of a model, which is the argument of this name in the ``ValueError`` if it has none"""
    policy = model if isinstance(model, BasePolicy) else getattr(model, "policy", None)
    if not isinstance(policy, nn.Module):
        raise ValueError(f"{argument}={model!r} has no policy network: pass a GRPO, PPO or A2C model.")
    return getattr(policy, COMPILED, policy)


def _fold_statistics(state: dict[str, th.Tensor]) -> dict[str, th.Tensor]:
    """
    Make the standardisation of observations a part of the first layer: ``W (s (x - m)) + b = (W s) x + (b - W s m)``. If that
    layer does not see the observations themselves, or another sees them too, the state stays as it is.
    """
    shift, scale = state[f"{_NORMALIZER}shift"], state[f"{_NORMALIZER}scale"]
    first = "policy_net.0" if "policy_net.0.weight" in state else "action_net"
    weight = state.get(f"{first}.weight", th.empty(0, 0))
    # With gSDE, the noise depends on the input of the action layer.
    noise_sees_observations = first == "action_net" and state.get("log_std", th.empty(0)).dim() == 2
    sees_others = any(key.startswith(("features_extractor.", "memory.")) for key in state)
    if weight.shape[-1] != len(shift) or sees_others or noise_sees_observations:
        return state
    weight = weight * scale
    folded = {f"{first}.weight": weight, f"{first}.bias": state[f"{first}.bias"] - weight @ shift}
    return {key: value for key, value in (state | folded).items() if not key.startswith(_NORMALIZER)}


def _name_in_actor(key: str) -> str | None:
    """:return: The name of a weight in ``ActorPolicy``, ``None`` for one of the critic. Unknown names show as differences"""
    key = plain_name(key)
    if key.startswith(_CRITIC_PREFIXES):
        return None
    for prefix, ours in _ACTOR_PREFIXES.items():
        if key.startswith(prefix):
            return ours + key.removeprefix(prefix)
    return key


def _actor_weights(state: dict[str, th.Tensor]) -> dict[str, th.Tensor]:
    """:return: Weights of the actor in a state dict, with their names in :class:`~sb3_grpo.policies.ActorPolicy`"""
    # Sorted, because the actor uses `pi_features_extractor` if it differs from `features_extractor`
    return {name: state[key] for key in sorted(state) if (name := _name_in_actor(key)) is not None}
