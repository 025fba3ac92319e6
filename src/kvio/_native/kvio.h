/* Everything the C files of kvio share: the public interface and the few
 * functions that cross files.  Every int function returns >= 0 or -errno. */
#ifndef KVIO_H
#define KVIO_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>

#include "kvio.cdef.h"

#define KVIO_MAX_IOV 256

/* A position in a gather or scatter list. */
struct kvio_cursor {
	const kvio_part *part;
	uint32_t left;
	size_t at;
};

/* The fields of a trailer. */
struct kvio_trailer {
	uint64_t nbytes;
	uint32_t crc;
	uint32_t flags;
};

/* parts.c */
struct kvio_cursor kvio_cursor_at(const kvio_op *op, uint64_t start);
uint64_t kvio_cursor_take(struct kvio_cursor *cursor, uint64_t want, struct iovec *iov, int *niov);
uint32_t kvio_cursor_gather(struct kvio_cursor *cursor, uint8_t *dst, size_t nbytes,
			    uint32_t crc, int checksum);
uint32_t kvio_cursor_scatter(struct kvio_cursor *cursor, const uint8_t *src, size_t nbytes,
			     uint32_t crc, int checksum);
int kvio_parts_aligned(const kvio_op *op, uint32_t memory_align, uint32_t offset_align);
void *kvio_alloc(size_t nbytes, size_t align);

/* trailer.c */
void kvio_trailer_seal(uint8_t out[KVIO_TRAILER_BYTES], const kvio_op *op, uint32_t crc,
		       uint32_t flags);
int kvio_trailer_parse(const uint8_t in[KVIO_TRAILER_BYTES], uint64_t file_nbytes,
		       const uint8_t key_hash[16], int verify, struct kvio_trailer *out);

/* directory.c */
int kvio_dir_is_gone(kvio_call *call, const kvio_op *op);
int kvio_remove(kvio_fault *fault, int dirfd, const char *name);
int kvio_sync_file(kvio_call *call, kvio_op *op);

/* publish.c */
int kvio_temp_open(kvio_call *call, kvio_op *op);
int kvio_temp_publish(kvio_call *call, kvio_op *op);
void kvio_temp_drop(kvio_call *call, kvio_op *op);
void kvio_drop_replaced(kvio_call *call, kvio_op *op);
int kvio_own_mode(kvio_call *call, kvio_op *op);
int kvio_sync_dir(kvio_call *call, kvio_op *op);

/* write.c */
int kvio_begin_unless_kept(kvio_call *call, kvio_op *op);

/* read.c */
int kvio_open_block(kvio_call *call, kvio_op *op);
int kvio_close_block(kvio_call *call, kvio_op *op, int r);
int kvio_load_trailer(kvio_call *call, kvio_op *op, struct kvio_trailer *out);
int kvio_scrub(kvio_call *call, kvio_op *op, const struct kvio_trailer *trailer);

/* cache.c */
int kvio_is_cached(kvio_call *call, kvio_op *op);
void kvio_choose_mode(kvio_call *call, kvio_op *op);

/* recent.c */
int kvio_read_lately(kvio_recent *recent, const kvio_op *op, uint64_t nbytes);

/* existing.c */
int kvio_keep_existing(kvio_call *call, kvio_op *op);

/* signals.c */
void kvio_let_handlers_run(kvio_call *call);

static inline int kvio_failed(kvio_op *op, int site, int r)
{
	op->site = site;
	return r;
}

static inline int kvio_corrupt(kvio_op *op, int reason)
{
	return kvio_failed(op, reason, KVIO_CORRUPT);
}

/* The error of a lookup in a directory that did not open. */
static inline int kvio_no_directory(kvio_op *op, int lookup)
{
	int missing = op->dirfd == -ENOENT || op->dirfd == -ENOTDIR;

	op->site = missing ? lookup : KVIO_SITE_OPEN_DIR;
	return op->dirfd;
}

/* Called between system calls that may take long together. */
static inline int kvio_cancelled(kvio_call *call)
{
	kvio_let_handlers_run(call);
	return __atomic_load_n(&call->cancel, __ATOMIC_ACQUIRE);
}

static inline uint64_t kvio_round_up(uint64_t n, uint64_t align)
{
	return (n + align - 1) / align * align;
}

static inline uint64_t kvio_round_down(uint64_t n, uint64_t align)
{
	return n / align * align;
}

static inline uint64_t kvio_min(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

static inline uint32_t kvio_crc_iov(uint32_t crc, const struct iovec *iov, int niov)
{
	for (int i = 0; i < niov; i++)
		crc = kvio_crc32c(crc, iov[i].iov_base, iov[i].iov_len);
	return crc;
}

#endif
