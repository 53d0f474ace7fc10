"""A policy as an ONNX file, which plays without this package and without torch."""

import os
import warnings
from typing import Any

import numpy as np
import torch as th
from gymnasium import spaces
from torch import nn

from sb3_grpo.arithmetic.conditions import ACTING, is_unaltered
from sb3_grpo.grpo import GRPO
from sb3_grpo.maskable import MaskableGRPO
from sb3_grpo.masks import choices_of, masked_logits
from sb3_grpo.observations import space_parts
from sb3_grpo.policies import ActorPolicy
from sb3_grpo.recurrent import RecurrentActorPolicy, RecurrentGRPO


class DeterministicActor(nn.Module):
    """Actions of ``predict(deterministic=True)``, without torch's distributions, whose checks cannot be exported."""

    low: th.Tensor
    high: th.Tensor

    def __init__(self, policy: ActorPolicy, is_masked: bool):
        super().__init__()
        self.policy, self.is_masked = policy, is_masked
        space = policy.action_space
        if isinstance(space, spaces.Box):
            self.register_buffer("low", th.as_tensor(space.low, device=policy.device))
            self.register_buffer("high", th.as_tensor(space.high, device=policy.device))

    def forward(self, *parts: th.Tensor) -> tuple[th.Tensor, ...]:
        """
        :param parts: Observations, shape ``(n, *obs_shape)``, or those of each key of a ``Dict`` space in its order. With
            memory, its states come next, shape ``(n, state_size)``. If actions are masked, masks come last, shape
            ``(n, n_choices)``
        :return: Actions, shape ``(n, *action_shape)``, and with memory its states after the step
        """
        policy = self.policy
        keys = list(space_parts(policy.observation_space))
        obs: Any = parts[0] if keys == [None] else dict(zip(keys, parts, strict=False))
        if isinstance(policy, RecurrentActorPolicy):
            remembered, after = policy.remember(obs, parts[len(keys)])
            return self._actions(policy.policy_net(remembered), parts[-1]), after
        return (self._actions(policy.policy_net(policy.extract_features(obs)), parts[-1]),)

    def _actions(self, latent: th.Tensor, action_masks: th.Tensor) -> th.Tensor:
        policy, space = self.policy, self.policy.action_space
        outputs = policy.action_net(latent)
        if self.is_masked:
            outputs = masked_logits(outputs, action_masks, space)
        if isinstance(space, spaces.Box):
            outputs = outputs.reshape(-1, *space.shape)
            if policy.squash_output:
                return self.low + 0.5 * (th.tanh(outputs) + 1.0) * (self.high - self.low)
            return th.clamp(outputs, self.low, self.high)
        if isinstance(space, spaces.Discrete):
            return outputs.argmax(dim=1)
        if isinstance(space, spaces.MultiDiscrete):
            return th.stack([logits.argmax(dim=1) for logits in outputs.split(choices_of(space), dim=1)], dim=1)
        return (outputs > 0).to(th.float32).reshape(-1, *space.shape)  # type: ignore[misc]


def export_onnx(model: GRPO, path: str | os.PathLike[str]) -> None:
    """
    Write the deterministic policy of a model as an ONNX file: observations in, the actions of ``predict(deterministic=True)``
    out. The model's own normalisation of observations, and the bounds of the actions, are a part of the graph.

    Observations have the shape and the type of the model's observation space, with one more axis in front, of any length. The
    input is named ``observation``; a ``Dict`` space has an input for each key, with the name of the key. A
    :class:`~sb3_grpo.MaskableGRPO` has another input, ``action_masks``, of booleans. The output is named ``action``. A
    :class:`~sb3_grpo.RecurrentGRPO` has the input ``state``, zeros where an episode begins, of shape ``(n, state_size)``, and
    the output ``next_state``, which is the state of the next step.

    The file needs neither this package nor torch. Writing it needs the extra ``export``.

    :param model: The model
    :param path: Path of the file
    :raises ImportError: If a package of the extra is missing
    :raises ValueError: If the policy chooses actions in a way of its own
    """
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"export_onnx needs {error.name!r}, which is not installed: pip install 'sb3-grpo[export]', or from a clone "
            "pip install -e '.[export]'."
        ) from error
    policy = model.policy
    if not is_unaltered(policy, ACTING):
        raise ValueError(
            f"{type(policy).__name__} chooses actions in its own way: export the policy with `torch.onnx.export`."
        )
    outputs = ["action"]
    is_masked = model._uses_masks if isinstance(model, RecurrentGRPO) else isinstance(model, MaskableGRPO)
    batch = th.export.Dim("batch")
    parts = space_parts(policy.observation_space)
    names = ["observation" if key is None else str(key) for key in parts]
    examples = [th.as_tensor(np.stack([part.sample(), part.sample()]), device=policy.device) for part in parts.values()]
    if policy.state_size > 0:
        names.append("state")
        outputs.append("next_state")
        examples.append(th.zeros((2, policy.state_size), device=policy.device))
    if is_masked:
        names.append("action_masks")
        examples.append(th.ones((2, sum(choices_of(policy.action_space))), dtype=th.bool, device=policy.device))
    was_training = policy.training
    policy.set_training_mode(False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of torch about itself, and about the axis that all inputs share
            th.onnx.export(
                DeterministicActor(policy, is_masked).eval(),
                tuple(examples),
                os.fspath(path),
                input_names=names,
                output_names=outputs,
                dynamic_shapes={"parts": tuple({0: batch} for _ in examples)},
                dynamo=True,
                external_data=False,
                verbose=False,
            )
    finally:
        policy.set_training_mode(was_training)
