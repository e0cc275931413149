# Penstock: operator, planner, router and simulated workers in one image. Every pod that Penstock starts
# runs it but for vLLM's and Dynamo's workers.
#
#   docker build -t penstock:dev .
#   docker build --build-arg EXTRAS=kubernetes,kv-events,prometheus,tensorboard -t penstock:dev-tensorboard .
ARG BASE_IMAGE=docker.io/library/python:3.11-slim

FROM ${BASE_IMAGE} AS build
ARG EXTRAS=kubernetes,kv-events,prometheus
WORKDIR /src
RUN python3 -m venv /opt/penstock
# Dependencies first, by themselves: a changed source file then costs seconds, not a download of numpy.
COPY pyproject.toml ./
RUN python3 -c 'import sys, tomllib; p = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
extras = [each for each in sys.argv[1].split(",") if each]; \
print("\n".join([*p["dependencies"], *(d for each in extras for d in p["optional-dependencies"][each])]))' \
    "${EXTRAS}" > requirements.txt \
    && /opt/penstock/bin/pip install --no-cache-dir --disable-pip-version-check -r requirements.txt
COPY LICENSE README.md ./
COPY src ./src
COPY manifests/samples ./manifests/samples
RUN /opt/penstock/bin/pip wheel --no-cache-dir --disable-pip-version-check --no-deps --wheel-dir /dist . \
    && /opt/penstock/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps /dist/*.whl \
    && /opt/penstock/bin/pip uninstall --yes --quiet pip

FROM ${BASE_IMAGE}
LABEL org.opencontainers.image.title="penstock" \
      org.opencontainers.image.description="Operator, router and autoscaling planner for disaggregated LLM serving" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN getent passwd 1000 > /dev/null \
    || { groupadd --gid 1000 penstock && useradd --uid 1000 --gid 1000 --no-create-home --home-dir /tmp --shell /usr/sbin/nologin penstock; }
COPY --from=build /opt/penstock /opt/penstock
# First on PATH, so that a pod's `python -m penstock.cli` is this interpreter. Nothing is written at run
# time: the root file system is read-only in a cluster.
ENV PATH=/opt/penstock/bin:$PATH \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /tmp
USER 1000:1000
EXPOSE 8000
ENTRYPOINT ["penstock"]
CMD ["--help"]
