"""Turns recorded rollouts into a better policy: Megatron-core, CISPO, and the push of new weights to the engines."""
