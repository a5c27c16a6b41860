# volpipe, for drivers and workers alike:
#   docker build --tag lab/volpipe:1 .                               the default build of PyTorch, with CUDA on x86-64
#   docker build --build-arg VARIANT=cpu --build-arg TORCH_INDEX=... --tag lab/volpipe:1-cpu .
# TORCH_INDEX is the address that PyTorch's installation page names for the wheels of a variant.

ARG PYTHON=3.11

FROM python:${PYTHON}-slim-bookworm AS build
ARG VARIANT=cuda
ARG TORCH_INDEX=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/volpipe
ENV PATH=/opt/volpipe/bin:$PATH
WORKDIR /source
# First what is large and seldom changes.
COPY constraints.txt ./
RUN pip install --no-compile --constraint constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} torch==2.13.0 \
    && python -c "import sys, torch; sys.exit((torch.version.cuda is None) != ('$VARIANT' == 'cpu'))"
COPY pyproject.toml README.md LICENSE ./
COPY volpipe ./volpipe
COPY apps ./apps
COPY models ./models
COPY configs ./configs
RUN pip install --no-compile --constraint constraints.txt ".[kubernetes]"
# What no run needs goes: torch's own tests and protoc. torch/include stays, for infer.compile where a compiler is added.
# Bytecode only of what every driver and worker imports, which costs each 3 s without; they may not write it themselves.
WORKDIR /
RUN site=$(python -c "import sysconfig; print(sysconfig.get_path('purelib'))") \
    && rm -rf "$site/torch/test" && find "$site/torch/bin" -type f ! -name torch_shm_manager -delete \
    && python -c "import kubernetes.client, parsl, tensorstore, torch, zarr, volpipe.cli.app, volpipe.runs.worker"

# The slim image has bash, setsid and setpriv, which workers and the driver's interchange are started with.
FROM python:${PYTHON}-slim-bookworm
COPY --from=build /opt/volpipe /opt/volpipe
# A pod may run as any user, without a name or a home of its own.
ENV PATH=/opt/volpipe/bin:$PATH HOME=/tmp LOGNAME=volpipe USER=volpipe PYTHONUNBUFFERED=1 NVIDIA_DRIVER_CAPABILITIES=compute,utility
# By number: Kubernetes cannot tell otherwise that it is not root.
USER 1000:1000
WORKDIR /tmp
ENTRYPOINT ["volpipe"]
CMD ["--help"]
