"""Actor-only policies: what Stable-Baselines3's actor-critic policies are once the critic is taken away."""

import inspect
from collections.abc import Callable, Mapping
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
from stable_baselines3.common.preprocessing import get_action_dim
from stable_baselines3.common.torch_layers import (
    BaseFeaturesExtractor,
    CombinedExtractor,
    FlattenExtractor,
    NatureCNN,
    create_mlp,
)
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import nn

from sb3_grpo.fast_actor import LEAN_DISTRIBUTIONS, ClosedFormActor, LeanDistribution, closed_form_layers, has_hooks
from sb3_grpo.validation import is_finite_number, require_between, require_flag, require_positive

#: From features, shape ``(n, features_dim)``, to actions, shape ``(n, *action_shape)``, and log-probabilities, shape ``(n,)``.
Actor = Callable[[th.Tensor], tuple[th.Tensor, th.Tensor]]

#: Methods of a policy that lead from observations to a distribution; who overrides one of them has an own idea of it.
DISTRIBUTION_METHODS = ("get_distribution", "_distribution", "_latent")


class ActorPolicy(BasePolicy):
    """
    A policy made of an actor alone: features extractor, hidden layers, action layer, and ``log_std`` for continuous actions.

    Its arguments, defaults and initialisation are those of the actor in
    :class:`stable_baselines3.common.policies.ActorCriticPolicy`, so that the two can exchange weights (:func:`load_actor`).

    :param observation_space: Observation space
    :param action_space: Action space: ``Box``, ``Discrete``, ``MultiDiscrete`` or ``MultiBinary``
    :param lr_schedule: Learning rate schedule, a function of the remaining progress (1 at the start, 0 at the end)
    :param net_arch: Sizes of the hidden layers, as ``[64, 64]`` or ``dict(pi=[64, 64])``. None means two layers of 64
        units, or no hidden layer on top of a ``NatureCNN``.
    :param activation_fn: Activation function
    :param ortho_init: Whether to initialise the layers orthogonally
    :param use_sde: Whether to explore with state-dependent noise (gSDE) instead of independent Gaussian noise
    :param log_std_init: Initial value of the log standard deviation
    :param full_std: With gSDE, whether to learn one standard deviation for each pair of feature and action
        instead of one for each feature
    :param use_expln: With gSDE, whether to keep the standard deviation positive with ``expln()``, which grows
        more slowly than ``exp()``
    :param squash_output: With gSDE, whether to keep the actions inside their bounds with ``tanh()`` instead of clipping them
    :param features_extractor_class: Features extractor. None means ``default_features_extractor_class`` of this class.
    :param features_extractor_kwargs: Keyword arguments of the features extractor
    :param normalize_images: Whether to divide images by 255
    :param optimizer_class: Optimizer
    :param optimizer_kwargs: Keyword arguments of the optimizer, the learning rate excluded. None means ``eps=1e-5``
        and ``fused=True`` for ``Adam``, and nothing for the others.
    :param log_std_lr_factor: Learning rate of the log standard deviation over that of all other weights. A step of Adam's is
        about as long as the learning rate, however clear the gradient: at a rate that suits a large network, exploration
        fades more slowly than the returns ask for. Needs Box actions.
    """

    default_features_extractor_class: ClassVar[type[BaseFeaturesExtractor]] = FlattenExtractor

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
        log_std_init: float = 0.0,
        full_std: bool = True,
        use_expln: bool = False,
        squash_output: bool = False,
        features_extractor_class: type[BaseFeaturesExtractor] | None = None,
        features_extractor_kwargs: dict[str, Any] | None = None,
        normalize_images: bool = True,
        optimizer_class: type[th.optim.Optimizer] = th.optim.Adam,
        optimizer_kwargs: dict[str, Any] | None = None,
        log_std_lr_factor: float = 1.0,
    ):
        flags = dict(
            ortho_init=ortho_init,
            use_sde=use_sde,
            full_std=full_std,
            use_expln=use_expln,
            squash_output=squash_output,
            normalize_images=normalize_images,
        )
        for name, flag in flags.items():
            require_flag(name, flag)
        require_between("log_std_init", log_std_init, -np.inf, np.inf)
        require_positive("log_std_lr_factor", log_std_lr_factor)
        _check_schedule(lr_schedule)
        _check_factory("activation_fn", activation_fn, nn.Module, "as torch.nn.Tanh")
        if features_extractor_class is not None:
            _check_factory("features_extractor_class", features_extractor_class, nn.Module, "or None for the policy's own")
        _check_factory("optimizer_class", optimizer_class, th.optim.Optimizer, "as torch.optim.Adam")
        for name, kwargs in (("features_extractor_kwargs", features_extractor_kwargs), ("optimizer_kwargs", optimizer_kwargs)):
            if kwargs is not None and not isinstance(kwargs, Mapping):
                raise ValueError(f"`{name}` must be a dict or None, not {kwargs!r}.")
        _check_action_space(action_space, use_sde)
        if log_std_lr_factor != 1.0 and not isinstance(action_space, spaces.Box):
            raise ValueError(
                f"log_std_lr_factor={log_std_lr_factor} is for Box actions, {action_space} has no standard deviation: "
                "leave it out"
            )
        if squash_output and not use_sde:
            raise ValueError(f"squash_output={squash_output} needs gSDE: pass use_sde=True too, or squash_output=False")
        if features_extractor_class is None:
            features_extractor_class = self.default_features_extractor_class
        _check_observation_space(observation_space, features_extractor_class, features_extractor_kwargs or {})
        if optimizer_kwargs is None:
            # PPO's value: Adam's own 1e-8 lets a step explode where the gradients vanish
            optimizer_kwargs = dict(eps=1e-5, fused=True) if optimizer_class is th.optim.Adam else {}

        super().__init__(
            observation_space,
            action_space,
            features_extractor_class,
            # BaseModel writes into this dict when normalize_images is False
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
        self.log_std_init = log_std_init
        self.log_std_lr_factor = log_std_lr_factor
        self.full_std = full_std
        self.use_expln = use_expln
        # Shape of one action as the distributions take it
        self._flat_action_shape = () if isinstance(action_space, spaces.Discrete) else (get_action_dim(action_space),)

        dist_kwargs: dict[str, Any] | None = None
        if use_sde:
            dist_kwargs = dict(full_std=full_std, use_expln=use_expln, squash_output=squash_output, learn_features=False)
        self.action_dist = make_proba_distribution(action_space, use_sde=use_sde, dist_kwargs=dist_kwargs)
        self._build(lr_schedule)

    def _build(self, lr_schedule: Schedule) -> None:
        """
        Create the layers and the optimizer.

        :param lr_schedule: Learning rate schedule; ``lr_schedule(1)`` is the initial learning rate
        """
        try:
            self.features_extractor = self.make_features_extractor()
        except AssertionError as error:  # NatureCNN's, on what is no image
            raise ValueError(
                f"`observation_space` is {self.observation_space!r}, which {self.features_extractor_class.__name__} refuses: "
                f"{error}"
            ) from error
        self.features_dim = self.features_extractor.features_dim
        self.policy_net = nn.Sequential(*create_mlp(self.features_dim, -1, self.net_arch, self.activation_fn))

        latent_dim = self.net_arch[-1] if self.net_arch else self.features_dim
        if isinstance(self.action_dist, (DiagGaussianDistribution, StateDependentNoiseDistribution)):
            self.action_net, self.log_std = self.action_dist.proba_distribution_net(latent_dim, log_std_init=self.log_std_init)
        else:
            self.action_net = self.action_dist.proba_distribution_net(latent_dim)  # type: ignore[assignment]

        if self.ortho_init:
            # The small gain of the last layer starts the policy near uniform, or near a zero mean
            for module, gain in ((self.features_extractor, 2**0.5), (self.policy_net, 2**0.5), (self.action_net, 0.01)):
                module.apply(partial(self.init_weights, gain=gain))

        try:
            self.optimizer = self.optimizer_class(
                self._parameter_groups(), lr=lr_schedule(1), **self.optimizer_kwargs  # type: ignore[call-arg]
            )
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"`optimizer_kwargs` must be keyword arguments of {self.optimizer_class!r} other than `lr`, which is "
                f"`learning_rate`, not {self.optimizer_kwargs!r}: {error}"
            ) from error
        self.set_learning_rate(lr_schedule(1))

    def _parameter_groups(self) -> list[dict[str, Any]]:
        """:return: what the optimizer is made of: all weights, or those and the log standard deviation on its own"""
        if self.log_std_lr_factor == 1.0:
            return [{"params": list(self.parameters())}]
        others = [parameter for parameter in self.parameters() if parameter is not self.log_std]
        return [{"params": others}, {"params": [self.log_std], "lr_factor": self.log_std_lr_factor}]

    def set_learning_rate(self, learning_rate: float) -> None:
        """
        :param learning_rate: of all weights but those that have a factor of their own
        """
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_factor", 1.0)

    @classmethod
    def check_keywords(cls, policy_kwargs: Mapping[str, Any]) -> None:
        """
        :param policy_kwargs: what a model is to construct its policy with, beside what it passes itself
        :raises ValueError: if the constructor does not take one of these, or would get it twice
        """
        passed = ("observation_space", "action_space", "lr_schedule", "use_sde")
        signature = inspect.signature(cls)
        try:
            signature.bind(*passed[:3], use_sde=False, **policy_kwargs)
        except TypeError as error:
            accepted = ", ".join(name for name in signature.parameters if name not in passed)
            raise ValueError(
                f"`policy_kwargs` must be keyword arguments of {cls.__name__}, of {accepted}, not {policy_kwargs!r}: {error}."
            ) from error

    def _get_constructor_parameters(self) -> dict[str, Any]:
        data = super()._get_constructor_parameters()
        data.update(
            lr_schedule=self._dummy_schedule,  # a policy that is loaded alone is not trained
            net_arch=self.net_arch,
            activation_fn=self.activation_fn,
            ortho_init=self.ortho_init,
            use_sde=self.use_sde,
            log_std_init=self.log_std_init,
            log_std_lr_factor=self.log_std_lr_factor,
            full_std=self.full_std,
            use_expln=self.use_expln,
            squash_output=self.squash_output,
            features_extractor_class=self.features_extractor_class,
            features_extractor_kwargs=self.features_extractor_kwargs,
            optimizer_class=self.optimizer_class,
            optimizer_kwargs=self.optimizer_kwargs,
        )
        return data

    def reset_noise(self, n_envs: int = 1) -> None:
        """
        Draw new exploration matrices; only gSDE has them.

        :param n_envs: Number of environments that explore side by side, each with a matrix of its own
        """
        if not isinstance(self.action_dist, StateDependentNoiseDistribution):
            raise ValueError(f"reset_noise() is for gSDE and this policy has use_sde={self.use_sde}: pass use_sde=True")
        self.action_dist.sample_weights(self.log_std, batch_size=n_envs)

    def forward(self, obs: PyTorchObs, deterministic: bool = False) -> tuple[th.Tensor, th.Tensor]:
        """
        Choose actions.

        :param obs: Observations, shape ``(n, *observation_shape)``
        :param deterministic: Whether to take the mode of the distribution instead of a sample
        :return: the actions, shape ``(n, *action_shape)``, and their log-probabilities, shape ``(n,)``
        """
        if self._is_unaltered(*DISTRIBUTION_METHODS):
            return self.forward_features(self.extract_features(obs, self.features_extractor), deterministic)
        return self._sample(self.get_distribution(obs), deterministic)

    def forward_features(self, features: th.Tensor, deterministic: bool = False) -> tuple[th.Tensor, th.Tensor]:
        """
        Choose actions, as :meth:`forward` does, for observations that the features extractor has seen already.

        :param features: What it made of them, shape ``(n, features_dim)``
        :param deterministic: Whether to take the mode of the distribution instead of a sample
        :return: the actions, shape ``(n, *action_shape)``, and their log-probabilities, shape ``(n,)``
        """
        latent = self.policy_net(features)
        lean = self._lean_distribution()
        if lean is not None:
            actions, log_prob = lean.sample(self.action_net(latent), getattr(self, "log_std", None), deterministic)
            return self._shaped(actions), log_prob
        return self._sample(self._distribution(latent), deterministic)

    def _sample(self, distribution: Distribution, deterministic: bool) -> tuple[th.Tensor, th.Tensor]:
        actions = distribution.get_actions(deterministic=deterministic)
        return self._shaped(actions), distribution.log_prob(actions)

    def _shaped(self, actions: th.Tensor) -> th.Tensor:
        return actions.reshape((-1, *self.action_space.shape))  # type: ignore[misc]

    def evaluate_actions(self, obs: PyTorchObs, actions: th.Tensor) -> tuple[th.Tensor, th.Tensor | None]:
        """
        Judge given actions by the current policy.

        :param obs: Observations, shape ``(n, *observation_shape)``
        :param actions: Actions, shape ``(n, *action_shape)`` or, as rollout buffers keep them, ``(n, action_dim)``
        :return: their log-probabilities, shape ``(n,)``, and the entropy of the policy at each observation, shape ``(n,)``,
            or None where it has no closed form (gSDE with ``squash_output``)
        """
        # Categorical would broadcast (n, 1) against (n,) to (n, n) without a word
        actions = actions.reshape((-1, *self._flat_action_shape))
        lean = self._lean_distribution()
        if lean is not None:
            return lean.evaluate(self.action_net(self._latent(obs)), getattr(self, "log_std", None), actions)
        distribution = self.get_distribution(obs)
        return distribution.log_prob(actions), distribution.entropy()

    def _lean_distribution(self) -> LeanDistribution | None:
        """:return: what gives the same numbers as :meth:`get_distribution` in less time, if there is such a thing"""
        if not self._is_unaltered(*DISTRIBUTION_METHODS):
            return None
        return LEAN_DISTRIBUTIONS.get(type(self.action_dist))

    def closed_form(self) -> ClosedFormActor | None:
        """
        The same actor without autograd, if there is such a thing: for hidden layers of tanh or ReLU on flat observations, and
        Discrete actions or independent Gaussians. A subclass that overrides how actions are chosen or judged has none.

        It shares the weights of this policy, and describes the modules it has now.
        """
        distribution = self._lean_distribution()
        if distribution is None or type(self.features_extractor) is not FlattenExtractor:
            return None
        if not self._is_unaltered("__call__", "forward", "forward_features", "evaluate_actions", "extract_features"):
            return None
        if type(self.policy_net) is not nn.Sequential or any(map(has_hooks, (self, self.features_extractor, self.policy_net))):
            return None
        layers = closed_form_layers([*self.policy_net, self.action_net])
        if layers is None:
            return None
        log_std = getattr(self, "log_std", None)
        ours = [*layers.weights, *layers.biases, *([] if log_std is None else [log_std])]
        # Shared or frozen weights, and weights that somebody has added, are left to autograd
        is_whole = len(ours) == len(set(ours)) and set(ours) == set(self.parameters())
        if not is_whole or not all(parameter.requires_grad for parameter in ours):
            return None
        return ClosedFormActor(layers, distribution, log_std)

    def actor(self) -> Actor | None:
        """
        :return: what chooses actions for features as :meth:`forward` does for observations, in less time where
            :meth:`closed_form` can; ``None`` where a subclass has its own way from observations to actions, or somebody
            listens to this policy by hooks
        """
        own_way = ("__call__", "forward", "forward_features", "extract_features", *DISTRIBUTION_METHODS)
        if not self._is_unaltered(*own_way) or has_hooks(self):
            return None
        closed_form = self.closed_form()
        if closed_form is None:
            return self.forward_features

        def act(features: th.Tensor) -> tuple[th.Tensor, th.Tensor]:
            actions, log_prob = closed_form.sample(features)
            return self._shaped(actions), log_prob

        return act

    def _is_unaltered(self, *methods: str) -> bool:
        """
        :param methods: names of methods of this class
        :return: whether neither a subclass nor an attribute of this object has replaced any of them
        """
        return all(getattr(getattr(self, name), "__func__", None) is getattr(ActorPolicy, name) for name in methods)

    def _latent(self, obs: PyTorchObs) -> th.Tensor:
        return self.policy_net(self.extract_features(obs, self.features_extractor))

    def get_distribution(self, obs: PyTorchObs) -> Distribution:
        """
        The distribution over actions at each observation.

        .. warning::
            SB3's distributions are set in place and a policy owns a single one, so the object returned here is the same
            at each call of any method of this policy, and it describes the *latest* observations. Take what you need from it
            (``log_prob``, ``entropy``, or the PyTorch distribution in its ``distribution`` attribute, which is new each
            time) before the next call. To compare two policies, use two policy objects.

        :param obs: Observations, shape ``(n, *observation_shape)``
        :return: the action distribution, for a batch of ``n``
        """
        return self._distribution(self._latent(obs))

    def _distribution(self, latent: th.Tensor) -> Distribution:
        action_params = self.action_net(latent)
        if isinstance(self.action_dist, StateDependentNoiseDistribution):
            return self.action_dist.proba_distribution(action_params, self.log_std, latent)
        if isinstance(self.action_dist, DiagGaussianDistribution):
            return self.action_dist.proba_distribution(action_params, self.log_std)
        return self.action_dist.proba_distribution(action_params)

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> th.Tensor:
        return self.get_distribution(observation).get_actions(deterministic=deterministic)

    def obs_to_tensor(self, observation: np.ndarray | dict[str, np.ndarray]) -> tuple[PyTorchObs, bool]:
        """
        Turn what a user hands in into tensors; :meth:`predict` goes through here, training does not.

        :param observation: One observation or a batch of them; empty ones, NaN and infinities are refused
        :return: the observation as a batch of tensors, and whether it came as a batch
        """
        if isinstance(observation, dict):
            if not observation:
                raise ValueError("observation={} is empty: pass one array for each key of the observation space")
            for key, part in observation.items():
                _check_observation(f"observation[{key!r}]", part)
        else:
            _check_observation("observation", observation)
        return super().obs_to_tensor(observation)


