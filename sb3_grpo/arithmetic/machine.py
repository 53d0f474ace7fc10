"""
Acting and updating in machine code, for policies that are small networks on a CPU.

With such networks, most of the time goes into calling torch, not into arithmetic. The numbers are those of torch up to
rounding, and actions are drawn from the same random numbers. :mod:`~sb3_grpo.arithmetic.conditions` says which policies it is
for.

**One memory.** The parameters of a policy, their gradients and Adam's moments lie in flat arrays, of which torch's tensors
are views. So saving, loading, ``predict`` and callbacks see the same numbers, and a run may change between both ways at any
update. Whatever replaces a tensor (``policy.to()``, ``optimizer.load_state_dict()``) is noticed before the next rollout or
update, and the flat arrays take over its numbers.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.preprocessing import get_action_dim
from stable_baselines3.common.type_aliases import PyTorchObs

from sb3_grpo.arithmetic.conditions import Parts
from sb3_grpo.arithmetic.first_layers import NO_ROWS, NO_STEPS
from sb3_grpo.arithmetic.machine_code import layers, optimizer
from sb3_grpo.arithmetic.metrics import Epoch
from sb3_grpo.arithmetic.natural import fisher_stride
from sb3_grpo.arithmetic.network import CATEGORICAL, GAUSSIAN, Distribution, Network
from sb3_grpo.arithmetic.objective import Objective
from sb3_grpo.buffers import GroupRolloutBuffer, GroupRolloutBufferSamples
from sb3_grpo.extractors import SmallCNN
from sb3_grpo.masks import forced_logits
from sb3_grpo.policies import ActorPolicy

NO_NUMBERS = np.zeros(0, np.float32)


class MachinePolicy:
    """A policy and its optimizer in machine code, in one memory with those of torch."""

    def __init__(self, parts: Parts):
        self.network = parts.network
        #: The policy's parameters, in the order of :attr:`parameters`
        self.tensors = parts.tensors
        shapes = [tensor.shape for tensor in parts.tensors]
        self.bounds = np.cumsum([0, *(shape.numel() for shape in shapes)])
        self._views: dict[str, list[th.Tensor]] = {}
        arrays = {}
        for name in ("parameter", "grad", "exp_avg", "exp_avg_sq"):
            flat = th.zeros(int(self.bounds[-1]), dtype=th.float32)
            arrays[name] = flat.numpy()
            pieces = flat.split(np.diff(self.bounds).tolist())
            self._views[name] = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]
        steps = th.zeros(len(shapes), dtype=th.float32)
        self._views["step"] = list(steps.unbind())
        #: All parameters in one array, which is the policy's memory, and the gradient of the last minibatch
        self.parameters, self.gradient = arrays["parameter"], arrays["grad"]
        self._moments = arrays["exp_avg"], arrays["exp_avg_sq"], steps.numpy()
        self._rates = np.zeros((len(shapes), 4))

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        # A copy of the policy has its own memory, so this object is not for it.
        return type(None), ()

    def fits(self, parts: Parts) -> bool:
        """:return: Whether the policy still has the same parameters with the same shapes, and the same activation"""
        return list(map(id, self.tensors)) == list(map(id, parts.tensors)) and self.network.is_like(parts.network)

    def take_over(self, optimizer: th.optim.Optimizer | None) -> None:
        """
        Make views of the flat arrays of those tensors that are none, and copy their numbers. Without an optimizer, do so for
        the parameters alone.
        """
        for i, tensor in enumerate(self.tensors):
            view = self._views["parameter"][i]
            if not tensor.is_set_to(view):
                view.copy_(tensor.detach())
                tensor.data = view
            if optimizer is None:
                continue
            state = optimizer.state[tensor]
            for name in ("exp_avg", "exp_avg_sq", "step"):
                view = self._views[name][i]
                if name not in state:
                    view.zero_()
                elif state[name].is_set_to(view):
                    continue
                else:
                    view.copy_(state[name])
                state[name] = view
        if optimizer is not None:
            groups = {id(tensor): group for group in optimizer.param_groups for tensor in group["params"]}
            for i, tensor in enumerate(self.tensors):
                group = groups[id(tensor)]
                self._rates[i] = [float(each) for each in (group["lr"], *group["betas"], group["eps"])]

    def take_gradient_step(self, max_grad_norm: float) -> float:
        """Clip :attr:`gradient`, take a step of Adam along it, and return its norm before clipping."""
        norm = optimizer.clip_gradient.run(self.gradient, max_grad_norm)
        optimizer.adam.run(self.parameters, self.gradient, *self._moments, self.bounds, self._rates)
        return float(norm)

    def show_gradient(self) -> None:
        """Leave the gradient in the ``grad`` of the parameters, as torch does."""
        for tensor, gradient in zip(self.tensors, self._views["grad"], strict=True):
            tensor.grad = gradient

    def actor(self, policy: ActorPolicy) -> Callable[..., tuple[Any, ...]]:
        """
        :return: A function that chooses actions as the policy does now: with its weights of any time, and with its present
            statistics of observations
        """
        network, parameters, log_std = self.network, self.parameters, self.network.log_std(self.parameters)
        draw, running_for = self._noise(), functools.cache(lambda n: np.array([n]))
        values_for = functools.cache(lambda n: network.new_values(n, n))
        is_vector = isinstance(policy.observation_space, spaces.Box) and not isinstance(policy.features_extractor, SmallCNN)
        shift = scale = np.zeros(0, np.float32)
        if is_vector and policy.normalizer is not None:
            shift, scale = policy.normalizer.shift.numpy(), policy.normalizer.scale.numpy()
        dtype: type[np.generic] = np.int64 if network.family is CATEGORICAL else np.float32
        shape = (-1, *policy.action_space.shape)  # type: ignore[misc]

        def choose(obs: Any, obs_tensor: Any, action_masks: Any = None, states: np.ndarray = NO_ROWS) -> tuple[Any, ...]:
            if not is_vector:  # numbers of categories, which the policy encodes, or pictures
                obs = network_inputs(policy, obs_tensor).numpy()
            observations = np.array(obs, dtype=np.float64, order="C").reshape(len(obs), -1)
            n = len(observations)
            values, actions = values_for(n), np.empty((n, network.n_components), np.float32)
            terms = np.empty((3, n), np.float32)
            layers.standardise.run(shift, scale, observations, values[: observations.size].reshape(n, -1))
            forced = forced_outputs(policy, action_masks, n)
            outputs = network.forward(parameters, values, n, forced, running_for(n), states)
            distribution = network.distribution(outputs, log_std)
            network.family.sample.run(*distribution, draw(n), actions)
            network.family.evaluate.run(*distribution, NO_ROWS, NO_NUMBERS, actions, terms)
            after = (network.states_after(values, n),) if network.has_memory else ()
            return actions.astype(dtype, copy=False).reshape(shape), th.from_numpy(terms[0]), *after

        return choose

    def _noise(self) -> Callable[[int], np.ndarray]:
        """:return: A function that draws the noise of ``n`` actions, as SB3's distributions draw it"""
        network = self.network
        choices = network.n_categories.tolist()
        if len(choices) > 1:
            return lambda n: th.cat([th.empty(n, each).exponential_() for each in choices], dim=1).numpy()
        memory = functools.cache(lambda n: (noise := th.empty(n, network.n_outputs), noise.numpy()))

        def draw(n: int) -> np.ndarray:
            noise, array = memory(n)
            getattr(noise, network.family.noise)()
            return array

        return draw


