"""Kernels, one file each: the inner loops of attention, which share the contract of `nanochat_lib.attention`, and the
sum by segments of embedding gradients.
"""
