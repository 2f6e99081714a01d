"""Tests in a browser are collected where the extra `docs` is installed: `make docs-test`."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("selenium") else ["test_*.py"]
