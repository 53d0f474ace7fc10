"""Policies that consist of an actor alone: Stable-Baselines3's actor-critic policies without the critic."""

import inspect
import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.distributions import (
    DiagGaussianDistribution,
    Distribution,
    StateDependentNoiseDistribution,
    make_proba_distribution,
)
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.preprocessing import get_action_dim, get_flattened_obs_dim, is_image_space, preprocess_obs
from stable_baselines3.common.torch_layers import (
    BaseFeaturesExtractor,
    CombinedExtractor,
    FlattenExtractor,
    NatureCNN,
    create_mlp,
)
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from stable_baselines3.common.utils import obs_as_tensor
from torch import nn

from sb3_grpo.extractors import SmallCNN, has_channels_first
from sb3_grpo.masks import masked_logits
from sb3_grpo.normalization import ObservationNormalizer, normalized_parts
from sb3_grpo.observations import Observations, is_large_image, space_parts, take_observations, with_axes
from sb3_grpo.validation import MAX_ACTION_RANGE, require_between, require_bool, require_positive

#: Largest number of observations that are encoded at a time, and about how many numbers they may have.
ENCODING_BATCH = 1024
ENCODING_NUMBERS = 2**21
#: Part of the limit of a natural-gradient step that the change of a log standard deviation may use up. For small changes,
#: the divergence of two Gaussians with the same mean is the square of the change.
LOG_STD_SHARE = 0.02

#: Methods that subclasses of SB3's actor-critic policies override, and what to do in a subclass of ``ActorPolicy``.
ACTOR_CRITIC_HOOKS = {
    "_build_mlp_extractor": "make the network a `features_extractor_class`, and pass net_arch=[]",
    "_get_action_dist_from_latent": "override `_distribution`",
}

#: The features extractors of SB3 and of this package, for which observations may be standardised
EXTRACTORS = (FlattenExtractor, CombinedExtractor, NatureCNN, SmallCNN)

#: The attribute in which ``torch.compile`` keeps the module that it wraps. It is also a part of the names of weights.
COMPILED = "_orig_mod"


def initial_std(space: spaces.Box) -> np.ndarray:
    """:return: Initial standard deviations, a quarter of the range of each action, shape ``(action_dim,)``"""
    low, high = (np.ravel(bound).astype(np.float64) for bound in (space.low, space.high))
    if not np.max(high - low, initial=0.0) <= MAX_ACTION_RANGE:
        raise ValueError(
            f"The bounds of the action space {space} are more than {MAX_ACTION_RANGE:g} apart, so a quarter of its range is "
            "no useful standard deviation: give it tighter bounds, such as those of the actuators, or set the deviation, for "
            "example `policy_kwargs=dict(log_std_init=0.0)` for 1."
        )
    return np.where(high > low, 0.25 * (high - low), 1.0)


