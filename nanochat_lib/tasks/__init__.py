"""Chat tasks: where conversations come from and how an answer is scored."""

from nanochat_lib.tasks.common import Task, TaskMixture, TaskSequence

__all__ = ["Task", "TaskMixture", "TaskSequence"]
