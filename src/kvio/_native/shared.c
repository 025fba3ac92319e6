/*
 * Files that several processes write, and the steps that give one its name.
 *
 * A file is divided into cells; one writer owns each.  A piece's checksum, shifted by
 * the bytes of the cell behind it, is its share of the cell's checksum: shares come in
 * any order and are joined by exclusive or.  What a cell counts as written was taken by
 * the kernel before; a writer that dies in between leaves bytes that are not counted.
 */
#include "transfer.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <time.h>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23	/* Linux 5.14 */
#endif

/* Make ready for a store into a mapped file.  A page that writeback has cleaned asks the
 * file system for leave to be written: one that is dead, or has no room to copy it, says
 * so by a SIGBUS, or here by EFAULT.  Kernels before 5.14 do not know the question. */
static int ready(const void *at, size_t nbytes)
{
	uintptr_t start = (uintptr_t)at & ~((uintptr_t)sysconf(_SC_PAGESIZE) - 1);
	size_t length = (uintptr_t)at + nbytes - start;

	return madvise((void *)start, length, MADV_POPULATE_WRITE) && errno == EFAULT ? -EIO : 0;
}

/* How many bytes of the cell have been written, these included. */
static uint64_t count(kvio_cell *cell, uint32_t crc, uint64_t behind, uint64_t nbytes)
{
	uint32_t share = kvio_crc32c_combine(crc, 0, behind);

	__atomic_fetch_xor(&cell->crc, share, __ATOMIC_RELAXED);
	return __atomic_add_fetch(&cell->written, (uint32_t)nbytes, __ATOMIC_RELEASE);
}

/* Write op's parts at op->offset, all inside one stripe whose cells these are. */
int kvio_shared_write(kvio_call *call, kvio_op *op, const kvio_stripe *stripe)
{
	uint64_t at = op->offset, end = op->offset + op->nbytes;

	op->status = 0;
	while (at < end) {
		uint64_t cell = (at - stripe->origin) / stripe->cell_bytes;
		uint64_t cell_end = kvio_min(stripe->origin + (cell + 1) * stripe->cell_bytes,
					     stripe->end);
		uint64_t cell_start = stripe->origin + cell * stripe->cell_bytes;
		uint64_t n = kvio_min(cell_end, end) - at, whole;
		uint32_t crc = 0;

		op->status = kvio_stream_write(call, op, at, n, 0, &crc);
		if (op->status < 0) {
			op->site = KVIO_SITE_WRITE;
			return op->status;
		}
		at += n;
		if (!stripe->cells)
			continue;
		op->status = ready(&stripe->cells[cell], sizeof(kvio_cell));
		if (!op->status)
			op->status = ready(stripe->progress, sizeof(*stripe->progress));
		if (op->status < 0) {
			op->site = KVIO_SITE_WRITE;
			return op->status;
		}
		whole = cell_end - (cell_start > stripe->start ? cell_start : stripe->start);
		if (count(&stripe->cells[cell], crc, cell_end - at, n) == whole)
			kvio_bump_word(stripe->progress);
	}
	return 0;
}

/* The same of one piece of memory, the request as plain arguments; direct I/O asks for
 * a bounce buffer where the memory is not aligned. */
int kvio_shared_write_one(const kvio_call *shared, kvio_fault *fault, void *bounce,
			  size_t bounce_bytes, int fd, int direct, void *base, size_t nbytes,
			  uint64_t offset, const kvio_stripe *stripe)
{
	kvio_call call = *shared;
	kvio_part part = { base, nbytes };
	kvio_op op = { .parts = &part, .nparts = 1, .nbytes = nbytes, .offset = offset, .fd = fd,
		       .mode_taken = direct ? KVIO_MODE_DIRECT : KVIO_MODE_BUFFERED };

	call.fault = fault;
	call.bounce = bounce;
	call.bounce_bytes = bounce_bytes;
	if (direct && !bounce && !kvio_parts_aligned(&op, call.memory_align, call.offset_align))
		return KVIO_WANTS_BOUNCE;
	return kvio_shared_write(&call, &op, stripe);
}

/* Count bytes of which the checksum is known, behind bytes before the end of their cell. */
int kvio_shared_count(kvio_cell *cell, uint32_t crc, uint64_t nbytes, uint64_t behind)
{
	int r = ready(cell, sizeof(*cell));

	if (!r)
		count(cell, crc, behind, nbytes);
	return r;
}

/* Read nbytes of a file at offset into parts, and sum them on the way; direct I/O wants a
 * bounce buffer.  KVIO_CORRUPT: the file ends before that. */
