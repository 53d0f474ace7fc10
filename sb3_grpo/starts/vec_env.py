"""
Shared starts: the layer right around the base ``VecEnv`` through which environments are reset with the seeds of the ledger.

The layer is in place only while the algorithm resets or steps the environments. Callbacks, and whoever uses the environments
between rollouts, find them as they were passed.
"""

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import numpy as np
from stable_baselines3.common.atari_wrappers import EpisodicLifeEnv
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from sb3_grpo.masks import checked_masks, choices_of
from sb3_grpo.observations import in_form, observation_parts, same_values
from sb3_grpo.questions import holds
from sb3_grpo.starts.adapters import VecEnvAdapter, adapter_of
from sb3_grpo.starts.faults import add_note
from sb3_grpo.starts.ledger import Ledger
from sb3_grpo.validation import check_finite, check_step, has_action_masks
from sb3_grpo.vec_wrappers import base_of, normalizes_directly

#: Log-probability below which nobody takes the same actions by chance.
RARE = -25.0


class SeededVecEnv:
    """
    Resets and steps the environments of a run, and gives each reset the seed of the next start in the ledger.

    :param env: The training environment, with or without wrappers
    :param share_starts: Whether resets get the seed of their start. If not, starts are only recorded
    :param adapter: Adapter of the base; ``None`` for the one that belongs to its kind
    """

    def __init__(self, env: VecEnv, ledger: Ledger, share_starts: bool, adapter: VecEnvAdapter | None = None):
        self.env = env
        self._wrapper, self.venv = base_of(env)
        self.adapter = adapter or adapter_of(self.venv)
        self.ledger = ledger
        self.wants_shared_starts = share_starts
        #: Whether the members of a group share their start.
        self.share_starts = share_starts
        #: Number of starts whose first observation differed from that of their group's first member.
        self.mismatches = 0
        #: Number of transitions before the present rollout, for messages.
        self.num_timesteps = 0
        # Running statistics must not see values that are not finite. Other wrappers may be there to replace them.
        self._checks = normalizes_directly(env) and env.num_envs == self.venv.num_envs
        # First observation of each group whose members have not all begun
        self._first: dict[int, Any] = {}
        self._first_raw: VecEnvObs | None = None
        # Environments that were reset in the present step, in this order, and the group of the next start of each
        self._restarted: list[tuple[int, int]] = []
        # Seeds of the next resets of environments that had shared starts, and share them no longer
        self._parting: dict[int, int] = {}
        # The lists of the base after the last reset of ours, see `was_reset`
        self._lists: tuple[Any, Any] = (None, None)
        self._seeds_apart: Any = None
        self._warned: set[str] = set()
        if not share_starts:
            return
        name = type(self.venv).__name__
        if env.num_envs != self.venv.num_envs:
            self._share_no_longer(f"The wrappers make {env.num_envs} environments of the {self.venv.num_envs} of `{name}`")
        elif not self.adapter.takes_seeds:
            reason = getattr(self.venv, "unseeded_because", None)
            remedy = "To share starts, define `reset_envs(env_indices, seeds)` in the class, which resets these environments "
            remedy += "and no others, and returns their observations and their infos."
            because = f"`{name}` cannot reset single environments with a seed"
            self._share_no_longer(because, remedy if reason is None else f"The reason: {reason}.")
        elif _goes_on_after_a_lost_life(self.venv):
            self.share_starts = False

    def _share_no_longer(self, because: str, remedy: str = "") -> None:
        """Only record starts from now on. Members of one group have equal generators, so their next resets get other seeds."""
        self.share_starts = False
        self._parting = {env_idx: self.ledger.seed_apart(1 + env_idx) for env_idx in range(len(self.ledger.position.steps))}
        self.warn(
            f"{because}, so the members of a group do not share their start. Training works without that. {remedy}".strip()
        )

    # --- for the algorithm --------------------------------------------------------------------------------------------

    @property
    def was_reset(self) -> bool:
        """Whether somebody else has reset the environments, so that they are elsewhere than the ledger says."""
        # Every reset of a base makes new lists of seeds and of options.
        (seeds, options), (seeds_now, options_now) = self._lists, self._present_lists()
        return seeds is not None and seeds is not seeds_now and options is not options_now

    def begin(self, reset: Callable[[], VecEnvObs]) -> VecEnvObs:
        """Reset all environments, each with a new start, by a function that does so once, and return their observations."""
        n_envs = self.env.num_envs
        starts = self.ledger.begin_all(self.adapter.lanes if n_envs == self.venv.num_envs else [0] * n_envs)
        self._first, self._restarted, self._parting = {}, [], {}
        if self.share_starts:
            self.venv._seeds = [self.adapter.seed(env_idx, start.seed) for env_idx, start in enumerate(starts)]
        self._first_raw = None
        try:
            with self._in_place(), self.adapter.resetting():
                observations = reset()
        except Exception as error:
            if not self.share_starts:
                raise
            add_note(error, "The environments were reset with seeds: pass share_starts=False to GRPO if they take none.")
            self.venv._seeds = [None] * self.venv.num_envs
            try:
                with self._in_place():
                    observations = reset()
            except Exception:  # which is no matter of seeds
                raise error from None
            self._share_no_longer(f"A reset with a seed failed with {error!r}")
            self._parting = {}
        raw = observations if self._wrapper is None else self._first_raw
        if self.share_starts and raw is not None:
            for env_idx, start in enumerate(starts):
                self._verify(env_idx, start.group, raw)
        self._lists = self._present_lists()
        self._note_ends([])
        observations = in_form(observations, self.env.observation_space)
        check_finite("observation", observations, self.num_timesteps)
        return observations

    def step_all(self, actions: np.ndarray) -> VecEnvStepReturn:
        """Step the training environment, with its wrappers, whose outermost says which episodes have ended."""
        if self._wrapper is None:
            observations, rewards, dones, infos = self.step(actions)
        else:
            was_reset = self.was_reset
            with self._in_place():
                observations, rewards, dones, infos = self.env.step(actions)
            if self.was_reset and not was_reset:  # by a wrapper
                self._lists = self._present_lists()
                self._restarted.append((-1, -1))
        is_in_form = isinstance(rewards, np.ndarray) and isinstance(dones, np.ndarray) and dones.dtype.kind == "b"
        if not is_in_form or not rewards.ndim == dones.ndim == 1:
            rewards, dones = np.reshape(rewards, -1), np.reshape(dones, -1).astype(bool)
        if np.count_nonzero(dones) or self._restarted:
            self._note_ends(np.flatnonzero(dones).tolist())
        self.ledger.advance()
        return in_form(observations, self.env.observation_space), rewards, dones, infos

    def _note_ends(self, ended: list[int]) -> None:
        """Take the next starts of the environments whose episodes end with the step, as the outermost wrapper has it."""
        restarted, self._restarted = [env_idx for env_idx, _ in self._restarted], []
        if self.share_starts and sorted(restarted) != ended:
            self._share_no_longer("A wrapper ends episodes where no environment below it is reset, or hides such ends")
        for env_idx in restarted if self.share_starts else ended:
            self.ledger.restart(env_idx)

    def require_action_masks(self) -> None:
        """Raise a ``ValueError`` if an environment does not say which actions it allows."""
        if not has_action_masks(self.env):
            raise ValueError(
                f"The environment {self._env_name(0)!r} has no method `action_masks`: define it, wrap the environment in "
                "`ActionMasker` of sb3-contrib, or pass use_masking=False to `learn`."
            )

    def action_masks(self) -> np.ndarray:
        """:return: Choices that each environment allows now, see :mod:`sb3_grpo.masks`, shape ``(n_envs, n_choices)``"""
        try:
            given = self.env.env_method("action_masks")
        except TypeError as error:
            add_note(error, "`action_masks` is called without arguments. Pass use_masking=False to `learn` to do without it.")
            raise
        masks = checked_masks(given, choices_of(self.env.action_space))
        if isinstance(masks, tuple):
            env_idx, what = masks
            where = f"Environment {getattr(self.adapter, 'first_env', 0) + env_idx} ({self._env_name(env_idx)!r})"
            what += ", or pass use_masking=False to `learn`"
            raise ValueError(f"{where} returned {what}. The rollout was discarded, so the model can be saved.")
        return masks

    def release(self) -> None:
        """
        Leave the environments to others until the next rollout. Members of one group leave equal random generators behind:
        without other seeds, later resets would draw equal starts. Seeds that a user has set take precedence.
        """
        seeds = vars(self.venv).get("_seeds")
        if not self.share_starts or seeds is None:
            return
        if all(seed is None for seed in seeds) or seeds is self._seeds_apart:
            is_known = not self.was_reset
            VecEnv.seed(self.venv, self.ledger.seed_apart())  # a subclass may seed a simulator at once
            self._seeds_apart = self.venv._seeds
            if is_known:
                self._lists = self._present_lists()

    def note_copies(self, rollout: Any, is_continuous: bool) -> None:
        """Warn if members of a group took the same actions after the first, as hardly happens by chance, while both ran."""
        first: dict[int, tuple[int, int, int]] = {}
        for env_idx, steps in enumerate(rollout.steps):
            for begin, end in pairwise([*np.flatnonzero(steps == 0).tolist(), len(steps)]):
                env, other, n = first.setdefault(int(rollout.groups[env_idx, begin]), (env_idx, begin, end - begin))
                n = min(n, end - begin)
                own, others = (env_idx, slice(begin + 1, begin + n)), (env, slice(other + 1, other + n))
                # Logarithm of the chance of these actions, those of single precision that are next to them included
                precision = np.log(np.finfo(np.float32).eps) * rollout.actions[own].size if is_continuous else 0.0
                is_rare = rollout.log_probs[own].sum() + precision < RARE
                is_other = (env, other) != (env_idx, begin)
                if is_rare and is_other and np.array_equal(rollout.actions[own], rollout.actions[others]):
                    self.warn(
                        "Members of a group took the same actions from beginning to end, so nothing can be learned from "
                        "comparing them. Probably the environment sets the global random generator of torch: use "
                        "`self.np_random` in it, or pass share_starts=False to GRPO."
                    )

    # --- in the place of the base -------------------------------------------------------------------------------------

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Take the place of the base under the wrappers."""
        if self._wrapper is None:
            yield
            return
        self._wrapper.venv = StandIn(self)  # type: ignore[assignment]
        try:
            yield
        finally:
            self._wrapper.venv = self.venv

    def reset(self) -> VecEnvObs:
        """:return: First observations of all environments"""
        self._first_raw = self.venv.reset()
        if self._wrapper is not None:
            self._wrapper.venv = self.venv  # SB3 goes on to set up callbacks, which find the environments as they are
        if self._checks:
            check_finite("observation", self._first_raw, self.num_timesteps)
        return self._first_raw

    def step(self, actions: np.ndarray) -> VecEnvStepReturn:
        """:return: A step of the base, as of :meth:`step_wait`"""
        return self._checked(self.adapter.step(actions, self._restart))

    def step_async(self, actions: np.ndarray) -> None:
        """Send actions of shape ``(n_envs, *action_shape)``."""
        self.adapter.step_async(actions)

    def step_wait(self) -> VecEnvStepReturn:
        """:return: A step of the base, with the observations of the reset for environments that are done"""
        return self._checked(self.adapter.step_wait(self._restart))

    def _checked(self, stepped: VecEnvStepReturn) -> VecEnvStepReturn:
        observations, _, dones, _ = stepped
        for env_idx, group in self._restarted:
            if dones[env_idx]:
                self._verify(env_idx, group, observations)
        if self._checks:
            check_step(stepped, self.num_timesteps, self.ledger.position.steps)
        self.num_timesteps += self.venv.num_envs
        return stepped

    def _restart(self, env_idx: int) -> int | None:
        """:return: Seed of the reset of an environment of the base, which it takes now"""
        if not self.share_starts:
            return self._parting.pop(env_idx, None)
        group, seed = self.ledger.foresee([*(each for each, _ in self._restarted), env_idx])
        self._restarted.append((env_idx, group))
        return seed

    def _present_lists(self) -> tuple[Any, Any]:
        attributes = vars(self.venv)
        return attributes.get("_seeds"), attributes.get("_options")

    def _verify(self, env_idx: int, group: int, observations: VecEnvObs) -> None:
        """Compare the first observation of an environment with that of the group's first member."""
        observation = {key: np.array(batch[env_idx]) for key, batch in observation_parts(observations).items()}
        if group not in self._first:
            if len(self._first) > 2 * self.venv.num_envs:
                still_open = self.ledger.open_groups()
                self._first = {each: first for each, first in self._first.items() if each in still_open}
            self._first[group] = observation
        elif not same_values(observation, self._first[group]):
            self.mismatches += 1
            if self.mismatches == 1:
                self.warn(
                    f"The environment {self._env_name(env_idx)!r} does not reproduce its initial state: two calls of "
                    "`reset(seed=...)` with the same seed returned different observations, so the members of a group do not "
                    "share their start. In the environment and in each of its wrappers, call `super().reset(seed=seed)` first "
                    "and draw random numbers only from `self.np_random`. Or pass share_starts=False to GRPO, for example with "
                    "a wrapper that does not reset at every end of an episode."
                )

    def _env_name(self, env_idx: int) -> str:
        """The id of the environment, or the name of its class."""
        if holds(self.venv, lambda env: bool(str(env))) is False:
            return type(self.venv).__name__
        try:
            # Not `get_attr("spec")`, because a spec that cannot be pickled would end the worker.
            description = str(self.venv.env_method("__str__", indices=[env_idx])[0])
        except Exception:  # the methods of a simulator may do anything
            return type(self.venv).__name__
        # "<Wrapper<Class<id>>>" or "<Wrapper<Class instance>>"
        innermost = re.search(r"<([^<>]+?)(?: instance)?>+$", description)
        return innermost.group(1) if innermost else description

    def warn(self, message: str) -> None:
        """Print a warning once for these environments."""
        if message not in self._warned:
            self._warned.add(message)
            warnings.warn(message, stacklevel=2)


class StandIn:
    """
    Stands in for the base under its wrapper: everything but resetting and stepping, its class included, is that of the base.

    :param layer: The layer that resets and steps the base
    """

    def __init__(self, layer: SeededVecEnv):
        object.__setattr__(self, "_layer", layer)

    def __getattribute__(self, name: str) -> Any:
        layer = object.__getattribute__(self, "_layer")
        return getattr(layer if name in ("reset", "step", "step_async", "step_wait") else layer.venv, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(object.__getattribute__(self, "_layer").venv, name, value)


def _goes_on_after_a_lost_life(venv: VecEnv) -> bool:
    """:return: Whether most episodes begin where a life was lost, so that a seed cannot say where"""
    try:
        return any(venv.env_is_wrapped(EpisodicLifeEnv))
    except Exception:  # the methods of a simulator may do anything
        return False
