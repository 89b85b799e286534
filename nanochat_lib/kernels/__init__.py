"""Attention's inner loops: one file a kernel, each with the same contract as `nanochat_lib.attention.attention`."""
