/*
 * What benchmarks/scenarios/calls.py compares with: a plain C loop that stores
 * and loads blocks with the system calls such a store needs and nothing else.
 * It checks no key, looks for no existing block, verifies nothing, and times
 * itself, so that its caller adds nothing to its figure.
 *
 *   write: openat(O_TMPFILE), pwritev(payload, tail), linkat, close
 *   read:  openat, fstat, preadv(payload, tail), close
 *   durable: fdatasync before linkat, fsync of the directory after it
 *   direct: O_DIRECT on aligned memory, the tail padded to 4096 bytes
 *   look: also what "keep the block that stands there, mode 0600 whatever the
 *         umask" costs: an openat that finds nothing, and an fstat
 *
 * With several threads the blocks are dealt out one by one; the threads stand
 * ready before the clock starts, as those of a pool would.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define DIRECT 1
#define DURABLE 2
#define LINK_BY_PROC 4
#define LOOK 8

#define TRAILER_BYTES 64
#define ALIGN 4096
#define MAX_THREADS 256

enum { READY, GO, DONE };

struct block {
	const char *name;
	void *base;
	size_t nbytes;
	int64_t ns;
	int32_t dirfd;
	int32_t status;
};

typedef int64_t (*transfer_fn)(int fd, const struct iovec *iov, int niov, off_t offset);
typedef int (*block_fn)(struct block *block, int flags, void *tail);

struct loop {
	struct block *blocks;
	size_t nblocks;
	int flags;
	block_fn one;
	atomic_size_t next;
	pthread_barrier_t barriers[3];
};

static int64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static size_t tail_bytes(int flags)
{
	return flags & DIRECT ? ALIGN : TRAILER_BYTES;
}

static int64_t put(int fd, const struct iovec *iov, int niov, off_t offset)
{
	return pwritev(fd, iov, niov, offset);
}

static int64_t get(int fd, const struct iovec *iov, int niov, off_t offset)
{
	return preadv(fd, iov, niov, offset);
}

/* All of payload and tail; more than one call only after a short one. */
static int transfer(transfer_fn move, int fd, const struct block *block, void *tail, size_t ntail)
{
	struct iovec iov[2] = { { block->base, block->nbytes }, { tail, ntail } };
	size_t done = 0, whole = block->nbytes + ntail;
	int first = 0;

	while (done < whole) {
		int64_t r = move(fd, iov + first, 2 - first, (off_t)done);
		size_t left;

		if (r < 0 && errno == EINTR)
			continue;
		if (r <= 0)
			return r ? -errno : -EIO;
		done += (size_t)r;
		for (left = (size_t)r; first < 2 && left >= iov[first].iov_len; first++)
			left -= iov[first].iov_len;
		if (first < 2) {
			iov[first].iov_base = (char *)iov[first].iov_base + left;
			iov[first].iov_len -= left;
		}
	}
	return 0;
}

static int publish(int fd, const struct block *block, int flags)
{
	char path[32];

	if (!(flags & LINK_BY_PROC))
		return linkat(fd, "", block->dirfd, block->name, AT_EMPTY_PATH);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	return linkat(AT_FDCWD, path, block->dirfd, block->name, AT_SYMLINK_FOLLOW);
}

static int nothing_stands(const struct block *block)
{
	int fd = openat(block->dirfd, block->name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);

	if (fd < 0)
		return errno == ENOENT ? 0 : -errno;
	close(fd);
	return -EEXIST;
}

static int write_one(struct block *block, int flags, void *tail)
{
	int direct = flags & DIRECT ? O_DIRECT : 0, fd;
	int r = flags & LOOK ? nothing_stands(block) : 0;
	struct stat st;

	if (r)
		return r;
	fd = openat(block->dirfd, ".", O_TMPFILE | O_WRONLY | O_CLOEXEC | direct, 0600);
	if (fd < 0)
		return -errno;
	if (flags & LOOK && fstat(fd, &st))
		r = -errno;
	if (!r)
		r = transfer(put, fd, block, tail, tail_bytes(flags));
	if (!r && flags & DURABLE && fdatasync(fd))
		r = -errno;
	if (!r && publish(fd, block, flags))
		r = -errno;
	if (!r && flags & DURABLE && fsync(block->dirfd))
		r = -errno;
	if (close(fd) && !r)
		r = -errno;
	return r;
}

static int read_one(struct block *block, int flags, void *tail)
{
	int direct = flags & DIRECT ? O_DIRECT : 0, r;
	int fd = openat(block->dirfd, block->name, O_RDONLY | O_NOFOLLOW | O_CLOEXEC | direct);
	struct stat st;

	if (fd < 0)
		return -errno;
	r = fstat(fd, &st) ? -errno : 0;
	if (!r && (size_t)st.st_size != block->nbytes + tail_bytes(flags))
		r = -EIO;
	if (!r)
		r = transfer(get, fd, block, tail, tail_bytes(flags));
	close(fd);
	return r;
}

static void deal(struct loop *loop, void *tail)
{
	size_t i;

	while ((i = atomic_fetch_add(&loop->next, 1)) < loop->nblocks) {
		struct block *block = &loop->blocks[i];
		int64_t start = now_ns();

		block->status = loop->one(block, loop->flags, tail);
		block->ns = now_ns() - start;
	}
}

static void *work(void *arg)
{
	struct loop *loop = arg;
	void *tail = aligned_alloc(ALIGN, ALIGN);

	memset(tail, 0, ALIGN);
	pthread_barrier_wait(&loop->barriers[READY]);
	pthread_barrier_wait(&loop->barriers[GO]);
	deal(loop, tail);
	pthread_barrier_wait(&loop->barriers[DONE]);
	free(tail);
	return NULL;
}

static int64_t run_here(struct loop *loop)
{
	static _Alignas(ALIGN) char tail[ALIGN];
	int64_t start = now_ns();

	deal(loop, tail);
	return now_ns() - start;
}

static int64_t run_threads(struct loop *loop, int threads)
{
	pthread_t ids[MAX_THREADS];
	int64_t start, ns;

	for (int i = 0; i < 3; i++)
		pthread_barrier_init(&loop->barriers[i], NULL, (unsigned)threads + 1);
	for (int i = 0; i < threads; i++)
		if (pthread_create(&ids[i], NULL, work, loop))
			abort();
	pthread_barrier_wait(&loop->barriers[READY]);
	start = now_ns();
	pthread_barrier_wait(&loop->barriers[GO]);
	pthread_barrier_wait(&loop->barriers[DONE]);
	ns = now_ns() - start;
	for (int i = 0; i < threads; i++)
		pthread_join(ids[i], NULL);
	for (int i = 0; i < 3; i++)
		pthread_barrier_destroy(&loop->barriers[i]);
	return ns;
}

/* Nanoseconds for all blocks, or the first -errno. */
static int64_t run(struct block *blocks, size_t nblocks, int threads, int flags, block_fn one)
{
	struct loop loop = { .blocks = blocks, .nblocks = nblocks, .flags = flags, .one = one };
	int64_t ns;

	if (threads > MAX_THREADS)
		return -EINVAL;
	ns = threads < 2 ? run_here(&loop) : run_threads(&loop, threads);
	for (size_t i = 0; i < nblocks; i++)
		if (blocks[i].status)
			return blocks[i].status;
	return ns;
}

int64_t blockloop_write(struct block *blocks, size_t nblocks, int threads, int flags)
{
	return run(blocks, nblocks, threads, flags, write_one);
}

int64_t blockloop_read(struct block *blocks, size_t nblocks, int threads, int flags)
{
	return run(blocks, nblocks, threads, flags, read_one);
}
