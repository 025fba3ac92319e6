/* The block that stands under a key when a write arrives: may it stay? */
#include "transfer.h"

#include <stdlib.h>

/* A trailer may lie across two blocks of the file system. */
#define SCRATCH_BYTES ((size_t)4 * KVIO_MAX_ALIGN)

/* From here on the block's descriptor reads the disk.  Where there is no direct
 * I/O the page cache is believed. */
static int pass_the_cache(kvio_call *call, kvio_op *standing)
{
	int r = sys_fcntl_setfl(call->fault, standing->fd, O_RDONLY | O_NONBLOCK | O_DIRECT);

	if (!r)
		standing->mode_taken = KVIO_MODE_DIRECT;
	return r == -EINVAL ? 0 : r;
}

/* A block without a checksum is compared with what the page cache has of it. */
static int expect_what_is_read(kvio_call *call, kvio_op *standing, struct kvio_trailer *expected)
{
	if (expected->flags & KVIO_CHECKSUM)
		return 0;
	expected->flags |= KVIO_CHECKSUM;
	return kvio_stream_read(call, standing, 0, expected->nbytes, NULL, 0, 1, &expected->crc);
}

/* Make the standing block durable; it was perhaps written by someone who asked
 * for less.  A writeback that failed leaves good pages over a bad disk, and
 * fdatasync tells of it once, perhaps to somebody else: so the disk itself is
 * read through.  On any doubt the caller writes its own bytes instead. */
static int promote(kvio_call *call, kvio_op *op, kvio_op *standing, struct kvio_trailer expected)
{
	uint8_t *bounce = call->bounce;
	size_t bounce_bytes = call->bounce_bytes;
	struct kvio_trailer found;
	int r = kvio_sync_file(call, standing);

	if (r < 0)
		return kvio_failed(op, standing->site, r);
	call->bounce_bytes = SCRATCH_BYTES;
	call->bounce = aligned_alloc(KVIO_MAX_ALIGN, SCRATCH_BYTES);
	if (!call->bounce)
		r = -ENOMEM;
	if (!r)
		r = expect_what_is_read(call, standing, &expected);
	if (!r)
		r = pass_the_cache(call, standing);
	if (!r && call->flags & KVIO_TRAILER)
		r = kvio_load_trailer(call, standing, &found);
	if (!r)
		r = kvio_scrub(call, standing, &expected);
	free(call->bounce);
	call->bounce = bounce;
	call->bounce_bytes = bounce_bytes;
	return r;
}

/* Is the key taken?  Then op->existed is set and the block may stay; a broken
 * block, or one of another length, counts as absent unless the caller asked
 * for an error, because otherwise a truncated file would stay for ever. */
int kvio_standing_kept(kvio_call *call, kvio_op *op)
{
	kvio_op standing = *op;
	struct kvio_trailer trailer = { 0, 0, 0 };
	int r;

	standing.fd = -1;
	standing.mode = standing.mode_taken = KVIO_MODE_BUFFERED;
	/* A directory that is gone is noticed when the temporary is made. */
	standing.flags = KVIO_OP_SCRUB | KVIO_OP_STANDING;
	standing.offset = 0;
	op->existed = 0;
	r = kvio_open_block(call, &standing);
	trailer.nbytes = standing.file_nbytes;
	if (!r && call->flags & KVIO_TRAILER)
		r = kvio_load_trailer(call, &standing, &trailer);
	if (!r && trailer.nbytes != op->nbytes && call->if_exists == KVIO_KEEP)
		r = KVIO_CORRUPT;
	if (!r && call->flags & KVIO_DURABLE && call->if_exists == KVIO_KEEP)
		r = promote(call, op, &standing, trailer) ? KVIO_CORRUPT : 0;
	kvio_close_block(call, &standing, 0);
	if (r == KVIO_CORRUPT && call->if_exists == KVIO_KEEP) {
		op->flags |= KVIO_OP_UNFIT;
		return 0;
	}
	if (r == -ENOENT)
		return 0;
	if (r < 0 && r != KVIO_CORRUPT)
		return kvio_failed(op, standing.site, r);
	op->existed = 1;
	op->crc = trailer.crc;
	op->flags |= standing.flags & KVIO_OP_HAS_CHECKSUM;
	return 0;
}
