/*
 * Transfer bytes between gather lists and files.
 *
 * Straight transfers pass the caller's memory to the kernel; bounced ones copy
 * through call->bounce, because direct I/O needs aligned memory, offsets and
 * lengths.  The checksum is computed chunk by chunk, before or after the transfer.
 * The end of a block (last bytes, padding, trailer) always travels in one
 * piece with the chunk before it, so a small block is one system call.
 */
#include "transfer.h"

/* The disk writes the first bytes of a long durable block while the next ones are copied. */
#define WRITEBACK_BYTES ((uint64_t)8 << 20)

static void advance(struct iovec **iov, int *niov, size_t done)
{
	while (*niov && done >= (*iov)->iov_len) {
		done -= (*iov)->iov_len;
		(*iov)++;
		(*niov)--;
	}
	if (*niov && done) {
		(*iov)->iov_base = (uint8_t *)(*iov)->iov_base + done;
		(*iov)->iov_len -= done;
	}
}

static size_t total(const struct iovec *iov, int niov)
{
	size_t nbytes = 0;

	for (int i = 0; i < niov; i++)
		nbytes += iov[i].iov_len;
	return nbytes;
}

static int is_direct(const kvio_op *op)
{
	return op->mode_taken == KVIO_MODE_DIRECT;
}

static int rwf(const kvio_op *op)
{
	return op->mode_taken == KVIO_MODE_DONTCACHE ? RWF_DONTCACHE : 0;
}

/* A direct write stopped inside its first file block, as at a file size limit: a write of
 * the next byte returns the reason. */
static int why_short(kvio_call *call, const kvio_op *op, struct iovec *iov, int niov,
		     uint64_t offset, size_t done)
{
	int64_t r;

	advance(&iov, &niov, done);
	r = done ? sys_transfer(call->fault, KVIO_SITE_WRITE, op->fd, iov, niov, offset + done, 0)
		 : 0;
	return r < 0 && r != -EINVAL ? (int)r : -EIO;
}

/* Write all bytes.  After a short direct write the rest must start on a file block, so the
 * part of a block that was written is written again. */
static int write_all(kvio_call *call, const kvio_op *op, struct iovec *iov, int niov,
		     uint64_t offset)
{
	while (niov) {
		int64_t done, r;

		if (kvio_cancelled(call))
			return -ECANCELED;
		r = done = sys_transfer(call->fault, KVIO_SITE_WRITE, op->fd, iov, niov, offset,
					rwf(op));
		if (r < 0)
			return (int)r;
		if (is_direct(op) && (uint64_t)r < total(iov, niov))
			r = (int64_t)kvio_round_down((uint64_t)r, call->offset_align);
		if (!r)
			return why_short(call, op, iov, niov, offset, (size_t)done);
		offset += (uint64_t)r;
		advance(&iov, &niov, (size_t)r);
	}
	return 0;
}

/* Read until the list is full or the file ends; return the count, or -errno. */
int64_t kvio_read_all(kvio_call *call, const kvio_op *op, struct iovec *iov, int niov,
		      uint64_t offset)
{
	uint64_t done = 0;

	while (niov) {
		int64_t r;

		if (kvio_cancelled(call))
			return -ECANCELED;
		r = sys_transfer(call->fault, KVIO_SITE_READ, op->fd, iov, niov, offset + done,
				 rwf(op));
		if (r < 0)
			return r;
		if (!r || offset + done + (uint64_t)r >= op->file_nbytes)
			return (int64_t)done + r;
		if (is_direct(op) && (uint64_t)r < total(iov, niov))
			r = (int64_t)kvio_round_down((uint64_t)r, call->offset_align);
		if (!r)
			return -EIO;
		done += (uint64_t)r;
		advance(&iov, &niov, (size_t)r);
	}
	return (int64_t)done;
}

/* Add padding and trailer to the last n payload bytes at buf. */
static size_t seal_tail(kvio_call *call, const kvio_op *op, uint8_t *buf, size_t n, uint32_t crc)
{
	uint32_t align = is_direct(op) ? call->offset_align : 1;
	size_t trailer = call->flags & KVIO_TRAILER ? KVIO_TRAILER_BYTES : 0;
	size_t end = (size_t)kvio_round_up(n + trailer, align);

	memset(buf + n, 0, end - n);
	if (trailer)
		kvio_trailer_seal(buf + end - trailer, op, crc, call->flags);
	return end;
}

