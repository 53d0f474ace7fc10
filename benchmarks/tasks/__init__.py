"""
Gymnasium environments whose seed fixes a stream of inputs that nobody controls and that drives the rewards: jobs,
demand, prices, bandwidth, wind. Members of a group live through the same inputs, whatever they do.

Importing ``benchmarks`` registers them. Their modules are imported when an environment is made, so that registering costs
next to nothing; in a process that has not imported it, such as a worker, write
``gym.make("benchmarks.tasks:sb3_grpo/LoadBalancing-v0")``.
"""

from importlib import import_module
from typing import Any

from gymnasium.envs.registration import register

#: Id of each environment, its class, and its time limit; ``None`` where episodes end by themselves.
TASKS = {
    "sb3_grpo/LoadBalancing-v0": ("load_balancing:LoadBalancingEnv", None),
    "sb3_grpo/LostSales-v0": ("lost_sales:LostSalesEnv", None),
    "sb3_grpo/EnergyStorage-v0": ("energy_storage:EnergyStorageEnv", None),
    "sb3_grpo/BitRate-v0": ("bit_rate:BitRateEnv", None),
    "sb3_grpo/GustyHalfCheetah-v0": ("gusty_half_cheetah:GustyHalfCheetahEnv", 1000),
    "sb3_grpo/Queueing-v0": ("queueing:QueueingEnv", None),
    "sb3_grpo/TokenArithmetic-v0": ("token_arithmetic:TokenArithmeticEnv", None),
}
#: The same of environments with action masks
MASKED_TASKS = {
    "sb3_grpo/FullServers-v0": ("load_balancing:FullServersEnv", None),
    "sb3_grpo/TMaze-v0": ("t_maze:TMazeEnv", None),
}


def make(task: str, **kwargs: Any) -> Any:
    """
    Make an environment; ``gymnasium.make`` calls this.

    It is a function because of Gymnasium's warning about a class that cannot render ``rgb_array``, the mode SB3 asks
    for first.

    :param task: Module and class of the environment, separated by a colon
    :param kwargs: Arguments of the class
    :return: The environment
    """
    module, name = task.split(":")
    return getattr(import_module(f"benchmarks.tasks.{module}"), name)(**kwargs)


for env_id, (task, max_episode_steps) in {**TASKS, **MASKED_TASKS}.items():
    register(env_id, entry_point="benchmarks.tasks:make", max_episode_steps=max_episode_steps, kwargs={"task": task})
