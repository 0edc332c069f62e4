# radixlm's server, for amd64 and arm64: docker build -t radixlm . && docker run -p 8000:8000 -v radixlm:/cache radixlm
# Models that are compiled are kept in /cache. With --build-arg DISTRIBUTION=radixlm-serve there is no compiler, and
# artifacts are served: docker run -p 8000:8000 -v ./models:/models:ro radixlm serve /models/NAME.radixlm --host 0.0.0.0
FROM python:3.13-slim AS build
ARG DISTRIBUTION=radixlm
WORKDIR /src
COPY . .
RUN python .ci/distributions.py /build \
    && python -m venv /opt/radixlm \
    && if [ "$DISTRIBUTION" = radixlm ]; then set -- requirements.lock /build/radixlm; else set -- requirements-serve.lock; fi \
    && /opt/radixlm/bin/pip install --no-cache-dir --no-deps /build/radixlm-serve -r "$@"

FROM python:3.13-slim
COPY --from=build /opt/radixlm /opt/radixlm
RUN install -d -m 1777 /cache
ENV PATH=/opt/radixlm/bin:$PATH HOME=/cache XDG_CACHE_HOME=/cache
USER 10001:10001
VOLUME /cache
EXPOSE 8000
HEALTHCHECK --start-period=10m CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health')"]
ENTRYPOINT ["radixlm"]
CMD ["serve", "smollm2", "--host", "0.0.0.0", "--port", "8000"]
