"""The limit of open files, which only a process of its own may change here."""

import subprocess
import sys

PROGRAM = """
import os, resource
from nanoserve.utils.descriptors import allow_descriptors, open_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 300))
print(allow_descriptors(50), *resource.getrlimit(resource.RLIMIT_NOFILE))
print(allow_descriptors(200), *resource.getrlimit(resource.RLIMIT_NOFILE))
print(allow_descriptors(5000), *resource.getrlimit(resource.RLIMIT_NOFILE))
before = open_descriptors()
files = [os.open(os.devnull, os.O_RDONLY) for _ in range(7)]
print(open_descriptors() - before)
"""


def test_the_limit_is_raised_as_far_as_it_is_needed_and_allowed() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == ["50 100 300", "200 200 300", "300 300 300", "7"]
