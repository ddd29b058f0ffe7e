# The daemon, with NIXL for its movers and without torch, 0.9 GB that nothing of either runs: movers hide it. So nixl's
# packages are installed by --no-deps. No module stands in for torch: a library that looks for one would find it.
# deploy/image/build.py builds it; so does an engine with a registry at hand:
#
#   docker build --target cpu -t kvxferd:VERSION .
#   docker build --target gpu -t kvxferd:VERSION-gpu .                        # CUDA 13
#   docker build --target gpu -t kvxferd:VERSION-gpu --build-arg CUDA=12 .
#
# BASE_IMAGE: anything of glibc 2.28 or newer with Python 3.11 or newer and its venv.
# CUDA: 12 or 13, for which NIXL and cuda-python are installed; the node's driver must be of that version or newer.
# UID: the user, who is best the one that the engines run as: only processes of one user read each other's memory
# by the fast same-node path.
# Where packages do not come from PyPI: --secret id=pip.conf,src=FILE, which is mounted and in no layer.

ARG BASE_IMAGE=docker.io/library/python:3.12-slim

FROM ${BASE_IMAGE} AS build-cpu
ARG CUDA=13
ARG UID=10001
# pip stays here. The environment gets what it installs, and no pip.
RUN python3 -m venv /opt/pip && python3 -m venv --without-pip /opt/kvxferd
ENV PIP="/opt/pip/bin/pip --python /opt/kvxferd/bin/python --no-cache-dir --disable-pip-version-check"
WORKDIR /src
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY kvxferd kvxferd
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    ${PIP} install -c constraints.txt '.[daemon]'
# nixl names torch, and its wheels for both CUDA versions, as its dependencies: none of these is wanted. nixl_ep is
# another library in the same wheel, which cannot be imported without torch.
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    ${PIP} install --no-deps -c constraints.txt nixl "nixl-cu${CUDA}" \
 && rm -r /opt/kvxferd/lib/python3*/site-packages/nixl_ep*
# The user and what is the user's, for a stage that runs no command. NIXL looks into the home directory.
RUN useradd --uid "${UID}" --home-dir /home/kvxferd --no-create-home kvxferd \
 && install -d /users/home /users/run/worker

FROM build-cpu AS build-gpu
ARG CUDA
COPY deploy/image/cuda${CUDA}.txt ./cuda.txt
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    ${PIP} install --no-deps -r cuda.txt \
 && dirname "$(find /opt/kvxferd -name 'libcudart.so.*')" > /etc/ld.so.conf.d/kvxferd.conf && ldconfig

# No command runs from here on, so that no layer holds what the engine mounts for a command.
FROM ${BASE_IMAGE} AS runtime
ARG UID=10001
COPY --from=build-cpu /etc/passwd /etc/group /etc/
COPY --from=build-cpu --chown=${UID}:${UID} /users/home /home/kvxferd
COPY --from=build-cpu --chown=${UID}:${UID} /users/run /run/kvxferd
ENV PATH=/opt/kvxferd/bin:$PATH
ENV HOME=/home/kvxferd
# Metrics and probes come from outside the container. Nothing there changes state.
ENV KVXFERD_HTTP_BIND=0.0.0.0:9440
# Other nodes need KVXFERD_PEER_BIND and KVXFERD_PEER_ADVERTISE too: see docs/how-to/configure.md.
EXPOSE 9440 9441
# By number: Kubernetes cannot tell of a name that it is not root's (runAsNonRoot).
USER ${UID}:${UID}
ENTRYPOINT ["kvxferd"]
CMD ["serve"]

FROM runtime AS gpu
COPY --from=build-gpu /opt/kvxferd /opt/kvxferd
COPY --from=build-gpu /etc/ld.so.conf.d/kvxferd.conf /etc/ld.so.conf.d/
COPY --from=build-gpu /etc/ld.so.cache /etc/
# The NVIDIA container toolkit reads these two. compute brings libcuda, utility NVML; UCX needs both.
ENV NVIDIA_VISIBLE_DEVICES=all
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM runtime AS cpu
COPY --from=build-cpu /opt/kvxferd /opt/kvxferd
