"""The policy network in Megatron-core: dense and expert layers. No training."""
