# The course in a container: JupyterLab on port 8888. docs/containers.md has the commands to run it.
FROM docker.io/library/python:3.11-slim-bookworm

# make builds the environment, git brings updates, procps is for looking at ranks
RUN apt-get update \
    && apt-get install -y --no-install-recommends git make procps \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 1000 --shell /bin/bash learner \
    && install -d -o learner -g learner /home/learner/course

USER learner
WORKDIR /home/learner/course
# outside of the course: a folder that is mounted over the course does not hide it
ENV VENV=/home/learner/venv

# the packages first: they are built again only when this list or the tools that read it change
COPY --chown=learner:learner Makefile pyproject.toml requirements.lock setup.py README.md LICENSE ./
COPY --chown=learner:learner tools tools
COPY --chown=learner:learner course_lib/__init__.py course_lib/__init__.py
COPY --chown=learner:learner course_tools/__init__.py course_tools/__init__.py
RUN make environment TORCH=cpu && rm -rf /home/learner/.cache/pip /home/learner/.cache/uv

COPY --chown=learner:learner . .
RUN make environment TORCH=cpu

ENV PATH=/home/learner/venv/bin:$PATH
EXPOSE 8888
CMD ["make", "lab", "LAB_ARGS=--ip=0.0.0.0 --no-browser"]
