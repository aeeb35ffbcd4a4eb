"""Attention over prefix trees: the module for Megatron's layers and the kernels behind it. No other layers."""
