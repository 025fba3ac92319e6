/* Which pages of a file are in the page cache, and the I/O mode of a read that follows. */
#include "transfer.h"

#define HOT_PERCENT 50

int kvio_cached_pages(int fd, uint64_t offset, uint64_t nbytes, uint64_t *resident,
		      uint64_t *dirty)
{
	struct kvio_cachestat_range range = { offset, nbytes };
	struct kvio_cachestat stat;
	int r = sys_cachestat(NULL, fd, &range, &stat);

	if (!r) {
		*resident = stat.nr_cache;
		*dirty = stat.nr_dirty + stat.nr_writeback;
	}
	return r;
}

/* The share of the wanted bytes from op->offset that is in the page cache; unknown before
 * Linux 6.5. */
static uint32_t hot_percent(kvio_call *call, const kvio_op *op, uint64_t wanted)
{
	struct kvio_cachestat_range range = { op->offset, wanted };
	uint64_t pages = kvio_round_up(wanted, 4096) / 4096;
	struct kvio_cachestat stat;

	if (!pages || sys_cachestat(call->fault, op->fd, &range, &stat))
		return KVIO_UNKNOWN;
	return (uint32_t)(kvio_min(stat.nr_cache, pages) * 100 / pages);
}

static int is_hot(const kvio_op *op)
{
	return op->hot_percent != KVIO_UNKNOWN && op->hot_percent >= HOT_PERCENT;
}

/* Is a block in the page cache, if it is as long as the caller's memory?  Its length is not
 * known yet; a shorter one may seem less cached than it is. */
int kvio_is_cached(kvio_call *call, kvio_op *op)
{
	op->hot_percent = hot_percent(call, op, op->nbytes);
	return is_hot(op);
}

/* Should a read be direct?  Not if the page cache has the data; an unknown state counts as
 * not cached.  The first read of an uncached block is direct, and the second goes through
 * the page cache, so that the third finds it there. */
static int pays_direct(kvio_call *call, kvio_op *op, uint64_t wanted)
{
	if (op->hot_percent == KVIO_UNKNOWN || wanted != op->nbytes)
		op->hot_percent = hot_percent(call, op, wanted);
	if (is_hot(op))
		return 0;
	return !call->recent || op->flags & KVIO_OP_SCRUB ||
	       !kvio_read_lately(call->recent, op, wanted);
}

void kvio_choose_mode(kvio_call *call, kvio_op *op)
{
	uint64_t wanted = op->flags & KVIO_OP_SCRUB ? op->file_nbytes : op->nbytes;

	op->mode_taken = op->mode;
	if (op->mode != KVIO_MODE_DIRECT_IF_COLD)
		return;
	op->mode_taken = pays_direct(call, op, kvio_min(wanted, op->file_nbytes))
				 ? KVIO_MODE_DIRECT : KVIO_MODE_BUFFERED;
	if (op->mode_taken == KVIO_MODE_DIRECT &&
	    sys_fcntl_setfl(call->fault, op->fd, O_RDONLY | O_NONBLOCK | O_DIRECT) < 0)
		op->mode_taken = KVIO_MODE_BUFFERED;
}