class ActorCnnPolicy(ActorPolicy):
    """
    :class:`ActorPolicy` for images: its features extractor is a ``NatureCNN`` unless told otherwise.
    """

    default_features_extractor_class = NatureCNN


class MultiInputActorPolicy(ActorPolicy):
    """
    :class:`ActorPolicy` for ``Dict`` observations: its features extractor is a ``CombinedExtractor`` unless told otherwise.
    """

    default_features_extractor_class = CombinedExtractor


def _hidden_sizes(net_arch: Any, features_extractor_class: type[BaseFeaturesExtractor]) -> list[int]:
    """
    The sizes of the hidden layers that ``net_arch`` asks for.

    :param net_arch: What the user passed
    :param features_extractor_class: Features extractor, on which the default depends
    :return: one size for each layer
    """
    if net_arch is None:
        return [] if features_extractor_class is NatureCNN else [64, 64]
    if isinstance(net_arch, dict) and "vf" in net_arch:
        raise ValueError(
            f"net_arch={net_arch!r}: there is no value network in GRPO; pass net_arch=[...] or net_arch=dict(pi=[...])"
        )
    sizes = net_arch["pi"] if isinstance(net_arch, dict) and set(net_arch) == {"pi"} else net_arch
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        raise ValueError(f"net_arch={net_arch!r}: pass a list of positive integers, net_arch=[...] or net_arch=dict(pi=[...])")
    return list(sizes)


