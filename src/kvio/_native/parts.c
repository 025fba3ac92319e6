/* Gather and scatter lists, and the aligned memory that direct I/O needs. */
#include "kvio.h"

#include <stdlib.h>
#include <sys/mman.h>

#define HUGE_PAGE ((size_t)2 << 20)

static void skip_empty(struct kvio_cursor *cursor)
{
	while (cursor->left && cursor->at == cursor->part->nbytes) {
		cursor->part++;
		cursor->left--;
		cursor->at = 0;
	}
}

struct kvio_cursor kvio_cursor_at(const kvio_op *op, uint64_t start)
{
	struct kvio_cursor cursor = { op->parts, op->nparts, 0 };

	while (cursor.left && start >= cursor.part->nbytes) {
		start -= cursor.part->nbytes;
		cursor.part++;
		cursor.left--;
	}
	if (cursor.left)
		cursor.at = (size_t)start;
	return cursor;
}

/* Append up to want bytes to iov, leaving room for one more entry; return the count. */
uint64_t kvio_cursor_take(struct kvio_cursor *cursor, uint64_t want, struct iovec *iov, int *niov)
{
	uint64_t taken = 0;

	skip_empty(cursor);
	while (taken < want && cursor->left && *niov < KVIO_MAX_IOV - 1) {
		size_t n = (size_t)kvio_min(want - taken, cursor->part->nbytes - cursor->at);

		iov[*niov].iov_base = (uint8_t *)cursor->part->base + cursor->at;
		iov[*niov].iov_len = n;
		(*niov)++;
		cursor->at += n;
		taken += n;
		skip_empty(cursor);
	}
	return taken;
}

uint32_t kvio_cursor_gather(struct kvio_cursor *cursor, uint8_t *dst, size_t nbytes,
			    uint32_t crc, int checksum)
{
	skip_empty(cursor);
	while (nbytes && cursor->left) {
		const uint8_t *src = (const uint8_t *)cursor->part->base + cursor->at;
		size_t n = (size_t)kvio_min(nbytes, cursor->part->nbytes - cursor->at);

		if (checksum)
			crc = kvio_crc32c_copy(crc, dst, src, n);
		else
			memcpy(dst, src, n);
		dst += n;
		nbytes -= n;
		cursor->at += n;
		skip_empty(cursor);
	}
	return crc;
}

uint32_t kvio_cursor_scatter(struct kvio_cursor *cursor, const uint8_t *src, size_t nbytes,
			     uint32_t crc, int checksum)
{
	skip_empty(cursor);
	while (nbytes && cursor->left) {
		uint8_t *dst = (uint8_t *)cursor->part->base + cursor->at;
		size_t n = (size_t)kvio_min(nbytes, cursor->part->nbytes - cursor->at);

		if (checksum)
			crc = kvio_crc32c_copy(crc, dst, src, n);
		else
			memcpy(dst, src, n);
		src += n;
		nbytes -= n;
		cursor->at += n;
		skip_empty(cursor);
	}
	return crc;
}

/* Can direct I/O use this memory without a copy?  The length of every part but the last
 * must also be a multiple of the file block, or the next one would start inside a block. */
int kvio_parts_aligned(const kvio_op *op, uint32_t memory_align, uint32_t offset_align)
{
	for (uint32_t i = 0; i < op->nparts; i++) {
		if (!op->parts[i].nbytes)
			continue;
		if ((uintptr_t)op->parts[i].base % memory_align)
			return 0;
		if (i + 1 < op->nparts && op->parts[i].nbytes % offset_align)
			return 0;
	}
	return 1;
}

/* Allocate memory that starts on an align boundary, not zeroed; NULL when there is none
 * left.  From 4 MiB on, or with a huge alignment, it asks for huge pages: new memory then
 * costs 512 times fewer page faults, and direct I/O fewer segments (1.5 to 2.5 times faster
 * on a virtio disk).  Memory with a huge alignment is kept for long, so small pages that the
 * allocator reuses are dropped first. */
void *kvio_alloc(size_t nbytes, size_t align)
{
	size_t rounded = (size_t)kvio_round_up(nbytes ? nbytes : 1, align);
	int huge = nbytes >= 2 * HUGE_PAGE || align >= HUGE_PAGE;
	void *base;

	if (nbytes > PTRDIFF_MAX - align - HUGE_PAGE)	/* rounding up would wrap around */
		return NULL;
	base = aligned_alloc(huge && align < HUGE_PAGE ? HUGE_PAGE : align,
			     huge ? (size_t)kvio_round_up(rounded, HUGE_PAGE) : rounded);
	if (base && align >= HUGE_PAGE)
		madvise(base, rounded, MADV_DONTNEED);
	if (base && huge)
		madvise(base, rounded, MADV_HUGEPAGE);
	return base;
}

void kvio_free(void *base)
{
	free(base);
}
