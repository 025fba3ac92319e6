/*
 * A block from a file of the caller's, without a second copy.
 *
 * Move: the file itself becomes the block.
 *  1. It is examined: a regular file of this user, with one name, which nothing else writes.
 *  2. An existing block is kept or refused, as for every write.
 *  3. The checksum is computed, and the trailer appended.  Failure: it is cut off again.
 *     Death: the file has 64 bytes more, and step 1 of the next attempt knows them.
 *  4. fdatasync, rename, fsync of the directory: those of publish.c.  Failure before the
 *     rename: as in 3.
 *  5. A file whose block was there already is removed, and its directory is synced.
 *
 * Clone: a temporary shares the file's extents (ioctl_ficlone(2)), and is published as every
 * other.
 */
#include "transfer.h"

#define PIECE_BYTES ((size_t)256 << 10)

/* The CRC32C of the first op->nbytes bytes. */
static int checksum(kvio_call *call, kvio_op *op, int fd)
{
	uint8_t *piece = kvio_pool_alloc(PIECE_BYTES, 4096);
	uint64_t at = 0;
	int64_t r = piece ? 0 : -ENOMEM;

	op->crc = 0;
	while (r >= 0 && at < op->nbytes) {
		struct iovec iov = { piece, (size_t)kvio_min(PIECE_BYTES, op->nbytes - at) };

		r = kvio_cancelled(call) ? -ECANCELED
					 : sys_transfer(call->fault, KVIO_SITE_READ, fd, &iov, 1, at, 0);
		if (!r)
			r = -EIO;	/* it became shorter */
		if (r > 0) {
			op->crc = kvio_crc32c(op->crc, piece, (size_t)r);
			at += (uint64_t)r;
		}
	}
	kvio_pool_free(piece);
	return r < 0 ? kvio_failed(op, KVIO_SITE_READ, (int)r) : 0;
}

/* Append the trailer to a file of op->nbytes bytes. */
static int seal(kvio_call *call, kvio_op *op)
{
	int r;

	if (!(call->flags & KVIO_TRAILER))
		return 0;
	op->offset = op->nbytes;
	op->nparts = 0;
	r = kvio_stream_write(call, op, op->nbytes, 0, 1, &op->crc);
	op->offset = 0;
	return r < 0 ? kvio_failed(op, KVIO_SITE_WRITE, r) : 0;
}

/* Does the file end with a trailer of this key, which a move has left that was killed?  Then
 * its payload is shorter.  Returns 1 if so. */
static int sealed_before(kvio_call *call, kvio_op *op, const kvio_source *source)
{
	uint8_t tail[KVIO_TRAILER_BYTES];
	struct iovec iov = { tail, sizeof(tail) };
	struct kvio_trailer trailer;

	if (!(call->flags & KVIO_TRAILER) || source->nbytes < sizeof(tail))
		return 0;
	if (sys_transfer(call->fault, KVIO_SITE_READ, source->fd, &iov, 1,
			 source->nbytes - sizeof(tail), 0) != sizeof(tail))
		return 0;	/* if that is an error, the checksum meets it again */
	if (kvio_trailer_parse(tail, source->nbytes, op->key_hash, KVIO_VERIFY_FULL, &trailer) ||
	    trailer.nbytes + sizeof(tail) != source->nbytes ||
	    (trailer.flags & KVIO_CHECKSUM) != (call->flags & KVIO_CHECKSUM))
		return 0;
	op->nbytes = trailer.nbytes;
	if (trailer.flags & KVIO_CHECKSUM && !checksum(call, op, source->fd) &&
	    op->crc == trailer.crc)
		return 1;
	if (!(trailer.flags & KVIO_CHECKSUM))
		return 1;
	op->nbytes = source->nbytes;
	return 0;
}

/* Is the file the block already?  So a move by linkat leaves it that is killed before unlink. */
static int is_the_block(kvio_call *call, const kvio_op *op, const struct stat *file)
{
	struct stat block;

	return file->st_nlink == 2 && op->dirfd >= 0 &&
	       !sys_fstatat(call->fault, op->dirfd, op->name, &block) &&
	       block.st_ino == file->st_ino && block.st_dev == file->st_dev;
}

/* 0: it can become the block; 1: it is the block.  -EXDEV: only a copy of it can. */
static int examine(kvio_call *call, kvio_op *op, const kvio_source *source)
{
	struct stat st;
	int r = sys_fstat(call->fault, source->fd, &st);

	if (r < 0)
		return kvio_failed(op, KVIO_SITE_FSTAT, r);
	if (is_the_block(call, op, &st))
		return 1;
	if (st.st_nlink != 1 || st.st_uid != geteuid())
		return kvio_failed(op, KVIO_SITE_RENAME, -EXDEV);
	/* Where there are no leases (NFS, FUSE), the caller's word that no other has the file open
	 * must do. */
	r = sys_sole_writer(call->fault, source->fd);
	return r == -EAGAIN ? kvio_failed(op, KVIO_SITE_FCNTL, r) : 0;
}