def _check_action_space(action_space: spaces.Space, use_sde: bool) -> None:
    """
    Refuse an action space for which there is no distribution.

    :param action_space: Action space
    :param use_sde: Whether gSDE is asked for
    """
    if not isinstance(action_space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        raise ValueError(f"action_space={action_space} is not supported: pass Box, Discrete, MultiDiscrete or MultiBinary")
    if isinstance(action_space, spaces.MultiDiscrete) and action_space.nvec.ndim != 1:
        raise ValueError(f"action_space={action_space} is not flat: pass MultiDiscrete with a one-dimensional nvec")
    if isinstance(action_space, spaces.MultiBinary) and not isinstance(action_space.n, int):
        raise ValueError(f"action_space={action_space} is not flat: pass MultiBinary(n) with an integer n")
    if use_sde and not isinstance(action_space, spaces.Box):
        raise ValueError(f"use_sde={use_sde} needs continuous actions and action_space={action_space}: pass use_sde=False")


def _check_observation_space(
    observation_space: spaces.Space, features_extractor_class: Callable[..., Any], features_extractor_kwargs: Mapping[str, Any]
) -> None:
    """
    Refuse an observation space that the features extractor cannot read, and arguments that it does not take.

    :param observation_space: Observation space
    :param features_extractor_class: Features extractor
    :param features_extractor_kwargs: Keyword arguments of the features extractor
    """
    if not isinstance(observation_space, spaces.Space):
        raise ValueError(f"`observation_space` must be one of Gymnasium's spaces, not {observation_space!r}.")
    is_dict = isinstance(observation_space, spaces.Dict)
    if is_dict and features_extractor_class in (FlattenExtractor, NatureCNN):
        raise ValueError(f"`observation_space` is {observation_space!r}: pass `MultiInputPolicy`, which takes Dict spaces.")
    if not is_dict and features_extractor_class is CombinedExtractor:
        raise ValueError(
            f"`observation_space` is {observation_space!r}, and `MultiInputPolicy` takes Dict spaces: pass `MlpPolicy`, or "
            "`CnnPolicy` for images."
        )
    try:
        inspect.signature(features_extractor_class).bind(observation_space, **features_extractor_kwargs)
    except TypeError as error:
        raise ValueError(
            f"`features_extractor_kwargs` must be keyword arguments of {features_extractor_class!r}, not "
            f"{features_extractor_kwargs!r}: {error}."
        ) from error


def _check_factory(name: str, value: Any, product: type, hint: str) -> None:
    """
    Refuse what cannot make layers, or an optimizer.

    :param name: The name of the argument, for the message
    :param value: What the user passed: a class, or a function that makes an object of one
    :param product: What it is to make
    :param hint: What to pass, for the message
    """
    is_other_class = isinstance(value, type) and not issubclass(value, product)
    # A module can be called too, but does not make modules
    if not callable(value) or is_other_class or isinstance(value, nn.Module):
        raise ValueError(f"`{name}` must be a subclass of torch's {product.__name__}, {hint}, not {value!r}.")


def _check_schedule(lr_schedule: Any) -> None:
    """
    Refuse what gives no learning rate to begin with.

    :param lr_schedule: What the user passed
    """
    if not callable(lr_schedule):
        raise ValueError(f"`lr_schedule` must be a function of the progress remaining, not {lr_schedule!r}.")
    first = lr_schedule(1)
    if not is_finite_number(first) or first < 0:
        raise ValueError(f"`lr_schedule` must give a finite number of at least 0, and gives {first!r} at 1.")


def _check_observation(name: str, observation: Any) -> None:
    """
    Refuse an observation from which no action can be predicted.

    :param name: How to call it in the message
    :param observation: One observation, or a batch, or one entry of a ``Dict`` observation
    """
    array = np.asarray(observation)
    if array.size == 0:
        raise ValueError(f"{name}={array.tolist()} of shape {array.shape} is empty: pass at least one observation")
    # Integers (images, Discrete) are always finite
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        shown = np.array2string(array, threshold=16, separator=", ")
        raise ValueError(f"{name}={shown} has NaN or infinite entries: pass finite numbers, and look for where they come from")


MlpPolicy = ActorPolicy
CnnPolicy = ActorCnnPolicy
MultiInputPolicy = MultiInputActorPolicy
