# Penstock: operator, planner, router and simulated workers in one image. Every pod that Penstock starts
# runs it but for vLLM's and Dynamo's workers.
#
#   docker build -t penstock:dev .
#   docker build --build-arg VARIANT=tensorboard -t penstock:dev-tensorboard .
#   docker build --secret id=pip_cert,src=/etc/ssl/certs/ca-certificates.crt .    behind a proxy with its own CA
# The index of linux/amd64 and linux/arm64, Python 3.11.16 on Debian 13, of 2026-08-16; a newer one is printed by
# `docker buildx imagetools inspect python:3.11-slim`. A machine without a registry gives the tag that it has.
ARG BASE_IMAGE=docker.io/library/python:3.11-slim@sha256:9c900dea9e8fb7e16277c179b555cc72d29a352dbc33cff48ad5a0412fd5bfc7

FROM ${BASE_IMAGE} AS build
ARG VARIANT=standard
WORKDIR /src
RUN python3 -m venv /opt/penstock
# Read where the secret of that name is given, and by pip alone; the build argument names a file of the base image.
ARG PIP_CERT=
ARG CERTIFICATE="if [ -s /run/secrets/pip_cert ]; then export PIP_CERT=/run/secrets/pip_cert; fi"
# Dependencies first, by themselves: a changed source file then costs seconds, not a download of numpy. Versions and hashes
# are those of `make lock`.
COPY requirements/${VARIANT}.txt ./requirements.txt
RUN --mount=type=secret,id=pip_cert eval "${CERTIFICATE}"; /opt/penstock/bin/pip install --no-cache-dir \
    --disable-pip-version-check --require-hashes -r requirements.txt
COPY pyproject.toml LICENSE README.md ./
COPY src ./src
COPY operator ./operator
COPY planner ./planner
COPY manifests/samples ./manifests/samples
COPY charts/penstock ./charts/penstock
RUN --mount=type=secret,id=pip_cert eval "${CERTIFICATE}"; /opt/penstock/bin/pip wheel --no-cache-dir --disable-pip-version-check --no-deps --wheel-dir /dist . \
    && /opt/penstock/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps /dist/*.whl \
    && /opt/penstock/bin/pip uninstall --yes --quiet pip $(case "${VARIANT}" in tensorboard) ;; *) echo setuptools ;; esac)
# What no process reads: tests, sources of C extensions, stubs. Of the Kubernetes client, half of the rest, a process imports
# a tenth, and of pygments nothing but at an error: they are one archive of bytecode, from which Python imports as well.
RUN cd /opt/penstock/lib/python3*/site-packages \
    && find . -type d \( -name tests -o -name test \) -prune -exec rm -r {} + \
    && find . -type f \( -name '*.pyi' -o -name '*.pyx' -o -name '*.pxd' -o -name '*.h' -o -name '*.a' \) -delete \
    && packages=$(find kubernetes pygments -maxdepth 0 2> /dev/null || true) \
    && find ${packages} -type d -name __pycache__ -prune -exec rm -r {} + \
    && /opt/penstock/bin/python -m compileall -q -b ${packages} \
    && find ${packages} -type f -name '*.py' -delete \
    && /opt/penstock/bin/python -m zipfile -c archive.zip ${packages} \
    && rm -r ${packages} && echo archive.zip > archive.pth

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
