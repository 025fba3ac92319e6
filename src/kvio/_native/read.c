/*
 * Read blocks.  A whole block takes one open and one read of payload and trailer, with an
 * fstat between them where a wrong guess of the length would be expensive.  A block is
 * returned only if trailer, file length, key and checksum are right.
 */
#include "transfer.h"

static int is_regular(kvio_call *call, const kvio_op *op)
{
	struct stat st;

	return !sys_fstatat(call->fault, op->dirfd, op->name, &st) && S_ISREG(st.st_mode);
}

/* O_NONBLOCK: the open of a FIFO of that name must not hang. */
static int open_file(kvio_call *call, kvio_op *op)
{
	int direct = op->mode == KVIO_MODE_DIRECT ? O_DIRECT : 0, r;

	if (op->dirfd < 0)
		return kvio_no_directory(op, KVIO_SITE_OPEN_READ);
	r = sys_openat(call->fault, KVIO_SITE_OPEN_READ, op->dirfd, op->name,
		       O_RDONLY | O_NOFOLLOW | O_NONBLOCK | direct, 0);
	if (r == -ELOOP || r == -ENXIO || (r == -EINVAL && direct && !is_regular(call, op)))
		return kvio_corrupt(op, KVIO_BAD_KIND);
	if (r < 0)
		return kvio_failed(op, KVIO_SITE_OPEN_READ,
			      r == -ENOENT && !(op->flags & KVIO_OP_EXISTING) &&
				      kvio_dir_is_gone(call, op) ? -ESTALE : r);
	op->fd = r;
	return 0;
}

/* Check that the open file can be a block, and get its length. */
static int examine(kvio_call *call, kvio_op *op)
{
	struct stat st;
	int r = sys_fstat(call->fault, op->fd, &st);

	if (r < 0)
		return kvio_failed(op, KVIO_SITE_FSTAT, r);
	if (S_ISDIR(st.st_mode))	/* layout=plain: the first part of longer keys */
		return kvio_failed(op, KVIO_SITE_OPEN_READ, -ENOENT);
	if (!S_ISREG(st.st_mode))
		return kvio_corrupt(op, KVIO_BAD_KIND);
	op->file_nbytes = (uint64_t)st.st_size;
	op->inode = st.st_ino;
	op->mtime_ns = (int64_t)st.st_mtim.tv_sec * 1000000000 + st.st_mtim.tv_nsec;
	if (call->flags & KVIO_TRAILER && op->file_nbytes < KVIO_TRAILER_BYTES)
		return kvio_corrupt(op, KVIO_BAD_SHORT);
	return 0;
}

int kvio_open_block(kvio_call *call, kvio_op *op)
{
	int r = open_file(call, op);

	return r < 0 ? r : examine(call, op);
}

int kvio_close_block(kvio_call *call, kvio_op *op, int r)
{
	if (op->fd >= 0)
		sys_close(call->fault, op->fd);
	op->fd = -1;
	return r;
}

static int parse(kvio_call *call, kvio_op *op, const uint8_t *trailer, struct kvio_trailer *out)
{
	int reason = kvio_trailer_parse(trailer, op->file_nbytes, op->key_hash, call->verify, out);

	if (reason)
		return kvio_corrupt(op, reason);
	op->block_nbytes = out->nbytes;
	op->crc = out->crc;
	if (out->flags & KVIO_CHECKSUM)
		op->flags |= KVIO_OP_HAS_CHECKSUM;
	return 0;
}

/* Read the trailer alone. */
int kvio_load_trailer(kvio_call *call, kvio_op *op, struct kvio_trailer *out)
{
	uint32_t align = op->mode_taken == KVIO_MODE_DIRECT ? call->offset_align : 1;
	uint64_t at = op->file_nbytes - KVIO_TRAILER_BYTES, base = kvio_round_down(at, align);
	uint8_t small[KVIO_TRAILER_BYTES], *buf = align > 1 ? call->bounce : small;
	struct iovec iov = { buf, (size_t)kvio_round_up(op->file_nbytes - base, align) };
	int64_t r = kvio_read_all(call, op, &iov, 1, base);

	if (r < 0)
		return kvio_failed(op, KVIO_SITE_READ, (int)r);
	if ((uint64_t)r < op->file_nbytes - base)
		return kvio_corrupt(op, KVIO_BAD_SHORT);
	return parse(call, op, buf + (at - base), out);
}

static int load(kvio_call *call, kvio_op *op, uint64_t nbytes, uint8_t *tail, size_t tail_nbytes,
		int checksum, uint32_t *crc)
{
	int r = kvio_stream_read(call, op, op->offset, nbytes, tail, tail_nbytes, checksum, crc);

	if (r == KVIO_CORRUPT)
		return kvio_corrupt(op, KVIO_BAD_SHORT);
	return r < 0 ? kvio_failed(op, KVIO_SITE_READ, r) : 0;
}

