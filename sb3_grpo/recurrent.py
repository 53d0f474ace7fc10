"""GRPO with memory: policies with an LSTM or a GRU, for environments whose single observations do not show the state."""

from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import GymEnv, MaybeCallback, PyTorchObs, Schedule
from torch import nn

from sb3_grpo.grpo import GRPO
from sb3_grpo.maskable import MaskableGRPO
from sb3_grpo.policies import ActorCnnPolicy, ActorPolicy, MultiInputActorPolicy
from sb3_grpo.validation import has_action_masks, require_at_least, require_mapping, require_one_of

Cell = Literal["lstm", "gru"]
SelfRecurrentGRPO = TypeVar("SelfRecurrentGRPO", bound="RecurrentGRPO")

#: Larger than those of ``GRPO``, because minibatches have whole sequences, and there are fewer of them
LEARNING_RATE, BATCH_SIZE = 1e-3, 256
#: Arguments that ``lstm_kwargs`` may have. Others would let the policy see later steps, or change the shape of its state.
LSTM_OPTIONS = {"bias", "dropout"}


class Block(NamedTuple):
    """
    Steps of several sequences for one call of a recurrent layer, which is fast if all have the same number of steps.

    :param rows: Index of the row of each step and sequence, shape ``(n_steps, n_sequences)``
    :param is_real: Whether the sequence has that step; the last row of the sequence stands in for the others
    """

    rows: np.ndarray
    is_real: np.ndarray


def blocks_of(sequences: np.ndarray) -> tuple[np.ndarray, list[Block]]:
    """
    Divide sequences into blocks that follow each other in time. A block ends where half of its sequences have ended, so most
    of its work is for steps that exist.

    :param sequences: Label of each row's sequence. The rows of a sequence follow each other in order of time, shape ``(n,)``
    :return: Index of the first row of each sequence, and the blocks. Both begin with the longest sequence
    """
    first = np.flatnonzero(np.append(True, np.diff(sequences) != 0))
    lengths = np.diff(np.append(first, len(sequences)))
    order = np.argsort(-lengths, kind="stable")
    first, lengths = first[order], lengths[order]
    n_running = np.count_nonzero(lengths > np.arange(lengths[0])[:, None], axis=1)
    blocks: list[Block] = []
    begin = 0
    while begin < lengths[0]:
        n = int(n_running[begin])
        end = int(np.count_nonzero(2 * n_running > n))
        steps = np.arange(begin, end)[:, None]
        blocks.append(Block(first[:n] + np.minimum(steps, lengths[:n] - 1), steps < lengths[:n]))
        begin = end
    return first, blocks


