# An image for GPU hosts. A host needs a driver of 580 or newer and the NVIDIA container toolkit; see docs/gpu.md.
#   docker build --tag rlhf .
#   docker run --gpus all --ipc=host --ulimit memlock=-1 rlhf plan ppo --help
FROM python:3.11-slim-bookworm

# Triton compiles the launchers of its kernels on the host, with a C compiler. The image of Python has the headers.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

# The pins change less often than the code, so their layer is reused.
WORKDIR /opt/prefect-rlhf
COPY constraints-cuda.txt ./
RUN pip install --no-cache-dir --no-deps --requirement constraints-cuda.txt
COPY . ./

# A run without PREFECT_API_URL starts a server, whose first start would take seconds to make the database's tables.
RUN pip install --no-cache-dir --no-deps . \
    && prefect server database upgrade --yes

ENTRYPOINT ["prefect-rlhf"]