/* layout=plain with direct I/O: cut off the zeros after the last byte. */
static int trim(kvio_call *call, const kvio_op *op)
{
	if (call->flags & KVIO_TRAILER || !is_direct(op) || !(op->nbytes % call->offset_align))
		return 0;
	return sys_ftruncate(call->fault, op->fd, op->nbytes);
}

static int write_bounced(kvio_call *call, const kvio_op *op, uint64_t start, uint64_t nbytes,
			 int last, uint32_t *crc)
{
	struct kvio_cursor cursor = kvio_cursor_at(op, start - op->offset);
	size_t room = (size_t)kvio_round_down(call->bounce_bytes - KVIO_TRAILER_BYTES,
					      call->offset_align) - call->offset_align;
	int checksum = !!(call->flags & KVIO_CHECKSUM);
	uint64_t offset = start, end = start + nbytes;
	int r, more;

	do {
		size_t n = (size_t)kvio_min(room, end - offset);
		struct iovec iov = { call->bounce, n };

		*crc = kvio_cursor_gather(&cursor, call->bounce, n, *crc, checksum);
		more = offset + n < end;
		if (!more && last)
			iov.iov_len = seal_tail(call, op, call->bounce, n, *crc);
		if (iov.iov_len) {
			r = write_all(call, op, &iov, 1, offset);
			if (r < 0)
				return r;
		}
		offset += n;
	} while (more);
	return last ? trim(call, op) : 0;
}

static int write_straight(kvio_call *call, const kvio_op *op, uint64_t start, uint64_t nbytes,
			  int last, uint32_t *crc)
{
	struct kvio_cursor cursor = kvio_cursor_at(op, start - op->offset);
	uint8_t trailer[KVIO_TRAILER_BYTES], *tail = is_direct(op) ? call->bounce : trailer;
	uint64_t offset = start, end = start + nbytes, begun = start;
	int checksum = !!(call->flags & KVIO_CHECKSUM);
	size_t chunk = checksum && !is_direct(op) ? KVIO_CHECKSUM_CHUNK : call->chunk_bytes;
	int r;

	if (last && is_direct(op))
		end = kvio_round_down(end, call->offset_align);
	do {
		struct iovec iov[KVIO_MAX_IOV];
		int niov = 0;
		uint64_t n = kvio_cursor_take(&cursor, kvio_min(chunk, end - offset), iov, &niov);

		if (checksum)
			*crc = kvio_crc_iov(*crc, iov, niov);
		if (last && offset + n == end) {
			size_t rest = (size_t)(start + nbytes - end);

			*crc = kvio_cursor_gather(&cursor, tail, rest, *crc, checksum);
			iov[niov].iov_base = tail;
			iov[niov].iov_len = seal_tail(call, op, tail, rest, *crc);
			if (iov[niov].iov_len)
				niov++;
		}
		r = write_all(call, op, iov, niov, offset);
		if (r < 0)
			return r;
		offset += n;
		if (offset - begun >= WRITEBACK_BYTES && call->flags & KVIO_DURABLE &&
		    !is_direct(op) && offset < end) {
			sys_start_writeback(call->fault, op->fd);
			begun = offset;
		}
	} while (offset < end);
	return last ? trim(call, op) : 0;
}

/* Write file bytes [start, start + nbytes) of op's parts, which begin at file offset
 * op->offset, to op->fd; with last, padding and trailer too.  *crc is continued. */
int kvio_stream_write(kvio_call *call, const kvio_op *op, uint64_t start, uint64_t nbytes,
		      int last, uint32_t *crc)
{
	if (is_direct(op) && !kvio_parts_aligned(op, call->memory_align, call->offset_align))
		return write_bounced(call, op, start, nbytes, last, crc);
	return write_straight(call, op, start, nbytes, last, crc);
}

/* Copy one window of a bounced read: payload to the caller, the rest to tail. */
static uint32_t deliver(const kvio_op *op, struct kvio_cursor *cursor, const uint8_t *src,
			size_t payload, uint8_t **tail, size_t tail_nbytes, uint32_t crc,
			int checksum)
{
	if (op->flags & KVIO_OP_SCRUB)
		crc = checksum ? kvio_crc32c(crc, src, payload) : crc;
	else
		crc = kvio_cursor_scatter(cursor, src, payload, crc, checksum);
	if (tail_nbytes) {
		memcpy(*tail, src + payload, tail_nbytes);
		*tail += tail_nbytes;
	}
	return crc;
}

