"""Attention over prefix trees, and the kernels that compute it. No model layers."""