def network_inputs(policy: ActorPolicy, observations: PyTorchObs) -> th.Tensor:
    """:return: Inputs of the network: flattened pictures for ``SmallCNN``, else features, shape ``(n, n_inputs)``"""
    if not isinstance(policy.features_extractor, SmallCNN):
        return policy.extract_features(observations)
    pictures = policy.preprocess(observations)
    assert isinstance(pictures, th.Tensor)
    return pictures.flatten(start_dim=1)


def forced_outputs(policy: ActorPolicy, action_masks: Any, n: int) -> np.ndarray:
    """:return: The logits that ``n`` masks put in the place of outputs, shape ``(n, k)``; no rows without masks"""
    if action_masks is None:
        return NO_ROWS
    return np.ascontiguousarray(forced_logits(action_masks, policy.action_space, n), dtype=np.float32)


class Rows(NamedTuple):
    """
    Transitions of an update.

    :param features: Standardised observations, shape ``(n, n_inputs)``
    :param actions: Actions, shape ``(n, d)``
    :param old_log_prob: Log-probabilities under the policy that sampled the actions, shape ``(n,)``
    :param advantages: Advantages, shape ``(n,)``
    :param weights: Weights in the loss, shape ``(n,)``
    :param forced: See :meth:`~sb3_grpo.arithmetic.network.Network.forward`
    :param reference: Outputs of the reference's network, shape ``(n, k)``; no rows without a penalty
    :param states: States of the memory before each step, shape ``(n, state_size)``; no rows without memory
    :param steps: Step of each transition within its sequence, shape ``(n,)``; empty without memory
    """

    features: np.ndarray
    actions: np.ndarray
    old_log_prob: np.ndarray
    advantages: np.ndarray
    weights: np.ndarray
    forced: np.ndarray
    reference: np.ndarray
    states: np.ndarray
    steps: np.ndarray

    @property
    def running(self) -> np.ndarray:
        """Number of sequences that have each step; empty without memory."""
        return np.bincount(self.steps)

    @property
    def n_sequences(self) -> int:
        """Number of sequences; 0 without memory."""
        return int(np.count_nonzero(self.steps == 0))

    def take(self, index: np.ndarray | slice) -> "Rows":
        """:return: The transitions at an index"""
        return Rows(*(array[index] if len(array) > 0 else array for array in self))


