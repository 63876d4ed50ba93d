# syntax=docker/dockerfile:1
# The engine shim, with torch. Build from the repository's root:
#   docker build -f deploy/docker/shim.Dockerfile -t homing-shim:0.1.0 .
# TORCH_INDEX names the index of torch builds: the CPU's by default; .../whl/cu130 or another CUDA for `--device cuda`.

FROM python:3.11-slim-bookworm AS build
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
RUN python -m venv /opt/homing
# The large layer first: it changes with the pins, not with the code.
COPY requirements-dev.txt requirements-engine.txt requirements-data.txt ./
RUN /opt/homing/bin/pip install --no-cache-dir -c requirements-dev.txt setuptools \
    && /opt/homing/bin/pip install --no-cache-dir --index-url "$TORCH_INDEX" -r requirements-engine.txt \
    && /opt/homing/bin/pip install --no-cache-dir --no-deps -r requirements-data.txt
COPY pyproject.toml README.md LICENSE ./
COPY router router
COPY engine_shim engine_shim
COPY loadtest loadtest
RUN /opt/homing/bin/pip install --no-cache-dir --no-build-isolation -c requirements-dev.txt ".[engine,structured]"

FROM python:3.11-slim-bookworm
RUN useradd --system --uid 10001 --user-group --no-create-home homing
COPY --from=build /opt/homing /opt/homing
ENV PATH=/opt/homing/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 10001:10001
# HTTP; cache events of ranks 0 and 1; their replay.
EXPOSE 8100 5557 5558 5657 5658
HEALTHCHECK --interval=5s --timeout=3s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8100/health', timeout=2)"]
ENTRYPOINT ["homing", "shim"]
CMD ["--host", "0.0.0.0"]
