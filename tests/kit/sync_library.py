"""A library that, loaded before others, makes every sync fail or hang once a file exists.

The one rule: without the variables that name the files it changes nothing.
"""

import shutil
import subprocess
from pathlib import Path

import pytest

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

static int exists(const char *variable) {
    const char *path = getenv(variable);
    return path && access(path, F_OK) == 0;
}

static int sync_file(const char *name, int fd) {
    while (exists("SYNC_HANGS_WHILE_EXISTS")) usleep(5000);
    if (exists("SYNC_FAILS_ONCE_EXISTS")) {
        errno = EIO;
        return -1;
    }
    return ((int (*)(int))dlsym(RTLD_NEXT, name))(fd);
}

int fsync(int fd) { return sync_file("fsync", fd); }
int fdatasync(int fd) { return sync_file("fdatasync", fd); }
"""


def built(source: str, library: Path) -> Path:
    """Compile C source to a shared library; skips the test where nothing can."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler (cc)")
    file = library.with_suffix(".c")
    file.write_text(source)
    command = [compiler, "-shared", "-fPIC", "-o", str(library), str(file), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    return library


def compiled(directory: Path) -> Path:
    """The library, for LD_PRELOAD; skips the test where nothing compiles it."""
    return built(_SOURCE, directory / "sync.so")
