/* Between Python's columns, or plain arguments, and C's array of operations. */
#include "kvio.h"

void kvio_fill_ops(kvio_op *ops, size_t nops, kvio_part *parts, size_t nparts,
		   const int32_t *dirfds, const uint32_t *modes, const uint64_t *sizes,
		   const uint32_t *counts, const uint8_t *key_hashes, const char *names,
		   void *const *bases, const size_t *lengths, uint64_t offset, uint32_t flags)
{
	for (size_t i = 0; i < nparts; i++) {
		parts[i].base = bases[i];
		parts[i].nbytes = lengths[i];
	}
	for (size_t i = 0; i < nops; i++) {
		ops[i].dirfd = dirfds[i];
		ops[i].mode = modes[i];
		ops[i].name = names;
		ops[i].parts = parts;
		ops[i].nparts = counts[i];
		ops[i].nbytes = sizes[i];
		ops[i].offset = offset;
		ops[i].flags = flags;
		memcpy(ops[i].key_hash, key_hashes + i * sizeof(ops[i].key_hash),
		       sizeof(ops[i].key_hash));
		names += strlen(names) + 1;
		parts += counts[i];
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

static void one(kvio_call *shared, kvio_fault *fault, void *bounce, size_t bounce_bytes,
		const kvio_part *part, int dirfd, uint32_t mode, const char *name,
		const uint8_t *key_hash, kvio_op *op,
		int (*batch)(kvio_call *, kvio_op *, size_t))
{
	kvio_call call = *shared;

	call.fault = fault;
	call.bounce = bounce;
	call.bounce_bytes = bounce_bytes;
	memset(op, 0, sizeof(*op));
	op->dirfd = dirfd;
	op->mode = mode;
	op->name = name;
	op->parts = part;
	op->nparts = 1;
	op->nbytes = part->nbytes;
	memcpy(op->key_hash, key_hash, sizeof(op->key_hash));
	batch(&call, op, 1);
	op->name = NULL;
	op->parts = NULL;
	if (call.publish > shared->publish)
		__atomic_store_n(&shared->publish, call.publish, __ATOMIC_RELAXED);
}

int kvio_write_one(kvio_call *shared, kvio_fault *fault, void *bounce, size_t bounce_bytes,
		   int dirfd, uint32_t mode, const char *name, void *base, size_t nbytes,
		   const uint8_t *key_hash, kvio_op *op)
{
	kvio_part part = { base, nbytes };

	one(shared, fault, bounce, bounce_bytes, &part, dirfd, mode, name, key_hash, op,
	    kvio_write_batch);
	return op->status;
}

int kvio_read_one(kvio_call *shared, kvio_fault *fault, void *bounce, size_t bounce_bytes,
		  int dirfd, uint32_t mode, const char *name, void *base, size_t nbytes,
		  const uint8_t *key_hash, kvio_op *op)
{
	kvio_part part = { base, nbytes };

	one(shared, fault, bounce, bounce_bytes, &part, dirfd, mode, name, key_hash, op,
	    kvio_read_batch);
	return op->status;
}