int kvio_shared_read(const kvio_call *shared, kvio_fault *fault, void *bounce,
		     size_t bounce_bytes, int fd, int direct, const kvio_part *parts,
		     unsigned int nparts, uint64_t nbytes, uint64_t offset, uint64_t file_nbytes,
		     int checksum, uint32_t *crc)
{
	kvio_call call = *shared;
	kvio_op op = { .parts = (kvio_part *)(uintptr_t)parts, .nparts = nparts, .nbytes = nbytes,
		       .offset = offset, .fd = fd, .file_nbytes = file_nbytes,
		       .mode_taken = direct ? KVIO_MODE_DIRECT : KVIO_MODE_BUFFERED };

	call.fault = fault;
	call.bounce = bounce;
	call.bounce_bytes = bounce_bytes;
	*crc = 0;
	return kvio_stream_read(&call, &op, offset, nbytes, NULL, 0, checksum, crc);
}

int kvio_file_create(kvio_fault *fault, int dirfd, const char *name)
{
	int fd = sys_openat(fault, KVIO_SITE_OPEN_TEMP, dirfd, name,
			    O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW, 0600), r;

	if (fd < 0)
		return fd;
	r = sys_fchmod(fault, fd, 0600);	/* whatever the umask took away */
	if (r < 0) {
		kvio_remove(NULL, dirfd, name);
		sys_close(NULL, fd);
	}
	return r < 0 ? r : fd;
}

int kvio_file_open(kvio_fault *fault, int dirfd, const char *name, int flags)
{
	return sys_openat(fault, KVIO_SITE_OPEN_READ, dirfd, name, flags | O_NOFOLLOW, 0);
}

/* Full size, all blocks allocated; 1: the file system cannot, and the file is a hole. */
int kvio_file_allocate(kvio_fault *fault, int fd, uint64_t nbytes, int preallocate)
{
	int r = preallocate && nbytes ? sys_fallocate(fault, fd, nbytes) : -EOPNOTSUPP;

	if (r != -EOPNOTSUPP && r != -ENOSYS)
		return r;
	r = sys_ftruncate(fault, fd, nbytes);
	return r < 0 ? r : 1;
}

int kvio_file_truncate(kvio_fault *fault, int fd, uint64_t nbytes)
{
	return sys_ftruncate(fault, fd, nbytes);
}

int kvio_file_sync(kvio_fault *fault, int fd)
{
	return sys_fdatasync(fault, fd);
}

int kvio_file_mode(kvio_fault *fault, int fd, unsigned int mode)
{
	return sys_fchmod(fault, fd, (mode_t)mode);
}

int kvio_file_close(kvio_fault *fault, int fd)
{
	return sys_close(fault, fd);
}

/* Rename a file in its directory.  Where RENAME_NOREPLACE is not known, a
 * link refuses a name that is taken just as well, and a rename onto that link follows:
 * a FUSE server that knows files by their paths gives the link an inode of its own, with
 * its own page cache and locks, and the rename gives the name back to the inode that the
 * caller has open.  Where both are one inode the rename does nothing (rename(2)). */
int kvio_name_move(kvio_fault *fault, int dirfd, const char *from, const char *to, int replace)
{
	int r = sys_renameat2(fault, dirfd, from, dirfd, to, replace ? 0 : RENAME_NOREPLACE);

	if (replace || (r != -EINVAL && r != -ENOSYS))
		return r;
	r = sys_linkat(fault, dirfd, from, dirfd, to, 0);
	if (r < 0)
		return r;
	r = sys_renameat2(fault, dirfd, from, dirfd, to, 0);
	if (r < 0) {
		kvio_remove(NULL, dirfd, to);
		return r;
	}
	r = kvio_remove(fault, dirfd, from);
	return r == -ENOENT ? 0 : r;	/* or the server has moved it */
}

/* Two files of a directory exchange their names in one step. */
int kvio_name_exchange(kvio_fault *fault, int dirfd, const char *name, const char *other)
{
	return sys_renameat2(fault, dirfd, name, dirfd, other, RENAME_EXCHANGE);
}

int kvio_name_remove(kvio_fault *fault, int dirfd, const char *name)
{
	return kvio_remove(fault, dirfd, name);
}

int kvio_dir_sync(kvio_fault *fault, int dirfd)
{
	return sys_fsync_dir(fault, dirfd);
}

/* Sleep while a word of shared memory has this value; -ETIMEDOUT, -EAGAIN, -EINTR. */
int kvio_wait_word(uint32_t *word, uint32_t value, uint64_t timeout_ns)
{
	struct timespec t = { (time_t)(timeout_ns / 1000000000u), (long)(timeout_ns % 1000000000u) };
	int r;

	__atomic_fetch_add(word + 1, 1, __ATOMIC_SEQ_CST);
	r = syscall(SYS_futex, word, FUTEX_WAIT, value, &t, NULL, 0) ? -errno : 0;
	__atomic_fetch_sub(word + 1, 1, __ATOMIC_SEQ_CST);
	return r;
}

/* Change a word and wake who waits for that; one who died waiting costs a call each. */
void kvio_bump_word(uint32_t *word)
{
	__atomic_fetch_add(word, 1, __ATOMIC_SEQ_CST);
	if (__atomic_load_n(word + 1, __ATOMIC_SEQ_CST))
		syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, NULL, NULL, 0);
}
