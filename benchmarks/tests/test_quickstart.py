"""The quickstart trains, and prints a screen."""

import re
import sys
from pathlib import Path

import pytest

from benchmarks import quickstart


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
    for name in ("CartPole-v1.zip", "CartPole-v1.png"):
        assert f" {tmp_path / name}\n" in printed and (tmp_path / name).is_file()
