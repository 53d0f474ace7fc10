from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
README = ROOT / "README.md"

# Learning curves, the window of CartPole, progress bar, TensorBoard logs
EXTRA = ["gymnasium[classic-control]", "matplotlib>=3.7", "rich>=13", "tensorboard>=2.14", "tqdm>=4.65"]
BOX2D = ["gymnasium[box2d]>=1.2.3"]  # older ones build box2d-py, which needs swig and a compiler
MUJOCO = ["gymnasium[mujoco]"]
MINIGRID = ["minigrid>=3.0"]
MINATAR = ["MinAtar>=1.0.15"]
# rl_zoo3 imports requests and pandas, and needs moviepy and pygame for videos, without asking for them
ZOO = ["rl_zoo3[plots]>=2.9,<3", "moviepy>=1.0.3", "pandas>=2.2", "requests>=2.31"]
DOCS = [
    "furo",
    "matplotlib",
    "myst-parser",
    "pandas",
    "sphinx",
    "sphinx-copybutton",
    "sphinx-gallery>=0.17",
    "sphinx-mathjax-offline",
]
RAY = ["ray>=2.40,<3"]
EXPORT = ["onnx>=1.18", "onnxscript>=0.5", "onnxruntime>=1.20"]
CONTRIB = ["sb3-contrib>=2.9,<3"]  # ActionMasker, and evaluation with action masks
LINT = ["black", "codespell", "mypy", "proselint", "ruff"]
RELEASE = ["build", "setuptools>=77", "twine", "uv"]
TESTS = [*LINT, *RELEASE, "ale-py", "hypothesis", "ipykernel", "nbclient", "opencv-python-headless", "pytest", "pytest-xdist"]

setup(
    name="sb3-grpo",
    version=(ROOT / "sb3_grpo" / "version.txt").read_text(encoding="utf-8").strip(),
    description="Group relative policy optimization (GRPO) for Stable-Baselines3: an actor, no critic.",
    long_description=README.read_text(encoding="utf-8") if README.is_file() else "",
    long_description_content_type="text/markdown",
    author="sb3-grpo contributors",
    license_expression="MIT",
    license_files=["LICENSE"],
    keywords="reinforcement-learning grpo policy-gradient critic-free stable-baselines3 gymnasium pytorch",
    packages=find_packages(include=["sb3_grpo", "sb3_grpo.*"]),
    package_data={"sb3_grpo": ["py.typed", "version.txt", "zoo/hyperparams/*.yml"]},
    entry_points={"console_scripts": ["sb3-grpo-zoo = sb3_grpo.zoo.cli:main"]},
    python_requires=">=3.10",
    install_requires=[
        "stable-baselines3>=2.9,<3",
        "gymnasium>=1.0,<2",
        "torch>=2.8,<3",
        "numpy>=1.24,<3",
        'numba>=0.61; python_version < "3.15"',  # without it, torch does the work
    ],
    extras_require={
        "extra": EXTRA,
        "box2d": BOX2D,
        "mujoco": MUJOCO,
        "minigrid": MINIGRID,
        "minatar": MINATAR,
        "zoo": ZOO + EXTRA,
        "ray": RAY,
        "contrib": CONTRIB,
        "export": EXPORT,
        "docs": DOCS,
        "tests": TESTS + DOCS + EXTRA + MINIGRID + ZOO + RAY + CONTRIB + EXPORT,
        "benchmarks": EXTRA + BOX2D + MUJOCO + MINIGRID + MINATAR + ZOO,
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: OS Independent",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
