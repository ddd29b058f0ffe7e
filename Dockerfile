# The daemon, with NIXL for its movers.
#
#   docker build -t kvxferd .
#   docker build -t kvxferd --build-arg TORCH_INDEX_URL=https://pypi.org/simple .   # torch with CUDA
#
# nixl imports torch, so the movers need one. The version is the locked one either way; the default
# takes the CPU build, which moves host memory. Nodes with GPUs want the CUDA build, 3 GB larger.

FROM python:3.12-slim AS build
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY kvxferd kvxferd
RUN python -m venv /opt/kvxferd \
 && /opt/kvxferd/bin/pip install --no-cache-dir --disable-pip-version-check \
      -c constraints.txt --extra-index-url "${TORCH_INDEX_URL}" '.[daemon,nixl]'

FROM python:3.12-slim
# Run it as the user that the engines run as, where that is known: only processes of one user read
# each other's memory by the fast same-node path.
ARG UID=10001
# NIXL looks into the home directory.
RUN useradd --uid "${UID}" --create-home kvxferd \
 && install -d -o kvxferd -g kvxferd -m 0755 /run/kvxferd /run/kvxferd/worker
COPY --from=build /opt/kvxferd /opt/kvxferd
ENV PATH=/opt/kvxferd/bin:$PATH
# Metrics and probes come from outside the container. Nothing there changes state.
ENV KVXFERD_HTTP_BIND=0.0.0.0:9440
# Other nodes need KVXFERD_PEER_BIND and KVXFERD_PEER_ADVERTISE too: see docs/how-to/configure.md.
EXPOSE 9440 9441
USER kvxferd
# Engines' containers mount this, without the locks and the control socket.
VOLUME /run/kvxferd/worker
ENTRYPOINT ["kvxferd"]
CMD ["serve"]
