/*
 * Publish a block: give it its name, at once and whole.
 *
 *  1. kvio_temp_open: an inode without a name (O_TMPFILE) in the block's directory;
 *     where the file system has none, a named temporary.
 *     Failure: nothing exists.
 *  2. The caller writes the bytes and, for a durable block, fdatasyncs them.
 *     Failure: the inode is dropped and never synced again, because after a
 *     failed fsync the page cache marks pages as clean that never reached the disk.
 *  3. kvio_temp_publish: linkat or rename.  Failure: no name.
 *  4. kvio_sync_dir (directory.c).  Failure: the name is visible, may be lost by a
 *     power cut, and the block gets no receipt.
 *  5. close, checked: NFS reports ENOSPC and EDQUOT as late as here, so a named
 *     temporary is closed before it is renamed.
 *
 * A file of the caller's that becomes a block (file.c) is what a named temporary is here, in
 * a directory of its own.
 *
 * Links: AT_EMPTY_PATH needs no privilege since Linux 6.10; before, it is
 * ENOENT, and /proc/self/fd/N with AT_SYMLINK_FOLLOW is used instead
 * (open(2), "O_TMPFILE").  Both are used on descriptors of this process only.
 */
#include "sys.h"

/* The name from which a file is renamed: that of a file of the caller's, which is in another
 * directory, or of a temporary. */
static int has_name(const kvio_op *op)
{
	return op->source || op->temp[0];
}

static int old_dir(const kvio_op *op)
{
	return op->source ? op->source->dirfd : op->dirfd;
}

static const char *old_name(const kvio_op *op)
{
	return op->source ? op->source->name : op->temp;
}

static void lost_name(kvio_op *op)
{
	op->source = NULL;
	op->temp[0] = 0;
}

/* In a removed directory calls fail with ENOENT, or with EPERM where they make an inode
 * (ext4_new_inode of Linux 6.18); both become -ESTALE. */
static int stale_or(kvio_call *call, const kvio_op *op, int r)
{
	struct stat st;
	int asked;

	if (r != -ENOENT && r != -EPERM)
		return r;
	asked = sys_fstat(call->fault, op->dirfd, &st);
	if (asked < 0)
		return asked;
	return st.st_nlink ? r : -ESTALE;
}

static int make_temp_name(kvio_call *call, kvio_op *op)
{
	uint8_t random[16];
	size_t at = strlen(call->temp_prefix);
	int r = sys_getrandom(call->fault, random, sizeof(random));

	if (r < 0)
		return kvio_failed(op, KVIO_SITE_RANDOM, r);
	if (at + 2 * sizeof(random) >= KVIO_TEMP_NAME)
		return kvio_failed(op, KVIO_SITE_RANDOM, -ENAMETOOLONG);
	memcpy(op->temp, call->temp_prefix, at);
	for (size_t i = 0; i < sizeof(random); i++)
		snprintf(op->temp + at + 2 * i, 3, "%02x", random[i]);
	return 0;
}

static int no_tmpfile_here(int r)
{
	return r == -EOPNOTSUPP || r == -EISDIR || r == -EINVAL || r == -ENOSYS || r == -ENOENT;
}

/* The mode with which a temporary is created.  With a group it is the owner's alone until
 * it belongs to that group, because the bits are not meant for another group. */
static mode_t first_mode(const kvio_call *call)
{
	return call->group == KVIO_NO_GROUP ? call->file_mode : 0600;
}

static int access_of(const kvio_op *op)
{
	return op->flags & KVIO_OP_CLONE ? O_RDWR : O_WRONLY;
}

/* ENOENT counts only the second time: another thread may have replaced a removed directory
 * under this descriptor meanwhile. */
static int open_anonymous(kvio_call *call, kvio_op *op, int flags)
{
	int r = -ENOENT;

	op->temp[0] = 0;
	for (int tries = 0; tries < 2 && r == -ENOENT; tries++) {
		r = sys_openat(call->fault, KVIO_SITE_OPEN_TEMP, op->dirfd, ".",
			       O_TMPFILE | access_of(op) | flags, first_mode(call));
		r = stale_or(call, op, r);
	}
	if (r < 0 && no_tmpfile_here(r))
		call->publish = KVIO_PUBLISH_NAMED;
	return r;
}

static int open_named(kvio_call *call, kvio_op *op, int flags)
{
	int r = make_temp_name(call, op);

	if (r < 0)
		return r;
	r = sys_openat(call->fault, KVIO_SITE_OPEN_TEMP, op->dirfd, op->temp,
		       O_CREAT | O_EXCL | O_NOFOLLOW | access_of(op) | flags,
		       first_mode(call));
	if (r < 0)
		op->temp[0] = 0;
	return r;
}

