/* The block that stands under a key when a write arrives: may it stay? */
#include "transfer.h"

#define SCRATCH_BYTES ((size_t)64 << 10)

/* Make the standing block durable; it was perhaps written by someone who asked
 * for less.  fdatasync reports a writeback that failed while the inode was in
 * memory, reading the block through finds one that failed before.  On any
 * doubt the caller writes its own bytes instead. */
static int promote(kvio_call *call, kvio_op *op, kvio_op *standing)
{
	uint8_t scratch[SCRATCH_BYTES];
	kvio_call reading = *call;
	struct kvio_trailer trailer;
	int r = sys_fdatasync(call->fault, standing->fd);

	if (r < 0)
		return kvio_failed(op, KVIO_SITE_FDATASYNC, r);
	if (!(call->flags & KVIO_TRAILER))
		return 0;
	reading.bounce = scratch;
	reading.bounce_bytes = sizeof(scratch);
	r = kvio_load_trailer(&reading, standing, &trailer);
	return r < 0 ? r : kvio_scrub(&reading, standing, &trailer);
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
		r = promote(call, op, &standing) ? KVIO_CORRUPT : 0;
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
