# syntax=docker/dockerfile:1
# The router, without torch. Build from the repository's root:
#   docker build -f deploy/docker/router.Dockerfile -t homing-router:0.1.0 .

# Not the slim image: setup.py compiles the path of a request with its C compiler.
FROM python:3.11-bookworm AS build
WORKDIR /src
RUN python -m venv /opt/homing
COPY pyproject.toml setup.py README.md LICENSE requirements-dev.txt ./
COPY router router
COPY engine_shim engine_shim
COPY loadtest loadtest
# The build takes the pins from the variable, which it is given as well.
RUN HOMING_COMPILE=1 PIP_CONSTRAINT=/src/requirements-dev.txt /opt/homing/bin/pip install --no-cache-dir '.[redis]'

FROM python:3.11-slim-bookworm
RUN useradd --system --uid 10001 --user-group --no-create-home homing
COPY --from=build /opt/homing /opt/homing
# Only what holds in every container: a variable wins over a settings file.
ENV PATH=/opt/homing/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOMING__LOG_FORMAT=json \
    HOMING__SERVER__HOST=0.0.0.0
USER 10001:10001
EXPOSE 8000 8001
# Alive, not ready: a router without workers is to be reported, not restarted. At the admin port, for the other one refuses
# all who come when it is full.
HEALTHCHECK --interval=5s --timeout=3s --start-period=20s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8001/health', timeout=2)"]
ENTRYPOINT ["homing", "router"]
