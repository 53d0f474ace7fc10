"""
Record what agents have learned: trains with the default settings and writes `docs/animations/*.webp`.

    python -m benchmarks.animations               # all of them, about eight minutes
    python -m benchmarks.animations CartPole-v1

Each animation shows the policy before training on the left, and after it on the right, from the same seeds. HalfCheetah needs
a way to render without a display: `MUJOCO_GL=egl`, or `MUJOCO_GL=osmesa`.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch as th
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image, ImageDraw
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.env_util import make_vec_env

from sb3_grpo import GRPO

FOLDER = Path(__file__).parents[1] / "docs" / "animations"
#: Environment: steps of training, steps from one frame to the next, and frames. No file is larger than 200 kB
RECORDED = {
    "CartPole-v1": (100_000, 2, 100),
    "LunarLander-v3": (600_000, 3, 100),
    "HalfCheetah-v5": (300_000, 2, 45),
    "sb3_grpo/LoadBalancing-v0": (200_000, 1, 100),
    "MinAtar/SpaceInvaders-v1": (200_000, 1, 100),
}
#: How to render where the default does not do: the camera of MuJoCo stays behind
RENDERING: dict[str, dict[str, Any]] = {
    "HalfCheetah-v5": dict(render_mode="rgb_array", camera_name="track", width=480, height=320),
}
FRAMES_PER_SECOND = 25
#: Width of one picture in pixels, of the gap between two, and height of the strip with its title
WIDTH, GAP, STRIP = 300, 6, 26
#: Seed of the first recorded episode, far from those of training
SEED = 1_000_000


def draw_queues(env: Any) -> np.ndarray:
    """
    :param env: Load balancing
    :return: Picture of the queues, shape ``(height, width, 3)``
    """
    figure = Figure(figsize=(3, 2), dpi=100, layout="constrained")
    axis = figure.subplots()
    servers = np.arange(len(env.n_queued))
    axis.barh(servers, env.n_queued, color="tab:blue")
    axis.set(xlim=(0, 20), xlabel=f"jobs at each server ({sum(env.n_queued)} in all)", ylabel="faster servers")
    axis.set_yticks([])
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def draw_board(env: Any) -> np.ndarray:
    """
    :param env: One of MinAtar's games
    :return: Picture of the board, each channel in a colour of its own, shape ``(height, width, 3)``
    """
    board = env.game.state()
    colours = np.vstack([[0, 0, 0], colormaps["tab10"](np.arange(board.shape[-1]), bytes=True)[:, :3]]).astype(np.uint8)
    uppermost = np.max(board * np.arange(1, board.shape[-1] + 1), axis=-1)
    square = np.pad(np.ones((28, 28, 1), dtype=np.uint8), ((1, 1), (1, 1), (0, 0)))
    return np.kron(colours[uppermost], square)


#: How to draw environments that are not rendered
DRAWING: dict[str, Callable[[Any], np.ndarray]] = {
    "sb3_grpo/LoadBalancing-v0": draw_queues,
    "MinAtar/SpaceInvaders-v1": draw_board,
}


def frames(model: BaseAlgorithm, env: gym.Env, seed: int, every: int) -> Iterator[np.ndarray]:
    """
    Act deterministically, episode after episode.

    :param model: Whose policy acts
    :param env: Environment that renders ``rgb_array`` or is one of :data:`DRAWING`
    :param seed: Seed of the first episode
    :param every: Steps from one frame to the next
    :return: Pictures, without end, shape ``(height, width, 3)``
    """
    assert env.spec is not None
    own = DRAWING.get(env.spec.id)
    draw: Callable[[], Any] = env.render if own is None else partial(own, env.unwrapped)
    while True:
        observation, _ = env.reset(seed=seed)
        done, n_steps, seed = False, 0, seed + 1
        while not done:
            if n_steps % every == 0:
                yield draw()
            action, _ = model.predict(observation, deterministic=True)
            observation, _, terminated, truncated, _ = env.step(action)
            done, n_steps = terminated or truncated, n_steps + 1


def side_by_side(pictures: list[np.ndarray], titles: list[str]) -> Image.Image:
    """
    :param pictures: Of the same shape ``(height, width, 3)``
    :param titles: One for each
    :return: The pictures with their titles
    """
    height = round(WIDTH * pictures[0].shape[0] / pictures[0].shape[1])
    whole = Image.new("RGB", ((WIDTH + GAP) * len(pictures) - GAP, height + STRIP), "#444444")
    pen = ImageDraw.Draw(whole)
    for i, (picture, title) in enumerate(zip(pictures, titles, strict=True)):
        whole.paste(Image.fromarray(picture).resize((WIDTH, height)), (i * (WIDTH + GAP), STRIP))
        pen.text((i * (WIDTH + GAP) + WIDTH / 2, STRIP / 2), title, fill="white", font_size=17, anchor="mm")
    return whole


def record(models: dict[str, BaseAlgorithm], env_id: str, path: Path, every: int = 2, n_frames: int = 100) -> None:
    """
    :param models: Models by title
    :param env_id: Environment to show them in
    :param path: File of the animation, ``.webp`` or ``.gif``
    :param every: Steps from one frame to the next
    :param n_frames: Number of frames
    """
    rendering = {} if env_id in DRAWING else RENDERING.get(env_id, dict(render_mode="rgb_array"))
    envs = [gym.make(env_id, **rendering) for _ in models]
    films = [frames(model, env, SEED, every) for model, env in zip(models.values(), envs, strict=True)]
    images = [side_by_side(list(pictures), list(models)) for pictures in islice(zip(*films, strict=True), n_frames)]
    images[0].save(
        path, save_all=True, append_images=images[1:], duration=1000 // FRAMES_PER_SECOND, loop=0, quality=25, method=6
    )
    for env in envs:
        env.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("envs", nargs="*", default=list(RECORDED), metavar="ENV", help="one of " + ", ".join(RECORDED))
    args = parser.parse_args()
    th.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    for env_id in args.envs:
        if env_id.startswith("MinAtar/"):
            from minatar.gym import register_envs  # not among the packages with which the quickstart runs

            register_envs()
        timesteps, *cut = RECORDED[env_id]
        env = make_vec_env(env_id, n_envs=8, seed=0)
        policy = "MlpPolicy" if len(env.observation_space.shape or ()) == 1 else "CnnPolicy"
        untrained, trained = GRPO(policy, env, seed=0), GRPO(policy, make_vec_env(env_id, n_envs=8, seed=0), seed=0)
        trained.learn(timesteps, progress_bar=True)
        path = FOLDER / f"{env_id.split('/')[-1].split('-')[0].lower()}.webp"
        record({"before training": untrained, f"after {timesteps:,} steps": trained}, env_id, path, *cut)
        print(f"{path}: {path.stat().st_size / 1024:.0f} kB")


if __name__ == "__main__":
    main()
