/* pwrites MODE TRANSFER BLOCK SEGMENTS WRITERS {PATH CPUS OFFSET...}...
 *
 * MODE is "buffered" or "direct"; CPUS are numbers joined by commas, or "-"; there are SEGMENTS
 * offsets. Standard input: the bytes of all writers, one after the other; then, when "ready" has
 * been printed, eight bytes: when to begin, in nanoseconds of CLOCK_MONOTONIC. Each writer is a
 * thread, the only one stays in main. Prints for each its start and end in ns and then the ns of
 * every call; at last "synced", the time after one fdatasync a file, and user and system us.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

struct writer {
    int fd, error;
    cpu_set_t cpus;
    int pinned;
    const char *path, *bytes;
    const off_t *offsets;
    int64_t start, end, *calls;
};

static size_t transfer, block, segments;
static struct timespec begin;

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void die(const char *what, int error)
{
    printf("error %d %s\n", error, what);
    exit(1);
}

static void take(char *to, size_t n)
{
    while (n) {
        ssize_t got = read(0, to, n);
        if (got <= 0)
            exit(1); /* the parent is gone */
        to += got;
        n -= (size_t)got;
    }
}

static int put(int fd, const char *from, size_t n, off_t at)
{
    while (n) {
        ssize_t done = pwrite(fd, from, n, at);
        if (done < 0 && errno == EINTR)
            continue;
        if (done <= 0)
            return done ? errno : EIO;
        from += done;
        n -= (size_t)done;
        at += done;
    }
    return 0;
}

static void *work(void *argument)
{
    struct writer *w = argument;
    const char *from = w->bytes;
    int64_t *call = w->calls;

    if (w->pinned && sched_setaffinity(0, sizeof w->cpus, &w->cpus) < 0)
        w->error = errno;
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &begin, NULL) == EINTR)
        ;
    w->start = now();
    for (size_t s = 0; s < segments && !w->error; s++)
        for (size_t at = 0; at < block && !w->error; at += transfer) {
            int64_t start = now();
            w->error = put(w->fd, from, transfer, w->offsets[s] + (off_t)at);
            *call++ = now() - start;
            from += transfer;
        }
    w->end = now();
    return NULL;
}

static void parse_cpus(struct writer *w, char *text)
{
    CPU_ZERO(&w->cpus);
    w->pinned = strcmp(text, "-") != 0;
    for (char *one = w->pinned ? strtok(text, ",") : NULL; one; one = strtok(NULL, ","))
        CPU_SET(atoi(one), &w->cpus);
}

static int64_t us(struct timeval after, struct timeval before)
{
    return (int64_t)(after.tv_sec - before.tv_sec) * 1000000 + after.tv_usec - before.tv_usec;
}

int main(int argc, char **argv)
{
    int flags = O_WRONLY | O_CLOEXEC;
    int64_t at;

    if (argc < 6)
        return 2;
    if (strcmp(argv[1], "direct") == 0)
        flags |= O_DIRECT;
    transfer = strtoull(argv[2], NULL, 10);
    block = strtoull(argv[3], NULL, 10);
    segments = strtoull(argv[4], NULL, 10);
    size_t n = strtoull(argv[5], NULL, 10), own = segments * block, calls = own / transfer;
    if ((size_t)argc != 6 + n * (2 + segments))
        return 2;

    char *bytes = mmap(NULL, n * own, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct writer *writers = calloc(n, sizeof *writers);
    pthread_t *threads = calloc(n, sizeof *threads);
    off_t *offsets = calloc(n * segments, sizeof *offsets);
    int64_t *times = calloc(n * calls, sizeof *times);
    if (bytes == MAP_FAILED || !writers || !threads || !offsets || !times)
        die("memory", ENOMEM);
    madvise(bytes, n * own, MADV_HUGEPAGE);
    memset(times, 1, n * calls * sizeof *times);
    for (size_t i = 0; i < n; i++) {
        struct writer *w = &writers[i];
        char **given = argv + 6 + i * (2 + segments);
        w->path = given[0];
        parse_cpus(w, given[1]);
        for (size_t s = 0; s < segments; s++)
            offsets[i * segments + s] = strtoll(given[2 + s], NULL, 10);
        w->offsets = offsets + i * segments;
        w->bytes = bytes + i * own;
        w->calls = times + i * calls;
        if (i && strcmp(w->path, writers[i - 1].path) == 0)
            w->fd = writers[i - 1].fd;
        else if ((w->fd = open(w->path, flags)) < 0)
            die("open", errno);
    }
    for (size_t i = 0; i < n; i++) {  /* each writer's CPUs touch its memory first */
        if (writers[i].pinned && sched_setaffinity(0, sizeof writers[i].cpus, &writers[i].cpus) < 0)
            die("sched_setaffinity", errno);
        take(bytes + i * own, own);
    }
    printf("ready\n");
    fflush(stdout);
    take((char *)&at, sizeof at);
    begin.tv_sec = at / 1000000000;
    begin.tv_nsec = at % 1000000000;

    struct rusage before, after;
    int error = 0;
    getrusage(RUSAGE_SELF, &before);
    if (n == 1)
        work(writers);
    for (size_t i = 0; n > 1 && i < n; i++)
        if ((error = pthread_create(&threads[i], NULL, work, &writers[i])))
            die("pthread_create", error);
    for (size_t i = 0; n > 1 && i < n; i++)
        pthread_join(threads[i], NULL);
    for (size_t i = 0; i < n; i++)
        if (writers[i].error)
            die("pwrite", writers[i].error);
    for (size_t i = 0; i < n; i++)
        if ((!i || writers[i].fd != writers[i - 1].fd) && fdatasync(writers[i].fd) < 0)
            die("fdatasync", errno);
    at = now();
    getrusage(RUSAGE_SELF, &after);

    for (size_t i = 0; i < n; i++) {
        printf("%lld %lld", (long long)writers[i].start, (long long)writers[i].end);
        for (size_t c = 0; c < calls; c++)
            printf(" %lld", (long long)writers[i].calls[c]);
        printf("\n");
    }
    printf("synced %lld %lld %lld\n", (long long)at,
           (long long)us(after.ru_utime, before.ru_utime),
           (long long)us(after.ru_stime, before.ru_stime));
    return 0;
}
