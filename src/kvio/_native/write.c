/*
 * Write blocks: each operation of a batch goes through the steps of publish.c.
 *
 * A durable batch shares syncs, in windows of blocks whose descriptors are open at
 * the same time: writeback of every block is started before the first fdatasync
 * waits, and a directory that received several names is synced once.  A block whose
 * write or fdatasync failed with EIO is written once more, from the caller's memory,
 * to a new inode.
 */
#include "transfer.h"

/* A durable window has at most this many descriptors open. */
#define WINDOW 64
/* Checking for an existing block first costs as much as writing this many bytes in vain. */
#define CHECK_BYTES ((uint64_t)64 << 10)

static int live(const kvio_op *op)
{
	return !op->status && !op->existed;
}

static void fail(kvio_call *call, kvio_op *op, int r)
{
	kvio_temp_drop(call, op);
	op->status = r;
}

/* Write the bytes to a new inode, without a name and without a sync. */
static int put_bytes(kvio_call *call, kvio_op *op)
{
	int r = kvio_temp_open(call, op);

	if (r < 0)
		return r;
	op->crc = 0;
	r = kvio_stream_write(call, op, 0, op->nbytes, 1, &op->crc);
	if (r < 0) {
		kvio_temp_drop(call, op);
		return kvio_failed(op, KVIO_SITE_WRITE, r);
	}
	return 0;
}

static int put_bytes_twice(kvio_call *call, kvio_op *op)
{
	int r = put_bytes(call, op);

	return r == -EIO ? put_bytes(call, op) : r;
}

/* Check for an existing block; -EEXIST where the caller refuses one. */
static int check_existing(kvio_call *call, kvio_op *op)
{
	int r;

	if (op->flags & KVIO_OP_UNFIT)	/* checked before, and retried for want of a descriptor */
		return 0;
	r = kvio_keep_existing(call, op);
	call->expect_existing = (int32_t)op->existed;
	return !r && op->existed && call->if_exists == KVIO_ERROR ? -EEXIST : r;
}

/* A small block is written without a check if the last key had no block: publishing finds
 * an existing one. */
static int checks_first(const kvio_call *call, const kvio_op *op)
{
	return call->if_exists != KVIO_REPLACE &&
	       (call->expect_existing || call->flags & KVIO_DURABLE || op->nbytes > CHECK_BYTES);
}

static int begin(kvio_call *call, kvio_op *op)
{
	op->fd = -1;
	op->temp[0] = 0;
	op->existed = 0;
	op->status = 0;
	op->mode_taken = op->mode;
	if (op->dirfd < 0)
		return kvio_failed(op, KVIO_SITE_OPEN_DIR, op->dirfd);
	return kvio_cancelled(call) ? -ECANCELED : 0;
}

/* Write the bytes, unless there is a block that is kept. */
static int write_or_keep(kvio_call *call, kvio_op *op)
{
	int checked = checks_first(call, op), r = checked ? check_existing(call, op) : 0, site;

	if (r < 0 || op->existed)
		return r;
	r = put_bytes_twice(call, op);
	if (r >= 0 || checked || call->if_exists == KVIO_REPLACE)
		return r;
	site = op->site;	/* on a full disk a block that exists can still be kept */
	if (check_existing(call, op) == -EEXIST)
		return -EEXIST;
	op->site = site;
	return op->existed ? 0 : r;
}

static void prepare(kvio_call *call, kvio_op *op)
{
	int r = begin(call, op);

	if (!r)
		r = write_or_keep(call, op);
	if (r < 0)
		fail(call, op, r);
	else if (call->flags & KVIO_DURABLE && live(op))
		sys_start_writeback(call->fault, op->fd);
}

/* Can the bytes be written again? */
static int held(const kvio_op *op)
{
	return !(op->flags & KVIO_OP_STREAM);
}

static void sync_one(kvio_call *call, kvio_op *op)
{
	int r = kvio_cancelled(call) ? -ECANCELED : kvio_sync_file(call, op);

	if (r == -EIO && held(op)) {
		kvio_temp_drop(call, op);
		r = put_bytes(call, op);
		if (!r)
			r = kvio_sync_file(call, op);
	}
	if (r < 0)
		fail(call, op, r);
}

static void publish_one(kvio_call *call, kvio_op *op)
{
	int r = kvio_cancelled(call) ? -ECANCELED : kvio_temp_publish(call, op);

	if (r == -EOPNOTSUPP && call->publish == KVIO_PUBLISH_NAMED && !op->temp[0] && held(op)) {
		kvio_temp_drop(call, op);
		r = put_bytes(call, op);
		if (!r && call->flags & KVIO_DURABLE)
			r = kvio_sync_file(call, op);
		if (!r)
			r = kvio_temp_publish(call, op);
	}
	call->expect_existing = op->existed || r == -EEXIST;
	if (r < 0)
		fail(call, op, r);
}

/* The earlier operation that synced this one's directory, or failed to; i: none. */
static size_t synced_by(const kvio_op *ops, size_t i)
{
	for (size_t j = 0; j < i; j++)
		if (ops[j].dirfd == ops[i].dirfd &&
		    (!ops[j].status || ops[j].site == KVIO_SITE_FSYNC_DIR))
			return j;
	return i;
}

