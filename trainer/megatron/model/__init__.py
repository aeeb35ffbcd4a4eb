"""The policy network in Megatron-core: dense layers and layers with experts. No training, no weights files."""
