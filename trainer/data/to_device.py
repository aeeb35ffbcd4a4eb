"""Copies to the device that training runs on."""

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """A tensor of these values on the device.

    From pinned memory, a copy to a GPU waits for nothing; from other memory, for all that the GPU still has to do.
    """
    tensor = torch.from_numpy(values)
    if device.type == "cpu":
        return tensor
    return (tensor.pin_memory() if torch.cuda.is_available() else tensor).to(device, non_blocking=True)
