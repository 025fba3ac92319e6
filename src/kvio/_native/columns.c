/* From Python's columns, or plain arguments, to C's array of operations, and back. */
#include "kvio.h"

/* The directory of a key, which is changed into its file name: no key contains a tilde. */
static void place(kvio_leaf_table *leaves, kvio_op *op, char *name, size_t length)
{
	kvio_blake2b_128(leaves->prefix, leaves->prefix_bytes, name, length, op->key_hash);
	op->dir = &leaves->dirs[op->key_hash[0]];
	for (char *at = name; (at = memchr(at, '/', (size_t)(name + length - at)));)
		*at = '~';
}

void kvio_fill_ops(kvio_op *ops, size_t nops, kvio_leaf_table *leaves, kvio_dir *const *dirs,
		   char *names, const uint32_t *modes, size_t nmodes, const uint32_t *counts,
		   const uint64_t *sizes, kvio_part *parts, size_t nparts,
		   void *const *bases, const size_t *lengths, uint64_t offset, uint32_t flags)
{
	for (size_t i = 0; i < nparts; i++) {
		parts[i].base = bases[i];
		parts[i].nbytes = lengths[i];
	}
	for (size_t i = 0; i < nops; i++) {
		kvio_op *op = &ops[i];
		size_t length = strlen(names);

		op->name = names;
		op->mode = modes[nmodes == 1 ? 0 : i];
		op->parts = parts;
		op->nparts = counts ? counts[i] : 1;
		op->offset = offset;
		op->flags = flags;
		op->status = -ECANCELED;	/* until it is tried */
		if (leaves)
			place(leaves, op, names, length);
		else
			op->dir = dirs[i];
		names += length + 1;
		op->nbytes = counts ? sizes[i] : parts->nbytes;
		parts += op->nparts;
	}
}

void kvio_get_answers(const kvio_op *ops, size_t nops, int64_t *answers)
{
	for (size_t i = 0; i < nops; i++, answers += KVIO_ANSWERS) {
		answers[0] = ops[i].status;
		answers[1] = ops[i].site;
		answers[2] = ops[i].crc;
		answers[3] = ops[i].flags;
		answers[4] = ops[i].existed;
		answers[5] = ops[i].mode_taken;
		answers[6] = (int64_t)ops[i].done;
		answers[7] = (int64_t)ops[i].block_nbytes;
		answers[8] = (int64_t)ops[i].file_nbytes;
		answers[9] = ops[i].mtime_ns;
	}
}

void kvio_get_crcs(const kvio_op *ops, size_t nops, uint32_t *crcs)
{
	for (size_t i = 0; i < nops; i++)
		crcs[i] = ops[i].crc;
}

int kvio_lacks_descriptor(const kvio_op *op)
{
	return (op->status == -EMFILE || op->status == -ENFILE) &&
	       (op->site == KVIO_SITE_OPEN_TEMP || op->site == KVIO_SITE_OPEN_READ ||
		op->site == KVIO_SITE_OPEN_DIR);
}

void kvio_sum_up(const kvio_op *ops, size_t nops, kvio_summary *summary)
{
	memset(summary, 0, sizeof(*summary));
	summary->mode_taken = nops ? (int32_t)ops[0].mode_taken : -1;
	for (size_t i = 0; i < nops; i++) {
		summary->good += !ops[i].status;
		summary->stale += ops[i].status == -ESTALE;
		summary->exhausted += (size_t)kvio_lacks_descriptor(&ops[i]);
		summary->existed += !!ops[i].existed;
		summary->moved_less += ops[i].done < ops[i].nbytes;
		if ((int32_t)ops[i].mode_taken != summary->mode_taken)
			summary->mode_taken = -1;
	}
}

size_t kvio_leading(const kvio_op *ops, size_t nops)
{
	size_t i = 0;

	while (i < nops && !ops[i].status)
		i++;
	return i;
}

void kvio_enter(kvio_io_counters *counters)
{
	__atomic_fetch_add(&counters->in_flight, 1, __ATOMIC_RELAXED);
}

void kvio_leave(kvio_io_counters *counters, const kvio_op *ops, size_t nops)
{
	__atomic_fetch_sub(&counters->in_flight, 1, __ATOMIC_RELAXED);
	for (size_t i = 0; i < nops; i++)
		if (!ops[i].status && !ops[i].existed && ops[i].mode_taken <= KVIO_MODE_DIRECT)
			__atomic_fetch_add(&counters->moved[ops[i].mode_taken], 1, __ATOMIC_RELAXED);
}

int kvio_run_one(const kvio_one *one, kvio_fault *fault, void *bounce, size_t bounce_bytes,
		 kvio_dir *dir, uint32_t mode, const char *name, void *base, size_t nbytes,
		 kvio_op *op)
{
	static int (*const batches[])(kvio_call *, kvio_op *, size_t) = {
		[KVIO_WRITE] = kvio_write_batch,
		[KVIO_READ] = kvio_read_batch,
		[KVIO_STAT] = kvio_stat_batch,
	};
	const kvio_part part = { base, nbytes };
	kvio_call *shared = one->call, call = *shared;
	size_t length = strlen(name);
	char text[KVIO_NAME_BYTES];

	memset(op, 0, sizeof(*op));
	if (length >= sizeof(text))
		return op->status = -ENAMETOOLONG;
	memcpy(text, name, length + 1);
	op->dir = dir;
	if (one->leaves)
		place(one->leaves, op, text, length);
	op->dirfd = kvio_dir_acquire(op->dir);
	if (op->dirfd < 0)
		return op->status = -ESTALE;
	call.fault = fault;
	call.bounce = bounce;
	call.bounce_bytes = bounce_bytes;
	op->mode = mode;
	op->name = text;
	op->parts = &part;
	op->nparts = 1;
	op->nbytes = nbytes;
	kvio_enter(one->counters);
	batches[one->kind](&call, op, 1);
	kvio_leave(one->counters, op, one->kind == KVIO_STAT ? 0 : 1);
	kvio_dir_release(op->dir);
	op->name = NULL;
	op->parts = NULL;
	if (__atomic_load_n(&call.cancel, __ATOMIC_RELAXED))
		op->flags |= KVIO_OP_HANDLER;	/* the caller never sees this copy */
	__atomic_store_n(&shared->expect_existing, call.expect_existing, __ATOMIC_RELAXED);
	if (call.publish > shared->publish)
		__atomic_store_n(&shared->publish, call.publish, __ATOMIC_RELAXED);
	return op->status;
}
