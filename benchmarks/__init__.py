"""Benchmarks of ``sb3_grpo``, and the environments in ``benchmarks.tasks``, which this registers."""

from benchmarks import tasks

__all__ = ["tasks"]
