"""
Is the update as fast as it was? Times ``GRPO.train()`` with default settings here and at another commit, turn by turn.

    python -m benchmarks.update_time main~3     # ratio of times, this tree over that commit

The other commit is checked out into a temporary folder. Each tree has a process of its own, which collects one rollout and
then updates on it again and again; the two take turns, so that whatever else the machine does slows both. Printed are the
median of the paired ratios and an interval for it: below 1, this tree is faster.
"""

import argparse
import functools
import multiprocessing
import pathlib
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection

import numpy as np

from benchmarks.timing import median_with_interval, take_turns

ROOT = pathlib.Path(__file__).resolve().parents[1]


def serve(tree: str, env_id: str, n_envs: int, updates: int, connection: Connection) -> None:
    """
    Make updates on request, until the request is False.

    :param tree: folder from which to import the package
    :param env_id: Gymnasium environment
    :param n_envs: environments side by side
    :param updates: updates per request
    :param connection: requests come in and are answered here
    """
    sys.path.insert(0, tree)
    import torch as th
    from stable_baselines3.common.env_util import make_vec_env

    import sb3_grpo
    from sb3_grpo import GRPO

    assert pathlib.Path(sb3_grpo.__file__).is_relative_to(tree), f"{sb3_grpo.__file__} is not in {tree}"
    th.set_num_threads(1)
    model = GRPO("MlpPolicy", make_vec_env(env_id, n_envs, seed=0), seed=0, device="cpu")
    model.learn(1)  # a rollout and an update, to warm up
    connection.send(True)
    while connection.recv():
        for _ in range(updates):
            model.train()
        connection.send(True)


def request(connection: Connection) -> None:
    """
    :param connection: to a process that makes updates
    """
    connection.send(True)
    connection.recv()


def paired_times(trees: list[str], env_id: str, n_envs: int, updates: int, pairs: int) -> np.ndarray:
    """
    :param trees: folders to import the package from
    :param env_id: Gymnasium environment
    :param n_envs: environments side by side
    :param updates: updates per measurement
    :param pairs: measurements of each tree
    :return: seconds, shape ``(pairs, len(trees))``
    """
    context = multiprocessing.get_context("spawn")
    connections, processes = [], []
    for tree in trees:
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(tree, env_id, n_envs, updates, theirs), daemon=True))
        processes[-1].start()
        connections.append(ours)
    for connection in connections:
        connection.recv()
    times = take_turns({str(i): functools.partial(request, connection) for i, connection in enumerate(connections)}, pairs)
    for connection, process in zip(connections, processes, strict=True):
        connection.send(False)
        process.join()
    return np.column_stack(list(times.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", help="what to compare with")
    parser.add_argument("--env", default="CartPole-v1")
    parser.add_argument("--n-envs", type=int, default=8)
    parser.add_argument("--updates", type=int, default=1, help="updates per measurement")
    parser.add_argument("--pairs", type=int, default=40, help="measurements of each tree")
    args = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        other = str(pathlib.Path(folder) / "other")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", other, args.commit], cwd=ROOT, check=True)
        try:
            times = paired_times([str(ROOT), other], args.env, args.n_envs, args.updates, args.pairs)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", other], cwd=ROOT, check=True)
    ratio = median_with_interval(times[:, 0] / times[:, 1])
    here, there = np.median(times, axis=0) / args.updates
    print(f"update here {1e3 * here:.1f} ms, at {args.commit} {1e3 * there:.1f} ms (medians of {args.pairs})")
    print(f"ratio {ratio.median:.3f}, 95% interval {ratio.low:.3f} to {ratio.high:.3f}")


if __name__ == "__main__":
    main()
