# The server on a CPU, built from this checkout. docs/server.md says how to build and run it.
FROM python:3.11-slim

# Operators and layers are compiled on the machine that runs them, when a model is first used.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY nanoserve nanoserve
COPY triton_ops triton_ops
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu '.[server]'

# A volume that is mounted over the cache takes its owner from here.
RUN useradd --create-home --uid 1000 nanoserve \
    && install --directory --owner nanoserve --group nanoserve /home/nanoserve/.cache
USER nanoserve
WORKDIR /home/nanoserve

EXPOSE 8000
ENTRYPOINT ["nanoserve"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]
