"""Lets the PyPI (CUDA) wheel of torchvision be imported beside a CPU build of torch.

SGLang and transformers import torchvision for its python part. Its C++ ops cannot load without CUDA, and its
`_meta_registrations` then fails on the missing op `torchvision::nms`. Declaring the two ops first is enough. Does
nothing beside a CUDA build of torch.
"""

import importlib.abc
import sys


class _BeforeTorchvision(importlib.abc.MetaPathFinder):
    """Declares the ops at the first import of torchvision, so that other processes do not pay for importing torch."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            if torch.version.cuda is None:
                self.library = torch.library.Library("torchvision", "FRAGMENT")
                for op in ("nms", "qnms"):
                    self.library.define(op + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                sys.modules["sitecustomize"].torchvision_ops = self  # the declarations live as long as the library
        return None


sys.meta_path.insert(0, _BeforeTorchvision())
