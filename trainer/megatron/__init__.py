"""Everything that knows Megatron-core: model, weights, optimizer, checkpoints, and its port to machines without CUDA.

Importing this package installs that port (trainer/megatron/cpu.py), so that its modules may import megatron.core.
"""

from trainer.megatron.cpu import install_cpu_port

install_cpu_port()
