"""Group Relative Policy Optimization for Stable-Baselines3."""

import pathlib

from sb3_grpo.buffers import (
    CompleteGroupRolloutBuffer,
    GroupRolloutBuffer,
    KernelRolloutBuffer,
    OutcomeRolloutBuffer,
    ProcessRolloutBuffer,
    ReturnToGoRolloutBuffer,
    StepwiseRolloutBuffer,
)
from sb3_grpo.doctor import Doctor
from sb3_grpo.grpo import GRPO
from sb3_grpo.policies import ActorPolicy, CnnPolicy, MlpPolicy, MultiInputPolicy, load_actor

__version__ = pathlib.Path(__file__).with_name("version.txt").read_text().strip()

__all__ = [
    "GRPO",
    "ActorPolicy",
    "CnnPolicy",
    "CompleteGroupRolloutBuffer",
    "Doctor",
    "GroupRolloutBuffer",
    "KernelRolloutBuffer",
    "MlpPolicy",
    "MultiInputPolicy",
    "OutcomeRolloutBuffer",
    "ProcessRolloutBuffer",
    "ReturnToGoRolloutBuffer",
    "StepwiseRolloutBuffer",
    "load_actor",
]
