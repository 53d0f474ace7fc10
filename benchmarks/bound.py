"""The work that any on-policy method has to do, without a library around it: a bound for the speed of GRPO."""

import numpy as np
import torch as th
from gymnasium import spaces
from stable_baselines3.common.preprocessing import is_image_space, preprocess_obs
from stable_baselines3.common.torch_layers import NatureCNN
from stable_baselines3.common.vec_env import VecEnv, VecTransposeImage
from torch import nn


class LeanActor:
    """
    Steps environments, acts by one pass of a network, and updates it by the clipped surrogate, with rewards as advantages.

    :param env: Vectorised environment with Discrete or Box actions
    :param is_cnn: Use SB3's convolutional network in the place of two hidden layers
    :param n_steps: Steps per environment and rollout
    :param batch_size: Minibatch size
    :param n_epochs: Passes over a rollout
    """

    def __init__(self, env: VecEnv, is_cnn: bool, n_steps: int, batch_size: int, n_epochs: int):
        th.manual_seed(0)
        self.env = VecTransposeImage(env) if is_image_space(env.observation_space) else env
        self.n_steps, self.batch_size, self.n_epochs = n_steps, batch_size, n_epochs
        self.space = self.env.action_space
        assert isinstance(self.space, spaces.Discrete | spaces.Box), f"no bound for {self.space}"
        outputs = int(self.space.n) if isinstance(self.space, spaces.Discrete) else int(np.prod(self.space.shape))
        if is_cnn:
            assert isinstance(self.env.observation_space, spaces.Box)
            extractor = NatureCNN(self.env.observation_space)
            self.net = nn.Sequential(extractor, nn.Linear(extractor.features_dim, outputs))
        else:
            inputs = int(np.prod(self.env.observation_space.shape))  # type: ignore[arg-type]
            hidden = [nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
            self.net = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, outputs))
        self.log_std = nn.Parameter(th.zeros(outputs))
        self.parameters = [*self.net.parameters(), *([self.log_std] if isinstance(self.space, spaces.Box) else [])]
        self.optimizer = th.optim.Adam(self.parameters, lr=3e-4, eps=1e-5, fused=True)
        self.obs = np.asarray(self.env.reset())

    def forward(self, obs: th.Tensor) -> th.Tensor:
        """
        :param obs: Shape ``(n, ...)``
        :return: Outputs of the network, shape ``(n, outputs)``
        """
        return self.net(preprocess_obs(obs, self.env.observation_space))

    def log_prob(self, outputs: th.Tensor, actions: th.Tensor) -> th.Tensor:
        """
        :param outputs: Outputs of the network, shape ``(n, outputs)``
        :param actions: Shape ``(n,)`` or ``(n, outputs)``
        :return: Log-probabilities, shape ``(n,)``
        """
        if isinstance(self.space, spaces.Discrete):
            return th.log_softmax(outputs, dim=1).gather(1, actions[:, None])[:, 0]
        return (-0.5 * ((actions - outputs) * th.exp(-self.log_std)) ** 2 - self.log_std).sum(dim=1)

    def learn(self, total_timesteps: int) -> None:
        """
        :param total_timesteps: A multiple of the rollout
        """
        for _ in range(total_timesteps // (self.n_steps * self.env.num_envs)):
            observations, actions, log_probs, rewards = zip(*(self.step() for _ in range(self.n_steps)), strict=True)
            self.update(
                np.concatenate(observations), th.cat(actions), th.cat(log_probs), th.as_tensor(np.concatenate(rewards))
            )

    def step(self) -> tuple[np.ndarray, th.Tensor, th.Tensor, np.ndarray]:
        """:return: Observations, actions, log-probabilities and rewards of one step of all environments"""
        obs = self.obs
        with th.inference_mode():
            outputs = self.forward(th.as_tensor(obs))
            if isinstance(self.space, spaces.Discrete):
                actions = (outputs - th.empty_like(outputs).exponential_().log_()).argmax(dim=1)
            else:
                actions = outputs + th.exp(self.log_std) * th.randn_like(outputs)
            log_probs = self.log_prob(outputs, actions)
        taken = actions.numpy()
        if isinstance(self.space, spaces.Box):
            taken = np.clip(taken, self.space.low, self.space.high)
        next_obs, rewards, _, _ = self.env.step(taken)
        self.obs = np.asarray(next_obs)
        return obs, actions, log_probs, rewards

    def update(self, obs: np.ndarray, actions: th.Tensor, old_log_probs: th.Tensor, advantages: th.Tensor) -> None:
        """
        :param obs: Shape ``(n, ...)``
        :param actions: Shape ``(n,)`` or ``(n, outputs)``
        :param old_log_probs: Shape ``(n,)``
        :param advantages: Shape ``(n,)``
        """
        observations = th.as_tensor(obs)
        for _ in range(self.n_epochs):
            for batch in th.randperm(len(observations)).split(self.batch_size):
                ratio = th.exp(self.log_prob(self.forward(observations[batch]), actions[batch]) - old_log_probs[batch])
                gain = advantages[batch]
                loss = -th.min(ratio * gain, th.clamp(ratio, 0.8, 1.2) * gain).mean()
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.parameters, 0.5)
                self.optimizer.step()
