/* Look blocks up: read their trailers, or only check for their names. */
#include "sys.h"

static int stat_one(kvio_call *call, kvio_op *op)
{
	struct kvio_trailer trailer;
	int r;

	op->fd = -1;
	op->mode = op->mode_taken = KVIO_MODE_BUFFERED;
	if (kvio_cancelled(call))
		return -ECANCELED;
	r = kvio_open_block(call, op);
	op->block_nbytes = op->file_nbytes;
	if (!r && call->flags & KVIO_TRAILER)
		r = kvio_load_trailer(call, op, &trailer);
	return kvio_close_block(call, op, r);
}

int kvio_stat_batch(kvio_call *call, kvio_op *ops, size_t nops)
{
	int good = 0;

	for (size_t i = 0; i < nops; i++) {
		ops[i].status = stat_one(call, &ops[i]);
		good += !ops[i].status;
	}
	return good;
}

/* Is there a file of this name that may be a block?  Its content is not read. */
static int look_at(kvio_call *call, kvio_op *op)
{
	struct stat st;
	int r;

	if (kvio_cancelled(call))
		return -ECANCELED;
	if (op->dirfd < 0)
		return kvio_no_directory(op, KVIO_SITE_OPEN_READ);
	r = sys_fstatat(call->fault, op->dirfd, op->name, &st);
	if (r == -ENOENT && kvio_dir_is_gone(call, op))
		return kvio_failed(op, KVIO_SITE_OPEN_READ, -ESTALE);
	if (r < 0)
		return kvio_failed(op, KVIO_SITE_FSTAT, r);
	if (!S_ISREG(st.st_mode))
		return kvio_corrupt(op, KVIO_BAD_KIND);
	if (call->flags & KVIO_TRAILER && st.st_size < KVIO_TRAILER_BYTES)
		return kvio_corrupt(op, KVIO_BAD_SHORT);
	return 0;
}

/* Look for one block after the other, up to the first that is missing. */
int kvio_look_batch(kvio_call *call, kvio_op *ops, size_t nops)
{
	int good = 0;

	for (size_t i = 0; i < nops && good == (int)i; i++) {
		ops[i].status = look_at(call, &ops[i]);
		good += !ops[i].status;
	}
	return good;
}
