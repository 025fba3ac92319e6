/* Between Python's columns and C's array of operations. */
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