/* Make the file what the block's file will be.  op->fd is a duplicate, whose close tells what
 * NFS tells at a close, and leaves one to undo this with. */
static int adopt(kvio_call *call, kvio_op *op, kvio_source *source, int sealed)
{
	int r = sys_dup(call->fault, source->fd);

	if (r < 0)
		return kvio_failed(op, KVIO_SITE_FCNTL, r);
	op->fd = r;
	op->source = source;
	r = 0;
	if (call->flags & KVIO_CHECKSUM && !sealed)
		r = checksum(call, op, op->fd);
	if (!r && !sealed) {
		source->sealed = 1;
		r = seal(call, op);
	}
	if (!r)
		r = kvio_own_mode(call, op);
	if (!r && kvio_cancelled(call))
		r = -ECANCELED;
	return r;
}

static int clone(kvio_call *call, kvio_op *op, const kvio_source *source)
{
	struct stat st;
	int r = kvio_temp_open(call, op);

	if (r < 0)
		return r;
	/* Lost where this is refused: a copy takes the time and the space of the bytes. */
	r = sys_clone_file(call->fault, op->fd, source->fd);
	if (r < 0)
		return kvio_failed(op, KVIO_SITE_CLONE, r == -EOPNOTSUPP || r == -ENOTTY ? -EOPNOTSUPP
											  : -EXDEV);
	r = sys_fstat(call->fault, op->fd, &st);
	if (r < 0)
		return kvio_failed(op, KVIO_SITE_FSTAT, r);
	if ((uint64_t)st.st_size != op->nbytes)	/* it was written meanwhile */
		return kvio_failed(op, KVIO_SITE_CLONE, -EBUSY);
	if (call->flags & KVIO_CHECKSUM)
		r = checksum(call, op, op->fd);
	return r < 0 ? r : seal(call, op);
}

/* Remove the name of a file whose block was there already. */
static int remove_source(kvio_call *call, kvio_op *op, const kvio_source *source)
{
	int r = kvio_remove(call->fault, source->dirfd, source->name);

	return r < 0 && r != -ENOENT ? kvio_failed(op, KVIO_SITE_UNLINK, r) : 0;
}

/* The old name must not come back either: it would be a second name of the block. */
static int sync_source_dir(kvio_call *call, kvio_op *op, const kvio_source *source)
{
	int r;

	if (!(call->flags & KVIO_DURABLE))
		return 0;
	if (call->flags & KVIO_UNJOURNALED)
		kvio_inode_touch(call->fault, source->dirfd);
	r = sys_fsync_dir(call->fault, source->dirfd);
	return r < 0 ? kvio_failed(op, KVIO_SITE_FSYNC_DIR, r) : 0;
}

static void move(kvio_call *call, kvio_op *op, kvio_source *source)
{
	int sealed = sealed_before(call, op, source);
	int r = kvio_begin_unless_kept(call, op);

	if (!r) {
		r = adopt(call, op, source, sealed);
		if (r < 0) {
			kvio_temp_drop(call, op);
			op->status = r;
		} else {
			kvio_write_end(call, op);
		}
	}
	/* The file has lost its name only if op->source is NULL. */
	if (op->status && op->source && source->sealed)
		sys_ftruncate(call->fault, source->fd, op->nbytes);
	if (op->status == -ENOENT && kvio_dir_is_gone(call, op))
		op->status = -ESTALE;
	source->sealed = 0;
}

/* The rest of a move that was killed: the file is the block, and has a second name. */
static void finish_move(kvio_call *call, kvio_op *op, kvio_source *source)
{
	op->fd = -1;
	op->temp[0] = 0;
	op->mode_taken = op->mode;
	op->existed = 1;
	op->status = 0;
	sealed_before(call, op, source);
	op->flags |= call->flags & KVIO_TRAILER && call->flags & KVIO_CHECKSUM
		? KVIO_OP_HAS_CHECKSUM : 0;
	if (call->flags & KVIO_DURABLE) {
		op->fd = source->fd;
		op->status = kvio_sync_file(call, op);
		op->fd = -1;
		if (!op->status)
			op->status = kvio_sync_dir(call, op);
	}
}

int kvio_write_file(kvio_call *call, kvio_op *op, kvio_source *source)
{
	int r;

	op->source = NULL;
	op->nbytes = source->nbytes;
	source->sealed = 0;
	if (!source->moves) {
		r = kvio_begin_unless_kept(call, op);
		if (!r) {
			r = clone(call, op, source);
			if (r < 0) {
				kvio_temp_drop(call, op);
				op->status = r;
			} else {
				kvio_write_end(call, op);
			}
		}
		return op->status;
	}
	r = examine(call, op, source);
	if (r < 0)
		return op->status = r;
	if (r)
		finish_move(call, op, source);
	else
		move(call, op, source);
	if (!op->status && op->existed)
		op->status = remove_source(call, op, source);
	if (!op->status)
		op->status = sync_source_dir(call, op, source);
	op->source = NULL;
	return op->status;
}