static int check_payload(kvio_call *call, kvio_op *op, const struct kvio_trailer *trailer,
			 uint32_t crc)
{
	if (call->verify == KVIO_VERIFY_FULL && trailer->flags & KVIO_CHECKSUM &&
	    crc != trailer->crc)
		return kvio_corrupt(op, KVIO_BAD_PAYLOAD);
	op->done = trailer->nbytes;
	return 0;
}

/* Read payload and trailer at once, guessing that the block is exactly as long as the
 * caller's memory: 0 done, 1 the guess was wrong. */
static int read_guessing(kvio_call *call, kvio_op *op)
{
	uint64_t rest = op->file_nbytes - op->nbytes;
	uint8_t tail[KVIO_TAIL_BYTES];
	struct kvio_trailer trailer;
	uint32_t crc = 0;
	int r;

	if (op->flags & KVIO_OP_SCRUB || op->file_nbytes < op->nbytes ||
	    rest < KVIO_TRAILER_BYTES || rest > KVIO_TAIL_BYTES)
		return 1;
	r = load(call, op, op->nbytes, tail, (size_t)rest, call->verify == KVIO_VERIFY_FULL, &crc);
	if (!r)
		r = parse(call, op, tail + rest - KVIO_TRAILER_BYTES, &trailer);
	if (r < 0)
		return r;
	return trailer.nbytes != op->nbytes ? 1 : check_payload(call, op, &trailer, crc);
}

static int read_whole(kvio_call *call, kvio_op *op)
{
	struct kvio_trailer trailer;
	uint32_t crc = 0;
	int r = read_guessing(call, op);

	if (r <= 0)
		return r;
	r = kvio_load_trailer(call, op, &trailer);
	if (r < 0)
		return r;
	if (trailer.nbytes > op->nbytes && !(op->flags & KVIO_OP_SCRUB))
		return KVIO_TOO_SMALL;
	r = load(call, op, trailer.nbytes, NULL, 0, call->verify == KVIO_VERIFY_FULL, &crc);
	return r < 0 ? r : check_payload(call, op, &trailer, crc);
}

/* Read a whole open block and check it, without returning its bytes. */
int kvio_scrub(kvio_call *call, kvio_op *op, const struct kvio_trailer *trailer)
{
	uint32_t crc = 0;
	int r = load(call, op, trailer->nbytes, NULL, 0, 1, &crc);

	return r < 0 ? r : check_payload(call, op, trailer, crc);
}

static int read_range(kvio_call *call, kvio_op *op)
{
	struct kvio_trailer trailer = { op->file_nbytes, 0, 0 };
	uint32_t crc = 0;
	int r = call->flags & KVIO_TRAILER ? kvio_load_trailer(call, op, &trailer) : 0;

	if (r < 0)
		return r;
	op->block_nbytes = trailer.nbytes;
	if (op->offset > trailer.nbytes)
		return KVIO_BEYOND_END;
	if (!(op->flags & (KVIO_OP_RANGE | KVIO_OP_SCRUB)) && trailer.nbytes > op->nbytes)
		return KVIO_TOO_SMALL;
	op->done = kvio_min(op->nbytes, trailer.nbytes - op->offset);
	return load(call, op, op->done, NULL, 0, 0, &crc);
}

static int fits_one_call(kvio_call *call, kvio_op *op)
{
	size_t most = call->verify == KVIO_VERIFY_FULL ? KVIO_CHECKSUM_CHUNK : call->chunk_bytes;

	if (!(call->flags & KVIO_TRAILER) || op->nbytes > most || op->nparts >= KVIO_MAX_IOV ||
	    op->flags & (KVIO_OP_RANGE | KVIO_OP_SCRUB))
		return 0;
	if (op->mode == KVIO_MODE_DIRECT_IF_COLD)
		return kvio_is_cached(call, op);
	return op->mode != KVIO_MODE_DIRECT;
}

/* Find the trailer at the end of file_nbytes bytes in the caller's memory and tail. */
static void find_trailer(const kvio_op *op, const uint8_t *tail, uint8_t out[KVIO_TRAILER_BYTES])
{
	uint64_t at = op->file_nbytes - KVIO_TRAILER_BYTES, before = 0;

	if (at < op->nbytes) {
		struct kvio_cursor cursor = kvio_cursor_at(op, at);

		before = kvio_min(op->nbytes - at, KVIO_TRAILER_BYTES);
		kvio_cursor_gather(&cursor, out, (size_t)before, 0, 0);
	} else {
		tail += at - op->nbytes;
	}
	memcpy(out + before, tail, KVIO_TRAILER_BYTES - (size_t)before);
}

