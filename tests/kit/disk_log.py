"""A library that, loaded before others, writes down in one log and in order what a process asks of
its disk.

A sync does nothing but take a while: what it would have made durable is for whoever reads the log
to know.

The one rule: each record stands where it was true: a write when it was done, a sync twice, when it
began and when it ended.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.kit.sync_library import built

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define LOCKED(type, call, then) { \
    pthread_mutex_lock(&lock); \
    type done = call; \
    int error = errno; \
    then; \
    errno = error; \
    pthread_mutex_unlock(&lock); \
    return done; \
}

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static int log_fd = -1;
static const char *root;
static size_t root_length;

/* A header, then the pieces up to `length`. */
static void put(char kind, uint64_t who, uint64_t at, uint64_t length,
                const struct iovec *pieces, int count) {
    struct { char kind[8]; uint64_t who, at, length, bytes; } header = {{kind}, who, at, length, 0};
    if (log_fd < 0) return;
    if (pieces) header.bytes = length;
    syscall(SYS_write, log_fd, &header, sizeof header);
    for (int i = 0; i < count && length; i++) {
        size_t size = pieces[i].iov_len < length ? pieces[i].iov_len : length;
        syscall(SYS_write, log_fd, pieces[i].iov_base, size);
        length -= size;
    }
}

static void put_text(char kind, uint64_t who, uint64_t at, const char *text) {
    struct iovec piece = {(void *)text, strlen(text)};
    put(kind, who, at, piece.iov_len, &piece, 1);
}

__attribute__((constructor)) static void begin(void) {
    struct stat about;
    const char *path = getenv("DISK_LOG");
    root = getenv("DISK_LOG_OF");
    if (!path || !root || stat(root, &about)) return;
    root_length = strlen(root);
    int fd = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    log_fd = syscall(SYS_fcntl, fd, F_DUPFD_CLOEXEC, 900);
    syscall(SYS_close, fd);
    put('P', about.st_ino, 0, 0, NULL, 0);
}

/* The name of a file in the directory, or nothing. */
static const char *inside(const char *path) {
    if (log_fd < 0 || strncmp(path, root, root_length) || path[root_length] != '/') return NULL;
    return path + root_length + 1;
}

/* -- files */

static void opened(int fd, const char *path, int flags, int was_there) {
    struct stat about;
    if (fd < 0 || !inside(path) || fstat(fd, &about)) return;
    if (!was_there) put_text('C', about.st_ino, 0, inside(path));
    else if (flags & O_TRUNC) put('T', about.st_ino, 0, 0, NULL, 0);
}

#define OPEN(name) int name(const char *path, int flags, ...) { \
    va_list rest; \
    va_start(rest, flags); \
    mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest); \
    if (!inside(path)) return NEXT(name)(path, flags, mode); \
    pthread_mutex_lock(&lock); \
    int was_there = !access(path, F_OK); \
    int fd = NEXT(name)(path, flags, mode), error = errno; \
    opened(fd, path, flags, was_there); \
    errno = error; \
    pthread_mutex_unlock(&lock); \
    return fd; \
}
OPEN(open)
OPEN(open64)

/* `at` is -1 where the file's own position counts. */
static void wrote(int fd, ssize_t done, off_t at, const struct iovec *pieces, int count) {
    struct stat about;
    if (log_fd < 0 || done <= 0 || fstat(fd, &about)) return;
    if (!S_ISREG(about.st_mode)) return;
    if (at < 0) at = lseek(fd, 0, SEEK_CUR) - done;
    put('W', about.st_ino, at, done, pieces, count);
}

static void wrote_one(int fd, ssize_t done, off_t at, const void *data) {
    struct iovec piece = {(void *)data, done > 0 ? done : 0};
    wrote(fd, done, at, &piece, 1);
}

ssize_t write(int fd, const void *data, size_t size)
    LOCKED(ssize_t, NEXT(write)(fd, data, size), wrote_one(fd, done, -1, data))
ssize_t pwrite(int fd, const void *data, size_t size, off_t at)
    LOCKED(ssize_t, NEXT(pwrite)(fd, data, size, at), wrote_one(fd, done, at, data))
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at)
    LOCKED(ssize_t, NEXT(pwrite64)(fd, data, size, at), wrote_one(fd, done, at, data))
ssize_t writev(int fd, const struct iovec *pieces, int count)
    LOCKED(ssize_t, NEXT(writev)(fd, pieces, count), wrote(fd, done, -1, pieces, count))
ssize_t pwritev(int fd, const struct iovec *pieces, int count, off_t at)
    LOCKED(ssize_t, NEXT(pwritev)(fd, pieces, count, at), wrote(fd, done, at, pieces, count))
ssize_t pwritev64(int fd, const struct iovec *pieces, int count, off64_t at)
    LOCKED(ssize_t, NEXT(pwritev64)(fd, pieces, count, at), wrote(fd, done, at, pieces, count))

static void about_file(char kind, int failed, int fd, uint64_t at, uint64_t length) {
    struct stat about;
    if (log_fd >= 0 && !failed && !fstat(fd, &about)) put(kind, about.st_ino, at, length, NULL, 0);
}

int ftruncate(int fd, off_t size)
    LOCKED(int, NEXT(ftruncate)(fd, size), about_file('T', done, fd, size, 0))
int ftruncate64(int fd, off64_t size)
    LOCKED(int, NEXT(ftruncate64)(fd, size), about_file('T', done, fd, size, 0))
int unlink(const char *path)
    LOCKED(int, NEXT(unlink)(path),
           if (!done && inside(path)) put_text('U', 0, 0, inside(path)))

static void renamed(int failed, const char *old, const char *new) {
    if (failed || !inside(old) || !inside(new)) return;
    struct iovec names[] = {{(void *)inside(old), strlen(inside(old)) + 1},
                            {(void *)inside(new), strlen(inside(new))}};
    put('R', 0, 0, names[0].iov_len + names[1].iov_len, names, 2);
}

int rename(const char *old, const char *new)
    LOCKED(int, NEXT(rename)(old, new), renamed(done, old, new))

static int synced(int fd) {
    struct stat about;
    if (log_fd < 0) return 0;
    if (fstat(fd, &about)) return -1;
    pthread_mutex_lock(&lock);
    put('B', about.st_ino, gettid(), 0, NULL, 0);
    pthread_mutex_unlock(&lock);
    usleep(random() % 1000);
    pthread_mutex_lock(&lock);
    put('E', about.st_ino, gettid(), 0, NULL, 0);
    pthread_mutex_unlock(&lock);
    return 0;
}

int fsync(int fd) { return synced(fd); }
int fdatasync(int fd) { return synced(fd); }
"""


