"""The rules of the house that a machine can hold: direction of imports, version, exported names, examples in the docs."""

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
from stable_baselines3.common.callbacks import BaseCallback

import sb3_grpo
from sb3_grpo import GRPO
from sb3_grpo.buffers import BUFFERS
from sb3_grpo.doctor import SYMPTOMS

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "sb3_grpo"
#: Each example, by the first page that has it
PAGE_OF = {
    code: f"{page.name} example {i}"
    for page in (*sorted((ROOT / "docs").glob("*.md"), reverse=True), ROOT / "README.md")
    for i, code in enumerate(
        re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE), 1
    )
}
EXAMPLES = [
    # Ray runs in one process of the tests only
    pytest.param(code, id=name, marks=[pytest.mark.xdist_group("ray")] * ("RayVecEnv" in code))
    for code, name in PAGE_OF.items()
]

# What each module may import from the package; ``__init__`` is the package itself, ``sb3_grpo``.
CORE = {
    "advantages",
    "arithmetic",
    "baseline",
    "buffers",
    "compile",
    "doctor",
    "export",
    "grpo",
    "losses",
    "maskable",
    "persistence",
    "policies",
    "recurrent",
    "scenarios",
    "settings",
    "shared_inputs",
    "starts",
    "transfer",
    "validation",
}
MAY_IMPORT: dict[str, set[str]] = {
    "advantages": set(),
    "arithmetic": {"arithmetic", "buffers", "extractors", "losses", "masks", "policies", "validation"},
    "baseline": set(),
    "compile": {"arithmetic"},
    "doctor": {"masks", "shared_inputs", "validation"},
    "extractors": set(),
    "fit_inputs": {"extractors", "observations", "policies"},
    "export": {"arithmetic", "grpo", "maskable", "masks", "observations", "policies", "recurrent"},
    "gymnasium_vector": {"observations"},
    "maskable": {"grpo", "masks"},
    "masks": set(),
    "losses": set(),
    "normalization": {"observations"},
    "observations": set(),
    "persistence": {"arithmetic", "buffers", "policies", "settings", "starts", "validation"},
    "questions": set(),
    "recurrent": {"grpo", "maskable", "policies", "validation"},
    "relative": {"advantages"},
    "scenarios": set(),
    "shared_inputs": {"advantages", "baseline", "fit_inputs", "observations", "persistence", "relative", "validation"},
    "starts": {"masks", "observations", "questions", "starts", "validation", "vec_wrappers"},
    "collection": {"arithmetic", "buffers", "observations", "policies", "starts", "validation", "vec_wrappers"},
    "distributed": {"collection", "distributed", "observations", "persistence", "policies", "starts", "validation"},
    "transfer": {"policies"},
    "validation": {"observations", "questions"},
    "vec_wrappers": set(),
    "policies": {"extractors", "masks", "normalization", "observations", "validation"},
    "buffers": {
        "advantages",
        "baseline",
        "buffers",
        "fit_inputs",
        "losses",
        "observations",
        "policies",
        "relative",
        "starts",
        "validation",
        "vec_wrappers",
    },
    "settings": {"arithmetic", "buffers", "losses", "policies", "questions", "validation"},
    "grpo": {
        "arithmetic",
        "gymnasium_vector",
        "buffers",
        "collection",
        "losses",
        "normalization",
        "observations",
        "persistence",
        "policies",
        "settings",
        "starts",
        "validation",
    },
    "__init__": CORE,
    "zoo": {*CORE, "__init__", "distributed", "zoo"},
}
# Modules from outside, and the only modules of the package that may import them.
RESERVED: dict[str, set[str]] = {
    "rl_zoo3": {"zoo"},
    "ray": {"distributed"},
    "benchmarks": set(),
    "tests": set(),
    "pytest": set(),
    "_pytest": set(),
}