static uint32_t crc_of(const kvio_op *op, uint64_t nbytes)
{
	struct kvio_cursor cursor = kvio_cursor_at(op, 0);
	struct iovec iov[KVIO_MAX_IOV];
	int niov = 0;

	kvio_cursor_take(&cursor, nbytes, iov, &niov);
	return kvio_crc_iov(0, iov, niov);
}

/* Read a block with one system call, guessing that the caller's memory is large enough:
 * 0 done, 1 take the slow path. */
static int read_in_one_call(kvio_call *call, kvio_op *op)
{
	struct kvio_cursor cursor = kvio_cursor_at(op, 0);
	uint8_t tail[KVIO_TAIL_BYTES], found[KVIO_TRAILER_BYTES];
	struct kvio_trailer trailer;
	struct iovec iov[KVIO_MAX_IOV];
	int niov = 0, looked;
	int64_t r;

	kvio_cursor_take(&cursor, op->nbytes, iov, &niov);
	iov[niov++] = (struct iovec){ tail, sizeof(tail) };
	op->mode_taken = op->mode == KVIO_MODE_DONTCACHE ? op->mode : KVIO_MODE_BUFFERED;
	r = sys_transfer(call->fault, KVIO_SITE_READ, op->fd, iov, niov, 0,
			 op->mode == KVIO_MODE_DONTCACHE ? RWF_DONTCACHE : 0);
	if (r == -EISDIR || r == -EAGAIN || r == -ESPIPE || r == -EINVAL)
		return 1;
	if (r < 0)
		return kvio_failed(op, KVIO_SITE_READ, (int)r);
	op->file_nbytes = op->nbytes + KVIO_TRAILER_BYTES;
	if ((uint64_t)r != op->file_nbytes) {	/* another length: is this the whole file? */
		looked = examine(call, op);
		if (looked < 0)
			return looked;
		if ((uint64_t)r != op->file_nbytes)
			return 1;
	}
	find_trailer(op, tail, found);
	if (parse(call, op, found, &trailer) < 0 || trailer.nbytes > op->nbytes)
		return 1;
	return check_payload(call, op, &trailer,
			     call->verify == KVIO_VERIFY_FULL ? crc_of(op, trailer.nbytes) : 0);
}

static int read_open(kvio_call *call, kvio_op *op)
{
	int r = fits_one_call(call, op) ? read_in_one_call(call, op) : 1;

	if (r <= 0)
		return r;
	r = examine(call, op);
	if (r < 0)
		return r;
	kvio_choose_mode(call, op);
	return call->flags & KVIO_TRAILER && !(op->flags & KVIO_OP_RANGE) ? read_whole(call, op)
									 : read_range(call, op);
}

static int read_one(kvio_call *call, kvio_op *op)
{
	int r;

	op->fd = -1;
	op->done = 0;
	op->hot_percent = KVIO_UNKNOWN;
	if (kvio_cancelled(call))
		return -ECANCELED;
	r = open_file(call, op);
	if (!r)
		r = read_open(call, op);
	return kvio_close_block(call, op, r);
}

int kvio_read_batch(kvio_call *call, kvio_op *ops, size_t nops)
{
	int good = 0;

	for (size_t i = 0; i < nops; i++) {
		ops[i].status = read_one(call, &ops[i]);
		good += !ops[i].status;
	}
	return good;
}

/* Open a block whose ranges several threads will read; sets op->block_nbytes to its length,
 * and op->nbytes too. */
int kvio_read_begin(kvio_call *call, kvio_op *op)
{
	struct kvio_trailer trailer = { 0, 0, 0 };
	int r;

	op->fd = -1;
	op->hot_percent = KVIO_UNKNOWN;
	r = kvio_open_block(call, op);
	if (!r) {
		kvio_choose_mode(call, op);
		trailer.nbytes = op->block_nbytes = op->file_nbytes;
		if (call->flags & KVIO_TRAILER)
			r = kvio_load_trailer(call, op, &trailer);
	}
	if (!r && trailer.nbytes > op->nbytes)
		r = KVIO_TOO_SMALL;
	if (r < 0)
		return op->status = kvio_close_block(call, op, r);
	op->nbytes = op->done = trailer.nbytes;
	return 0;
}

int kvio_read_range(kvio_call *call, const kvio_op *op, uint64_t start, uint64_t nbytes,
		    uint32_t *crc)
{
	int checksum = call->verify == KVIO_VERIFY_FULL && op->flags & KVIO_OP_HAS_CHECKSUM;

	return kvio_stream_read(call, op, start, nbytes, NULL, 0, checksum, crc);
}

int kvio_read_end(kvio_call *call, kvio_op *op)
{
	return kvio_close_block(call, op, 0);
}
