/*
 * Blocks that were lately read with direct I/O.  A block that is read once should not
 * evict other data from the page cache; one that is read again soon should be in it for
 * the third reader.  So the first uncached read of a block is noted here and is direct,
 * and the next goes through the page cache, unless so much was read between the two that
 * the cache would not have kept it.
 */
#include "kvio.h"

#define POSITION_BITS 40
#define POSITION_UNIT 4096

/* The finalizer of SplitMix64: every bit of the input changes every bit of the output. */
static uint64_t mix(uint64_t x)
{
	x = (x ^ (x >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
	x = (x ^ (x >> 27)) * UINT64_C(0x94d049bb133111eb);
	return x ^ (x >> 31);
}

static uint64_t hash_of(uint64_t inode, uint64_t offset, int64_t mtime_ns)
{
	return mix(mix(inode + offset) ^ (uint64_t)mtime_ns);
}

/* A slot holds the upper bits of the range's hash, and the count of all bytes that were
 * read directly before it.  Threads may overwrite each other's notes; then a block stays
 * out of the page cache for one more read. */
int kvio_read_lately(kvio_recent *recent, const kvio_op *op, uint64_t nbytes)
{
	const uint64_t positions = (UINT64_C(1) << POSITION_BITS) - 1;
	uint64_t hash = hash_of(op->inode, op->offset, op->mtime_ns);
	uint64_t *slot = &recent->slots[hash % KVIO_RECENT_SLOTS];
	uint64_t now = __atomic_add_fetch(&recent->read_bytes, nbytes, __ATOMIC_RELAXED);
	uint64_t seen = __atomic_load_n(slot, __ATOMIC_RELAXED), at = now / POSITION_UNIT;
	uint64_t since = (at - seen) & positions;
	int lately = seen && !((seen ^ hash) & ~positions) &&
		     since <= recent->reach_bytes / POSITION_UNIT;

	__atomic_store_n(slot, lately ? 0 : (hash & ~positions) | (at & positions),
			 __ATOMIC_RELAXED);
	return lately;
}

/* Who drops a block from the page cache does not want its next read to bring it back. */
void kvio_forget_read(kvio_recent *recent, uint64_t inode, int64_t mtime_ns)
{
	uint64_t hash = hash_of(inode, 0, mtime_ns);

	if (recent)
		__atomic_store_n(&recent->slots[hash % KVIO_RECENT_SLOTS], 0, __ATOMIC_RELAXED);
}
