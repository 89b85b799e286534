"""Pallas kernels: what XLA alone does slowly on an accelerator. Each module holds one kernel and what it costs."""
