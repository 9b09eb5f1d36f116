# Images of the mesh. EXTRAS names what is inside; docker-compose.yml builds three:
#   penstock-mesh-router   EXTRAS=gateway        no torch, no numba
#   penstock-mesh-planner  EXTRAS=planner        no torch
#   penstock-mesh-worker   EXTRAS=worker,judge   workers and the judge
# By hand: `docker build -t penstock-mesh-router:0.1.0 --build-arg EXTRAS=gateway .`
# TORCH_INDEX: where torch comes from; the default is the CPU build. For GPUs: https://download.pytorch.org/whl/cu130
# Dependencies have a layer of their own, which an edit of the source, or of pyproject.toml beside the dependencies, keeps.
FROM python:3.12-slim AS requirements
ARG EXTRAS=gateway,planner,worker,judge
WORKDIR /src
COPY pyproject.toml scripts/requirements.py ./
RUN python requirements.py "${EXTRAS}" > requirements.txt

FROM python:3.12-slim AS dependencies
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
RUN python -m venv /opt/penstock && /opt/penstock/bin/pip install "setuptools>=77"
COPY constraints.txt /src/
COPY --from=requirements /src/requirements.txt /src/
RUN PIP_EXTRA_INDEX_URL=${TORCH_INDEX} /opt/penstock/bin/pip install -c /src/constraints.txt -r /src/requirements.txt

FROM dependencies AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY penstock penstock
COPY services services
COPY worker_service worker_service
COPY router_service router_service
COPY planner_service planner_service
COPY judge_service judge_service
RUN /opt/penstock/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels .

# Compiled code for CPUs like the builder's, which each container would otherwise compile at its start; on others they still do.
FROM wheel AS kernels
RUN /opt/penstock/bin/pip install --no-deps --no-index /wheels/*.whl
COPY scripts/compile_kernels.py scripts/
COPY models/family/small models/family/small
COPY models/family/medium models/family/medium
RUN mkdir /kernels && cd /tmp && /opt/penstock/bin/python /src/scripts/compile_kernels.py && \
    cd /opt/penstock && find lib -path '*/penstock/*.nb[ic]' -print0 | xargs -0 -r cp --parents -t /kernels

FROM python:3.12-slim
LABEL org.opencontainers.image.title="penstock-mesh" \
      org.opencontainers.image.description="A gRPC mesh that serves a cascade of language models on hardware you own" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN useradd --system --create-home --uid 10001 penstock
COPY --from=dependencies /opt/penstock /opt/penstock
COPY --from=wheel /wheels /tmp/wheels
RUN /opt/penstock/bin/pip install --no-deps --no-index /tmp/wheels/*.whl && rm -r /tmp/wheels
COPY --from=kernels /kernels /opt/penstock
COPY deploy/healthcheck.py /opt/penstock/healthcheck.py
ENV PATH=/opt/penstock/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HF_HUB_OFFLINE=1 \
    TOKENIZERS_PARALLELISM=false \
    OMP_NUM_THREADS=1 \
    GLIBC_TUNABLES=glibc.malloc.hugetlb=1 \
    PENSTOCK_BIND_HOST=0.0.0.0 \
    PENSTOCK_GRPC_PORT=50051 \
    PENSTOCK_HTTP_PORT=8000 \
    PENSTOCK_ADMIN_PORT=50052 \
    PENSTOCK_METRICS_PORT=9464 \
    PENSTOCK_LOG_FORMAT=json \
    PENSTOCK_MESH_FILE=/etc/penstock/mesh.yaml
USER penstock
WORKDIR /etc/penstock
EXPOSE 50051 8000 9464
HEALTHCHECK --interval=5s --timeout=3s --start-period=120s --retries=3 CMD ["python", "/opt/penstock/healthcheck.py"]
ENTRYPOINT ["python", "-m"]
CMD ["penstock.router_service"]