class Workspace(NamedTuple):
    """
    Memory for the passes of ``n`` transitions forward and back through the network. For ``terms`` and the gradients, see
    :mod:`~sb3_grpo.arithmetic.machine_code.distributions`.

    :param values: Numbers of all layers, see :meth:`~sb3_grpo.arithmetic.network.Network.new_values`
    :param inputs: View of the inputs among them, shape ``(n, n_inputs)``
    :param outputs: View of the outputs among them, shape ``(n, k)``
    """

    values: np.ndarray
    inputs: np.ndarray
    outputs: np.ndarray
    terms: np.ndarray
    grad_terms: np.ndarray
    grad_outputs: np.ndarray

    @classmethod
    def of(cls, network: Network, n: int, n_sequences: int) -> "Workspace":
        """:return: Memory for ``n`` transitions"""
        values, terms = network.new_values(n, n_sequences), np.empty((2, 3, n), np.float32)
        inputs, outputs = values[: n * network.n_inputs].reshape(n, -1), network.outputs(values, n)
        return cls(values, inputs, outputs, terms[0], terms[1], np.empty_like(outputs))


class MachineLearner:
    """
    An update in machine code. It is a :class:`~sb3_grpo.arithmetic.natural.LocalModel` of the policy as well. The arguments
    are those of :class:`~sb3_grpo.arithmetic.torch_learner.TorchLearner`, and the policy in machine code.
    """

    def __init__(
        self,
        objective: Objective,
        policy: ActorPolicy,
        rollout_buffer: GroupRolloutBuffer,
        max_kl: float,
        machine: MachinePolicy,
    ):
        self._objective = objective
        self._policy = policy
        self._rollout_buffer = rollout_buffer
        self._max_kl = max_kl
        self._machine = machine
        self._network = machine.network
        self._workspace = functools.lru_cache(2)(functools.partial(Workspace.of, machine.network))
        self._minibatches = functools.cache(self._minibatches_of)
        reference = objective.kl_penalty.policy if objective.kl_coef > 0 else None
        self._reference_log_std = NO_NUMBERS
        if reference is not None and self._network.family is GAUSSIAN:
            self._reference_log_std = array_of(reference.log_std.detach())
        sequences = rollout_buffer.update.sequences
        self._sequences = NO_STEPS if sequences is None else sequences.numpy()
        self._rows = self._rows_of(rollout_buffer.update, reference)

    @th.no_grad()
    def _rows_of(self, samples: GroupRolloutBufferSamples, reference: ActorPolicy | None) -> Rows:
        n = len(samples.advantages)
        forced = forced_outputs(self._policy, samples.action_masks, n)
        outputs = NO_ROWS
        if reference is not None:
            context = {name: column for name, column in samples.context.items() if name != "action_masks"}
            outputs = array_of(reference.action_net(reference._latent(samples.observations, **context)))
            if len(forced) > 0:
                np.copyto(outputs, forced, where=forced != 0)
            self._network.distribution(outputs, self._reference_log_std)
        return Rows(
            array_of(network_inputs(self._policy, samples.observations)),
            array_of(samples.actions.reshape(n, -1)),
            array_of(samples.old_log_prob),
            array_of(samples.advantages),
            np.ones(n, np.float32) if samples.weights is None else array_of(samples.weights),
            forced,
            outputs,
            NO_ROWS if samples.states is None else array_of(samples.states),
            np.arange(len(self._sequences)) - np.searchsorted(self._sequences, self._sequences),
        )

    def take_epoch(self, batch_size: int) -> tuple[Epoch, float]:
        """As :meth:`~sb3_grpo.arithmetic.torch_learner.TorchLearner.take_epoch`, but the divergence is always computed."""
        sums, norms = np.zeros(optimizer.N_SUMS), []
        approx_kl = 0.0
        for minibatch in self._shuffled(batch_size):
            approx_kl = self._evaluate(minibatch, sums, self._machine.gradient)
            if approx_kl > self._max_kl:  # not NaN, which is left to the check of the gradient
                break
            norms.append(self._machine.take_gradient_step(self._objective.max_grad_norm))
        self._machine.show_gradient()
        return self._epoch(sums)._replace(n_steps=len(norms), grad_norm=sum(norms) / max(len(norms), 1)), approx_kl

    def _shuffled(self, batch_size: int) -> Iterable[Rows]:
        """:return: The minibatches of an epoch, in random order"""
        if self._network.has_memory:
            return map(self._side_by_side, self._rollout_buffer.whole_batches(self._sequences, batch_size))
        shuffled, minibatches = self._minibatches(batch_size)
        order = self._rollout_buffer.permutation()
        for array, target in zip(self._rows, shuffled, strict=True):
            if len(array) > 0:
                np.take(array, order, axis=0, out=target, mode="clip")  # which is the mode that needs no copy
        return minibatches

    def _side_by_side(self, index: np.ndarray) -> Rows:
        """:return: The transitions of whole sequences, in the order of :mod:`~sb3_grpo.arithmetic.machine_code.recurrent`"""
        labels = self._sequences[index]
        return self._rows.take(index[np.lexsort((-np.bincount(labels)[labels], self._rows.steps[index]))])

    def _minibatches_of(self, batch_size: int) -> tuple[Rows, list[Rows]]:
        """:return: Memory for the transitions in the order of an epoch, and its minibatches, which are views of it"""
        shuffled, n = Rows(*map(np.empty_like, self._rows)), len(self._rows.advantages)
        return shuffled, [shuffled.take(slice(first, first + batch_size)) for first in range(0, n, batch_size)]

    def _evaluate(self, rows: Rows, sums: np.ndarray, gradient: np.ndarray | None = None) -> float:
        """
        The loss of a minibatch: its metrics and its gradient.

        :param sums: The :class:`~sb3_grpo.arithmetic.machine_code.optimizer.Sums` to which those of the minibatch are added
        :param gradient: Receives the gradient, shape of the parameters
        :return: Estimate of the divergence from the old policy
        """
        objective, network, parameters = self._objective, self._network, self._machine.parameters
        family, n, running = network.family, len(rows.advantages), rows.running
        values, inputs, outputs, terms, grad_terms, grad_outputs = self._workspace(n, rows.n_sequences)
        inputs[:] = rows.features
        network.forward(parameters, values, n, rows.forced, running, rows.states)
        distribution = network.distribution(outputs, network.log_std(parameters))
        known = *distribution, rows.reference, self._reference_log_std, rows.actions
        family.evaluate.run(*known, terms)
        approx_kl: float = optimizer.surrogate.run(
            terms,
            rows.old_log_prob,
            rows.advantages,
            rows.weights,
            *objective.clip_range,
            objective.ent_coef,
            objective.kl_coef,
            grad_terms,
            sums,
        )
        if gradient is not None:
            family.backward.run(*known, grad_terms, grad_outputs, network.log_std(gradient))
            network.backward(parameters, values, grad_outputs, gradient, running)
        return approx_kl

    # --- the policy as a natural-gradient step sees it ----------------------------------------------------------------

    @functools.cached_property
    def _all(self) -> Rows:
        """All transitions."""
        return self._side_by_side(np.arange(len(self._sequences))) if self._network.has_memory else self._rows

    @property
    def n_components(self) -> int:
        return get_action_dim(self._policy.action_space)

    def loss_and_gradient(self) -> tuple[float, th.Tensor]:
        parameters = self._machine.parameters.copy()
        gradient, self._sums = self._machine.gradient, np.zeros(optimizer.N_SUMS)
        self._evaluate(self._all, self._sums, gradient)
        self._machine.show_gradient()
        # Outputs and log standard deviations before the step
        outputs = self._workspace(len(self._all.advantages), self._all.n_sequences).outputs
        self._before = outputs.copy(), self._network.log_std(parameters)
        stride = fisher_stride(len(self._all.advantages))
        if self._network.has_memory:
            rows = self._side_by_side(np.flatnonzero(self._sequences % stride == 0))
        else:
            rows = self._all.take(slice(None, None, stride))
        self._fisher = functools.partial(self._fisher_product, parameters, rows.running, *self._evaluated(parameters, rows))
        return float(self._sums[optimizer.LOSS]), th.from_numpy(gradient)

    def _evaluated(self, parameters: np.ndarray, rows: Rows) -> tuple[np.ndarray, Distribution]:
        """:return: The numbers of all layers for some parameters, and the action distributions"""
        n = len(rows.advantages)
        values = self._network.new_values(n, rows.n_sequences)
        values[: rows.features.size] = np.ravel(rows.features)
        outputs = self._network.forward(parameters, values, n, rows.forced, rows.running, rows.states)
        return values, self._network.distribution(outputs, self._network.log_std(parameters))

    def _fisher_product(
        self, parameters: np.ndarray, running: np.ndarray, values: np.ndarray, distribution: Distribution, vector: np.ndarray
    ) -> np.ndarray:
        """
        ``1/n sum_t J_t' M_t J_t v``, where ``J`` is the Jacobian of the outputs and ``M`` the Fisher matrix of the action
        distribution. That of ``log sigma`` is twice the identity.
        """
        n = len(distribution.outputs)
        tangent = self._network.tangent(parameters, values, vector, n, running)
        self._network.family.fisher.run(*distribution, tangent)
        tangent *= np.float32(1.0) / np.float32(n)
        product = np.empty_like(parameters)
        self._network.backward(parameters, values, tangent, product, running)
        self._network.log_std(product)[:] = np.float32(2.0) * self._network.log_std(vector)
        return product

    def fisher_product(self, vector: th.Tensor) -> th.Tensor:
        return th.from_numpy(self._fisher(vector.numpy()))

    def largest_changes(self, limit: float) -> th.Tensor:
        return self._policy.largest_changes(self._machine.tensors, limit)

    def weights(self) -> th.Tensor:
        return th.from_numpy(self._machine.parameters.copy())

    def move(self, weights: th.Tensor) -> None:
        self._machine.parameters[:] = weights.numpy()

    def loss(self) -> float:
        self._sums = np.zeros(optimizer.N_SUMS)
        self._evaluate(self._all, self._sums)
        return float(self._sums[optimizer.LOSS])

    def log_probs(self) -> th.Tensor:
        self.loss()
        return th.from_numpy(self._workspace(len(self._all.advantages), self._all.n_sequences).terms[0].copy())

    def divergence(self) -> float:
        distribution, actions = self._evaluated(self._machine.parameters, self._all)[1], np.zeros_like(self._all.actions)
        terms = np.empty((3, len(actions)), np.float32)
        self._network.family.evaluate.run(*distribution, *self._before, actions, terms)
        return float(terms[2].mean(dtype=np.float64))

    def epoch(self) -> Epoch:
        """:return: Metrics of the last :meth:`loss`"""
        return self._epoch(self._sums)

    def _epoch(self, numbers: np.ndarray) -> Epoch:
        sums = optimizer.Sums(*numbers.tolist())
        return Epoch(
            n=sums.n,
            n_minibatches=sums.n_minibatches,
            n_steps=0.0,
            entropy=sums.entropy / sums.n,
            policy_gradient_loss=sums.surrogate / sums.n_minibatches,
            approx_kl=sums.approx_kl / sums.n,
            clip_fraction_low=sums.clipped_low / sums.n,
            clip_fraction_high=sums.clipped_high / sums.n,
            effective_sample_size=sums.ratio**2 / (sums.n * sums.ratio_squared),
            kl=sums.kl / sums.n if self._objective.kl_coef > 0 else None,
            grad_norm=0.0,
            loss=sums.loss,
        )


def array_of(tensor: th.Tensor) -> np.ndarray:
    """:return: The numbers of a tensor in single precision, contiguous"""
    return np.ascontiguousarray(tensor.numpy(), dtype=np.float32)
