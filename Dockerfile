# Three images from one file: facade (small), worker (a real LMCache on the CPU), ascend (on top of LMCache-Ascend's).
ARG PYTHON=3.11
ARG ASCEND_IMAGE=lmcache-ascend:v0.4.3

FROM python:${PYTHON}-slim AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN useradd --uid 10001 --create-home kvbus
WORKDIR /src

FROM base AS facade
COPY pyproject.toml README.md LICENSE ./
COPY requirements requirements
COPY kvbus kvbus
COPY publisher publisher
COPY worker_plugin worker_plugin
RUN pip install -c requirements/constraints.txt '.[rest,cli]'
USER kvbus
EXPOSE 6999
HEALTHCHECK --interval=5s --timeout=3s --start-period=10s --retries=3 \
    CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:6999/healthz', timeout=2)"]
CMD ["kvbus", "serve"]

FROM base AS worker
ENV LMCACHE_TRACK_USAGE=false PYTHONHASHSEED=0
COPY requirements requirements
RUN pip install torch==2.13.0 \
    && pip install -c requirements/constraints.txt -r requirements/lmcache-cpu.txt \
    && pip install --no-deps lmcache==0.4.3
COPY pyproject.toml README.md LICENSE ./
COPY kvbus kvbus
COPY publisher publisher
COPY worker_plugin worker_plugin
RUN pip install -c requirements/constraints.txt . && install -d -o kvbus /data
USER kvbus
CMD ["python", "-m", "worker_plugin.standalone", "--instance", "cpu", "--disk", "/data/ssd"]

# Build LMCache-Ascend's own image first (its docker/ folder, the tag that matches vLLM-Ascend 0.18.0), then name it in
# ASCEND_IMAGE. Nothing in it is changed: kvbus is one more package, and vLLM loads the connector by its name.
FROM ${ASCEND_IMAGE} AS ascend
COPY . /opt/kvbus
RUN python3 -m pip install --no-cache-dir /opt/kvbus
