/*
 * Publish: make a name appear, whole or not at all.
 *
 *  1. kvio_temp_open: an anonymous inode (O_TMPFILE) in the directory the name
 *     will live in; where the file system has none, a named temporary.
 *     Failure: nothing exists.
 *  2. The caller writes the bytes and, for a durable block, fdatasyncs them.
 *     Failure: the inode is dropped and never synced again, because after a
 *     failed fsync the page cache calls pages clean that the disk never got.
 *  3. kvio_temp_publish: linkat or rename.  Failure: no name.
 *  4. kvio_sync_dir (directory.c).  Failure: the name is visible, its fate after a
 *     power cut is unknown, and the block gets no receipt.
 *  5. close, checked: NFS reports ENOSPC and EDQUOT as late as here, so a named
 *     temporary is closed before it is renamed.
 *
 * Links: AT_EMPTY_PATH needs no privilege since Linux 6.10; before, it is
 * ENOENT, and /proc/self/fd/N with AT_SYMLINK_FOLLOW is the other way
 * (open(2), "O_TMPFILE").  Both are only ever used on our own descriptor.
 */
#include "sys.h"

/* A directory that was removed under us answers ENOENT, or EPERM where an inode
 * was to be made (ext4_new_inode of Linux 6.18); both read as -ESTALE. */
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

/* The permissions with which a temporary is created.  With a group it is the owner's
 * alone until it belongs to that group: the bits are meant for no other one. */
static mode_t first_mode(const kvio_call *call)
{
	return call->group == KVIO_NO_GROUP ? call->file_mode : 0600;
}

/* A refusal counts only the second time: another thread may have put a new
 * directory under the number of a removed one in between. */
static int open_anonymous(kvio_call *call, kvio_op *op, int flags)
{
	int r = -ENOENT;

	op->temp[0] = 0;
	for (int tries = 0; tries < 2 && r == -ENOENT; tries++) {
		r = sys_openat(call->fault, KVIO_SITE_OPEN_TEMP, op->dirfd, ".",
			       O_TMPFILE | O_WRONLY | flags, first_mode(call));
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
		       O_CREAT | O_EXCL | O_NOFOLLOW | O_WRONLY | flags, first_mode(call));
	if (r < 0)
		op->temp[0] = 0;
	return r;
}

/* Give a temporary the permissions and the group of a block.  The umask may have taken
 * bits away from those it was created with; it can never add any.  One that did not at
 * the first file of a call is taken not to at the others. */