/* Set the mode and group of a temporary to those of a block.  The umask may have removed
 * bits; it never adds any.  If it removed none from the first file of a call, it does not
 * from the others. */
int kvio_own_mode(kvio_call *call, kvio_op *op)
{
	struct stat st;
	int r;

	if (call->mode_was_exact)
		return 0;
	if (call->group != KVIO_NO_GROUP) {
		r = sys_fchown_group(call->fault, op->fd, call->group);
		if (r < 0)
			return kvio_failed(op, KVIO_SITE_FCHOWN, r);
	} else {
		r = sys_fstat(call->fault, op->fd, &st);
		if (r < 0)
			return kvio_failed(op, KVIO_SITE_FSTAT, r);
		call->mode_was_exact = (st.st_mode & 07777) == call->file_mode;
		if (call->mode_was_exact)
			return 0;
	}
	r = sys_fchmod(call->fault, op->fd, call->file_mode);
	return r < 0 ? kvio_failed(op, KVIO_SITE_FCHMOD, r) : 0;
}

int kvio_temp_open(kvio_call *call, kvio_op *op)
{
	int flags = op->mode_taken == KVIO_MODE_DIRECT ? O_DIRECT : 0;
	int r = -EOPNOTSUPP;

	if (call->publish != KVIO_PUBLISH_NAMED)
		r = open_anonymous(call, op, flags);
	if (r < 0 && call->publish == KVIO_PUBLISH_NAMED)
		r = open_named(call, op, flags);
	if (r < 0)
		return kvio_failed(op, KVIO_SITE_OPEN_TEMP, stale_or(call, op, r));
	op->fd = r;
	r = kvio_own_mode(call, op);
	if (r < 0)
		kvio_temp_drop(call, op);
	return r;
}

/* Drop a temporary.  op->site, of the failure before, stays as it is. */
void kvio_temp_drop(kvio_call *call, kvio_op *op)
{
	if (op->fd >= 0)
		sys_close(call->fault, op->fd);
	op->fd = -1;
	if (op->temp[0])
		kvio_remove(call->fault, op->dirfd, op->temp);
	op->temp[0] = 0;
}

/* Link the inode to its name; sets call->publish to the first form that works.
 * -EOPNOTSUPP: none does, and only a named temporary can be published here. */
static int link_anonymous(kvio_call *call, kvio_op *op, const char *name)
{
	char path[32];
	int r;

	if (call->publish == KVIO_PUBLISH_EMPTY_PATH) {
		r = sys_linkat(call->fault, op->fd, "", op->dirfd, name, AT_EMPTY_PATH);
		if (r != -ENOENT && r != -EPERM && r != -EINVAL)
			return r;
		if (stale_or(call, op, r) == -ESTALE)
			return -ESTALE;
		call->publish = KVIO_PUBLISH_PROC;
	}
	if (call->publish == KVIO_PUBLISH_PROC) {
		snprintf(path, sizeof(path), "/proc/self/fd/%d", op->fd);
		r = sys_linkat(call->fault, AT_FDCWD, path, op->dirfd, name, AT_SYMLINK_FOLLOW);
		if (r != -ENOENT && r != -EPERM && r != -EINVAL)
			return r;
		if (stale_or(call, op, r) == -ESTALE)
			return -ESTALE;
		call->publish = KVIO_PUBLISH_NAMED;
	}
	return -EOPNOTSUPP;
}

/* A retransmitted LINK of NFS may return EEXIST for the link that it made itself; then the
 * file has both names (nfs(5) does not say so; Postfix and Maildir rely on it). */
static int linked_after_all(kvio_call *call, const kvio_op *op)
{
	struct stat ours, theirs;

	return !sys_fstatat(call->fault, old_dir(op), old_name(op), &ours) &&
	       !sys_fstatat(call->fault, op->dirfd, op->name, &theirs) &&
	       ours.st_ino == theirs.st_ino && ours.st_dev == theirs.st_dev;
}

/* Rename a file that has a name; never replaces an existing name. */
static int rename_new(kvio_call *call, kvio_op *op)
{
	int r = sys_renameat2(call->fault, old_dir(op), old_name(op), op->dirfd, op->name,
			      RENAME_NOREPLACE), removed;

	if (r != -EINVAL && r != -ENOSYS) {
		if (!r)
			lost_name(op);
		return r;
	}
	r = sys_linkat(call->fault, old_dir(op), old_name(op), op->dirfd, op->name, 0);
	if (r == -EEXIST && linked_after_all(call, op))
		r = 0;
	if (!r) {
		removed = kvio_remove(call->fault, old_dir(op), old_name(op));
		/* With two names the caller could still write to the block. */
		if (op->source && removed < 0 && removed != -ENOENT)
			r = removed == -EOPNOTSUPP ? -EIO : removed;	/* it is published */
		lost_name(op);
	}
	return r;
}

