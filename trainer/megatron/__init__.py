"""All code that knows Megatron-core: model, weights, optimizer, checkpoints. No training loop, no rollouts.

The code is written for megatron-core 0.16.1, and every workaround names that version. Importing this package installs
the port to machines without CUDA (trainer/megatron/cpu.py), so its modules may import megatron.core.
"""

from trainer.megatron.cpu import install_cpu_port

install_cpu_port()
