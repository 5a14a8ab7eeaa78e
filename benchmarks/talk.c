/* Very many connections from one thread: prepared bytes out, counted bytes in.
 *
 *   talk DEPTH WIDTH COUNT ROOM MARKS MARK REQUESTS REPLIES TIMES FD...
 *
 * Each connection sends its COUNT requests of WIDTH bytes, which follow each other in the file
 * REQUESTS, connection after connection, with at most DEPTH of them unanswered. A reply is told by
 * MARK, which stands MARKS times in it. It starts when a line comes on stdin. It writes what each
 * connection received to REPLIES (ROOM bytes each, the rest zero), the seconds from each send to
 * its reply to TIMES, and its begin, end and CPU time to stdout.
 */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define SILENCE_MS 60000
#define EVENTS 512

struct talker {
    int fd;
    int is_blocked;
    char *out, *in;
    size_t sent, filled, scanned;
    long begun, marks, replies;
    double *began;
};

static long depth, count, marks_each;
static size_t width, room, mark_len;
static const char *mark;
static double *times;
static long times_count;

static void fail(const char *what) {
    fprintf(stderr, "%s: %s\n", what, errno ? strerror(errno) : "no more");
    exit(1);
}

static double now(clockid_t clock) {
    struct timespec at;
    clock_gettime(clock, &at);
    return at.tv_sec + at.tv_nsec * 1e-9;
}

static char *mapped(const char *path, size_t size, int is_new) {
    int fd = open(path, is_new ? O_RDWR | O_CREAT | O_TRUNC : O_RDONLY, 0600);
    if (fd < 0 || (is_new && ftruncate(fd, size)))
        fail(path);
    int protection = is_new ? PROT_READ | PROT_WRITE : PROT_READ;
    char *data = mmap(NULL, size, protection, MAP_SHARED | MAP_POPULATE, fd, 0);
    if (data == MAP_FAILED)
        fail(path);
    close(fd);
    return data;
}

/* Send what may go now. */
static void push(struct talker *t, int epoll) {
    long allowed = t->replies + depth < count ? t->replies + depth : count;
    size_t limit = allowed * width;
    if (t->begun < allowed) {
        double at = now(CLOCK_MONOTONIC);
        for (; t->begun < allowed; t->begun++)
            t->began[t->begun % depth] = at;
    }
    while (t->sent < limit) {
        ssize_t sent = send(t->fd, t->out + t->sent, limit - t->sent, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0 && errno != EAGAIN)
            fail("send");
        if (sent < 0)
            break;
        t->sent += sent;
    }
    int is_blocked = t->sent < limit;
    if (is_blocked != t->is_blocked) {
        struct epoll_event event = {EPOLLIN | (is_blocked ? EPOLLOUT : 0), {.ptr = t}};
        epoll_ctl(epoll, EPOLL_CTL_MOD, t->fd, &event);
        t->is_blocked = is_blocked;
    }
}

/* Take what has come. Return how many replies it completes. */
static long pull(struct talker *t) {
    ssize_t got = recv(t->fd, t->in + t->filled, room - t->filled, MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN)
        return 0;
    if (got <= 0)
        fail("recv");
    t->filled += got;
    char *found;
    while ((found = memmem(t->in + t->scanned, t->filled - t->scanned, mark, mark_len))) {
        t->scanned = found - t->in + mark_len;
        t->marks++;
    }
    if (t->filled > mark_len && t->scanned < t->filled - mark_len + 1)
        t->scanned = t->filled - mark_len + 1;
    long before = t->replies;
    t->replies = t->marks / marks_each;
    double at = now(CLOCK_MONOTONIC);
    for (long n = before; n < t->replies; n++)
        times[times_count++] = at - t->began[n % depth];
    return t->replies - before;
}

int main(int argc, char **argv) {
    if (argc < 11)
        return 2;
    depth = atol(argv[1]);
    width = atol(argv[2]);
    count = atol(argv[3]);
    room = atol(argv[4]);
    marks_each = atol(argv[5]);
    mark = argv[6];
    mark_len = strlen(mark);
    int connections = argc - 10;
    char *requests = mapped(argv[7], connections * count * width, 0);
    char *replies = mapped(argv[8], connections * room, 1);
    times = (double *)mapped(argv[9], connections * count * sizeof(double), 1);
    struct talker *talkers = calloc(connections, sizeof *talkers);
    int epoll = epoll_create1(0);
    for (int i = 0; i < connections; i++) {
        struct talker *t = &talkers[i];
        t->fd = atoi(argv[10 + i]);
        t->out = requests + i * count * width;
        t->in = replies + i * room;
        t->began = calloc(depth, sizeof(double));
        struct epoll_event event = {EPOLLIN, {.ptr = t}};
        if (epoll_ctl(epoll, EPOLL_CTL_ADD, t->fd, &event))
            fail("epoll_ctl");
    }
    puts("ready");
    fflush(stdout);
    if (getchar() == EOF)
        return 2;

    double began = now(CLOCK_MONOTONIC), cpu = now(CLOCK_PROCESS_CPUTIME_ID);
    long due = connections * count;
    for (int i = 0; i < connections; i++)
        push(&talkers[i], epoll);
    while (due) {
        struct epoll_event events[EVENTS];
        errno = 0;
        int n = epoll_wait(epoll, events, EVENTS, SILENCE_MS);
        if (n <= 0)
            fail("silence");
        for (int i = 0; i < n; i++) {
            struct talker *t = events[i].data.ptr;
            if (events[i].events & ~EPOLLOUT)
                due -= pull(t);
            push(t, epoll);
        }
    }
    double ended = now(CLOCK_MONOTONIC);
    printf("%.9f %.9f %.9f\n", began, ended, now(CLOCK_PROCESS_CPUTIME_ID) - cpu);
    return 0;
}
