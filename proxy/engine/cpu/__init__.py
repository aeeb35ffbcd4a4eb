"""Supplies what SGLang's CUDA wheels (0.5.23) lack on a machine without a GPU. Unused where CUDA exists.

`path/` goes on the PYTHONPATH of the engine process only: a pure-torch stand-in for the CUDA-only `sgl_kernel` package
and a `sitecustomize` that lets the CUDA build of torchvision be imported. `plugin.install` is an SGLang plugin (entry
point) that fills the few gaps inside SGLang itself. Each part refuses or does nothing where CUDA exists.
"""
