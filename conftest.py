"""Loads the plugins of the suite; nothing else."""

pytest_plugins = ["parity.plugin", "pytester"]
