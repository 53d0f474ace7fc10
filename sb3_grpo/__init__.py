"""Group Relative Policy Optimization for Stable-Baselines3."""

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
from sb3_grpo.export import export_onnx
from sb3_grpo.grpo import GRPO
from sb3_grpo.maskable import MaskableGRPO
from sb3_grpo.persistence import VERSION
from sb3_grpo.policies import ActorPolicy, CnnPolicy, MlpPolicy, MultiInputPolicy
from sb3_grpo.recurrent import CnnLstmPolicy, MlpLstmPolicy, MultiInputLstmPolicy, RecurrentGRPO
from sb3_grpo.scenarios import Scenarios
from sb3_grpo.settings import ObjectiveOptions
from sb3_grpo.shared_inputs import SharedInputs, check_shared_inputs
from sb3_grpo.starts import EnvironmentFault
from sb3_grpo.transfer import load_actor

__version__ = VERSION

__all__ = [
    "GRPO",
    "ActorPolicy",
    "CnnLstmPolicy",
    "CnnPolicy",
    "CompleteGroupRolloutBuffer",
    "Doctor",
    "EnvironmentFault",
    "GroupRolloutBuffer",
    "KernelRolloutBuffer",
    "MaskableGRPO",
    "MlpLstmPolicy",
    "MlpPolicy",
    "MultiInputLstmPolicy",
    "MultiInputPolicy",
    "ObjectiveOptions",
    "OutcomeRolloutBuffer",
    "ProcessRolloutBuffer",
    "RecurrentGRPO",
    "ReturnToGoRolloutBuffer",
    "Scenarios",
    "SharedInputs",
    "StepwiseRolloutBuffer",
    "check_shared_inputs",
    "export_onnx",
    "load_actor",
]
