# A vLLM server that follows, and `pulse-rl follow`. Build from the root of the repository, after `make dist`.
FROM vllm/vllm-openai:v0.32.0
COPY dist/*.whl /tmp/dist/
# The image has torch and vLLM already, of its own builds. Kernels are compiled for any processor of this kind of machine.
RUN python3 -m pip install --no-cache-dir "$(ls /tmp/dist/*.whl)[vllm,sign]" \
    && NUMBA_CPU_NAME=generic pulse-rl warmup --cache /opt/pulse-cache \
    && useradd --uid 10001 --create-home pulse
ENV NUMBA_CPU_NAME=generic PULSE_CACHE=/opt/pulse-cache VLLM_PLUGINS=pulse PULSE_RL_GATE=1
USER 10001
EXPOSE 8000
HEALTHCHECK --start-period=10m --interval=10s CMD ["python3", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/pulse/ready', timeout=5)"]
ENTRYPOINT ["vllm", "serve", "--weight-transfer-config", "{\"backend\":\"pulse\"}"]
