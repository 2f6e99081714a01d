"""Layers and models by the package they come from: what is built, and with which inputs."""