/* Sync each directory of a batch once. */
static void sync_dirs(kvio_call *call, kvio_op *ops, size_t nops)
{
	for (size_t i = 0; i < nops; i++) {
		size_t j = synced_by(ops, i);

		if (ops[i].status)
			continue;
		if (j == i) {	/* also if cancelled: a published name is synced, or has no receipt */
			kvio_let_handlers_run(call);
			ops[i].status = kvio_sync_dir(call, &ops[i]);
		} else {
			ops[i].status = ops[j].status;
			ops[i].site = ops[j].site;
		}
	}
}

/* A failed close means that bytes may be lost: a new name is removed again.  A block that
 * replaced another stays, without a receipt: the old one is gone, and the checksum shows
 * readers whether the new one is intact. */
static void close_one(kvio_call *call, kvio_op *op)
{
	int r;

	if (op->fd < 0)
		return;
	r = sys_close(call->fault, op->fd);
	op->fd = -1;
	if (r < 0 && !op->status) {
		if (!(op->flags & KVIO_OP_REPLACED))
			kvio_remove(call->fault, op->dirfd, op->name);
		op->status = kvio_failed(op, KVIO_SITE_CLOSE, r);
	}
}

static void finish(kvio_call *call, kvio_op *ops, size_t nops)
{
	size_t i;

	if (call->flags & KVIO_DURABLE)
		for (i = 0; i < nops; i++)
			if (live(&ops[i]))
				sync_one(call, &ops[i]);
	for (i = 0; i < nops; i++)
		if (live(&ops[i]))
			publish_one(call, &ops[i]);
	if (call->flags & KVIO_DURABLE)
		sync_dirs(call, ops, nops);
	for (i = 0; i < nops; i++) {
		kvio_drop_replaced(call, &ops[i]);
		close_one(call, &ops[i]);
	}
}

/* Files that the windows of this process have open, beyond one each. */
static int64_t spare_in_use;

static size_t take_spare(const kvio_call *call, size_t wanted)
{
	int64_t free;

	if (!wanted)
		return 0;
	free = call->spare_files -
	       __atomic_fetch_add(&spare_in_use, (int64_t)wanted, __ATOMIC_RELAXED);
	if (free >= (int64_t)wanted)
		return wanted;
	free = free < 0 ? 0 : free;
	__atomic_fetch_sub(&spare_in_use, (int64_t)wanted - free, __ATOMIC_RELAXED);
	return (size_t)free;
}

static void give_spare(size_t spare)
{
	if (spare)
		__atomic_fetch_sub(&spare_in_use, (int64_t)spare, __ATOMIC_RELAXED);
}

void kvio_forget_spare(void)
{
	__atomic_store_n(&spare_in_use, 0, __ATOMIC_RELAXED);
}

/* Prepare up to most operations; fewer if there is no descriptor for the next. */
static size_t prepare_window(kvio_call *call, kvio_op *ops, size_t most)
{
	for (size_t i = 0; i < most; i++) {
		prepare(call, &ops[i]);
		if (i && kvio_lacks_descriptor(&ops[i])) {
			ops[i].status = ops[i].site = 0;
			return i;
		}
	}
	return most;
}

int kvio_write_batch(kvio_call *call, kvio_op *ops, size_t nops)
{
	size_t most = call->flags & KVIO_DURABLE ? WINDOW : 1, window, spare;
	int good = 0;

	for (size_t at = 0; at < nops; at += window) {
		spare = take_spare(call, (size_t)kvio_min(most, nops - at) - 1);
		window = prepare_window(call, ops + at, spare + 1);
		finish(call, ops + at, window);
		give_spare(spare);
		if (window <= spare)	/* from here on leave some to other threads */
			most = (window + 1) / 2;
	}
	for (size_t i = 0; i < nops; i++)
		good += !ops[i].status;
	return good;
}

/* Is the length known?  Only a block of the same length is kept. */
static int known(const kvio_op *op)
{
	return held(op) || op->flags & KVIO_OP_CLONE || op->nbytes;
}

/* 0: go on; 1: the existing block was kept, and the write has ended. */
int kvio_begin_unless_kept(kvio_call *call, kvio_op *op)
{
	int r = begin(call, op);

	if (!r && (call->if_exists == KVIO_ERROR || (call->if_exists == KVIO_KEEP && known(op))))
		r = check_existing(call, op);
	if (!r && op->existed && call->flags & KVIO_DURABLE)
		r = kvio_sync_dir(call, op);
	if (r < 0)
		return op->status = r;
	return (int)op->existed;
}

/* 0: go on with ranges; 1: the existing block was kept, and the write has ended. */
int kvio_write_begin(kvio_call *call, kvio_op *op)
{
	int r = kvio_begin_unless_kept(call, op);

	if (r)
		return r;
	r = kvio_temp_open(call, op);
	if (r < 0)
		return op->status = r;
	/* ext4 runs direct writers of one file concurrently only where its blocks are
	 * allocated; without fallocate the writes may be serial. */
	r = known(op) ? sys_fallocate(call->fault, op->fd, op->nbytes) : 0;
	if (r < 0 && r != -EOPNOTSUPP && r != -ENOSYS) {
		op->site = KVIO_SITE_FALLOCATE;
		fail(call, op, r);
		return r;
	}
	return 0;
}

int kvio_write_range(kvio_call *call, const kvio_op *op, uint64_t start, uint64_t nbytes,
		     uint32_t *crc)
{
	return kvio_stream_write(call, op, start, nbytes, start + nbytes == op->nbytes, crc);
}

int kvio_write_end(kvio_call *call, kvio_op *op)
{
	finish(call, op, 1);
	return op->status;
}

void kvio_write_abort(kvio_call *call, kvio_op *op)
{
	kvio_temp_drop(call, op);
}