class RecurrentActorPolicy(ActorPolicy):
    """
    :class:`~sb3_grpo.ActorPolicy` with a recurrent layer between the features extractor and the hidden layers.

    The state of the memory is a vector for each environment: the hidden states of all layers, and then for an LSTM their cell
    states. It is zero where an episode begins.

    :param observation_space: Observation space
    :param action_space: Action space: ``Box``, ``Discrete``, ``MultiDiscrete`` or ``MultiBinary``
    :param lr_schedule: Learning rate schedule, a function of the remaining progress (from 1 to 0)
    :param args: Further arguments of :class:`~sb3_grpo.ActorPolicy`
    :param lstm_hidden_size: Number of units of each recurrent layer
    :param n_lstm_layers: Number of recurrent layers
    :param lstm_kwargs: Further arguments of the recurrent layers, ``bias`` or ``dropout``
    :param cell: ``"lstm"`` or ``"gru"``. On a CPU, PyTorch's LSTM is several times as fast as its GRU; in machine code, both
        take the same time
    :param chrono_init: Number of steps over which something has to be remembered, at least 2, for the chrono initialisation of
        `Tallec and Ollivier (2018) <https://arxiv.org/abs/1804.11188>`_: at first, each unit forgets after a time between one
        step and this number. ``None`` for PyTorch's initialisation, with which all units forget within a few steps
    :param kwargs: Further arguments of :class:`~sb3_grpo.ActorPolicy`
    :raises ValueError: If an argument is out of range, or does not fit the spaces
    """

    memory: nn.LSTM | nn.GRU

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Schedule,
        *args: Any,
        lstm_hidden_size: int = 64,
        n_lstm_layers: int = 1,
        lstm_kwargs: dict[str, Any] | None = None,
        cell: Cell = "lstm",
        chrono_init: int | None = None,
        **kwargs: Any,
    ):
        for hook in ("get_distribution", "_latent"):
            if getattr(type(self), hook) is not getattr(RecurrentActorPolicy, hook):
                raise TypeError(
                    f"{type(self).__name__} overrides `{hook}`, and actions are chosen without it, because a step also has "
                    "states: override `remember` or `_distribution`."
                )
        require_at_least("lstm_hidden_size", lstm_hidden_size, 1)
        require_at_least("n_lstm_layers", n_lstm_layers, 1)
        require_one_of("cell", cell, get_args(Cell))
        lstm_kwargs = {} if lstm_kwargs is None else lstm_kwargs
        require_mapping("lstm_kwargs", lstm_kwargs)
        if unknown := lstm_kwargs.keys() - LSTM_OPTIONS:
            raise ValueError(f"lstm_kwargs={lstm_kwargs} has {sorted(unknown)}, and takes {sorted(LSTM_OPTIONS)} only.")
        if chrono_init is not None:
            require_at_least("chrono_init", chrono_init, 2, "or None")
            if not lstm_kwargs.get("bias", True):
                raise ValueError(f"chrono_init={chrono_init} sets biases, and lstm_kwargs={lstm_kwargs} has none: drop one.")
        self.lstm_hidden_size, self.n_lstm_layers, self.cell = lstm_hidden_size, n_lstm_layers, cell
        self.chrono_init = chrono_init
        self.lstm_kwargs = dict(lstm_kwargs)
        self._n_parts = 2 if cell == "lstm" else 1
        self.state_size = self._n_parts * n_lstm_layers * lstm_hidden_size
        self._before: tuple[Any, Any] = None, None  # `state` and `episode_start` of a call of `predict`
        super().__init__(observation_space, action_space, lr_schedule, *args, **kwargs)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        own = ("lstm_hidden_size", "n_lstm_layers", "lstm_kwargs", "cell", "chrono_init")
        return {**super()._get_constructor_parameters(), **{name: getattr(self, name) for name in own}}

    def _build_memory(self, features_dim: int) -> int:
        layer = nn.LSTM if self.cell == "lstm" else nn.GRU
        self.memory = layer(int(features_dim), self.lstm_hidden_size, self.n_lstm_layers, **self.lstm_kwargs)
        if self.chrono_init is not None:
            for index in range(self.n_lstm_layers):
                self._forget_late(getattr(self.memory, f"bias_ih_l{index}").data, self.chrono_init)
        return self.lstm_hidden_size

    def _forget_late(self, biases: th.Tensor, n_steps: int) -> None:
        """Raise the biases of the second gate, by which a unit keeps its state, and let new inputs of an LSTM in as slowly."""
        keep = th.empty(self.lstm_hidden_size).uniform_(1.0, n_steps - 1.0).log()
        biases[self.lstm_hidden_size : 2 * self.lstm_hidden_size] += keep
        if self.cell == "lstm":
            biases[: self.lstm_hidden_size] -= keep

    def _parts(self, states: Any) -> Any:
        """:return: States of shape ``(n, state_size)`` as the layer takes them: one or two of shape ``(layers, n, units)``"""
        parts = states.reshape(-1, self._n_parts, self.n_lstm_layers, self.lstm_hidden_size)
        return tuple(parts[:, part].swapaxes(0, 1) for part in range(self._n_parts))

    def _joined(self, parts: Any) -> th.Tensor:
        """:return: The states that :meth:`_parts` has taken apart, shape ``(n, state_size)``"""
        return th.cat([each for part in parts for each in part], dim=1)

    def remember(self, obs: PyTorchObs, states: Any, sequences: th.Tensor | None = None) -> tuple[th.Tensor, th.Tensor]:
        """
        Pass observations through the recurrent layer. The arguments are those of :meth:`get_distribution`.

        :return: Its outputs, shape ``(n, lstm_hidden_size)``, and states of the memory after the last step
        """
        features = self.extract_features(obs, self.features_extractor)
        if states is not None and tuple(getattr(states, "shape", ())[1:]) != (self.state_size,):
            given = getattr(states, "shape", type(states).__name__)
            raise ValueError(
                f"`states` must be an array of shape (n, {self.state_size}), hidden and then cell states of all layers, not "
                f"{given}."
            )
        states = features.new_zeros(len(features), self.state_size) if states is None else th.as_tensor(states).to(features)
        if sequences is None:
            outputs, after = self._run(features[None], states)
            return outputs[0], after
        first, blocks = blocks_of(sequences.cpu().numpy())
        after, real = states[first], []
        for block in blocks:
            outputs, after = self._run(features[block.rows], after[: block.rows.shape[1]])
            real.append(outputs[block.is_real])
        order = np.concatenate([block.rows[block.is_real] for block in blocks])
        return th.cat(real)[np.argsort(order)], after

    def _run(self, features: th.Tensor, states: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
        """:return: Outputs for features of shape ``(n_steps, n, features_dim)``, and states after the last step"""
        before = tuple(part.contiguous() for part in self._parts(states))
        outputs, after = self.memory(features, before if self.cell == "lstm" else before[0])
        return outputs, self._joined(after if self.cell == "lstm" else (after,))

    def forward(  # type: ignore[override]
        self, obs: PyTorchObs, deterministic: bool = False, states: Any = None, **context: Any
    ) -> Any:
        """
        Choose actions. The arguments are those of :meth:`get_distribution`, and whether to take its mode instead of a sample.

        :return: Actions, shape ``(n, *action_shape)``, their log-probabilities, shape ``(n,)``, and the states of the memory
            after the step, shape ``(n, state_size)``
        """
        outputs, after = self.remember(obs, states)
        return *self._sample(self._distribution(self.policy_net(outputs), **context), deterministic), after

    def _latent(self, obs: PyTorchObs, states: Any = None, sequences: th.Tensor | None = None) -> th.Tensor:
        return self.policy_net(self.remember(obs, states, sequences)[0])

    def get_distribution(  # type: ignore[override]
        self, obs: PyTorchObs, states: Any = None, sequences: th.Tensor | None = None, **context: Any
    ) -> Distribution:
        """
        As :meth:`ActorPolicy.get_distribution <sb3_grpo.ActorPolicy.get_distribution>`.

        :param states: States of the memory before the steps, shape ``(n, state_size)``; ``None`` for zeros
        :param sequences: Label of each row's sequence, shape ``(n,)``. The state at the first row of a sequence is taken from
            ``states``, and the others follow from it. ``None`` if each row is a sequence of its own
        """
        return self._distribution(self._latent(obs, states, sequences), **context)

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
        action_masks: Any = None,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """
        Choose actions for one observation or a batch of ``n``, as sb3-contrib's ``RecurrentPPO`` does.

        :param state: State that the last call has returned: hidden and cell states of an LSTM, or the hidden states of a GRU,
            each of shape ``(n_lstm_layers, n, lstm_hidden_size)``. ``None`` for zeros
        :param episode_start: Where an episode begins, so that the state is zero, shape ``(n,)``; ``None`` for nowhere
        :param deterministic: Whether to take the mode of the distribution instead of a sample
        :param action_masks: The choices that are allowed, see :mod:`sb3_grpo.masks`; ``None`` for all
        :return: Actions, and the state after the step
        :raises ValueError: If the state or ``episode_start`` does not fit the observations
        """
        self._before = state, episode_start
        actions, _ = super().predict(observation, state, episode_start, deterministic, action_masks)
        return actions, self._after

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> th.Tensor:
        n = len(next(iter(observation.values())) if isinstance(observation, dict) else observation)
        actions, _, after = self(observation, deterministic, states=self._states_of(n, *self._before), **self._context)
        self._after = tuple(part.cpu().numpy() for part in self._parts(after))
        return actions

    def _states_of(self, n: int, state: Any, episode_start: Any) -> th.Tensor | None:
        """:return: The states of ``n`` environments that the arguments of :meth:`predict` mean; ``None`` for zeros"""
        starts = np.zeros(n, bool) if episode_start is None else np.asarray(episode_start, dtype=bool).reshape(-1)
        if len(starts) != n:
            raise ValueError(f"`episode_start` has {len(starts)} entries for {n} observation(s): pass one for each.")
        if state is None:
            return None
        parts = state if isinstance(state, (tuple, list)) else [state]
        shapes, shape = [np.shape(part) for part in parts], (self.n_lstm_layers, n, self.lstm_hidden_size)
        if shapes != [shape] * self._n_parts:
            raise ValueError(
                f"`state` has the shapes {shapes}, and {n} observation(s) need {[shape] * self._n_parts}: pass the state that "
                "the last call of `predict` returned for as many observations, or None where episodes begin."
            )
        states = self._joined([th.as_tensor(part) for part in parts])
        return states.masked_fill(th.as_tensor(starts)[:, None], 0.0)


class RecurrentCnnPolicy(RecurrentActorPolicy, ActorCnnPolicy):
    """:class:`RecurrentActorPolicy` for images, with the features extractors of ``CnnPolicy``."""


class RecurrentMultiInputPolicy(RecurrentActorPolicy, MultiInputActorPolicy):
    """:class:`RecurrentActorPolicy` for ``Dict`` observations."""


MlpLstmPolicy = RecurrentActorPolicy
CnnLstmPolicy = RecurrentCnnPolicy
MultiInputLstmPolicy = RecurrentMultiInputPolicy


class RecurrentGRPO(MaskableGRPO):
    """
    :class:`GRPO` with memory, used as sb3-contrib's ``RecurrentPPO``: the policy has an LSTM or a GRU. Its state is zero where
    an episode begins, and goes on from rollout to rollout. Where the environments have ``action_masks``, they are used as by
    :class:`MaskableGRPO`.

    An update goes over whole sequences: each begins with the state that was stored when it was sampled, and the gradient goes
    back through all its steps, see ``sequence_length`` of :class:`GroupRolloutBuffer`. The value estimate of ``"kernel"`` sees
    observations, their last changes, which can show hidden velocities, and time, but not the memory, see
    :class:`~sb3_grpo.fit_inputs.FitInputs`.

    Departures from ``RecurrentPPO``: there is no second recurrent layer for a critic, and ``predict`` takes ``action_masks``.

    :param policy: ``"MlpLstmPolicy"``, ``"CnnLstmPolicy"``, ``"MultiInputLstmPolicy"``, or a subclass of
        :class:`~sb3_grpo.recurrent.RecurrentActorPolicy`. Its arguments ``lstm_hidden_size``, ``n_lstm_layers``,
        ``lstm_kwargs``, ``cell`` and ``chrono_init`` are given as ``policy_kwargs``
    :param env: Environment to learn from, or its Gymnasium id
    :param learning_rate: Learning rate of clipped updates, a number or a function of the remaining progress (from 1 to 0)
    :param n_steps: Number of steps per environment and rollout, as for :class:`GRPO`
    :param batch_size: Number of transitions of a minibatch, which has as many whole sequences as it needs for them
    :param args: Further arguments of :class:`GRPO`
    :param kwargs: Further arguments of :class:`GRPO`
    :raises ValueError: If an argument is out of range, or does not fit the environment
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpLstmPolicy": MlpLstmPolicy,
        "CnnLstmPolicy": CnnLstmPolicy,
        "MultiInputLstmPolicy": MultiInputLstmPolicy,
    }
    supported_action_spaces: ClassVar[Any] = GRPO.supported_action_spaces
    _own_defaults: ClassVar[dict[str, Any]] = dict(learning_rate=LEARNING_RATE, batch_size=BATCH_SIZE)

    def __init__(
        self,
        policy: str | type[RecurrentActorPolicy],
        env: GymEnv | str | None,
        learning_rate: float | Schedule = LEARNING_RATE,
        n_steps: int | None = None,
        batch_size: int = BATCH_SIZE,
        *args: Any,
        **kwargs: Any,
    ):
        super().__init__(policy, env, learning_rate, n_steps, batch_size, *args, **kwargs)

    def _setup_model(self) -> None:
        self._uses_masks = self._uses_masks and self._is_maskable() and (self.env is None or has_action_masks(self.env))
        (MaskableGRPO if self._is_maskable() else GRPO)._setup_model(self)

    def _is_maskable(self) -> bool:
        return isinstance(self.action_space, MaskableGRPO.supported_action_spaces)

    def learn(  # type: ignore[override]
        self: SelfRecurrentGRPO,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int = 1,
        tb_log_name: str = "RecurrentGRPO",
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
        use_masking: bool = True,
    ) -> SelfRecurrentGRPO:
        """
        Learn. The arguments are those of ``RecurrentPPO.learn``, and ``use_masking``.

        :param use_masking: Whether to use the masks of environments that have ``action_masks``
        """
        masked = use_masking and self._is_maskable() and self.env is not None and has_action_masks(self.env)
        return super().learn(total_timesteps, callback, log_interval, tb_log_name, reset_num_timesteps, masked, progress_bar)
