# Engine and trainer for machines with NVIDIA GPUs: docker build -f docker/gpu.Dockerfile -t blackforge-gpu .
# CUDA's libraries and compiler come with the wheels of requirements/gpu.txt; the driver (580 or newer) is the host's, so
# run it with the NVIDIA Container Toolkit: docker run --gpus all --ipc host blackforge-gpu
FROM ubuntu:24.04
# g++ and Python's headers: Triton and SGLang compile kernels when they are first called. npm: fetches agents
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ git libnuma1 make npm python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /blackforge
# before the sources, so that a change of them does not fetch the gigabytes again
COPY Makefile requirements/gpu.txt ./
RUN mkdir requirements && mv gpu.txt requirements/ && make gpu-packages && rm -rf /root/.cache
COPY . .
RUN make install-gpu
ENV PATH=/blackforge/.venv/bin:$PATH
CMD ["proxy", "doctor"]
