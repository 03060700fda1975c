# The command line with all that it needs, but torchao, which exports in `int8` alone need.
#
#   docker build -t hf-hybrid .
#   docker build -t hf-hybrid --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .       # without CUDA
#   docker run --rm --gpus all -v "$PWD:/work" -v hf-cache:/cache hf-hybrid \
#     sft --model HuggingFaceTB/SmolLM2-135M-Instruct --dataset chats.jsonl --peft lora --output_dir out
#
# The container works in /work, and keeps models and data sets of the Hub in /cache. If your user has another number than
# 1000, add `--user "$(id -u)"`, and give /cache a folder of yours.
FROM python:3.12-slim

# torch.compile and Triton's kernels call a C compiler while a program runs.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ \
    && rm -rf /var/lib/apt/lists/*

ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 HF_HOME=/cache HF_HUB_DISABLE_TELEMETRY=1
ARG TORCH_INDEX=https://pypi.org/simple

# torch alone first: it is most of the image, and changes seldom.
WORKDIR /src
COPY constraints.txt ./
RUN pip install --index-url "$TORCH_INDEX" "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml README.md LICENSE ./
COPY hf_hybrid ./hf_hybrid
RUN pip install --constraint constraints.txt ".[all]"

RUN useradd --uid 1000 --create-home hybrid && mkdir /work /cache && chown hybrid /work /cache
USER hybrid
WORKDIR /work
ENTRYPOINT ["hf-hybrid"]
CMD ["--help"]