static int read_bounced(kvio_call *call, const kvio_op *op, uint64_t start, uint64_t nbytes,
			uint8_t *tail, size_t tail_nbytes, int checksum, uint32_t *crc)
{
	struct kvio_cursor cursor = kvio_cursor_at(op, start - op->offset);
	uint32_t align = is_direct(op) ? call->offset_align : 1;
	size_t room = (size_t)kvio_round_down(call->bounce_bytes, align);
	uint64_t at = start, end = start + nbytes, stop = end + tail_nbytes;

	while (at < stop) {
		uint64_t base = kvio_round_down(at, align);
		size_t want = (size_t)kvio_min(room, kvio_round_up(stop, align) - base);
		struct iovec iov = { call->bounce, want };
		int64_t r = kvio_read_all(call, op, &iov, 1, base);
		uint64_t reached, payload;

		if (r < 0)
			return (int)r;
		reached = kvio_min(base + (uint64_t)r, stop);
		if (reached <= at)
			return KVIO_CORRUPT;
		payload = at < end ? kvio_min(reached, end) - at : 0;
		*crc = deliver(op, &cursor, call->bounce + (at - base), (size_t)payload, &tail,
			       (size_t)(reached - at - payload), *crc, checksum);
		at = reached;
	}
	return 0;
}

static int read_straight(kvio_call *call, const kvio_op *op, uint64_t start, uint64_t nbytes,
			 uint8_t *tail, size_t tail_nbytes, int checksum, uint32_t *crc)
{
	struct kvio_cursor cursor = kvio_cursor_at(op, start - op->offset), copied;
	uint32_t align = is_direct(op) ? call->offset_align : 1;
	uint64_t at = start, end = kvio_round_down(start + nbytes, align);
	size_t rest = (size_t)(start + nbytes - end);
	size_t chunk = checksum && !is_direct(op) ? KVIO_CHECKSUM_CHUNK : call->chunk_bytes;
	uint8_t *last = is_direct(op) ? call->bounce : tail;

	do {
		struct iovec iov[KVIO_MAX_IOV], list[KVIO_MAX_IOV];
		int niov = 0, nlist;
		uint64_t n = kvio_cursor_take(&cursor, kvio_min(chunk, end - at), iov, &niov);
		size_t extra = at + n == end ? rest + tail_nbytes : 0;
		int64_t r;

		nlist = niov;
		memcpy(list, iov, (size_t)niov * sizeof(*iov));
		if (extra) {
			list[nlist].iov_base = last;
			list[nlist++].iov_len = (size_t)kvio_round_up(extra, align);
		}
		r = kvio_read_all(call, op, list, nlist, at);
		if (r < 0)
			return (int)r;
		if ((uint64_t)r < n + extra)
			return KVIO_CORRUPT;
		if (checksum)
			*crc = kvio_crc_iov(*crc, iov, niov);
		at += n;
	} while (at < end);
	if (last != tail) {
		copied = cursor;
		*crc = kvio_cursor_scatter(&copied, last, rest, *crc, checksum);
		if (tail_nbytes)
			memcpy(tail, last + rest, tail_nbytes);
	}
	return 0;
}

/* Read file bytes [start, start + nbytes) into op's parts, which begin at file
 * offset op->offset, and the tail_nbytes behind them into tail.  KVIO_CORRUPT
 * when the file ends before that. */
int kvio_stream_read(kvio_call *call, const kvio_op *op, uint64_t start, uint64_t nbytes,
		     uint8_t *tail, size_t tail_nbytes, int checksum, uint32_t *crc)
{
	int bounce = op->flags & KVIO_OP_SCRUB;

	if (!nbytes && !tail_nbytes)
		return 0;
	if (is_direct(op))
		bounce = bounce || start % call->offset_align ||
			 !kvio_parts_aligned(op, call->memory_align, call->offset_align);
	if (bounce)
		return read_bounced(call, op, start, nbytes, tail, tail_nbytes, checksum, crc);
	return read_straight(call, op, start, nbytes, tail, tail_nbytes, checksum, crc);
}
