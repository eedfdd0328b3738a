# A replica, or the router: docker build -t kvfold . && docker run --rm -p 127.0.0.1:8000:8000 kvfold serve reference:gqa --host 0.0.0.0
FROM python:3.12-slim

# Triton and kernels in CUDA C++ are compiled where they run.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# By default PyTorch with CUDA; https://download.pytorch.org/whl/cpu is smaller and for CPUs.
ARG TORCH_INDEX=https://pypi.org/simple
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" torch

WORKDIR /app
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir ".[server,structured,gguf,cpu]"

RUN useradd --create-home kvfold
USER kvfold
WORKDIR /home/kvfold
# Models of the hub, and what kernels were compiled to: keep it in a volume.
ENV HF_HOME=/home/kvfold/cache/hub TRITON_CACHE_DIR=/home/kvfold/cache/triton \
    NUMBA_CACHE_DIR=/home/kvfold/cache/numba
RUN mkdir cache
VOLUME /home/kvfold/cache

EXPOSE 8000
ENTRYPOINT ["kvfold"]
CMD ["serve", "reference:gqa", "--host", "0.0.0.0"]
HEALTHCHECK --start-period=5m --interval=10s --timeout=6s \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health', timeout=5)"]
