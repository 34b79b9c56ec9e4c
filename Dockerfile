# Two images from one source. `cpu` (the last, so the default) has one static binary and nothing else: the router,
# workers on the processor, the chart's test. `cuda` also has glibc, because NVIDIA's driver library is loaded at run
# time, which a static binary cannot do. Both have the certificates of the authorities, for downloads of models.
#
#   docker build -t cleave:0.1.0 .
#   docker build -t cleave:0.1.0-cuda --target cuda .
#
# Both are built with the profile `dist` (link-time optimisation), and run as user 65532 with a read-only root: only the
# cache (XDG_CACHE_HOME) is written to.

FROM rust:1.95-bookworm AS source
RUN apt-get update && apt-get install -y --no-install-recommends musl-tools python3-venv && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY Cargo.toml Cargo.lock clippy.toml ./
COPY crates crates
COPY kernels kernels
COPY proto proto
COPY assets assets
COPY scripts/install scripts/install
# Cargo needs the files of every target of Cargo.toml, but builds none of them here.
COPY tests tests

FROM source AS build-cpu
RUN rustup target add "$(uname -m)-unknown-linux-musl"
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target \
    cargo build --profile dist --locked -p cleave-cli --target "$(uname -m)-unknown-linux-musl" \
    && cp target/*-unknown-linux-musl/dist/cleave /cleave
# The cache is the only writable folder of the image.
RUN mkdir -p /root-fs/var/cache/cleave /root-fs/etc/ssl/certs \
    && cp /etc/ssl/certs/ca-certificates.crt /root-fs/etc/ssl/certs/

FROM source AS build-cuda
# The binary must have the machine code of every kernel, so the build fails without NVIDIA's compiler.
RUN scripts/install/nvcc.sh /nvcc
RUN --mount=type=cache,target=/usr/local/cargo/registry --mount=type=cache,target=/src/target \
    CLEAVE_NVCC=/nvcc/bin/nvcc CLEAVE_KERNELS=required cargo build --profile dist --locked -p cleave-cli \
    && cp target/dist/cleave /cleave

FROM debian:bookworm-slim AS cuda
RUN install -d -o 65532 -g 65532 /var/cache/cleave
COPY --from=build-cuda /cleave /usr/local/bin/cleave
COPY --from=source /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
# The container toolkit mounts the driver's libraries.
ENV XDG_CACHE_HOME=/var/cache/cleave NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 65532:65532
EXPOSE 8000 8001 7000
ENTRYPOINT ["/usr/local/bin/cleave"]
CMD ["serve", "--device", "cuda", "--host", "0.0.0.0"]

FROM scratch AS cpu
COPY --from=build-cpu --chown=65532:65532 /root-fs/ /
COPY --from=build-cpu /cleave /usr/local/bin/cleave
ENV XDG_CACHE_HOME=/var/cache/cleave
USER 65532:65532
EXPOSE 8000 8001 7000
ENTRYPOINT ["/usr/local/bin/cleave"]
CMD ["serve", "--host", "0.0.0.0"]
