"""What is raised when an environment cannot go on."""

import sys

#: What the methods of an environment return. Those of older versions of Gym returned less.
RETURNED = {"reset": "observation, info", "step": "observation, reward, terminated, truncated, info"}


class EnvironmentFault(RuntimeError):
    """
    The process of an environment has ended, or an environment has returned an observation of the wrong shape. The rollout was
    not used for learning. The model can be saved, and it can continue with another environment.

    :param env_idx: Index of the environment
    :param what: Description of the fault, which follows the words "Environment 3"
    """

    def __init__(self, env_idx: int, what: str):
        super().__init__(env_idx, what)
        self.env_idx = env_idx

    def __str__(self) -> str:
        env_idx, what = self.args
        return (
            f"Environment {env_idx} {what}. The rollout was discarded, so the model can be saved, and can continue after "
            "`set_env` with an environment that works."
        )


class RolloutLost(EnvironmentFault):
    """A worker was lost, and its environments cannot be brought back to where they were: all of them have to be reset."""


def add_note(error: BaseException, note: str) -> None:
    """Add a sentence to an exception of the user's code, whose type and traceback stay. Python 3.10 cannot do this."""
    if sys.version_info >= (3, 11):
        error.add_note(note)


def name_environment(error: Exception, env_idx: int, method: str) -> None:
    """Say in an exception of the user's code in which environment, by which method, it was raised."""
    where = f"This was raised by `{method}` of environment {env_idx}."
    add_note(error, f"{where} The rollout was discarded; the model can be saved.")
    if isinstance(error, ValueError) and "values to unpack" in str(error):
        add_note(error, f"In Gymnasium, `{method}` returns `{RETURNED[method]}`.")
