/* The existing block of a key that is written: can it be kept? */
#include "transfer.h"

#include <stdlib.h>

/* A trailer may lie across two blocks of the file system. */
#define SCRATCH_BYTES ((size_t)4 * KVIO_MAX_ALIGN)

/* From here on the block's descriptor reads the disk; without direct I/O, the page cache. */
static int pass_the_cache(kvio_call *call, kvio_op *existing)
{
	int r = sys_fcntl_setfl(call->fault, existing->fd, O_RDONLY | O_NONBLOCK | O_DIRECT);

	if (!r)
		existing->mode_taken = KVIO_MODE_DIRECT;
	return r == -EINVAL ? 0 : r;
}

/* A block without a checksum is compared with its content in the page cache. */
static int expect_cached(kvio_call *call, kvio_op *existing, struct kvio_trailer *expected)
{
	if (expected->flags & KVIO_CHECKSUM)
		return 0;
	expected->flags |= KVIO_CHECKSUM;
	return kvio_stream_read(call, existing, 0, expected->nbytes, NULL, 0, 1, &expected->crc);
}

/* Make the existing block durable, because its writer may not have asked for that.  A failed
 * writeback leaves good pages in the page cache and bad data on the disk, and fdatasync
 * reports it once, perhaps to another process: so the block is read from the disk.  If
 * anything fails, the caller writes its own bytes instead. */
static int promote(kvio_call *call, kvio_op *op, kvio_op *existing, struct kvio_trailer expected)
{
	uint8_t *bounce = call->bounce;
	size_t bounce_bytes = call->bounce_bytes;
	struct kvio_trailer found;
	int r = kvio_sync_file(call, existing);

	if (r < 0)
		return kvio_failed(op, existing->site, r);
	call->bounce_bytes = SCRATCH_BYTES;
	call->bounce = aligned_alloc(KVIO_MAX_ALIGN, SCRATCH_BYTES);
	if (!call->bounce)
		r = -ENOMEM;
	if (!r)
		r = expect_cached(call, existing, &expected);
	if (!r)
		r = pass_the_cache(call, existing);
	if (!r && call->flags & KVIO_TRAILER)
		r = kvio_load_trailer(call, existing, &found);
	if (!r)
		r = kvio_scrub(call, existing, &expected);
	free(call->bounce);
	call->bounce = bounce;
	call->bounce_bytes = bounce_bytes;
	return r;
}

/* Set op->existed if there is a block that can be kept.  A corrupt block, or one of another
 * length, counts as missing unless the caller asked for an error: otherwise a truncated file
 * would be kept for ever. */
int kvio_keep_existing(kvio_call *call, kvio_op *op)
{
	kvio_op existing = *op;
	struct kvio_trailer trailer = { 0, 0, 0 };
	int r;

	existing.fd = -1;
	existing.mode = existing.mode_taken = KVIO_MODE_BUFFERED;
	/* A removed directory is noticed when the temporary is made. */
	existing.flags = KVIO_OP_SCRUB | KVIO_OP_EXISTING;
	existing.offset = 0;
	op->existed = 0;
	r = kvio_open_block(call, &existing);
	trailer.nbytes = existing.file_nbytes;
	if (!r && call->flags & KVIO_TRAILER)
		r = kvio_load_trailer(call, &existing, &trailer);
	if (!r && trailer.nbytes != op->nbytes && call->if_exists == KVIO_KEEP)
		r = KVIO_CORRUPT;
	if (!r && call->flags & KVIO_DURABLE && call->if_exists == KVIO_KEEP)
		r = promote(call, op, &existing, trailer) ? KVIO_CORRUPT : 0;
	kvio_close_block(call, &existing, 0);
	if (r == KVIO_CORRUPT && call->if_exists == KVIO_KEEP) {
		op->flags |= KVIO_OP_UNFIT;
		return 0;
	}
	if (r == -ENOENT)
		return 0;
	if (r < 0 && r != KVIO_CORRUPT)
		return kvio_failed(op, existing.site, r);
	op->existed = 1;
	op->crc = trailer.crc;
	op->flags |= existing.flags & KVIO_OP_HAS_CHECKSUM;
	return 0;
}
