"""A library that, loaded before others, moves the wall clock of a process while it runs.

The one rule: the monotonic clock goes on as it does, as when somebody sets the system's clock.
"""

import struct
from pathlib import Path

from tests.kit.sync_library import built

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>

static int (*real)(clockid_t, struct timespec *);
static volatile long *ahead_s;

static void begin(void) {
    const char *path = getenv("CLOCK_AHEAD_S");
    int file = path ? open(path, O_RDONLY) : -1;
    if (file >= 0) ahead_s = mmap(0, sizeof(long), PROT_READ, MAP_SHARED, file, 0);
    real = dlsym(RTLD_NEXT, "clock_gettime");
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (!real) begin();  /* By whoever asks first: another library, before any of us, on 3.13. */
    int failed = real(clock, now);
    if (ahead_s && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += *ahead_s;
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now) *now = exact.tv_sec;
    return exact.tv_sec;
}
"""


def compiled(directory: Path) -> Path:
    """The library, for LD_PRELOAD; skips the test where nothing compiles it."""
    return built(_SOURCE, directory / "clock.so")


class Clock:
    """The clock of all processes that have `environment` in theirs."""

    def __init__(self, library: Path, directory: Path) -> None:
        self._file = directory / "ahead_s"
        self.ahead(0)
        self.environment = {"LD_PRELOAD": str(library), "CLOCK_AHEAD_S": str(self._file)}

    def ahead(self, seconds: int) -> None:
        """Set it so far ahead of the true time; below 0 it is behind."""
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("@l", seconds))
