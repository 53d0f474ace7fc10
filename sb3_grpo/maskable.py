"""GRPO for environments that say which actions are allowed."""

from typing import Any, ClassVar, TypeVar

import numpy as np
from gymnasium import spaces
from stable_baselines3.common.type_aliases import MaybeCallback

from sb3_grpo.grpo import GRPO
from sb3_grpo.masks import choices_of

SelfMaskableGRPO = TypeVar("SelfMaskableGRPO", bound="MaskableGRPO")


class MaskableGRPO(GRPO):
    """
    :class:`GRPO` with action masks, used as sb3-contrib's ``MaskablePPO``. Actions that an environment does not allow have
    probability zero.

    The environment says what it allows with a method ``action_masks()``, or through sb3-contrib's ``ActionMasker``. The masks
    have the layout of sb3-contrib, see :mod:`sb3_grpo.masks`. Its ``get_action_masks``, ``is_masking_supported``,
    ``evaluate_policy`` and ``MaskableEvalCallback`` take a model of this class. Arguments are those of :class:`GRPO`.

    Paper: https://arxiv.org/abs/2006.14171

    Departure from sb3-contrib: masks change the logits before they are normalised, and the distributions are those of SB3.
    Therefore a mask that allows everything changes nothing, bit for bit. The network is that of :class:`GRPO`; in particular,
    MultiBinary actions have one output for each component, where sb3-contrib has two.
    """

    supported_action_spaces: ClassVar[Any] = (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
    _uses_masks = True

    def _setup_model(self) -> None:
        super()._setup_model()
        self.rollout_buffer.keep("action_masks", sum(choices_of(self.action_space)))

    def learn(  # type: ignore[override]
        self: SelfMaskableGRPO,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "MaskableGRPO",
        reset_num_timesteps: bool = True,
        use_masking: bool = True,
        progress_bar: bool = False,
    ) -> SelfMaskableGRPO:
        """
        Learn. The arguments are those of ``GRPO.learn``, in the order of ``MaskablePPO.learn``.

        :param use_masking: Whether to ask the environments for masks. Without, this is :class:`GRPO`
        :raises ValueError: If the environments have no method ``action_masks``, or a mask allows nothing or has a wrong size
        """
        self._uses_masks = use_masking
        if use_masking and self.env is not None:
            self._starts(self.env).require_action_masks()
        return super().learn(total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, progress_bar)

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
        action_masks: Any = None,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """As :meth:`GRPO.predict <sb3_grpo.GRPO.predict>`, with masks."""
        with self.weight_average.shown(self.policy):
            return self.policy.predict(observation, state, episode_start, deterministic, action_masks)