/* Rename the temporary over the old block, which is linked to a second name first.
 *
 * Without a journal names and inodes reach the disk in any order, and a power cut after
 * the rename could lose the old block: its inode is written as unused, or its bytes are
 * overwritten by another file's, while the disk still has the old name and not the new
 * one.  So it keeps a name until the directory is synced; kvio_drop_replaced removes it.
 *
 * A link and not RENAME_EXCHANGE, which would move a directory that has the block's name. */
static int replace_keeping_old(kvio_call *call, kvio_op *op)
{
	char written[KVIO_TEMP_NAME];
	const char *from = op->source ? op->source->name : written;
	int r;

	memcpy(written, op->temp, sizeof(written));
	r = make_temp_name(call, op);
	if (!r)
		r = sys_linkat(call->fault, op->dirfd, op->name, op->dirfd, op->temp, 0);
	if (!r) {
		r = sys_renameat2(call->fault, old_dir(op), from, op->dirfd, op->name, 0);
		if (!r) {
			op->source = NULL;
			return 0;
		}
		kvio_remove(call->fault, op->dirfd, op->temp);
	}
	memcpy(op->temp, written, sizeof(written));
	return r;
}

void kvio_drop_replaced(kvio_call *call, kvio_op *op)
{
	if (op->flags & KVIO_OP_REPLACED && op->temp[0])
		kvio_remove(call->fault, op->dirfd, op->temp);
}

/* Rename the temporary to the block's name, over whatever has it. */
static int replace(kvio_call *call, kvio_op *op)
{
	int keeps_old = call->flags & KVIO_DURABLE && call->flags & KVIO_UNJOURNALED, r;

	if (!has_name(op)) {
		r = make_temp_name(call, op);
		if (r < 0)
			return r;
		r = link_anonymous(call, op, op->temp);
		if (r < 0) {
			op->temp[0] = 0;
			return kvio_failed(op, KVIO_SITE_LINK, r);
		}
	}
	r = keeps_old ? replace_keeping_old(call, op) : -ENOENT;
	if (!r) {
		op->flags |= KVIO_OP_REPLACED;
		return 0;
	}
	/* There is no old block, or it cannot be linked (FAT; another user's file with
	 * fs.protected_hardlinks): then a power cut may lose the old one with the new one. */
	if (r == -ENOENT || r == -EPERM || r == -EOPNOTSUPP || r == -EMLINK)
		r = sys_renameat2(call->fault, old_dir(op), old_name(op), op->dirfd, op->name, 0);
	if (r < 0)
		return kvio_failed(op, KVIO_SITE_RENAME, r);
	lost_name(op);
	op->flags |= KVIO_OP_REPLACED;
	return 0;
}

static int close_named_first(kvio_call *call, kvio_op *op)
{
	int r;

	if (!has_name(op) || op->fd < 0)
		return 0;
	r = sys_close(call->fault, op->fd);
	op->fd = -1;
	return r < 0 ? kvio_failed(op, KVIO_SITE_CLOSE, r) : 0;
}

/* 0: the block has its name, or op->existed: another one was kept.  -EOPNOTSUPP with
 * call->publish set to NAMED: the block must be written again. */
int kvio_temp_publish(kvio_call *call, kvio_op *op)
{
	int r = close_named_first(call, op);

	if (r < 0)
		return r;
	if (has_name(op) && call->if_exists == KVIO_REPLACE)
		return replace(call, op);
	r = has_name(op) ? rename_new(call, op) : link_anonymous(call, op, op->name);
	if (r != -EEXIST)
		return r < 0 ? kvio_failed(op, KVIO_SITE_LINK, r) : 0;
	if (call->if_exists == KVIO_ERROR)
		return kvio_failed(op, KVIO_SITE_LINK, -EEXIST);
	/* Never check a block twice: after an error the second fdatasync returns 0. */
	if (call->if_exists == KVIO_KEEP && !(op->flags & KVIO_OP_UNFIT)) {
		r = kvio_keep_existing(call, op);
		if (r < 0)
			return r;
		if (op->existed) {
			kvio_temp_drop(call, op);
			return 0;
		}
	}
	return replace(call, op);
}
