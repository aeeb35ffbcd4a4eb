"""What SGLang's CUDA wheels lack on a machine without a GPU.

`path/` goes on the PYTHONPATH of the engine process only: a pure-torch stand-in for the CUDA-only `sgl_kernel` package
and a `sitecustomize` that lets the CUDA build of torchvision be imported. `plugin.install` is an SGLang plugin (entry
point) that fills the few gaps inside SGLang itself. Each part refuses or does nothing where CUDA exists.
"""
