"""Copying an actor from one model to another, with or without a critic."""

import pathlib
from typing import Protocol

import torch as th
from stable_baselines3.common.save_util import load_from_zip_file
from torch import nn


class HasPolicy(Protocol):
    """Anything that keeps its networks in ``policy``, as every SB3 model does."""

    @property
    def policy(self) -> nn.Module: ...


def load_actor(target: HasPolicy, source: HasPolicy | str | pathlib.Path) -> None:
    """
    Copy an actor (features extractor, hidden layers, action layer, ``log_std``) into a model, in place.

    Both sides may be GRPO, PPO or A2C, so that a PPO actor can go on learning with GRPO and the other way round.
    In a PPO or A2C target the critic stays as it is, except for a features extractor that it shares with the actor.
    With gSDE the exploration matrices of the target are drawn anew from the copied ``log_std``.

    What is *not* copied: the optimizer's state in the target (Adam's moments still belong to the former weights), the
    statistics of a ``VecNormalize``, and what has no weights. Names and shapes are compared, nothing else: that activation
    function, ``squash_output``, ``use_expln`` and the kind of action space agree is up to the caller.

    :param target: The model to write into
    :param source: The model to read, or the path of a saved one (``.zip``)
    """
    policy = _policy_of(target, "target")
    # In each: the actor's name for a weight -> the name(s) it has in that state
    target_state = policy.state_dict()
    target_keys = _actor_keys(target_state)
    source_state = _source_state(source)
    source_keys = _actor_keys(source_state)

    differences = []
    for name in sorted({*target_keys, *source_keys}):
        # Where features_extractor and pi_features_extractor differ, the actor uses the latter: it sorts last
        ours = tuple(target_state[max(target_keys[name])].shape) if name in target_keys else "absent"
        theirs = tuple(source_state[max(source_keys[name])].shape) if name in source_keys else "absent"
        if ours != theirs:
            differences.append(f"{name}: {theirs} in the source, {ours} in the target")
    if differences:
        raise ValueError(
            "The actors differ, nothing was copied. Pass a target with the same spaces, net_arch, features extractor "
            "and use_sde as the source:\n  " + "\n  ".join(differences)
        )

    actor = {key: source_state[max(source_keys[name])] for name, keys in target_keys.items() for key in keys}
    policy.load_state_dict(actor, strict=False)
    if getattr(policy, "use_sde", False):
        policy.reset_noise()  # type: ignore[operator]


def _source_state(source: HasPolicy | str | pathlib.Path) -> dict[str, th.Tensor]:
    """
    The weights of a model's policy.

    :param source: A model, or the path of a saved one
    :return: the state dict of its policy
    """
    if not isinstance(source, (str, pathlib.Path)):
        return _policy_of(source, "source").state_dict()
    # The weights alone: the rest of the archive is pickled, and may need code that is not at hand
    _, params, _ = load_from_zip_file(source, load_data=False, device="cpu")
    if "policy" not in params:
        raise ValueError(
            f"source={str(source)!r} holds {sorted(params)} but no policy: pass a model saved by GRPO, PPO or A2C"
        )
    return params["policy"]  # type: ignore[return-value]


def _policy_of(model: HasPolicy, argument: str) -> nn.Module:
    """
    The policy of a model.

    :param model: What the user passed
    :param argument: The name of the argument, for the message
    :return: its ``policy``
    """
    policy = getattr(model, "policy", None)
    if not isinstance(policy, nn.Module):
        raise ValueError(f"{argument}={model!r} has no policy network: pass a GRPO, PPO or A2C model")
    return policy


_CRITIC_PREFIXES = ("value_net.", "mlp_extractor.value_net.", "vf_features_extractor.")
_ACTOR_PREFIXES = {"mlp_extractor.policy_net.": "policy_net.", "pi_features_extractor.": "features_extractor."}


def _actor_keys(state: dict[str, th.Tensor]) -> dict[str, list[str]]:
    """
    Find the actor in the state dict of an actor-only or an actor-critic policy.

    A name that belongs to neither is kept, so that an unknown kind of policy is a mismatch rather than copied in part.

    :param state: State dict of a policy
    :return: the names of the weights in :class:`ActorPolicy`, each with the key or keys it has in ``state``
    """
    keys: dict[str, list[str]] = {}
    for key in state:
        if key.startswith(_CRITIC_PREFIXES):
            continue
        name = key
        for prefix, ours in _ACTOR_PREFIXES.items():
            if key.startswith(prefix):
                name = ours + key.removeprefix(prefix)
        keys.setdefault(name, []).append(key)
    return keys