def imported_names(tree: ast.AST, module: str) -> Iterator[str]:
    """
    Yield each imported name, dotted and absolute, wherever in the file the import stands.

    :param tree: The parsed source
    :param module: Dotted name of the file, ``sb3_grpo.buffers`` or ``sb3_grpo.zoo.__init__``
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = module.split(".")[: -node.level] if node.level else []
            base += [node.module] if node.module else []
            yield from (".".join([*base, alias.name]) for alias in node.names)


def import_offences(source: str, module: str) -> list[str]:
    """
    Find the imports that go against the layers of the package.

    :param source: Python source of the module
    :param module: Dotted name of the module, ``sb3_grpo.buffers`` or ``sb3_grpo.zoo.__init__``
    :return: One line for each offending import
    """
    layer = module.split(".")[1]
    if layer not in MAY_IMPORT:
        return [f"{module} is new: give it a place in MAY_IMPORT"]
    offences = []
    for name in imported_names(ast.parse(source), module):
        top, _, rest = name.partition(".")
        target = rest.split(".")[0]
        if top == "sb3_grpo":
            # ``from sb3_grpo import GRPO`` and ``import sb3_grpo`` reach the package itself.
            allowed = (target if target in MAY_IMPORT else "__init__") in MAY_IMPORT[layer]
        else:
            allowed = layer in RESERVED.get(top, {layer})
        if not allowed:
            offences.append(f"{module} imports {name}")
    return offences


def test_imports_of_the_package_point_one_way():
    files = sorted(PACKAGE.rglob("*.py"))
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files}
    assert CORE <= {name.split(".")[1] for name in modules}
    offences = [line for name, file in modules.items() for line in import_offences(file.read_text(encoding="utf-8"), name)]
    assert not offences, "\n".join(offences)
    list(TopologicalSorter({module: may - {module} for module, may in MAY_IMPORT.items()}).static_order())  # no circle


def test_no_file_of_the_package_imports_itself_on_a_detour():
    files = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in PACKAGE.rglob("*.py")}

    def imported_files(module: str) -> set[str]:
        tree = ast.parse(files[module].read_text(encoding="utf-8"))
        names = {each for name in imported_names(tree, module) for each in (name, name.rpartition(".")[0])}
        return {each for each in names if each in files and each != module}

    assert "sb3_grpo.arithmetic.machine_code.jit" in imported_files("sb3_grpo.arithmetic.machine_code.layers")
    list(TopologicalSorter({module: imported_files(module) for module in files}).static_order())


@pytest.mark.parametrize(
    ("module", "source"),
    [
        pytest.param("advantages", "from sb3_grpo.baseline import KernelBaseline", id="absolute"),
        pytest.param("buffers", "def f():\n    from sb3_grpo.collection import collect", id="inside a function"),
        pytest.param("buffers", "from sb3_grpo import GRPO", id="name of the package"),
        pytest.param("zoo.cli", "from benchmarks import quickstart", id="benchmarks"),
        pytest.param("helpers", "import numpy", id="module without a layer"),
    ],
)
def test_an_import_against_the_layers_is_an_offence(module: str, source: str):
    assert len(import_offences(source, f"sb3_grpo.{module}")) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        pytest.param("grpo", "import numpy\nfrom sb3_grpo import buffers, policies, starts", id="grpo to its parts"),
        pytest.param("zoo.cli", "from rl_zoo3 import ALGOS\nfrom ..grpo import GRPO\nfrom . import cli", id="zoo module"),
    ],
)
def test_an_import_along_the_layers_is_no_offence(module: str, source: str):
    assert import_offences(source, f"sb3_grpo.{module}") == []


def test_the_version_is_that_of_version_txt():
    assert sb3_grpo.__version__ == (PACKAGE / "version.txt").read_text(encoding="utf-8").strip()


def test_every_exported_name_has_a_docstring():
    assert not [name for name in sb3_grpo.__all__ if not (getattr(sb3_grpo, name).__doc__ or "").strip()]


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_runs_as_written(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "example", "exec"), {"__name__": "__main__"})


class LoggedKeys(BaseCallback):
    """Records the keys that GRPO itself has logged."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: set[str] = set()

    def _on_step(self) -> bool:
        self.keys |= {key for key in self.logger.name_to_value if not key.startswith("time/")}
        return True

    def _on_rollout_end(self) -> None:
        self._on_step()

    def _on_training_end(self) -> None:
        self._on_step()


def logged_keys() -> set[str]:
    """:return: Keys that some buffer or option logs"""
    watcher = LoggedKeys()
    for buffer in BUFFERS:
        options: dict[str, Any] = dict(
            objective=dict(kl_coef=0.1, adaptive_kl_target=0.1, clip_range_high=0.3),
            rollout_buffer_class=buffer,
        )
        for env in ("CartPole-v1", "Pendulum-v1"):
            model = GRPO("MlpPolicy", env, n_steps=420, batch_size=60, n_epochs=1, **options)
            model.learn(840, callback=watcher, log_interval=100)
    GRPO("MlpPolicy", "Pendulum-v1", n_steps=64, update_rule="natural").learn(128, callback=watcher, log_interval=100)
    # These are recorded when the log is written, after the last call of a callback.
    return watcher.keys | {"rollout/ep_rew_mean", "rollout/ep_len_mean"}


def test_the_glossary_explains_each_logged_key_and_no_other():
    page = (ROOT / "docs" / "diagnostics.md").read_text(encoding="utf-8")
    first_cells = [line.split(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    explained = re.findall(r"`([a-z]+/\w+)`", " ".join(first_cells))
    assert len(explained) == len(set(explained))
    assert set(explained) == logged_keys()


def test_the_docs_name_each_pattern_that_the_doctor_knows():
    page = (ROOT / "docs" / "callbacks.md").read_text(encoding="utf-8").split("## The doctor")[1]
    assert re.findall(r"^\| (\w[\w ]+) \| ", page, re.MULTILINE)[1:] == [symptom.name for symptom in SYMPTOMS]
