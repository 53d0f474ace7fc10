"""The quickstart trains, and prints a screen."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence

from benchmarks import quickstart
from sb3_grpo import GRPO


def test_the_quickstart_prints_a_screen_with_its_settings_its_result_and_its_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "argv", ["quickstart", "--timesteps", "4096", "--out", str(tmp_path)])
    quickstart.main()
    printed = capsys.readouterr().out
    assert len(printed.splitlines()) <= 24
    assert "Using the kernel buffer" in printed
    assert "rollout/" not in printed and "train/" not in printed
    result = re.search(r"20 evaluation episodes: (\d+\.\d) \+/- .* counts as solved from 475", printed)
    assert result and float(result[1]) > 60  # random actions get 23
    for name in ("CartPole-v1.zip", "CartPole-v1.png", "CartPole-v1.gif"):
        assert f" {tmp_path / name}\n" in printed and (tmp_path / name).is_file()


def test_the_quickstart_needs_only_what_make_train_installs():
    others = ["minatar", "minigrid", "moviepy", "mujoco", "pandas", "ray", "requests", "rl_zoo3", "rliable", "sb3_contrib"]
    code = f"import sys; sys.modules.update(dict.fromkeys({others})); import benchmarks.quickstart"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_the_animation_shows_that_the_trained_policy_moves(tmp_path: Path):
    model = GRPO("MlpPolicy", "CartPole-v1", seed=0)
    assert quickstart.animation(model, "CartPole-v1", seed=0, path=tmp_path / "film.gif") == str(tmp_path / "film.gif")
    with Image.open(tmp_path / "film.gif") as film:
        frames = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(film)]
    assert len(frames) > 50 and frames[0].shape == (226, 606, 3)
    assert np.abs(frames[0].astype(int) - frames[5]).max() > 100


def test_an_environment_without_pictures_costs_the_animation_alone(tmp_path: Path):
    model = GRPO("MlpPolicy", "sb3_grpo/LostSales-v0", seed=0)
    text = quickstart.animation(model, "sb3_grpo/LostSales-v0", seed=0, path=tmp_path / "film.gif")
    assert text.startswith("none, because sb3_grpo/LostSales-v0 cannot be rendered here")