static int own_mode(kvio_call *call, kvio_op *op)
{
	struct stat st;
	int r;

	if (call->umask_is_kind)
		return 0;
	if (call->group != KVIO_NO_GROUP) {
		r = sys_fchown_group(call->fault, op->fd, call->group);
		if (r < 0)
			return kvio_failed(op, KVIO_SITE_FCHOWN, r);
	} else {
		r = sys_fstat(call->fault, op->fd, &st);
		if (r < 0)
			return kvio_failed(op, KVIO_SITE_FSTAT, r);
		call->umask_is_kind = (st.st_mode & 07777) == call->file_mode;
		if (call->umask_is_kind)
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
	r = own_mode(call, op);
	if (r < 0)
		kvio_temp_drop(call, op);
	return r;
}

/* Give up a temporary.  Keeps the site of the failure that led here. */
void kvio_temp_drop(kvio_call *call, kvio_op *op)
{
	if (op->fd >= 0)
		sys_close(call->fault, op->fd);
	op->fd = -1;
	if (op->temp[0])
		kvio_remove(call->fault, op->dirfd, op->temp);
	op->temp[0] = 0;
}

/* Give the anonymous inode a name; moves call->publish on to a form that works.
 * -EOPNOTSUPP: none does, only a named temporary can be published here. */
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

/* A retransmitted NFS LINK may say EEXIST for the link it made itself; then the
 * file has both names (nfs(5) says nothing of it; Postfix and Maildir rely on it). */
static int linked_after_all(kvio_call *call, const kvio_op *op)
{
	struct stat ours, theirs;

	return !sys_fstatat(call->fault, op->dirfd, op->temp, &ours) &&
	       !sys_fstatat(call->fault, op->dirfd, op->name, &theirs) &&
	       ours.st_ino == theirs.st_ino && ours.st_dev == theirs.st_dev;
}

/* A new name for a named temporary; never replaces one that stands. */
static int name_temporary(kvio_call *call, kvio_op *op)
{
	int r = sys_renameat2(call->fault, op->dirfd, op->temp, op->name, RENAME_NOREPLACE);

	if (r != -EINVAL && r != -ENOSYS) {
		if (!r)
			op->temp[0] = 0;
		return r;
	}
	r = sys_linkat(call->fault, op->dirfd, op->temp, op->dirfd, op->name, 0);
	if (r == -EEXIST && linked_after_all(call, op))
		r = 0;
	if (!r) {
		kvio_remove(call->fault, op->dirfd, op->temp);
		op->temp[0] = 0;
	}
	return r;
}

/* Put the temporary in the place of the old block, which gets a second name first.
 *
 * Where names and inodes reach the disk in any order, a rename over the old block could
 * lose it to a power cut: its inode is written as unused, or its bytes are overwritten by
 * another file's, while the disk still has the old name and not the new one.  So it keeps
 * a name until the directory is synced; kvio_drop_replaced takes it away.
 *
 * A link and not RENAME_EXCHANGE, which would move a directory that has the block's name. */
static int replace_keeping_old(kvio_call *call, kvio_op *op)
{
	char written[KVIO_TEMP_NAME];
	int r;

	memcpy(written, op->temp, sizeof(written));
	r = make_temp_name(call, op);
	if (!r)
		r = sys_linkat(call->fault, op->dirfd, op->name, op->dirfd, op->temp, 0);
	if (!r) {
		r = sys_renameat2(call->fault, op->dirfd, written, op->name, 0);
		if (!r)
			return 0;
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

/* Put the temporary in the place of whatever stands there. */
static int replace(kvio_call *call, kvio_op *op)
{
	int keeps_old = call->flags & KVIO_DURABLE && call->flags & KVIO_UNJOURNALED, r;

	if (!op->temp[0]) {
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
	/* There is no old block, or it can have no second name (FAT; another user's file where
	 * fs.protected_hardlinks is set): then the old one may be lost with the new one. */
	if (r == -ENOENT || r == -EPERM || r == -EOPNOTSUPP || r == -EMLINK)
		r = sys_renameat2(call->fault, op->dirfd, op->temp, op->name, 0);
	if (r < 0)
		return kvio_failed(op, KVIO_SITE_RENAME, r);
	op->temp[0] = 0;
	op->flags |= KVIO_OP_REPLACED;
	return 0;
}

static int close_named_first(kvio_call *call, kvio_op *op)
{
	int r;

	if (!op->temp[0] || op->fd < 0)
		return 0;
	r = sys_close(call->fault, op->fd);
	op->fd = -1;
	return r < 0 ? kvio_failed(op, KVIO_SITE_CLOSE, r) : 0;
}

/* 0 when the name stands (op->existed when another's block was kept); on
 * -EOPNOTSUPP with call->publish moved to NAMED the block must be written anew. */
int kvio_temp_publish(kvio_call *call, kvio_op *op)
{
	int r = close_named_first(call, op);

	if (r < 0)
		return r;
	if (op->temp[0] && call->if_exists == KVIO_REPLACE)
		return replace(call, op);
	r = op->temp[0] ? name_temporary(call, op) : link_anonymous(call, op, op->name);
	if (r != -EEXIST)
		return r < 0 ? kvio_failed(op, KVIO_SITE_LINK, r) : 0;
	if (call->if_exists == KVIO_ERROR)
		return kvio_failed(op, KVIO_SITE_LINK, -EEXIST);
	/* Never judge a block twice: the second fdatasync after an error says OK. */
	if (call->if_exists == KVIO_KEEP && !(op->flags & KVIO_OP_UNFIT)) {
		r = kvio_standing_kept(call, op);
		if (r < 0)
			return r;
		if (op->existed) {
			kvio_temp_drop(call, op);
			return 0;
		}
	}
	return replace(call, op);
}
