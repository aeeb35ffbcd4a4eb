"""All code that knows Megatron-core: model, weights, optimizer, checkpoints. No training loop, no rollouts.

The code is written for megatron-core 0.16.1, and every workaround names that version. Importing this package installs
the port to machines without CUDA and imports megatron.core without what it does not need (trainer/megatron/cpu.py).
"""

from trainer.megatron.cpu import import_megatron, install_cpu_port

install_cpu_port()
import_megatron()