class ActorPolicy(BasePolicy):
    """
    A policy that consists of a features extractor, hidden layers, an action layer, and ``log_std`` for continuous actions.

    It is the actor of :class:`stable_baselines3.common.policies.ActorCriticPolicy`: the layers have the same shapes, so
    weights can be exchanged (:func:`~sb3_grpo.transfer.load_actor`). The arguments are the same, except that there is no
    ``share_features_extractor``, ``log_std_init`` has another default, Adam is fused, and ``normalize_observations``,
    ``log_std_lr_factor`` and ``lr_follows_std`` are new.

    :param observation_space: Observation space
    :param action_space: Action space: ``Box``, ``Discrete``, ``MultiDiscrete`` or ``MultiBinary``
    :param lr_schedule: Learning rate schedule, a function of the remaining progress (from 1 to 0)
    :param net_arch: Sizes of the hidden layers: ``[64, 64]`` or ``dict(pi=[64, 64])``. ``None`` for two layers of 64 units, or
        for no hidden layer behind a ``NatureCNN`` or ``SmallCNN``
    :param activation_fn: Activation function
    :param ortho_init: Whether to initialise the layers orthogonally
    :param use_sde: Whether to explore with state-dependent noise (gSDE) instead of independent Gaussian noise
    :param log_std_init: Initial value of the log standard deviation, or an array with one for each component of an action. By
        default, the standard deviation is a quarter of the range of each action, which has to be at most 1e9, or 1 with gSDE
    :param full_std: With gSDE: whether each pair of a feature and an action has a standard deviation, or each feature
    :param use_expln: With gSDE: whether ``expln()`` keeps the standard deviation positive. It grows more slowly than ``exp()``
    :param squash_output: With gSDE: whether to keep actions within their bounds with ``tanh()`` instead of clipping them
    :param features_extractor_class: Features extractor; ``None`` for ``default_features_extractor_class`` of this class
    :param features_extractor_kwargs: Keyword arguments of the features extractor
    :param normalize_images: Whether to divide images by 255, or to standardise large ones, instead of taking them as they come
    :param normalize_observations: Whether to standardise vectors of floating point numbers and large images with the
        statistics that GRPO collects, see :class:`~sb3_grpo.normalization.ObservationNormalizer`
    :param optimizer_class: Optimizer
    :param optimizer_kwargs: Keyword arguments of the optimizer without the learning rate. ``None`` for ``eps=1e-5`` and
        ``fused=True`` with ``Adam``, and for no arguments with other optimizers
    :param log_std_lr_factor: Learning rate of the log standard deviation relative to the other parameters, or with
        ``update_rule="natural"`` its largest change relative to the default. The step size of Adam hardly depends on the size
        of the gradient, so a rate that suits a large network may change the exploration too slowly or too fast. For Box
        actions only
    :param lr_follows_std: Whether the learning rate falls with the standard deviation of continuous actions, see
        :meth:`learning_rate_factor`
    :raises ValueError: If an argument is out of range, or does not fit the spaces
    :raises TypeError: If a subclass defines a hook of SB3's ``ActorCriticPolicy``, which would not be called
    """

    default_features_extractor_class: ClassVar[type[BaseFeaturesExtractor]] = FlattenExtractor
    #: Number of entries of the state of its memory, which a policy carries from step to step
    state_size = 0

    policy_net: nn.Sequential
    action_net: nn.Module
    log_std: nn.Parameter

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Schedule,
        net_arch: list[int] | dict[str, list[int]] | None = None,
        activation_fn: type[nn.Module] = nn.Tanh,
        ortho_init: bool = True,
        use_sde: bool = False,
        log_std_init: float | np.ndarray | th.Tensor | None = None,
        full_std: bool = True,
        use_expln: bool = False,
        squash_output: bool = False,
        features_extractor_class: type[BaseFeaturesExtractor] | None = None,
        features_extractor_kwargs: dict[str, Any] | None = None,
        normalize_images: bool = True,
        normalize_observations: bool = False,
        optimizer_class: type[th.optim.Optimizer] = th.optim.Adam,
        optimizer_kwargs: dict[str, Any] | None = None,
        log_std_lr_factor: float = 1.0,
        lr_follows_std: bool = True,
    ):
        for hook, instead in ACTOR_CRITIC_HOOKS.items():
            if hasattr(self, hook):
                raise TypeError(
                    f"{type(self).__name__} defines `{hook}`, which belongs to SB3's ActorCriticPolicy and is not called "
                    f"here: {instead}."
                )
        if not callable(activation_fn):
            raise ValueError(f"`activation_fn` must be a class such as `torch.nn.ReLU`, not {activation_fn!r}.")
        if isinstance(log_std_init, (np.ndarray, th.Tensor)):
            log_std_init = th.as_tensor(log_std_init, dtype=th.float32)
        for number in [] if log_std_init is None else np.ravel(log_std_init).tolist():
            require_between("log_std_init", number, -np.inf)
        require_positive("log_std_lr_factor", log_std_lr_factor)
        flags = dict(ortho_init=ortho_init, full_std=full_std, use_expln=use_expln, squash_output=squash_output)
        for name, flag in dict(flags, normalize_images=normalize_images, lr_follows_std=lr_follows_std).items():
            require_bool(name, flag)
        if log_std_lr_factor != 1.0 and not isinstance(action_space, spaces.Box):
            raise ValueError(f"log_std_lr_factor={log_std_lr_factor} is for Box actions, not {action_space}: leave it out.")
        if squash_output and not use_sde:
            raise ValueError(f"squash_output={squash_output} needs gSDE: pass use_sde=True, or squash_output=False.")
        if features_extractor_class is None:
            features_extractor_class = self.default_features_extractor(observation_space)
        if features_extractor_class is CombinedExtractor and not isinstance(observation_space, spaces.Dict):
            raise ValueError(
                f"`MultiInputPolicy` needs a Dict observation space, not {observation_space}: pass `MlpPolicy` or "
                "`CnnPolicy`, with a memory `MlpLstmPolicy` or `CnnLstmPolicy`."
            )
        if optimizer_kwargs is None:
            # eps as in SB3's PPO: with Adam's own 1e-8, a step can explode where gradients vanish.
            optimizer_kwargs = dict(eps=1e-5, fused=True) if optimizer_class is th.optim.Adam else {}

        super().__init__(
            observation_space,
            action_space,
            features_extractor_class,
            # A copy, because BaseModel writes into it if normalize_images is False.
            dict(features_extractor_kwargs or {}),
            optimizer_class=optimizer_class,
            optimizer_kwargs=dict(optimizer_kwargs),
            squash_output=squash_output,
            normalize_images=normalize_images,
        )
        self.net_arch = _hidden_sizes(net_arch, features_extractor_class)
        self.activation_fn = activation_fn
        self.ortho_init = ortho_init
        self.use_sde = use_sde
        self.normalize_observations = normalize_observations
        self.log_std_init = log_std_init
        self.log_std_lr_factor = log_std_lr_factor
        self.lr_follows_std = lr_follows_std
        self.full_std = full_std
        self.use_expln = use_expln
        # The shape in which distributions take an action
        self._flat_action_shape = () if isinstance(action_space, spaces.Discrete) else (get_action_dim(action_space),)

        dist_kwargs: dict[str, Any] | None = None
        if use_sde:
            dist_kwargs = dict(full_std=full_std, use_expln=use_expln, squash_output=squash_output, learn_features=False)
        self.action_dist = make_proba_distribution(action_space, use_sde=use_sde, dist_kwargs=dist_kwargs)
        #: Standardises observations; ``None`` if it is not asked for, or if there is nothing to standardise.
        self.normalizer: ObservationNormalizer | None = None
        if normalize_observations and normalized_parts(observation_space, normalize_images):
            self.normalizer = ObservationNormalizer(observation_space, normalize_images)
        self._first_log_std: th.Tensor | None = None
        self._context: dict[str, Any] = {}  # of a call of `predict`, which SB3 does not hand on to `_predict`
        self._build(lr_schedule)
        if hasattr(self, "log_std"):  # also in a subclass with layers of its own
            self._first_log_std = self.log_std.detach().clone()

    @classmethod
    def default_features_extractor(cls, observation_space: spaces.Space) -> type[BaseFeaturesExtractor]:
        """:return: The features extractor for an observation space if none is asked for"""
        return cls.default_features_extractor_class

    @classmethod
    def has_own_extractor(cls, observation_space: spaces.Space, policy_kwargs: Mapping[str, Any]) -> bool:
        """:return: Whether the features extractor comes from elsewhere, and thus expects observations as they are"""
        name = "features_extractor_class"
        signatures = (inspect.signature(each).parameters for each in cls.__mro__)
        by_default = next(parameters[name].default for parameters in signatures if name in parameters)
        extractor = policy_kwargs.get(name) or by_default or cls.default_features_extractor(observation_space)
        return extractor not in EXTRACTORS

    def _build(self, lr_schedule: Schedule) -> None:
        """Create the layers and the optimizer."""
        self.features_extractor = self.make_features_extractor()
        self.features_dim = self.features_extractor.features_dim
        latent_dim = self._build_memory(self.features_dim)
        self.policy_net = nn.Sequential(*create_mlp(latent_dim, -1, self.net_arch, self.activation_fn))

        latent_dim = self.net_arch[-1] if self.net_arch else latent_dim
        if isinstance(self.action_dist, (DiagGaussianDistribution, StateDependentNoiseDistribution)):
            log_std_init: Any = 0.0 if self.log_std_init is None else self.log_std_init
            self.action_net, self.log_std = self.action_dist.proba_distribution_net(latent_dim, log_std_init=log_std_init)
            if self.log_std_init is None and isinstance(self.action_dist, DiagGaussianDistribution):
                self.log_std.data.copy_(th.as_tensor(np.log(initial_std(self.action_space))))  # type: ignore[arg-type]
        else:
            self.action_net = self.action_dist.proba_distribution_net(latent_dim)  # type: ignore[assignment]

        if self.ortho_init:
            # The small gain of the last layer makes the initial policy nearly uniform, or gives it a mean near zero.
            for module, gain in ((self.features_extractor, 2**0.5), (self.policy_net, 2**0.5), (self.action_net, 0.01)):
                module.apply(partial(self.init_weights, gain=gain))

        trained: Any = self.parameters()  # as SB3 passes them; optimizers of users may not know groups
        if self.log_std_lr_factor != 1.0:
            others = [parameter for parameter in self.parameters() if parameter is not self.log_std]
            trained = [{"params": others}, {"params": [self.log_std], "lr_factor": self.log_std_lr_factor}]
        self.optimizer = self.optimizer_class(trained, lr=lr_schedule(1), **self.optimizer_kwargs)  # type: ignore[call-arg]
        self.set_learning_rate(lr_schedule(1))

    def _build_memory(self, features_dim: int) -> int:
        """Create what stands between features and hidden layers, and return the number of its outputs."""
        return features_dim

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the rate of all parameters, before :meth:`learning_rate_factor` and ``log_std_lr_factor``."""
        learning_rate *= self.learning_rate_factor()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_factor", 1.0)

    def largest_changes(self, parameters: Sequence[nn.Parameter], limit: float) -> th.Tensor:
        """
        :return: Largest change of each of ``m`` numbers in some parameters in a natural-gradient step with a limit of the
            divergence per component of an action, finite for log standard deviations only, shape ``(m,)``
        """
        own = self.log_std_lr_factor * math.sqrt(LOG_STD_SHARE * limit)
        log_std = getattr(self, "log_std", None)
        numbers = [(each, own if each is log_std else math.inf) for each in parameters]
        return th.cat([th.full((each.numel(),), largest, device=each.device) for each, largest in numbers])

    def learning_rate_factor(self) -> float:
        """
        How far the learning rate has fallen: the geometric mean over actions of the standard deviation divided by the initial
        one, and at most 1. It is 1 without ``lr_follows_std``, and for actions without a standard deviation.

        A step of Adam moves the means of the actions by an amount that hardly depends on the gradient. The divergence from the
        policy before is the square of this amount over twice the variance. So with a constant rate, the divergence of each
        update grows while the policy becomes more certain, and in the end a single update can destroy it.
        """
        if not self.lr_follows_std or self._first_log_std is None:
            return 1.0
        change = (self.log_std.detach().cpu() - self._first_log_std.cpu()).mean().item()
        return min(1.0, math.exp(change))

    def _get_constructor_parameters(self) -> dict[str, Any]:
        names = [name for name in inspect.signature(ActorPolicy.__init__).parameters if name not in ("self", "lr_schedule")]
        # The schedule is another one, because a policy that is loaded alone is not trained.
        return {"lr_schedule": self._dummy_schedule, **{name: getattr(self, name) for name in names}}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load weights as :class:`torch.nn.Module` does, whichever modules were compiled, here and where they come from."""
        own_names = {plain_name(name): name for name in self.state_dict()}
        renamed = {own_names.get(plain_name(name), name): value for name, value in state_dict.items()}
        if renamed.keys() != state_dict.keys():  # otherwise the original, which knows the versions of its modules
            state_dict = renamed
        has_statistics = any(name.startswith("normalizer.") for name in state_dict)
        if strict and has_statistics != (self.normalizer is not None):
            raise ValueError(
                f"The weights belong to a policy with normalize_observations={has_statistics}, and this one has "
                f"normalize_observations={not has_statistics}: leave the argument as it was, and load a file with the "
                "algorithm that saved it. Or copy the weights to a new model with `load_actor(model, path)`, which takes this "
                "into account."
            )
        if any(name.startswith("mlp_extractor.") for name in state_dict) and not strict:
            warnings.warn(
                "The weights are those of an actor-critic, whose hidden layers have other names, so they are left out: copy "
                "them with `load_actor(model, path)`.",
                stacklevel=2,
            )
        return super().load_state_dict(state_dict, strict, assign)

    def reset_noise(self, n_envs: int = 1) -> None:
        """Sample new exploration matrices for gSDE, one for each of ``n_envs`` environments."""
        if not isinstance(self.action_dist, StateDependentNoiseDistribution):
            raise ValueError(f"reset_noise() is for gSDE, and this policy has use_sde={self.use_sde}: pass use_sde=True.")
        self.action_dist.sample_weights(self.log_std, batch_size=n_envs)

    def extract_features(self, obs: PyTorchObs, features_extractor: BaseFeaturesExtractor | None = None) -> th.Tensor:
        """:return: Output of a features extractor, that of the policy for ``None``, shape ``(n, features_dim)``"""
        if self.training:
            obs = _channels_innermost(obs, self.observation_space)
        return (self.features_extractor if features_extractor is None else features_extractor)(self.preprocess(obs))

    def preprocess(self, obs: PyTorchObs) -> PyTorchObs:
        """:return: What the features extractor sees of observations: standardised, or else as SB3 preprocesses them"""
        obs, space = with_axes(obs, self.observation_space), self.observation_space
        if self.normalizer is not None:
            obs, space = self.normalizer(obs), self.normalizer.space
        return preprocess_obs(obs, space, normalize_images=self.normalize_images)

    def forward(
        self, obs: PyTorchObs, deterministic: bool = False, action_masks: Any = None, **context: Any
    ) -> tuple[th.Tensor, th.Tensor]:
        """
        Choose actions. The arguments are those of :meth:`get_distribution`, and whether to take its mode instead of a sample.

        :return: Actions, shape ``(n, *action_shape)``, and their log-probabilities, shape ``(n,)``
        """
        return self._sample(self.get_distribution(obs, **_with_masks(context, action_masks)), deterministic)

    def _sample(self, distribution: Distribution, deterministic: bool = False) -> tuple[th.Tensor, th.Tensor]:
        actions = distribution.get_actions(deterministic=deterministic)
        return actions.reshape((-1, *self.action_space.shape)), distribution.log_prob(actions)  # type: ignore[misc]

    def within_bounds(self, actions: np.ndarray) -> np.ndarray:
        """:return: Actions as environments take them, from those that were sampled, shape ``(n, *action_shape)``"""
        if not isinstance(self.action_space, spaces.Box):
            return actions
        if self.squash_output:
            return self.unscale_action(actions)
        return np.clip(actions, self.action_space.low, self.action_space.high)

    def evaluate_actions(
        self, obs: PyTorchObs, actions: th.Tensor, action_masks: Any = None, **context: Any
    ) -> tuple[th.Tensor, th.Tensor | None]:
        """
        Evaluate given actions under the current policy.

        :param obs: Observations, shape ``(n, *obs_shape)``
        :param actions: Actions, shape ``(n, *action_shape)``, or ``(n, action_dim)`` as in a rollout buffer
        :param action_masks: As for :meth:`predict`
        :param context: States of a policy with memory
        :return: Log-probabilities of the actions, shape ``(n,)``, and entropies of the policy, shape ``(n,)``, or ``None`` if
            they have no closed form (gSDE with ``squash_output``)
        """
        return self.evaluate_distribution(self.get_distribution(obs, **_with_masks(context, action_masks)), actions)

    def evaluate_distribution(self, distribution: Distribution, actions: th.Tensor) -> tuple[th.Tensor, th.Tensor | None]:
        """Evaluate actions under a distribution from :meth:`get_distribution`, as :meth:`evaluate_actions` does."""
        # SB3's categorical distribution would broadcast (n, 1) against (n,) to (n, n) without an error.
        return distribution.log_prob(actions.reshape((-1, *self._flat_action_shape))), distribution.entropy()

    def encoding_batch(self) -> int:
        """:return: Number of observations that are encoded at a time where no gradient is asked for"""
        n_numbers = sum(get_flattened_obs_dim(part) for part in space_parts(self.observation_space).values())
        return min(max(ENCODING_NUMBERS // n_numbers, 1), ENCODING_BATCH)

    def encode(self, observations: Observations, features_extractor: BaseFeaturesExtractor | None = None) -> np.ndarray:
        """
        :return: Features of observations, shape ``(n, *obs_shape)`` or a dict of such, in double precision, shape
            ``(n, dim)``. They come from the features extractor of the policy if there is no other one
        """
        n_observations = len(next(iter(observations.values())) if isinstance(observations, dict) else observations)
        parts, size = [], self.encoding_batch()
        for first in range(0, max(n_observations, 1), size):
            batch = take_observations(observations, slice(first, first + size))
            with th.no_grad():
                features = self.extract_features(obs_as_tensor(batch, self.device), features_extractor)
            # Double precision comes after the transfer, because not every device has it.
            parts.append(features.cpu().double().numpy())
        return np.concatenate(parts)

    def _latent(self, obs: PyTorchObs) -> th.Tensor:
        return self.policy_net(self.extract_features(obs, self.features_extractor))

    def get_distribution(self, obs: PyTorchObs, action_masks: Any = None) -> Distribution:
        """
        .. warning::
            A policy has a single distribution object, as in SB3, and every call overwrites it. Take what you need from it
            (``log_prob``, ``entropy``) before the next call. To compare two policies, use two policy objects.

        :param obs: Observations, shape ``(n, *obs_shape)``
        :param action_masks: As for :meth:`predict`
        :return: Action distribution for a batch of ``n``
        """
        return self._distribution(self._latent(obs), action_masks)

    def _distribution(self, latent: th.Tensor, action_masks: Any = None) -> Distribution:
        return self._distribution_of(self.action_net(latent), latent, action_masks)

    def _distribution_of(self, output: th.Tensor, latent: th.Tensor | None = None, action_masks: Any = None) -> Distribution:
        """:return: The distribution for an output of the action layer. Only that of gSDE needs the layer's input too"""
        # Torch checks this only as long as it has compiled nothing. An update would have to wait for the GPU here, and checks
        # its gradient at the end.
        if not self.training and not th.isfinite(output).all():
            raise ValueError(
                f"The output of the policy is not finite: {output.tolist()}. Check the weights and the features extractor."
            )
        params = [output if action_masks is None else masked_logits(output, action_masks, self.action_space)]
        if isinstance(self.action_dist, StateDependentNoiseDistribution):
            assert latent is not None
            params += [self.log_std, latent]
        elif isinstance(self.action_dist, DiagGaussianDistribution):
            params += [self.log_std.to(output.device)]
        return self.action_dist.proba_distribution(*params)

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
        action_masks: Any = None,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """
        Choose actions for one observation or a batch of them, as :meth:`stable_baselines3.common.policies.BasePolicy.predict`.
        The state is returned as it was passed, because the policy has none.

        :param deterministic: Whether to take the mode of the distribution instead of a sample
        :param action_masks: The choices that are allowed, see :mod:`sb3_grpo.masks`; ``None`` for all
        """
        self._context = {} if action_masks is None else {"action_masks": action_masks}
        try:
            return super().predict(observation, state, episode_start, deterministic)
        finally:
            self._context = {}

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> th.Tensor:
        return self.get_distribution(observation, **self._context).get_actions(deterministic=deterministic)

    def obs_to_tensor(self, observation: np.ndarray | dict[str, np.ndarray]) -> tuple[PyTorchObs, bool]:
        """:return: Observations of :meth:`predict` as a batch of tensors, and whether they came as a batch"""
        for key, part in observation.items() if isinstance(observation, dict) else [(None, observation)]:
            name, array = "observation" if key is None else f"observation[{key!r}]", np.asarray(part)
            if array.size == 0:
                raise ValueError(f"`{name}` of shape {array.shape} is empty: pass at least one observation.")
            if array.dtype.kind == "f" and not np.isfinite(array).all():
                shown = np.array2string(array, threshold=16, separator=", ")
                raise ValueError(f"`{name}` has NaN or infinite entries: {shown}. Pass finite numbers.")
        return super().obs_to_tensor(observation)


class ActorCnnPolicy(ActorPolicy):
    """:class:`ActorPolicy` for images: features come from ``NatureCNN``, or ``SmallCNN`` if they are too small for it."""

    default_features_extractor_class = NatureCNN

    @classmethod
    def default_features_extractor(cls, observation_space: spaces.Space) -> type[BaseFeaturesExtractor]:
        shape = observation_space.shape or ()
        is_small = len(shape) == 3 and not is_large_image(observation_space)
        return SmallCNN if is_small else super().default_features_extractor(observation_space)


class MultiInputActorPolicy(ActorPolicy):
    """:class:`ActorPolicy` for ``Dict`` observations: the default features extractor is ``CombinedExtractor``."""

    default_features_extractor_class = CombinedExtractor


def _channels_innermost(observations: Any, space: spaces.Space) -> Any:
    # In this memory format, the gradient of a convolution takes a quarter less time on a CPU, and a GPU would convert to it.
    for name, part in space_parts(space).items():
        if is_image_space(part) and has_channels_first(part.shape or ()):
            if name is None:
                return observations.contiguous(memory_format=th.channels_last)
            observations = {**observations, name: observations[name].contiguous(memory_format=th.channels_last)}
    return observations


def _with_masks(context: dict[str, Any], action_masks: Any) -> dict[str, Any]:
    # Without masks, a `get_distribution` of the user needs to know nothing of them.
    return context if action_masks is None else {**context, "action_masks": action_masks}


def plain_name(name: str) -> str:
    """:return: The name of a weight in a state dict if no module was compiled"""
    return name.replace(f"{COMPILED}.", "")


def _hidden_sizes(net_arch: Any, features_extractor_class: type[BaseFeaturesExtractor]) -> list[int]:
    if net_arch is None:
        return [] if features_extractor_class in (NatureCNN, SmallCNN) else [64, 64]
    if isinstance(net_arch, Sequence) and len(net_arch) == 1 and isinstance(net_arch[0], dict):
        net_arch = net_arch[0]  # as SB3 wrote it once, and still reads it
    sizes = net_arch.get("pi", []) if isinstance(net_arch, dict) and set(net_arch) <= {"pi"} else net_arch
    is_list = isinstance(sizes, (Sequence, np.ndarray)) and not isinstance(sizes, str)
    if not is_list or not all(isinstance(size, (int, np.integer)) and size > 0 for size in sizes):
        has_critic = isinstance(net_arch, dict) and "vf" in net_arch
        fault = "asks for a value network, which GRPO does not have" if has_critic else "is no list of positive integers"
        raise ValueError(f"net_arch={net_arch!r} {fault}: pass net_arch=[...] or net_arch=dict(pi=[...]).")
    return [int(size) for size in sizes]


MlpPolicy = ActorPolicy
CnnPolicy = ActorCnnPolicy
MultiInputPolicy = MultiInputActorPolicy