_HEADER = struct.Struct("<c7xQQQQ")


class Record(NamedTuple):
    """`kind` tells what the numbers mean; files and directories stand by their inodes.

    P  a server begins: the directory
    C  a file was made: inode, name         W  written: inode, offset, data
    T  truncated: inode, size               A  allocated: inode, offset, length
    D  a directory was made: inode, name
    U  unlinked: name                       R  renamed: old name, a zero byte, new name
    B  a sync begins: inode, thread         E  it has ended, F  it has failed: inode, thread
    """

    kind: str
    who: int
    at: int
    length: int
    data: bytes


def records(log: Path) -> Iterator[Record]:
    """What was written down, in order."""
    with log.open("rb") as file:
        while header := file.read(_HEADER.size):
            kind, who, at, length, size = _HEADER.unpack(header)
            yield Record(kind.decode(), who, at, length, file.read(size))


def compiled(directory: Path) -> Path:
    """The library, for LD_PRELOAD; skips the test where nothing compiles it."""
    return built(_SOURCE, directory / "disk_log.so")


def environment(library: Path, log: Path, directory: Path) -> dict[str, str]:
    """Variables for a process that is to be watched: its files in `directory`, to which nobody
    else writes."""
    return {
        "LD_PRELOAD": str(library),
        "DISK_LOG": str(log),
        "DISK_LOG_OF": str(directory),
    }
